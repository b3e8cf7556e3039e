"""Frameworks that come as extras of the package."""

from __future__ import annotations

import importlib
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
