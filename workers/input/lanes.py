"""`LanePlan`: which rows every lane reads at every step. Pure arithmetic; no file is touched.

An epoch is a seeded permutation of the row groups, laid end to end and cut into S lanes. Their lengths differ by at
most one row. A step takes the same number of rows from every lane. The input position of a whole run is therefore one
integer, the step, and the batch of step t is a function of (seed, t). How many hosts there are only decides who reads
which lanes. Rows are shuffled inside their row group, by an order that depends on (seed, epoch, row group) alone. A row
group that a cut between two lanes divides therefore comes out whole.

A striped plan deals the same rows out the other way round. Step t takes the t-th `batch_size` rows of the epoch, and
each lane its part of them. Steps thus follow the epoch from its first row to its last. With rows in file order that is
the order of the files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from podembed.embedding.hashing import combine, mix_word
from podembed.workers.data.columns import DataConfigError

# Separates the two uses of one seed, so that the order of row groups says nothing about the order of rows.
_ROW_GROUPS, _ROWS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePiece:
    """What one lane reads of one row group in an epoch.

    Attributes:
      row_group: its number in file order.
      start, stop: rows `start` to `stop - 1` of the row group, counted in its shuffled order.
      position: position in the epoch of the first of them.
    """

    row_group: int
    start: int
    stop: int
    position: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """The row groups of one epoch, laid end to end.

    Attributes:
      epoch: counted from 0.
      row_groups: int64 `[num_row_groups]`, in the order in which they are read.
      starts: int64 `[num_row_groups + 1]`, position in the epoch at which each begins; the last is the number of rows.
    """

    epoch: int
    row_groups: np.ndarray
    starts: np.ndarray

    def pieces(self, *, lane: tuple[int, int], span: tuple[int, int]) -> list[LanePiece]:
        """The pieces of a lane that a span of it touches, in order. Each is as long as the lane has it, also beyond the
        span.

        Args:
          lane: positions in the epoch at which the lane begins and ends.
          span: positions at which a part of that lane begins and ends.
        """
        if span[0] >= span[1]:
            return []
        first = int(np.searchsorted(self.starts, span[0], side="right")) - 1
        last = int(np.searchsorted(self.starts, span[1], side="left"))
        return [self._piece(at, lane) for at in range(first, last)]

    def _piece(self, at: int, lane: tuple[int, int]) -> LanePiece:
        begin, end = int(self.starts[at]), int(self.starts[at + 1])
        position = max(begin, lane[0])
        return LanePiece(
            row_group=int(self.row_groups[at]),
            start=position - begin,
            stop=min(end, lane[1]) - begin,
            position=position,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """How the rows of a data set are dealt out over lanes and steps.

    Attributes:
      row_group_rows: rows of every row group, all above 0, in file order.
      num_lanes: S, fixed when the run is created; the most hosts that can ever read.
      batch_size: B, rows of a global batch; a multiple of S.
      seed: seed of the shuffle.
      shuffle: False reads everything in file order in every epoch, as evaluation does.
      is_striped: whether steps, and not lanes, are consecutive parts of the epoch.

    Raises:
      DataConfigError: on construction, if B is no multiple of S, or a size is not positive.
    """

    row_group_rows: tuple[int, ...]
    num_lanes: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    is_striped: bool = False

    def __post_init__(self) -> None:
        if self.num_lanes < 1 or self.batch_size < 1 or self.batch_size % self.num_lanes:
            raise DataConfigError(
                f"Found batch_size {self.batch_size} over {self.num_lanes} lanes. Expected a positive multiple of the "
                "number of lanes. Use batch_size "
                f"{max(1, -(-self.batch_size // max(1, self.num_lanes))) * max(1, self.num_lanes)}, or other lanes."
            )
        if not self.row_group_rows or min(self.row_group_rows) < 1:
            raise DataConfigError(
                f"Found row groups of {self.row_group_rows[:8]} rows. Expected at least one row in each. Pass "
                "InputIndex.row_group_rows."
            )

    @property
    def num_rows(self) -> int:
        return sum(self.row_group_rows)

    @property
    def rows_per_lane_step(self) -> int:
        """Rows, with padding, that a step takes from one lane: B / S."""
        return self.batch_size // self.num_lanes

    @property
    def steps_per_epoch(self) -> int:
        """Steps until the longest lane is read; of a striped plan, until the last row is."""
        if self.is_striped:
            return -(-self.num_rows // self.batch_size)
        longest_lane = -(-self.num_rows // self.num_lanes)
        return -(-longest_lane // self.rows_per_lane_step)

    def position_of(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch) of a step counted from 0 over the whole run.

        Raises:
          DataConfigError: the step is negative.
        """
        if step < 0:
            raise DataConfigError(f"Found step {step}. Expected 0 or more. Steps count from 0 over all epochs.")
        return divmod(step, self.steps_per_epoch)

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """Positions in the epoch at which a lane begins and ends. Lanes of a striped plan lie between each other, all
        over the epoch.

        Raises:
          DataConfigError: there is no such lane.
        """
        if not 0 <= lane < self.num_lanes:
            raise DataConfigError(f"Found lane {lane}. Expected 0 to {self.num_lanes - 1}. Assign existing lanes.")
        if self.is_striped:
            return 0, self.num_rows
        base, longer = divmod(self.num_rows, self.num_lanes)
        start = lane * base + min(lane, longer)
        return start, start + base + (lane < longer)

    def step_bounds(self, lane: int, step_in_epoch: int) -> tuple[int, int]:
        """Positions in the epoch that a lane gives to a step; fewer than `rows_per_lane_step`, down to none, at the
        lane's end.
        """
        start, stop = self.lane_bounds(lane)
        before = step_in_epoch * self.rows_per_lane_step
        if self.is_striped:
            before = step_in_epoch * self.batch_size + lane * self.rows_per_lane_step
        first = min(stop, start + before)
        return first, min(stop, first + self.rows_per_lane_step)

    def rows_before(self, step: int) -> int:
        """Rows of all steps before this one, over all epochs, without padding."""
        epochs, in_epoch = self.position_of(step)
        if self.is_striped:
            rows = min(self.num_rows, in_epoch * self.batch_size)
        else:
            base, longer = divmod(self.num_rows, self.num_lanes)
            of_lane = in_epoch * self.rows_per_lane_step
            rows = sum(min(of_lane, base + (lane < longer)) for lane in range(self.num_lanes))
        return epochs * self.num_rows + rows

    def epoch_order(self, epoch: int) -> EpochOrder:
        """The order of row groups in one epoch. Costs a sort of the row groups; callers keep it for the epoch."""
        count = len(self.row_group_rows)
        order = np.arange(count)
        if self.shuffle:
            order = permutation(count, seed=combine(self.seed, _ROW_GROUPS, epoch))
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(np.asarray(self.row_group_rows, np.int64)[order], out=starts[1:])
        return EpochOrder(epoch=epoch, row_groups=order, starts=starts)

    def row_order(self, epoch: int, row_group: int) -> np.ndarray:
        """int64 `[rows of the group]`: entry i is the row of the group that is read i-th in that epoch."""
        count = self.row_group_rows[row_group]
        if not self.shuffle:
            return np.arange(count)
        return permutation(count, seed=combine(self.seed, _ROWS, epoch, row_group))


