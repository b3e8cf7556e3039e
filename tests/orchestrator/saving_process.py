"""Lives of a driver that saves checkpoints and is killed with SIGKILL inside a chosen storage operation.

Runs in children of a fork server, so that a life costs milliseconds and the kill is a real one: nothing is flushed, no handler runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from orchestrator import checkpoint
from orchestrator.keep import keep_latest
from tests.orchestrator.checkpoint_samples import take, write_next
from workers import local_files
from workers.digest import bucket_digest
from workers.storage import Store

Answer = TypeVar("Answer")

# Loaded once in the fork server: every child has the compiled kernels from the start.
bucket_digest([np.zeros((1, 1), np.float32)], first_row=0, row_stride=1, num_rows=1)


class MortalStore(Store):
    """Counts its operations; the process dies before, inside or after the one with the given number."""

    def __init__(self, url: str, *, die_at: int, moment: str):
        super().__init__(url)
        self.die_at = die_at
        self.moment = moment
        self.counted = 0

    def _reach(self, operation: Callable[[], Answer], *, torn: Callable[[], None]) -> Answer:
        self.counted += 1
        dies = self.counted == self.die_at
        if dies and self.moment == "before":
            die()
        if dies and self.moment == "inside":
            torn()
        answer = operation()
        if dies and self.moment == "after":
            die()
        return answer

    def write_new(self, name: str, buffers: Sequence[local_files.Buffer]) -> None:
        self._reach(lambda: Store.write_new(self, name, buffers), torn=die_in_the_middle_of_a_write)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        return self._reach(lambda: Store.create_exclusive(self, name, data), torn=die_in_the_middle_of_a_write)

    def delete(self, name: str) -> None:
        self._reach(lambda: Store.delete(self, name), torn=lambda: None)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_a_write() -> None:
    """From now on a write reaches the disk in half, and the process is gone."""
    real = os.writev

    def half(handle: int, views: Sequence[memoryview]) -> int:
        data = b"".join(views)
        real(handle, [data[: len(data) // 2]])
        die()
        return 0

    os.writev = half  # pyright: ignore[reportAttributeAccessIssue]


def live(url: str, steps: Sequence[int], die_at: int, moment: str, said: Connection) -> None:
    """Takes the run, commits each step, prunes, and reports each acknowledged commit; then the number of operations."""
    store = MortalStore(url, die_at=die_at, moment=moment)
    lease = take(store)
    for step in steps:
        said.send(checkpoint.commit(store, write_next(store, lease, step), lease))
        keep_latest(store, lease, num_to_keep=2)
    said.send(store.counted)
