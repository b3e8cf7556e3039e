"""`RamUndoLog` beside the plain way, whole copies at the moments: going back to either of two, a full log, and
tables of every optimizer.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
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
from podembed.embedding.table.stores.ram_kept import RamUndoLog
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding.table.stores.preserving import preserve
from tests.long_tests import examples

NUM_ROWS = 29


def arrays_of(num_rows: int = NUM_ROWS) -> list[np.ndarray]:
    rows = np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3)
    return [rows, 1000 + np.arange(num_rows, dtype=np.float32).reshape(num_rows, 1)]


def copy_of(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [array.copy() for array in arrays]


def assert_back(arrays: list[np.ndarray], before: list[np.ndarray], lost: np.ndarray) -> None:
    known = np.setdiff1d(np.arange(len(arrays[0])), lost)
    for array, expected in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array[known], expected[known])


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), max_rows=st.sampled_from([0, 1, 4, 11, 2 * NUM_ROWS]))
def test_undo_is_exact_but_for_the_rows_that_it_names(data: st.DataObject, max_rows: int) -> None:
    """Commits that are acknowledged, that are not, and that are still being written when it comes to going back, to
    whichever of the two.
    """
    arrays, changed = arrays_of(), set[int]()
    log = RamUndoLog(arrays, max_rows=max_rows)
    log.begin()
    older, newer = copy_of(arrays), None
    since_older, since_newer = set[int](), set[int]()
    for _ in range(data.draw(st.integers(0, 12), "operations")):
        match data.draw(st.sampled_from(["change", "change", "change", "freeze", "advance", "begin"]), "operation"):
            case "change":
                rows = np.array(data.draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=9), "rows"), np.int64)
                preserve(log, rows)
                for array in arrays:
                    array[rows] += 0.5
                since_older |= {*rows.tolist()}
                since_newer |= {*rows.tolist()}
            case "freeze":
                log.freeze()
                newer, since_newer = copy_of(arrays), set()
            case "advance" if newer is not None:
                log.advance()
                older, newer, since_older = newer, None, since_newer
            case "begin":
                log.begin()
                older, newer, since_older = copy_of(arrays), None, set()
    to_newer = newer is not None and data.draw(st.booleans(), "to newer")
    before, changed = (newer, since_newer) if to_newer else (older, since_older)
    assert before is not None
    lost = log.undo(to_newer=to_newer)
    assert {*lost.tolist()} <= changed, "a row is named that never changed"
    assert (np.diff(lost) > 0).all()
    if max_rows == 2 * NUM_ROWS:
        assert len(lost) == 0
    if max_rows == 0:
        assert {*lost.tolist()} == changed
    assert_back(arrays, before, lost)


def test_of_two_values_of_a_row_the_older_one_wins() -> None:
    arrays = arrays_of()
    log = RamUndoLog(arrays, max_rows=8)
    log.begin()
    before = copy_of(arrays)
    for step in range(2):
        preserve(log, np.array([3, 5]))
        arrays[0][[3, 5]] += 1
        if step == 0:
            log.freeze()
    assert log.num_kept == 4
    assert len(log.undo()) == 0
    assert_back(arrays, before, np.empty(0, np.int64))


def test_a_commit_that_stands_makes_room_and_the_ring_goes_round() -> None:
    arrays = arrays_of()
    log = RamUndoLog(arrays, max_rows=7)
    log.begin()
    for step in range(20):
        log.freeze()
        before = copy_of(arrays)
        log.advance()
        rows = np.array([step % NUM_ROWS, (step + 9) % NUM_ROWS, (step + 13) % NUM_ROWS])
        preserve(log, rows)
        arrays[0][rows] += 1
        assert log.num_kept == 3
    assert len(log.undo()) == 0
    assert_back(arrays, before, np.empty(0, np.int64))


def test_a_commit_may_stand_after_rows_have_changed_since_it() -> None:
    """As a rule it does: it is acknowledged while training goes on. Round the ring several times."""
    arrays = arrays_of()
    log = RamUndoLog(arrays, max_rows=11)
    log.begin()
    for step in range(20):
        preserve(log, np.array([step % NUM_ROWS, (step + 9) % NUM_ROWS]))
        arrays[0][[step % NUM_ROWS, (step + 9) % NUM_ROWS]] += 1
        log.freeze()
        before = copy_of(arrays)
        rows = np.array([(step + 4) % NUM_ROWS, step % NUM_ROWS, (step + 13) % NUM_ROWS])
        preserve(log, rows)
        arrays[0][rows] += 1
        log.advance()
        assert log.num_kept == 3
    assert len(log.undo()) == 0
    assert_back(arrays, before, np.empty(0, np.int64))


def test_a_row_that_was_lost_stays_lost_when_a_commit_is_given_up() -> None:
    """Kept since the commit that came to nothing, but not since the one before: its value then is not known."""
    arrays = arrays_of()
    log = RamUndoLog(arrays, max_rows=1)
    log.begin()
    preserve(log, np.array([1, 2]))
    log.freeze()
    log.advance()
    preserve(log, np.array([4, 2]))
    log.freeze()
    log.freeze()
    assert log.undo().tolist() == [2]


def test_advancing_needs_a_newer_moment() -> None:
    log = RamUndoLog(arrays_of(), max_rows=1)
    log.begin()
    with pytest.raises(ValueError, match="Expected freeze before"):
        log.advance()


OPTIMIZERS = [
    SGD(0.1),
    Momentum(0.1),
    Adagrad(0.1),
    RowWiseAdagrad(0.1),
    AdagradMomentum(0.1, 0.9),
    Adam(0.1),
    Lion(0.1),
    FTRL(0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("share", [0.05, 2.0])
def test_a_table_goes_back_bit_by_bit(optimizer: Optimizer, share: float) -> None:
    rng = np.random.default_rng(3)
    spec = TableSpec.of(TableConfig(1000, 8, optimizer=optimizer, name="t"), seed=1, num_buckets=8)
    table = Table(spec, np.arange(8))
    table.initialize()
    log = RamUndoLog([table.rows, *table.slots.values()], max_rows=int(share * table.num_rows))
    table.before_change = partial(preserve, log)

    def train(steps: int) -> None:
        for _ in range(steps):
            rows = rng.integers(0, table.num_rows, 30)
            table.update(rows, rng.standard_normal((30, 8), np.float32), 0.1)

    log.begin()
    train(3)
    log.freeze()
    before = copy_of([table.rows, *table.slots.values()])
    train(5)
    lost = log.undo(to_newer=True)
    assert bool(len(lost)) == (share < 1)
    assert_back([table.rows, *table.slots.values()], before, lost)
