"""The memory beside the rows: taken after the start, given back when a generation ends."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.shard import Shard
from podembed.workers.liveness.progress import Tracker


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shard_of(*tables: Table) -> Shard:
    spec = SimpleNamespace(
        undo_share=0.1,
        step_timeout_s=60.0,
        tracks_changes=False,
        num_hosts=1,
        placement=[np.zeros(table.spec.layout.num_buckets, np.int64) for table in tables],
    )
    return Shard(cast(Any, spec), tables, surviving=None, tracker=Tracker(), check=lambda: None)


def test_what_saves_and_undo_took_is_given_back_and_rows_stay() -> None:
    """The next generation takes as much, before all of this one is gone."""
    config = TableConfig(200_000, 64, optimizer=Adagrad(0.1), name="t")
    table = Table(TableSpec.of(config, seed=1, num_buckets=64), np.arange(64))
    table.initialize()
    rows = table.rows[:1000].copy()
    shard = shard_of(table)
    shard.take_memory()
    assert shard._populating is not None
    shard._populating._thread.join()
    taken_bytes = resident_bytes()
    survivor = shard.release()
    # A tenth of the table each for undo and saves, but for staging buffers.
    assert taken_bytes - resident_bytes() > 0.15 * table.size_bytes
    assert survivor.tables == [table]
    np.testing.assert_array_equal(table.rows[:1000], rows)
    shard.close()
