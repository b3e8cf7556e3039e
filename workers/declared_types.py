"""Checks of the types of what a user declares, when it is declared. They find a string for a number, a class for an
object, a tuple for a name.

Otherwise the first thing that uses such a value would raise, minutes later and somewhere else. One sentence names the
field, what was found and what to write.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from typing import Any

import numpy as np

_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "True or False", "None": "None"}
_LONGEST = 80


def several(values: Any) -> tuple[Any, ...]:
    """The values of an argument that takes several. One that stands alone is one of them: a text is not its letters."""
    alone = (str, bytes, os.PathLike, int, np.integer)
    return (values,) if isinstance(values, alone) else tuple(values)


def shown(value: Any) -> str:
    """A value in few words: itself if it is short, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text else f"a {type(value).__name__}"


def plain_number(value: Any) -> bool | int | float | None:
    """One number as Python has it, which goes into records: also that of an array of numpy or JAX without axes. None
    for all else: text, None, complex numbers, and arrays with axes, even of one number.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    if isinstance(value, bool | int):
        return value
    return float(value) if isinstance(value, numbers.Real) else None


def check_plain_fields(declared: Any, error: type[Exception]) -> None:
    """Checks the fields of a dataclass that are declared as plain values: `int`, `float`, `str`, `bool` and `None`, or
    one of several.

    Numbers of numpy and JAX become those of Python, which go into records.

    Raises:
      error: naming the first field with another value.
    """
    for field in dataclasses.fields(declared):
        kinds = [part.strip() for part in str(field.type).split("|")]
        value = getattr(declared, field.name, None)
        if not set(kinds) <= _WORDS.keys():
            continue
        if hasattr(value, "dtype") and (number := plain_number(value)) is not None:
            value = number
            object.__setattr__(declared, field.name, number)
        if not any(_is_a(value, kind) for kind in kinds):
            expected = " or ".join(_WORDS[kind] for kind in kinds)
            quotes = " without quotes" if isinstance(value, str) else ""
            raise error(
                f"Found {field.name}={shown(value)} in {type(declared).__name__}. Expected {expected}. Write it "
                f"so{quotes}."
            )


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    types: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "None": type(None)}
    return isinstance(value, types[kind])
