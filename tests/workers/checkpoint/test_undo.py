"""`Undo` under `BackgroundSave`: which commit a host can go back to, while one is written, after it stands, and when
the log is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import Adagrad, Adam, Optimizer
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.liveness.progress import Tracker
from tests.workers.checkpoint.test_background_save import PATIENCE_S, GatedStore


def table_of(optimizer: Optimizer, *, num_rows: int = 900, name: str = "t") -> Table:
    table = Table(
        TableSpec.of(TableConfig(num_rows, 4, optimizer=optimizer, name=name), seed=1, num_buckets=4), np.arange(4)
    )
    table.initialize()
    return table


class Host:
    """Tables that are trained at random, saved and taken back."""

    def __init__(self, tables: Sequence[Table], *, share: float = 1.0) -> None:
        self.tables = tables
        self.undo = Undo(tables, share=share)
        self.save = BackgroundSave(
            tables, tracker=Tracker(), stalled_after_s=PATIENCE_S, raise_if_aborted=lambda: None, undo=self.undo
        )
        self._rng = np.random.default_rng(11)

    def train(self, steps: int = 3, *, below: int = 900) -> None:
        for _ in range(steps):
            for table in self.tables:
                rows = self._rng.integers(0, below, 20)
                table.update(rows, self._rng.standard_normal((20, 4), np.float32), 0.1)

    def state(self) -> list[bytes]:
        return [array.tobytes() for table in self.tables for array in (table.rows, *table.slots.values())]


def test_while_a_commit_is_written_both_can_be_gone_back_to(tmp_path: Path) -> None:
    for target in ("s1-g1", "s2-g1"):
        host = Host([table_of(Adagrad(0.1))])
        host.save.track([], "s1-g1")
        states = {"s1-g1": host.state()}
        host.train()
        store = GatedStore(tmp_path / target, passes=0)
        host.save.freeze("s2-g1")
        states["s2-g1"] = host.state()
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(host.save.write, store, "s2-g1", is_first=True)
            host.train()
            store.tickets.release(1000)
            writing.result(timeout=PATIENCE_S)
        host.train()
        known = host.undo.back_to(target)
        assert known is not None
        assert known[0].all()
        assert host.state() == states[target]


def test_once_a_commit_stands_the_one_before_is_gone_and_a_second_undo_knows_nothing() -> None:
    host = Host([table_of(Adagrad(0.1))])
    host.save.track([], "s1-g1")
    host.train()
    host.undo.freeze("s2-g1")
    host.undo.acknowledge("s2-g1")
    before = host.state()
    host.train()
    after = host.state()
    assert host.undo.back_to("s1-g1") is None
    assert host.undo.back_to("s3-g1") is None
    assert host.undo.back_to("") is None
    assert host.state() == after, "an undo that was refused changed rows"
    assert host.undo.back_to("s2-g1") is not None
    assert host.state() == before
    assert host.undo.back_to("s2-g1") is None


def test_the_word_that_a_commit_stands_may_come_after_the_next_one_has_begun() -> None:
    """The two come by different threads. A save that begins says what became of the one before."""
    host = Host([table_of(Adagrad(0.1))])
    host.save.track([], "s1-g1")
    host.train()
    host.undo.freeze("s2-g1")
    before = host.state()
    host.train()
    host.undo.freeze("s3-g1")
    host.undo.acknowledge("s2-g1")
    host.train()
    assert host.undo.back_to("s2-g1") is not None
    assert host.state() == before


def test_an_older_word_that_comes_while_a_save_begins_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread writes its name at the worst moment: right after what the save that begins had noted itself."""
    host = Host([table_of(Adagrad(0.1))])
    host.save.track([], "s1-g1")
    host.train()
    host.undo.freeze("s2-g1")
    host.undo.freeze("s3-g1")
    before = host.state()
    real = Undo._settle

    def late(self: Undo) -> None:
        self.acknowledge("s2-g1")
        real(self)

    host.train()
    monkeypatch.setattr(Undo, "_settle", late)
    host.undo.freeze("s4-g1")
    monkeypatch.undo()
    host.train()
    assert host.undo.back_to("s3-g1") is not None
    assert host.state() == before


def test_a_commit_that_came_to_nothing_is_passed_over() -> None:
    host = Host([table_of(Adagrad(0.1))])
    host.save.track([], "s1-g1")
    before = host.state()
    for attempt in ("s2-g1", "s3-g1", "s4-g1"):
        host.train()
        host.undo.freeze(attempt, before_failed=True)
        # An acknowledgement of something else changes nothing.
        host.undo.acknowledge("s9-g9")
    host.train()
    assert host.undo.back_to("s3-g1") is None
    assert host.undo.back_to("s1-g1") is not None
    assert host.state() == before


def test_before_the_first_commit_nothing_is_known_and_after_it_there_is() -> None:
    host = Host([table_of(Adagrad(0.1))])
    host.train()
    assert host.undo.back_to("s1-g1") is None
    host.save.freeze("s1-g1")
    before = host.state()
    host.train()
    assert host.undo.back_to("s1-g1") is not None
    assert host.state() == before


def test_a_full_log_stops_nobody_and_names_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podembed.workers.checkpoint.undo.MIN_LOG_BYTES", 0)
    dense = Adam(0.1, lazy_adam=False)
    tables = [table_of(Adagrad(0.1)), table_of(Adagrad(0.1), name="quiet"), table_of(dense, name="all")]
    host = Host(tables, share=0.02)
    host.save.track([], "s1-g1")
    before = [{bucket: [a.copy() for a in t.bucket(bucket).values()] for bucket in range(4)} for t in tables]
    for _ in range(3):
        for table in (tables[0], tables[2]):
            rows = np.arange(100, 400)
            table.update(rows, np.ones((300, 4), np.float32), 0.1)
    known = host.undo.back_to("s1-g1")
    assert known is not None
    assert known[0].tolist() == [False, False, True, True], "rows 100 to 399 lie in the first two buckets"
    assert known[1].all()
    assert not known[2].any(), "a rule that changes all rows is not logged"
    for table, buckets, is_known in zip(tables, before, known, strict=True):
        for bucket in np.flatnonzero(is_known):
            for array, expected in zip(table.bucket(int(bucket)).values(), buckets[int(bucket)], strict=True):
                np.testing.assert_array_equal(array, expected)
