"""`CarriedError`: an exception on its way to another process, in parts that can be copied one by one.

Pickle makes an exception again by calling its class with `args`. That fails, or says something else, where a class
builds its sentence from other arguments, as many do. Ray reports what it cannot copy as a process that is gone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any


class CarriedError(Exception):
    """See the module.

    Args:
      kind: class of the exception.
      arguments: its `args`.
      state: its attributes.
    """

    def __init__(self, kind: type[Exception], arguments: tuple[Any, ...], state: Mapping[str, Any]) -> None:
        # Pickle calls the class with these.
        super().__init__(kind, arguments, state)

    def __str__(self) -> str:
        error = self.unpacked()
        return f"{type(error).__qualname__}: {words_of(error)}"

    def unpacked(self) -> Exception:
        """The exception as it was raised, but for its traceback."""
        kind, arguments, state = self.args
        error = kind.__new__(kind, *arguments)
        error.__dict__.update(state)
        return error


MOST_LETTERS = 2_000
"""Most letters of an exception's text. The lines of its traceback together have a few times as many."""


def words_of(error: BaseException) -> str:
    """The text of an exception, whatever its class does, in a form that a terminal and a record can take.

    Control characters become `?`. Of a text beyond `MOST_LETTERS` the beginning and the end are left. Where `__str__`
    raises, this says so.
    """
    try:
        text = str(error)
    except Exception as fault:
        return f"no message, since its __str__ raised {type(fault).__name__}"
    return plain_text(text, MOST_LETTERS)


def trace_of(error: BaseException) -> str:
    """The traceback of an exception, as `words_of` has its words."""
    return plain_text("".join(traceback.format_exception(error)).rstrip())


def plain_text(text: str, most: int = 4 * MOST_LETTERS) -> str:
    """A text without control characters but line ends and tabs, and without its middle where it is longer than `most`
    letters.
    """
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters left out ... {text[-half:]}"
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def carried(error: Exception, copy: Callable[[Any], Any]) -> Exception:
    """The exception itself if it can be copied, and else its parts. A part that cannot be copied is left out; where the
    class itself cannot, a RuntimeError says the same.

    Args:
      copy: function that copies as the way to the other process does; raises where it cannot.
    """
    if _is_same(error, copy):
        return error
    parts = CarriedError(
        type(error),
        tuple(one if _can_copy(one, copy) else _shown(one) for one in error.args),
        {name: value for name, value in vars(error).items() if _can_copy(value, copy)},
    )
    if _is_same(parts, copy):
        return parts
    return RuntimeError(f"{type(error).__qualname__}: {words_of(error)}")


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def original(error: Exception) -> Exception:
    """The exception that the other process raised."""
    return error.unpacked() if isinstance(error, CarriedError) else error


def _is_same(error: Exception, copy: Callable[[Any], Any]) -> bool:
    try:
        made = copy(error)
        return type(made) is type(error) and str(made) == str(error)
    except Exception:
        return False


def _can_copy(value: Any, copy: Callable[[Any], Any]) -> bool:
    try:
        copy(value)
    except Exception:
        return False
    return True
