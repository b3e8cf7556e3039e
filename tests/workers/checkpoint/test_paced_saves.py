"""What a save tells its pace, and where the pace holds it up: whole saves with real files and threads."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.optimizers import SGD, Adagrad
from podembed.workers.checkpoint import background_save, frozen_rows
from podembed.workers.checkpoint.save_pace import FILE_AS_BYTES, SavePace
from podembed.workers.storage import local
from podembed.workers.storage.direct import DirectWrites
from podembed.workers.storage.store import Store
from tests.processes import wait_for
from tests.workers.checkpoint.test_background_save import PATIENCE_S, GatedStore, saver, table_of


class RecordingPace(SavePace):
    """Notes what it is told, and pauses for nobody."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"processors": 1e9})
        self.begun: list[tuple[int | None, str]] = []
        self.files: list[int] = []
        self.taken: list[float] = []
        self.rests: list[tuple[int, float]] = []
        self.num_waits = 0

    def begin(self, total_bytes: int | None = None, *, kind: str = "") -> None:
        self.begun.append((total_bytes, kind))
        super().begin(total_bytes, kind=kind)

    def keep_to(self, num_bytes: int, *, num_files: int = 0, **options: Any) -> None:
        self.files.append(num_files)
        self.taken.append(options["taken"]())
        super().keep_to(num_bytes, num_files=num_files, **options)

    def rest(self, num_bytes: int, *, taken: float = 0.0) -> None:
        self.rests.append((num_bytes, taken))

    def was_waited_for(self) -> None:
        self.num_waits += 1
        super().was_waited_for()


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "SavePace", RecordingPace)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def pace_of(save: background_save.BackgroundSave) -> RecordingPace:
    assert isinstance(save._pace, RecordingPace)
    return save._pace


def test_it_says_how_much_comes_and_how_many_files(tmp_path: Path) -> None:
    tables = [table_of(Adagrad(0.1), name="two arrays"), table_of(SGD(0.1), num_buckets=2, name="one")]
    save, _ = saver(tables)
    store = Store(str(tmp_path))
    for attempt, is_first in [("s000000001-g00000001", True), ("s000000002-g00000001", False)]:
        save.freeze(attempt)
        save.write(store, attempt, is_first=is_first)
    total_bytes = sum(table.size_bytes for table in tables) + (8 * 2 + 2) * FILE_AS_BYTES
    assert pace_of(save).begun == [(total_bytes, "whole")] * 2
    # Beside the first piece of a table are the files that describe its arrays, if this host writes them.
    assert sorted(pace_of(save).files[:10]) == sorted([4, *[2] * 7, 2, 1])
    assert sorted(pace_of(save).files[10:]) == sorted([*[2] * 8, *[1] * 2])


def test_it_rests_within_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the save down to the blocks of a file, unless training would wait."""
    # Any filesystem takes this flag.
    monkeypatch.setattr(local, "DirectWrites", functools.partial(DirectWrites, flag=os.O_NONBLOCK))
    table = table_of(SGD(0.1), num_rows=20_000, dim=64, num_buckets=4)
    save, _ = saver([table])
    store = Store(str(tmp_path))
    save.freeze("s000000001-g00000001")
    save.write(store, "s000000001-g00000001", is_first=True)
    assert sum(num_bytes for num_bytes, _ in pace_of(save).rests) > 0.8 * table.size_bytes
    assert {taken for _, taken in pace_of(save).rests} == {0.0}
    pace_of(save).rests.clear()
    pace_of(save).taken.clear()
    save.freeze("s000000002-g00000001")
    # Most of the buffer, until the second bucket is read.
    changed = np.arange(20_000)[-int(0.8 * len(save.rows.buffers[0])) :]
    table.update(changed, np.ones((len(changed), 64), np.float32), 0.1)
    save.write(store, "s000000002-g00000001", is_first=True)
    assert pace_of(save).taken[0] == pytest.approx(0.8, abs=0.01)
    assert 0 < sum(num_bytes for num_bytes, _ in pace_of(save).rests) < 0.7 * table.size_bytes
    assert max(taken for _, taken in pace_of(save).rests) > 0.4


def test_it_says_that_training_waited_and_leaves_its_buffer_in_order(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    table = table_of(SGD(1.0))
    save, _ = saver([table], buffer_bytes=5 << 10)
    store = GatedStore(tmp_path, passes=0)
    save.freeze("s000000001-g00000001")
    training = threads.submit(table.update, np.arange(1500), np.ones((1500, 4), np.float32), 0.1)
    wait_for("training waits for room", lambda: save.rows.num_waits > 0, seconds=PATIENCE_S)
    store.tickets.release(1000)
    save.write(store, "s000000001-g00000001", is_first=True)
    training.result(PATIENCE_S)
    assert pace_of(save).num_waits >= 1
    (room,) = {snapshot.room for snapshot in save.rows._in_order}
    np.testing.assert_array_equal(room.free, np.arange(len(room.free))[::-1])


def test_a_table_that_is_written_asks_no_one(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """While the save goes on with others."""
    tables = [table_of(SGD(1.0), name="written"), table_of(SGD(1.0), name="not yet")]
    save, _ = saver(tables)
    save.freeze("s000000001-g00000001")
    save.rows.skip(tables[0], tables[0].num_rows)
    is_over, holds = threading.Event(), threading.Event()

    def hold() -> None:
        with save.rows.turn:
            holds.set()
            assert is_over.wait(PATIENCE_S)

    holding = threads.submit(hold)
    assert holds.wait(PATIENCE_S)
    try:
        guard = tables[0].before_change
        assert guard is not None
        threads.submit(guard, np.arange(10)).result(PATIENCE_S)
    finally:
        is_over.set()
    holding.result(PATIENCE_S)
    assert save.rows.is_running
    save.rows.end()


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_step_that_waits_does_it_for_several(
    is_patient: bool, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a quarter of the buffer is free, but not for long: other hosts wait meanwhile."""
    monkeypatch.setattr(frozen_rows, "MOST_FOR_OTHERS_S", PATIENCE_S if is_patient else 0.2)
    table = table_of(SGD(1.0), num_rows=20_000)
    save, _ = saver([table], buffer_bytes=5 << 10)
    rows = save.rows
    room_rows = len(rows.buffers[0])
    rows.freeze(joins_before=False)
    # One more than the buffer holds, spread over all rows. So each tenth of the table that is read frees a tenth of it.
    changed = np.linspace(0, table.num_rows - 1, room_rows + 1).astype(np.int64)
    training = threads.submit(table.update, changed, np.ones((len(changed), 4), np.float32), 0.1)
    wait_for("training waits for room", lambda: rows.num_waits > 0, seconds=PATIENCE_S)
    tenth = table.num_rows // 10
    out = [np.empty((tenth, 4), np.float32)]
    rows.read(table, 0, out)
    if is_patient:
        assert rows.taken > 0.75
        with pytest.raises(TimeoutError):
            training.result(timeout=0.3)
        for at in (1, 2):
            rows.read(table, at * tenth, out)
        assert rows.taken <= 0.75
    training.result(timeout=PATIENCE_S)
    assert rows.num_waits == 1
    rows.end()