def permutation(count: int, *, seed: int) -> np.ndarray:
    """A shuffled `arange(count)`, int64, that depends on the two arguments alone.

    It is the order that sorts the mixed positions. They are a bijection of the positions, so there are no ties and
    every sort algorithm gives the same order.
    """
    order = np.empty(count, np.int64)
    _sort_mixed(np.uint64(combine(seed) if seed else 0), order)
    return order


@numba.njit(nogil=True, cache=True)
def _sort_mixed(offset: np.uint64, order: np.ndarray) -> None:
    """Writes the order that sorts `mix_word` of the positions. They go by their first bits into about as many buckets
    as there are positions, then by insertion within each. Mixed bits are evenly spread, so a bucket has few.
    """
    count = len(order)
    num_bits = 1
    while num_bits < 24 and (1 << num_bits) < count:
        num_bits += 1
    shift = np.uint64(64 - num_bits)
    ends = np.zeros((1 << num_bits) + 1, np.int64)
    for i in range(count):
        ends[np.int64(mix_word(np.uint64(i), offset) >> shift) + 1] += 1
    for i in range(1, len(ends)):
        ends[i] += ends[i - 1]
    keys = np.empty(count, np.uint64)
    for i in range(count):
        key = mix_word(np.uint64(i), offset)
        bucket = np.int64(key >> shift)
        # Where the next one of the bucket goes; it ends up where the bucket ends.
        keys[ends[bucket]] = key
        order[ends[bucket]] = i
        ends[bucket] += 1
    for i in range(1, count):
        key, position = keys[i], order[i]
        at = i
        while at > 0 and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            order[at] = order[at - 1]
            at -= 1
        keys[at] = key
        order[at] = position
