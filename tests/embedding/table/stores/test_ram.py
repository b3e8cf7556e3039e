"""A store of rows: what is written is read, views change it, a frozen view and an undo log remember it."""

from __future__ import annotations

import numpy as np

from podembed.embedding.table.stores.ram import RamStore
from podembed.embedding.table.stores.ram_kept import RamSnapshot, RamUndoLog, SnapshotRoom
from tests.embedding.table.stores.preserving import preserve

WIDTHS = {"rows": 3, "accumulator": 1}


def test_what_is_written_is_read_and_views_change_it() -> None:
    store = RamStore(WIDTHS, 10)
    rows = np.array([7, 2])
    store.write(rows, {"rows": np.full((2, 3), 5.0, np.float32), "accumulator": np.array([[1.0], [2.0]])})
    store.view(2, 3)["rows"][:] += 1
    found = store.read(rows)
    assert found["rows"].tolist() == [[5.0] * 3, [6.0] * 3]
    assert found["accumulator"].tolist() == [[1.0], [2.0]]
    assert store.size_bytes == 10 * 4 * 4


def test_gather_and_pool_read_rows_where_they_lie() -> None:
    store = RamStore(WIDTHS, 4)
    store.view(0, 4)["rows"][:] = np.arange(4, dtype=np.float32)[:, None]
    out = np.empty((2, 3), np.float32)
    store.gather(np.array([3, 1]), out)
    assert out[:, 0].tolist() == [3.0, 1.0]
    store.pool(np.array([3, 1, 2], np.int32), np.array([0, 2, 3]), None, "sum", out)
    assert out[:, 0].tolist() == [4.0, 2.0]


def test_a_frozen_view_and_an_undo_log_remember_rows_and_slots() -> None:
    store = RamStore(WIDTHS, 6)
    room = SnapshotRoom([*WIDTHS.values()], max_rows=6, num_rows=6)
    arrays = [*store.arrays.values()]
    frozen, log = RamSnapshot(arrays, room=room), RamUndoLog(arrays, max_rows=6)
    frozen.freeze()
    log.begin()
    rows = np.array([4])
    preserve(frozen, rows)
    preserve(log, rows)
    store.write(rows, {"rows": np.ones((1, 3), np.float32), "accumulator": np.ones((1, 1), np.float32)})
    seen = [np.empty((6, width), np.float32) for width in WIDTHS.values()]
    frozen.read(0, 6, seen)
    assert not any(values.any() for values in seen)
    log.undo()
    assert not any(values.any() for values in store.read(rows).values())
