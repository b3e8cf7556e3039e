"""Whether a program is being traced that shall run without this package, as an exported model does.

Models with a kernel of their own for one platform ask `is_portable`, and take plain JAX then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_PORTABLE: ContextVar[bool] = ContextVar("is_portable", default=False)


def is_portable() -> bool:
    """Whether the program must not call kernels of this package."""
    return _IS_PORTABLE.get()


@contextmanager
def portable() -> Iterator[None]:
    """Traces inside are for a program that runs anywhere."""
    token = _IS_PORTABLE.set(True)
    try:
        yield
    finally:
        _IS_PORTABLE.reset(token)
