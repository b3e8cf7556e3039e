"""Lives of a driver that saves checkpoints and is killed with SIGKILL inside a chosen storage operation.

Runs in children of a fork server, so that a life costs milliseconds and the kill is a real one: nothing is flushed, no
handler runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.keep import keep_latest
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.digest import bucket_digest
from podembed.workers.checkpoint.files import assemble_table
from podembed.workers.checkpoint.shard import table_plan
from podembed.workers.liveness.progress import Tracker
from podembed.workers.storage import local as local_files
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import take, write_next

Answer = TypeVar("Answer")
COUNTS = "counts"


class Training:
    """A table whose every row grows by 1 in every step, trained by a thread that never rests; a save sees it between
    two steps.
    """

    def __init__(self) -> None:
        config = TableConfig(1000, 2, Constant(0.0), SGD(1.0), name=COUNTS)
        self.table = Table(TableSpec.of(config, seed=1, num_buckets=4), np.arange(4))
        self.table.initialize()
        self.save = BackgroundSave(
            [self.table],
            tracker=Tracker(),
            stalled_after_s=60.0,
            raise_if_aborted=lambda: None,
            buffer_bytes=2000,
            buckets_per_file={COUNTS: 2},
        )
        self._between_steps = threading.Lock()
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        rows, gradients = np.arange(self.table.num_rows), np.full((self.table.num_rows, 2), -1.0, np.float32)
        while True:
            with self._between_steps:
                for part in np.array_split(rows, 10):
                    self.table.update(part, gradients[part], 1.0)

    def write(self, store: Store, lease: Lease, step: int) -> Manifest:
        """The next checkpoint, with this table alone, written while the thread goes on."""
        attempt = commit_name(step=step, generation=lease.generation)
        manifest = write_next(store, lease, step)
        with self._between_steps:
            self.save.freeze()
        (shard,) = self.save.write(store, attempt, is_first=True).tables
        plan = table_plan(self.table.spec, attempt, buckets_per_file=shard.buckets_per_file)
        table = assemble_table(plan, shard.arrays, [shard.buckets])
        placement = {**manifest.placement, COUNTS: (0,) * 4}
        return replace(manifest, tables=(*manifest.tables, table), placement=placement)


# Loaded once in the fork server: every child has the compiled kernels from the start. No thread may run there.
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


def live_and_train(url: str, steps: Sequence[int], die_at: int, moment: str, said: Connection) -> None:
    """As `live`, while a thread changes the rows of one more table all the time."""
    store = MortalStore(url, die_at=die_at, moment=moment)
    lease = take(store)
    training = Training()
    for step in steps:
        said.send(checkpoint.commit(store, training.write(store, lease, step), lease))
    said.send(store.counted)
    os._exit(0)
