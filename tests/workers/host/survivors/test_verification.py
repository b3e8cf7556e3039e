"""`RowVerification` with real threads: what is compared is the commit's moment, whatever training does meanwhile, and
nobody waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.optimizers import Adagrad
from podembed.embedding.table.table import Table
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import has_digest
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.device.doorway import ChannelError
from podembed.workers.host.survivors import verification
from podembed.workers.host.survivors.verification import RowsDamaged, RowVerification
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.storage.store import Store
from tests.processes import wait_for
from tests.workers.checkpoint.test_background_save import table_of
from tests.workers.checkpoint.test_shard import assembled, write_live

COMMIT = "s000000004-g00000001"
# A bucket of these tables would take minutes at this pace.
STILL = 1e-9
PATIENCE_S = 60.0


@dataclass
class Host:
    """Two tables that hold the rows of a commit, as after undo."""

    store: Store
    tables: Sequence[Table]
    files: Sequence[TableFiles]
    save: BackgroundSave
    tracker: Tracker
    aborted: list[str] = field(default_factory=list)

    def check(self) -> None:
        if self.aborted:
            raise ChannelError(self.aborted[0])

    def verify(
        self, *, kept: Sequence[Sequence[int]] | None = None, processors: float = STILL, threads: int = 1
    ) -> RowVerification:
        masks = [np.ones(len(table.buckets), bool) for table in self.tables]
        if kept is not None:
            masks = [np.isin(table.buckets, own) for table, own in zip(self.tables, kept, strict=True)]
        self.save.track(self.files, COMMIT, is_read=True)
        return RowVerification(
            self.save.rows,
            self.tables,
            self.files,
            masks,
            tracker=self.tracker,
            check=self.check,
            threads=threads,
            processors=processors,
        )

    def train(self, at: int, rows: np.ndarray) -> None:
        """As a step: announce, then change."""
        table = self.tables[at]
        assert table.before_change is not None
        table.before_change(rows)
        table.rows[rows] += 1.0
        table.slots["accumulator"][rows] += 0.5

    def spoil(self, at: int, bucket: int) -> None:
        self.tables[at].bucket(bucket)["accumulator"].reshape(-1).view(np.uint32)[9] ^= 1 << 3


def host(tmp_path: Path, *, buffer_bytes: int | None = None, tracks_changes: bool = False) -> Host:
    store = Store(str(tmp_path))
    tables = [table_of(Adagrad(0.1), name=name, num_rows=12_000, dim=16) for name in "ab"]
    for table in tables:
        table.rows[: table.spec.layout.num_rows_of(0)] += 0.25
    receipt = write_live(store, tables, COMMIT)
    tracker = Tracker()
    made = Host(store, tables, assembled(tables, [receipt], COMMIT), None, tracker)  # type: ignore[arg-type]
    made.save = BackgroundSave(
        tables,
        tracker=tracker,
        stalled_after_s=PATIENCE_S,
        raise_if_aborted=made.check,
        undo=Undo(tables, share=0.5),
        tracks_changes=tracks_changes,
        buffer_bytes=buffer_bytes,
    )
    return made


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tracks_changes", [False, True])
def test_rows_that_training_changes_are_compared_as_they_were(
    tmp_path: Path, threads: int, tracks_changes: bool
) -> None:
    one = host(tmp_path, tracks_changes=tracks_changes)
    found = one.verify(threads=threads)
    for at, table in enumerate(one.tables):
        for _ in range(2):
            one.train(at, np.arange(table.num_rows)[::7])
    assert not found.is_over
    found.finish()
    assert found.is_over
    assert not any(mask.any() for mask in found.wrong)
    found.raise_if_damaged()
    assert not one.save.rows.is_running
    assert one.tracker.phase_s[Phase.RESTORE] > 0
    # The next save is of the present rows.
    one.save.freeze("s000000009-g00000002")
    receipt = one.save.write(one.store, "s000000009-g00000002", is_first=True, is_delta=tracks_changes)
    if tracks_changes:
        # Of what training changed, all and nothing else.
        changed = [sum(part.num_rows for part in table.parts) for table in receipt.tables]
        assert changed == [len(range(0, table.num_rows, 7)) for table in one.tables]


def test_one_table_is_compared_by_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen, barrier = host(tmp_path), set(), threading.Barrier(2)

    def compare(*arguments: Any) -> bool:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            barrier.wait(PATIENCE_S)
        return has_digest(*arguments)

    monkeypatch.setattr(verification, "has_digest", compare)
    one.verify(kept=[range(8), []], threads=2, processors=100.0).finish()
    assert len(seen) == 2


def test_tables_that_training_changes_are_compared_before_others(tmp_path: Path) -> None:
    """Otherwise a step would wait for a whole other table."""
    one = host(tmp_path, buffer_bytes=256 << 10)
    found = one.verify()
    one.train(1, np.arange(200))
    kept = found._next()
    assert kept is not None
    assert kept.table is one.tables[1]
    found.stop()


def test_what_differs_is_named_when_all_has_been_compared(tmp_path: Path) -> None:
    one = host(tmp_path)
    for bucket in (1, 6):
        one.spoil(1, bucket)
    # Nobody kept it, so nobody looks at it.
    one.spoil(0, 2)
    found = one.verify(kept=[[0, 1, 3], range(8)], processors=100.0)
    wait_for("end of the comparison", lambda: found.is_over, seconds=PATIENCE_S)
    for _ in range(2):
        with pytest.raises(
            RowsDamaged, match=r"table 'b', rows and slots, bucket 1 \(.*\); table 'b', rows and slots, bucket 6"
        ):
            found.raise_if_damaged()
    with pytest.raises(RowsDamaged):
        found.finish()
    assert [mask.nonzero()[0].tolist() for mask in found.wrong] == [[], [1, 6]]
    found.stop()
    found.raise_if_damaged()


def test_a_full_buffer_makes_it_hurry_and_training_waits_for_it(tmp_path: Path) -> None:
    one = host(tmp_path, buffer_bytes=64 << 10)
    found = one.verify()
    with ThreadPoolExecutor(1) as training:
        for at in (0, 1):
            training.submit(one.train, at, np.arange(one.tables[at].num_rows)).result(PATIENCE_S)
    assert one.tracker.phase_s[Phase.WAIT_FOR_SAVE] > 0
    found.finish()


def test_it_ends_at_once_when_nobody_wants_to_know_any_more(tmp_path: Path) -> None:
    one = host(tmp_path)
    one.spoil(0, 7)
    found = one.verify()
    found.stop()
    assert found.is_over
    found.raise_if_damaged()
    assert not one.save.rows.is_running
    assert not any("verification" in thread.name for thread in threading.enumerate())


def test_an_abort_ends_it_and_the_wait_for_it(tmp_path: Path) -> None:
    one = host(tmp_path)
    found = one.verify()
    one.aborted.append("a test")
    with pytest.raises(ChannelError, match="a test"):
        found.finish()
    found.stop()


def test_a_save_whose_files_are_requested_early_waits_for_its_own_moment(tmp_path: Path) -> None:
    one = host(tmp_path)
    found = one.verify()
    name = "s000000009-g00000002"
    with ThreadPoolExecutor(1) as saving:
        written = saving.submit(one.save.write, one.store, name, is_first=True)
        with pytest.raises(RuntimeError, match="while another one is running"):
            one.save.freeze(name)
        one.train(0, np.arange(100))
        assert not written.done()
        found.finish()
        one.save.freeze(name)
        receipt = written.result(PATIENCE_S)
    (changed, same) = assembled(one.tables, [receipt], name)
    assert changed.digests != one.files[0].digests
    assert same.digests == one.files[1].digests


@pytest.mark.parametrize("num_begun", [0, 1])
def test_without_threads_nothing_is_left_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_begun: int
) -> None:
    one, begun, real = host(tmp_path), [], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(begun) == num_begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        one.verify(threads=2)
    assert len(begun) == num_begun
    assert not any(thread.is_alive() for thread in begun)
    assert not one.save.rows.is_running
