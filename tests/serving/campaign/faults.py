"""What strikes the storage of this process: an end at an operation, an absence, a full disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from podembed.workers.storage.storage_errors import StorageFull, SystemRefused
from podembed.workers.storage.store import Store

_WRITES = ("write", "create", "replace")


class Killed(BaseException):
    """The process is gone."""


class StorageFaults:
    """Strikes the operations of all stores. Mutated: how many operations there were since it began.

    Attributes:
      kill_at: number of the operation at which the process ends, or None; before its effect, or after it.
      is_away, is_full: whether all operations, or all that write, fail.
    """

    def __init__(self) -> None:
        self.kill_at: int | None = None
        self.after = self.is_away = self.is_full = False
        self._count = 0

    def begin(self, *, kill_at: int | None = None, after: bool = False) -> None:
        """Counts from here."""
        self.kill_at, self.after, self._count = kill_at, after, 0

    def strike(self, what: str, call: Callable[[], Any]) -> Any:
        """Does an operation, or not."""
        self._count += 1
        ends = self.kill_at is not None and self._count > self.kill_at
        if ends and not (self.after and self._count == (self.kill_at or 0) + 1):
            raise Killed
        if self.is_away:
            raise SystemRefused.of(what, OSError(errno.EIO, "the storage is away"))
        if self.is_full and what.startswith(_WRITES):
            raise StorageFull(what, OSError(errno.ENOSPC, "no space left"))
        found = call()
        if ends:
            raise Killed
        return found

    @contextmanager
    def installed(self) -> Iterator[StorageFaults]:
        """Until the block ends."""
        original = Store._insist

        def insist(store: Store, what: str, call: Any, *, policy: Any = None) -> Any:
            return self.strike(what, lambda: original(store, what, call, policy=policy))

        Store._insist = insist
        try:
            yield self
        finally:
            Store._insist = original
