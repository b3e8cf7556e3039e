"""`BackgroundSave` with a real second thread: what is written is the frozen moment, whatever training does meanwhile,
and nobody waits for ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Lion,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
)
from podembed.embedding.table.stores.ram_kept import ENTRY_BYTES
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint import save_pace
from podembed.workers.checkpoint.background_save import (
    MEMORY_SHARE,
    MIN_BUFFER_BYTES,
    BackgroundSave,
    SaveStalled,
    save_bytes,
)
from podembed.workers.checkpoint.files import assemble_delta
from podembed.workers.checkpoint.shard import ShardReceipt, read_shard
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.processes import wait_for
from tests.workers.checkpoint.test_shard import assembled, write_live

PATIENCE_S = 120.0


class GatedStore(Store):
    """Lets a given number of files pass, and more when told; can fail instead."""

    def __init__(self, url: Path, *, passes: int) -> None:
        super().__init__(str(url))
        self.tickets = threading.Semaphore(passes)
        self.error: Exception | None = None

    def write_new(self, name: str, buffers: Sequence[object]) -> None:
        if not self.tickets.acquire(timeout=PATIENCE_S):
            raise TimeoutError(name)
        if self.error is not None:
            raise self.error
        super().write_new(name, buffers)  # type: ignore[arg-type]


def table_of(
    optimizer: Optimizer, *, num_rows: int = 1500, dim: int = 4, num_buckets: int = 8, name: str = "t"
) -> Table:
    config = TableConfig(num_rows, dim, Constant(0.0), optimizer, name=name)
    table = Table(TableSpec.of(config, seed=1, num_buckets=num_buckets), np.arange(num_buckets))
    table.initialize()
    return table


def saver(
    tables: Sequence[Table],
    *,
    buffer_bytes: int | None = None,
    stalled_after_s: float = PATIENCE_S,
    raise_if_aborted: Callable[[], None] = lambda: None,
    processors: float | None = None,
    tracker: Tracker | None = None,
) -> tuple[BackgroundSave, Tracker]:
    tracker = tracker or Tracker()
    save = BackgroundSave(
        tables,
        tracker=tracker,
        stalled_after_s=stalled_after_s,
        raise_if_aborted=raise_if_aborted,
        processors=processors,
        buffer_bytes=buffer_bytes,
    )
    return save, tracker


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def loaded(store: Store, tables: Sequence[Table], receipt: ShardReceipt, attempt: str) -> dict[str, np.ndarray]:
    """What the files hold, read into new tables."""
    fresh = [Table(table.spec, table.buckets) for table in tables]
    read_shard(store, fresh, assembled(tables, [receipt], attempt), on_chunk=lambda: None)
    return {f"{t.spec.name}/{name}": values for t in fresh for name, values in {"rows": t.rows, **t.slots}.items()}


def test_a_snapshot_contains_every_update_before_it_and_none_after(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    """Step t adds t to random rows; saves run one after another while training never stops. The sum of a row shows what
    was in it.
    """
    rng = np.random.default_rng(5)
    tables = [table_of(SGD(1.0), name="large"), table_of(SGD(1.0), num_rows=40, num_buckets=1, name="small")]
    expected = {table.spec.name: np.zeros((table.num_rows, 4), np.float32) for table in tables}
    save, _ = saver(tables, buffer_bytes=5 << 10)
    store = Store(str(tmp_path))
    frozen: list[tuple[str, dict[str, np.ndarray], Future[ShardReceipt]]] = []
    steps_during = 0
    for step in range(1, 100_000):
        if not frozen or frozen[-1][2].done():
            if len(frozen) == 6:
                break
            attempt = f"s{step:09d}-g00000001"
            save.freeze()
            writing = thread.submit(save.write, store, attempt, is_first=True)
            frozen.append((attempt, {name: sums.copy() for name, sums in expected.items()}, writing))
        else:
            steps_during += 1
        for table in tables:
            rows = np.unique(rng.integers(0, table.num_rows, 6))
            table.update(rows, np.full((len(rows), 4), -step, np.float32), 1.0)
            expected[table.spec.name][rows] += step
    assert steps_during > 6, "training did not go on during the saves"
    for attempt, sums, writing in frozen:
        found = loaded(store, tables, writing.result(), attempt)
        for name, values in sums.items():
            np.testing.assert_array_equal(found[f"{name}/rows"], values)


OPTIMIZERS = [
    SGD(0.1),
    Adagrad(0.1),
    RowWiseAdagrad(0.1),
    AdagradMomentum(0.1, 0.9),
    Adam(0.1),
    Adam(0.1, lazy_adam=False),
    FTRL(0.1),
    Momentum(0.1),
    Lion(0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("buffer_bytes", [0, None])
def test_the_bytes_are_those_of_a_save_that_stops_training(
    optimizer: Optimizer, buffer_bytes: int | None, tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    rng = np.random.default_rng(7)
    table = table_of(optimizer, num_rows=700, dim=8)

    def train() -> None:
        rows = rng.integers(0, 80, 30) * 8
        table.update(rows, rng.standard_normal((30, 8), np.float32), 0.1)

    for _ in range(3):
        train()
    stopped, store = Store(str(tmp_path / "stopped")), GatedStore(tmp_path / "running", passes=0)
    write_live(stopped, [table], "s1-g1")
    save, _ = saver([table], buffer_bytes=buffer_bytes)
    save.freeze()
    if buffer_bytes is None:
        # All before the first file; the buffer holds the whole table.
        for _ in range(5):
            train()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    store.tickets.release(1000)
    while not writing.done():
        train()
    writing.result()
    expected = {
        path.relative_to(tmp_path / "stopped"): path.read_bytes()
        for path in (tmp_path / "stopped").rglob("*")
        if path.is_file()
    }
    found = {
        path.relative_to(tmp_path / "running"): path.read_bytes()
        for path in (tmp_path / "running").rglob("*")
        if path.is_file()
    }
    assert found == expected
    assert len(found) == (1 + len(table.slots)) * 9


def test_a_full_buffer_holds_training_up_until_files_are_written_and_counts_the_time(
    tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    table, clock = table_of(SGD(1.0)), FakeClock()
    save, tracker = saver([table], buffer_bytes=0, tracker=Tracker(clock.monotonic_s))
    store = GatedStore(tmp_path, passes=0)
    save.freeze()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    table.update(np.array([1400]), np.ones((1, 4), np.float32), 1.0)  # takes the only place

    def touch_another_row() -> None:
        with tracker.phase(Phase.UPDATE):
            table.update(np.array([1000]), np.ones((1, 4), np.float32), 1.0)

    with ThreadPoolExecutor(1) as training:
        update = training.submit(touch_another_row)
        wait_for("wait for the save", lambda: tracker.progress().phase == "wait for save", seconds=PATIENCE_S)
        clock.sleep(5.0)
        with pytest.raises(TimeoutError):
            update.result(timeout=0.1)
        assert table.rows[1000, 0] == 0, "changed before its value was kept"
        store.tickets.release(1000)
        update.result(timeout=PATIENCE_S)
    receipt = writing.result(timeout=PATIENCE_S)
    assert not any(values.any() for values in loaded(store, [table], receipt, "s1-g1").values())
    assert table.rows[[1000, 1400], 0].tolist() == [-1.0, -1.0]
    spent = tracker.take_phase_s()
    assert (spent["wait for save"], spent["update"]) == (5.0, 0.0)
    # Eight files, and both ends of the wait, which has a deadline of its own.
    assert tracker.progress().marks == 10


def test_tables_that_change_most_are_written_first_and_use_the_room_of_the_others(
    tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    """The save sees in the step that it lets pass which these are. Alone, none of them had room for its rows."""
    tables = [table_of(SGD(1.0), num_rows=800, name=name) for name in ("a", "b", "c", "d")]
    row_bytes = tables[0].spec.row_bytes + ENTRY_BYTES
    tracker = Tracker()
    save, _ = saver(tables, buffer_bytes=4 * 40 * row_bytes, tracker=tracker)
    written: list[str] = []

    class Listening(GatedStore):
        def write_new(self, name: str, buffers: Sequence[object]) -> None:
            written.append(name.split("/")[3])
            super().write_new(name, buffers)

    store = Listening(tmp_path, passes=1000)
    with tracker.phase(Phase.UPDATE):
        save.freeze()
        writing = thread.submit(save.write, store, "s1-g1", is_first=True)
        for name, count in (("c", 60), ("b", 12), ("a", 1)):
            table = next(table for table in tables if table.spec.name == name)
            table.update(np.arange(count) * 8, np.ones((count, 4), np.float32), 1.0)
        assert tracker.take_phase_s().get("wait for save", 0.0) == 0
        tracker.finish_step()
        receipt = writing.result(timeout=PATIENCE_S)
    assert list(dict.fromkeys(written)) == ["c", "b", "a", "d"]
    assert not any(values.any() for values in loaded(store, tables, receipt, "s1-g1").values())


@pytest.mark.parametrize(
    ("processors", "is_local", "most"), [(0.5, True, 1), (2.5, True, 3), (math.inf, True, 4), (0.5, False, 4)]
)
def test_files_on_a_disk_are_written_as_many_at_a_time_as_there_are_processors(
    processors: float, is_local: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While training goes on. Requests to other storage mostly wait, so they are made side by side."""
    table = table_of(SGD(1.0), num_rows=20_000, num_buckets=256)
    tracker, lock = Tracker(), threading.Lock()
    in_flight: list[str] = []
    seen: list[int] = []

    class Slow(Store):
        def write_new(self, name: str, buffers: Sequence[object]) -> None:
            is_chunk = not name.endswith("zarr.json")
            with lock:
                in_flight.extend([name] * is_chunk)
                seen.append(len(in_flight))
            time.sleep(0.01)
            super().write_new(name, buffers)  # type: ignore[arg-type]
            with lock:
                in_flight[:] = [other for other in in_flight if other != name]

    monkeypatch.setattr(Slow, "is_local", is_local)
    # On a busy machine a save falls behind for other reasons.
    monkeypatch.setattr(save_pace, "LONGEST_LAG_S", PATIENCE_S)
    save, _ = saver([table], processors=processors, tracker=tracker)
    with tracker.phase(Phase.UPDATE):
        save.freeze()
        tracker.finish_step()
        save.write(Slow(str(tmp_path)), "s1-g1", is_first=True)
    assert max(seen) == most


