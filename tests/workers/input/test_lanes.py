from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.data.columns import DataConfigError
from podembed.workers.input.lanes import LanePlan

plans = st.builds(
    lambda rows, num_lanes, per_step, seed, shuffle: LanePlan(
        row_group_rows=tuple(rows), num_lanes=num_lanes, batch_size=num_lanes * per_step, seed=seed, shuffle=shuffle
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 2**63),
    st.booleans(),
)


def rows_of_step(plan: LanePlan, step: int) -> list[list[tuple[int, int]]]:
    """Per lane, the (row group, row) pairs of a step, looked up the slow way."""
    epoch, step_in_epoch = plan.position_of(step)
    order = plan.epoch_order(epoch)
    laid_out = [(int(group), int(row)) for group in order.row_groups for row in plan.row_order(epoch, int(group))]
    return [laid_out[slice(*plan.step_bounds(lane, step_in_epoch))] for lane in range(plan.num_lanes)]


@settings(deadline=None)
@given(plans, st.integers(0, 3))
def test_an_epoch_holds_every_row_once(plan: LanePlan, epoch: int) -> None:
    first = epoch * plan.steps_per_epoch
    read = [
        row for step in range(first, first + plan.steps_per_epoch) for lane in rows_of_step(plan, step) for row in lane
    ]
    assert sorted(read) == [(group, row) for group, rows in enumerate(plan.row_group_rows) for row in range(rows)]


@settings(deadline=None)
@given(plans)
def test_no_step_is_all_padding_and_lanes_differ_by_one_row(plan: LanePlan) -> None:
    lengths = [stop - start for start, stop in map(plan.lane_bounds, range(plan.num_lanes))]
    assert max(lengths) - min(lengths) <= 1
    assert sum(lengths) == plan.num_rows
    assert any(rows_of_step(plan, plan.steps_per_epoch - 1))
    assert all(len(lane) <= plan.rows_per_lane_step for lane in rows_of_step(plan, 0))


@settings(deadline=None)
@given(plans, st.data())
def test_pieces_are_the_rows_of_the_layout(plan: LanePlan, data: st.DataObject) -> None:
    order = plan.epoch_order(0)
    lane = plan.lane_bounds(data.draw(st.integers(0, plan.num_lanes - 1)))
    start = data.draw(st.integers(*lane))
    stop = data.draw(st.integers(start, lane[1]))
    positions = []
    for piece in order.pieces(lane=lane, span=(start, stop)):
        group_start = order.starts[order.row_groups.tolist().index(piece.row_group)]
        assert piece.position == group_start + piece.start
        assert 0 <= piece.start < piece.stop <= plan.row_group_rows[piece.row_group]
        positions += range(piece.position, piece.position + piece.num_rows)
    # Pieces are as long as the lane has them, so they cover the span and stay within the lane.
    assert positions == list(range(positions[0], positions[-1] + 1)) if positions else start == stop
    assert set(range(start, stop)) <= set(positions)
    assert set(positions) <= set(range(*lane))


def test_epochs_and_seeds_shuffle_differently_and_evaluation_does_not() -> None:
    rows = tuple([50] * 20)

    def order(seed: int, epoch: int, *, shuffle: bool = True) -> list[int]:
        plan = LanePlan(row_group_rows=rows, num_lanes=1, batch_size=1, seed=seed, shuffle=shuffle)
        return [*plan.epoch_order(epoch).row_groups.tolist(), *plan.row_order(epoch, 3).tolist()]

    shuffled = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(o) for o in shuffled}) == 4
    assert order(7, 4, shuffle=False) == [*range(20), *range(50)]


def test_row_groups_of_one_size_are_not_shuffled_alike() -> None:
    plan = LanePlan(row_group_rows=(100, 100), num_lanes=1, batch_size=1, seed=3)
    assert not np.array_equal(plan.row_order(0, 0), plan.row_order(0, 1))
    assert not np.array_equal(plan.epoch_order(0).row_groups, plan.row_order(0, 0)[:2])


@pytest.mark.parametrize(
    ("rows", "num_lanes", "batch_size", "message"),
    [
        ((4,), 3, 8, "Use batch_size 9"),
        ((4,), 0, 8, "positive multiple"),
        ((4,), 1, 0, "positive multiple"),
        ((), 1, 1, "at least one row"),
        ((4, 0), 1, 1, "at least one row"),
    ],
)
def test_impossible_plans_are_refused(rows: tuple[int, ...], num_lanes: int, batch_size: int, message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        LanePlan(row_group_rows=rows, num_lanes=num_lanes, batch_size=batch_size)


def test_steps_and_lanes_out_of_range_are_refused() -> None:
    plan = LanePlan(row_group_rows=(4,), num_lanes=2, batch_size=2)
    with pytest.raises(DataConfigError, match="step -1"):
        plan.position_of(-1)
    with pytest.raises(DataConfigError, match="lane 2"):
        plan.lane_bounds(2)
