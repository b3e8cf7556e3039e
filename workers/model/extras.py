"""Frameworks that come as extras of the package."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def framework(module: str, *, extra: str) -> Any:
    """The module of a framework.

    Raises:
      ModuleNotFoundError: it is not installed; the message says which extra brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"Found no module {error.name}. Expected it, since the model of the job is of it. Install "
            f"podembed[{extra}] on all hosts.",
            name=error.name,
        ) from error


def check_create(create: Any, *, adapter: str, arguments: str) -> None:
    """Raises `TypeError` for what is no function that makes a module, such as a module that is made already.

    Args:
      adapter: the class that is to call it.
      arguments: arguments of the function, by name.
    """
    remedy = f"Write {adapter}(lambda {arguments}: MyModule(...))."
    made = type(create)
    if not callable(create) or any(base.__name__ == "Module" for base in made.__mro__):
        raise TypeError(
            f"Found {adapter}(a {made.__name__}). Expected a function of {arguments} that makes the module. {remedy}"
        )
    try:
        inspect.signature(create).bind(*arguments.split(", "))
    except TypeError as error:
        raise TypeError(
            f"Found a function of {adapter} that does not take {arguments}: {error}. Expected both. {remedy}"
        ) from None
    except ValueError:
        # Functions without a signature are tried when they are called.
        return
