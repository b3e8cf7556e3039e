"""`Kept`: values that never change and therefore travel to a replica once, and not with every function that needs them.

A function that a strategy runs is packed anew for every call, with all that it refers to. While that happens inside
`collecting`, a `Kept` leaves its key alone in the package. The strategy sends the value ahead where a replica does not
hold it yet (`keep`). Everywhere else, as in a copy, a `Kept` travels whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

_collected: ContextVar[dict[str, Kept[Any]] | None] = ContextVar("_collected", default=None)
# What this process holds as a replica.
_here: dict[str, Kept[Any]] = {}


class Kept(Generic[Value]):
    """A value that never changes.

    Attributes:
      key: stands for the value; no other one has it.
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Value, key: str | None = None) -> None:
        self.key = key or secrets.token_hex(8)
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        found = _collected.get()
        if found is None:
            return Kept, (self.value, self.key)
        found[self.key] = self
        return _kept_here, (self.key,)


def _kept_here(key: str) -> Kept[Any]:
    if key not in _here:
        raise RuntimeError("Found a function that refers to a value which this replica does not hold. See keep.")
    return _here[key]


@contextmanager
def collecting() -> Iterator[dict[str, Kept[Any]]]:
    """What is packed inside refers to kept values by their keys. Yields those that it refers to, by key."""
    found: dict[str, Kept[Any]] = {}
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def keep(values: Iterable[Kept[Any]]) -> None:
    """Makes this process hold these values."""
    _here.update({one.key: one for one in values})


def forget_kept() -> None:
    """Lets go of all of them."""
    _here.clear()