def test_a_save_that_hangs_is_given_up_and_training_goes_on(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    table = table_of(SGD(1.0))
    save, _ = saver([table], buffer_bytes=0, stalled_after_s=0.3)
    store = GatedStore(tmp_path, passes=0)
    save.freeze()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    table.update(np.array([1400, 1000, 900]), np.ones((3, 4), np.float32), 1.0)
    assert table.rows[[900, 1000, 1400], 0].tolist() == [-1.0] * 3
    with pytest.raises(RuntimeError, match="Expected the end of that first"):
        save.freeze()
    store.tickets.release(1000)
    with pytest.raises(SaveStalled, match="wrote nothing for 0 s.* Look at the storage"):
        writing.result(timeout=PATIENCE_S)
    save.freeze(before_failed=True)
    receipt = save.write(store, "s2-g1", is_first=True)
    np.testing.assert_array_equal(loaded(store, [table], receipt, "s2-g1")["t/rows"], table.rows)


def test_a_failed_write_frees_training_and_the_next_save_is_whole(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    table = table_of(Adagrad(0.1))
    save, _ = saver([table], buffer_bytes=0)
    store = GatedStore(tmp_path, passes=4)
    save.freeze()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    with ThreadPoolExecutor(1) as training:
        update = training.submit(table.update, np.array([1400, 1000]), np.ones((2, 4), np.float32), 1.0)
        store.error = StorageError("the disk is full")
        store.tickets.release(1)
        with pytest.raises(StorageError, match="disk is full"):
            writing.result(timeout=PATIENCE_S)
        update.result(timeout=PATIENCE_S)
    assert table.before_change is None
    store.error = None
    store.tickets.release(1000)
    before = table.rows.copy()
    save.freeze()
    receipt = save.write(store, "s2-g1", is_first=True)
    np.testing.assert_array_equal(loaded(store, [table], receipt, "s2-g1")["t/rows"], before)


def test_an_abort_ends_both_the_save_and_the_wait_for_it(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    aborted = threading.Event()

    def check() -> None:
        if aborted.is_set():
            raise InterruptedError("a test")

    table = table_of(SGD(1.0))
    save, _ = saver([table], buffer_bytes=0, raise_if_aborted=check)
    store = GatedStore(tmp_path, passes=0)
    save.freeze()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    threading.Timer(0.2, aborted.set).start()
    with pytest.raises(InterruptedError):
        table.update(np.array([1400, 1000]), np.ones((2, 4), np.float32), 1.0)
    store.tickets.release(1000)
    with pytest.raises(InterruptedError):
        writing.result(timeout=PATIENCE_S)


@pytest.mark.parametrize("tracks_changes", [False, True])
def test_a_delta_needs_a_save_that_ended_well(tracks_changes: bool, tmp_path: Path) -> None:
    """After a failure nobody knows any more what changed since the commit before."""
    table = table_of(Adagrad(0.1))
    save = BackgroundSave(
        [table], tracker=Tracker(), stalled_after_s=1.0, raise_if_aborted=lambda: None, tracks_changes=tracks_changes
    )
    store = GatedStore(tmp_path, passes=1000)

    def write(attempt: str, *, is_delta: bool) -> None:
        table.update(np.array([3]), np.ones((1, 4), np.float32), 1.0)
        save.freeze()
        save.write(store, attempt, is_first=True, is_delta=is_delta)

    with pytest.raises(RuntimeError, match="Expected a whole save first"):
        write("s1-g1", is_delta=True)
    write("s2-g1", is_delta=False)
    if not tracks_changes:
        with pytest.raises(RuntimeError, match="Expected a whole save first"):
            write("s3-g1", is_delta=True)
        return
    write("s3-g1", is_delta=True)
    store.error = StorageError("the disk is full")
    with pytest.raises(StorageError, match="disk is full"):
        write("s4-g1", is_delta=True)
    store.error = None
    with pytest.raises(RuntimeError, match="Expected a whole save first"):
        write("s5-g1", is_delta=True)


@pytest.mark.parametrize("fails", ["while it writes", "after it has written"])
def test_a_delta_goes_back_to_the_last_save_that_became_a_commit(fails: str, tmp_path: Path) -> None:
    """Rows changed before a save that was lost, whether here or on another host, are in the next delta, and its digests
    are right.
    """
    table = table_of(Adagrad(0.1))
    save = BackgroundSave(
        [table], tracker=Tracker(), stalled_after_s=1.0, raise_if_aborted=lambda: None, tracks_changes=True
    )
    store = GatedStore(tmp_path, passes=1000)

    def change(row: int) -> None:
        table.update(np.array([row]), np.ones((1, 4), np.float32), 1.0)

    save.freeze()
    base = assembled([table], [save.write(store, "s1-g1", is_first=True)], "s1-g1")
    for attempt, row in (("s2-g1", 3), ("s3-g1", 700)):
        change(row)
        save.freeze(before_failed=attempt == "s3-g1")
        store.error = StorageError("lost") if fails == "while it writes" else None
        if store.error:
            with pytest.raises(StorageError, match="lost"):
                save.write(store, attempt, is_first=True, is_delta=True)
        else:
            save.write(store, attempt, is_first=True, is_delta=True)
    store.error = None
    change(1400)
    save.freeze(before_failed=True)
    (shard,) = save.write(store, "s4-g1", is_first=True, is_delta=True).tables
    assert sum(part.num_rows for part in shard.parts) == 3
    entry = assemble_delta(base[0], "s4-g1", shard.parts, [shard.buckets])
    fresh = Table(table.spec, table.buckets)
    read_shard(store, [fresh], [entry], on_chunk=lambda: None)
    np.testing.assert_array_equal(fresh.rows, table.rows)


def test_one_save_at_a_time() -> None:
    save, _ = saver([table_of(SGD(1.0))])
    save.freeze()
    with pytest.raises(RuntimeError, match="Expected the end of that first"):
        save.freeze()


def test_memory_is_a_tenth_of_the_tables() -> None:
    large = table_of(Adagrad(0.1), num_rows=400_000, dim=64, num_buckets=256)
    tables = [large, *(table_of(SGD(0.1), num_rows=100, num_buckets=1, name=f"small {at}") for at in range(5))]
    save, _ = saver(tables)
    total = sum(table.size_bytes for table in tables)
    assert 0.08 * total < save.size_bytes < 1.01 * MEMORY_SHARE * total
    assert save_bytes(total) == pytest.approx(save.size_bytes, rel=0.05)
    small = table_of(Adagrad(0.1))
    save, _ = saver([small])
    assert save.size_bytes < 1.6 * small.size_bytes < MIN_BUFFER_BYTES


def test_a_host_that_holds_nothing_saves_nothing(tmp_path: Path) -> None:
    empty = Table(table_of(Adagrad(0.1)).spec, np.empty(0, np.int64))
    save, _ = saver([empty])
    save.freeze()
    receipt = save.write(Store(str(tmp_path)), "s1-g1", is_first=False)
    assert receipt.tables[0].buckets.buckets == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ends_with", ["a buffer that fills", "the end of training", "an abort"])
def test_a_save_that_pauses_beside_training_goes_on_when_it_should(
    tmp_path: Path, thread: ThreadPoolExecutor, ends_with: str
) -> None:
    """At this pace the save would take an hour."""
    table, store = table_of(SGD(1.0)), Store(str(tmp_path))
    aborted = threading.Event()

    def raise_if_aborted() -> None:
        if aborted.is_set():
            raise RuntimeError("aborted")

    row_bytes = table.spec.row_bytes + ENTRY_BYTES
    save, tracker = saver([table], buffer_bytes=200 * row_bytes, processors=1e-8, raise_if_aborted=raise_if_aborted)
    with tracker.phase(Phase.DEVICE):
        save.freeze()
        writing = thread.submit(save.write, store, "s000000001-g00000001", is_first=True)
        wait_for("pause", lambda: bool(save.paused_s), seconds=PATIENCE_S)
        rows = np.arange(90)
        table.update(rows, np.ones((len(rows), 4), np.float32), 1.0)
        assert not writing.done()
        if ends_with == "a buffer that fills":
            for start in range(90, table.num_rows - 47, 47):
                table.update(rows[:47] + start, np.ones((47, 4), np.float32), 1.0)
            assert store.sizes("data"), "the buffer is not full, so most of the save must be behind us"
        elif ends_with == "an abort":
            aborted.set()
            with pytest.raises(RuntimeError, match="aborted"):
                writing.result(timeout=PATIENCE_S)
            return
    found = loaded(store, [table], writing.result(timeout=PATIENCE_S), "s000000001-g00000001")
    assert not found["t/rows"].any(), "the moment was before the updates"


@pytest.mark.parametrize("is_delta", [False, True])
def test_rows_that_are_no_numbers_are_reported_in_place_of_the_shard(is_delta: bool, tmp_path: Path) -> None:
    table = table_of(SGD(1.0))
    save = BackgroundSave(
        [table], tracker=Tracker(), stalled_after_s=1.0, raise_if_aborted=lambda: None, tracks_changes=True
    )
    store = Store(str(tmp_path))
    save.freeze()
    save.write(store, "s1-g1", is_first=True)
    table.update(np.array([9]), np.full((1, 4), np.nan, np.float32), 1.0)
    save.freeze()
    receipt = save.write(store, "s2-g1", is_first=True, is_delta=is_delta)
    assert receipt.spoilt is not None
    # Position 9 of bucket 0 of 8.
    assert receipt.spoilt.describe() == "row 72 of table 't'"
    assert receipt.tables == ()


def test_a_staging_buffer_is_free_before_its_file_is_durable(
    tmp_path: Path, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for room while the disk is busy with what no longer needs any."""
    monkeypatch.setattr("podembed.workers.checkpoint.file_threads.SYNC_FILES", 1)
    table, gate = table_of(SGD(1.0)), threading.Semaphore(0)
    save, _ = saver([table])
    store = GatedStore(tmp_path, passes=1000)
    given_back = threading.Semaphore(0)
    real_done, real_sync = save.done, store.sync

    def done(values: Sequence[np.ndarray]) -> None:
        real_done(values)
        given_back.release()

    def sync(unsynced: object) -> None:
        assert gate.acquire(timeout=PATIENCE_S)
        real_sync(unsynced)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "done", done)
    monkeypatch.setattr(store, "sync", sync)
    save.freeze()
    writing = thread.submit(save.write, store, "s1-g1", is_first=True)
    assert given_back.acquire(timeout=20.0), "the buffer waits for the disk"
    gate.release(1000)
    writing.result(timeout=PATIENCE_S)
