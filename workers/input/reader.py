"""`InputReader`: the rows of given lanes at a given step, from data files of any kind.

It joins what other modules know. `index` has the files, `formats` reads them. `lanes` says which rows a step takes, and
`columns` how a row group becomes arrays. A reader holds, for every lane, the decoded rows that the lane is in the
middle of, and nothing else. Reading on is cheap, and reading anywhere else gives the same rows at the price of decoding
a row group a lane. The lanes of a striped plan are all in the middle of the same row groups. In such a plan a reader
holds the rows of one window, and of them only those of its own lanes. One thread uses a reader at a time; `read_ahead`
gives it one of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.workers.columns.decode import Decoder
from podembed.workers.columns.gather import Block, LaneRows, WindowShape, interleave
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import InputData, ReadOrder
from podembed.workers.data.files import unreadable
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import RowGroup
from podembed.workers.formats.registry import OpenedFile, open_file
from podembed.workers.input.index import InputIndex, check_unchanged, read_vocabularies
from podembed.workers.input.lanes import EpochOrder, LanePiece, LanePlan

MAX_OPEN_FILES = 64
# Rows that are put into the order of steps at once. Putting lanes together has a fixed cost of some hundred
# microseconds, too much to pay for every step on its own. Beyond this it hardly shows.
WINDOW_ROWS = 16_384


def training_plan(
    index: InputIndex, *, num_lanes: int, batch_size: int, seed: int, order: ReadOrder = "shuffled"
) -> LanePlan:
    """Epoch after epoch, shuffled, or with `order="files"` from the first row of the first file to the last row of the
    last one.
    """
    is_shuffled = order == "shuffled"
    return LanePlan(
        row_group_rows=index.row_group_rows,
        num_lanes=num_lanes,
        batch_size=batch_size,
        seed=seed,
        shuffle=is_shuffled,
        is_striped=not is_shuffled,
    )


def evaluation_plan(index: InputIndex, *, num_lanes: int, batch_size: int) -> LanePlan:
    """Everything once in file order, in `steps_per_epoch` steps."""
    return LanePlan(row_group_rows=index.row_group_rows, num_lanes=num_lanes, batch_size=batch_size, shuffle=False)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Window:
    """Steps `first_step` to `stop_step - 1`, one after the other in `rows`, each of the same number of rows."""

    first_step: int
    stop_step: int
    rows: Batch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _DecodedPiece:
    """Rows of a piece, in the order of that epoch.

    Attributes:
      rows: int64, which rows of the piece the block has, ascending; None for all.
    """

    epoch: int
    piece: LanePiece
    block: Block
    rows: np.ndarray | None = None

    def place_of(self, row: int) -> int:
        """The position in the block of a row of the piece that the block has."""
        return row if self.rows is None else int(np.searchsorted(self.rows, row))


class InputReader:
    """Reads the rows of some lanes, step by step or at any step.

    Mutable: the rows kept per lane (per row group of a striped plan), the window of steps, the order of the epoch, and
    the open files.

    Attributes:
      num_samples: rows of every batch, padding included.
    """

    def __init__(
        self,
        data: InputData,
        index: InputIndex,
        plan: LanePlan,
        lanes: Sequence[int],
        *,
        bad_rows: BadRowLog | None = None,
    ) -> None:
        """Reads the vocabularies, and opens no data yet.

        Args:
          data: resolved (`ParquetData.resolved`), as the index was built from.
          index: index of all files, the same on every host.
          plan: made from that index.
          lanes: the lanes to read, in the order in which their rows stand in a batch.
          bad_rows: log that takes malformed rows; by default a log of its own.

        Raises:
          InputError: the plan was made from other data, or a vocabulary changed or does not fit its table.
          DataConfigError: there is no such lane.
        """
        if plan.row_group_rows != index.row_group_rows:
            raise InputError(
                f"Found a plan over {len(plan.row_group_rows)} row groups of {plan.num_rows:,} rows and an index of "
                f"{len(index.row_group_rows)} of {index.num_rows:,}. Expected both of the same data. Make the plan "
                "from this index."
            )
        for lane in lanes:
            plan.lane_bounds(lane)
        self.plan = plan
        self.lanes = tuple(lanes)
        self.num_samples = len(lanes) * plan.rows_per_lane_step
        self._data = data
        self._decoder = Decoder(data, read_vocabularies(data, index))
        self._bad_rows = bad_rows or BadRowLog(data.max_bad_rows)
        self._row_groups = index.row_groups()
        self._order: EpochOrder | None = None
        self._kept: dict[int, _DecodedPiece] = {}
        self._open_files: OrderedDict[str, OpenedFile] = OrderedDict()
        self._window: _Window | None = None
        self._no_rows = Batch.empty(
            list(data.features),
            num_dense=data.num_dense,
            columns=data.column_shapes,
            weighted=[name for name, source in data.id_columns.items() if source.weights is not None],
        )

    def read(self, step: int) -> Batch:
        """The rows of this reader's lanes at a step, lane after lane, each lane padded to `plan.rows_per_lane_step`.

        Args:
          step: counted from 0 over all epochs.

        Raises:
          InputError: a file changed, is damaged, or holds a value that the declaration refuses.
        """
        if self._window is None or not self._window.first_step <= step < self._window.stop_step:
            self._window = self._read_window(step)
        at = (step - self._window.first_step) * self.num_samples
        return self._window.rows.slice(at, at + self.num_samples)

    def close(self) -> None:
        """Closes the files and drops decoded rows. Reading again opens them anew."""
        for opened in self._open_files.values():
            opened.close()
        self._open_files.clear()
        self._kept.clear()
        self._window = None

    def _read_window(self, step: int) -> _Window:
        """The step and as many of those after it, up to the end of its epoch, as fit a window."""
        epoch, first = self.plan.position_of(step)
        # The row groups of a striped window hold the rows of all hosts, so it is their rows that bound what is kept.
        rows_per_step = self.plan.batch_size if self.plan.is_striped else self.num_samples
        num_steps = min(max(1, WINDOW_ROWS // max(1, rows_per_step)), self.plan.steps_per_epoch - first)
        order = self._epoch_order(epoch)
        shape = WindowShape(num_steps=num_steps, num_lanes=len(self.lanes), rows_per_step=self.plan.rows_per_lane_step)
        if self.plan.is_striped:
            parts = self._striped_parts(order, first, shape)
        else:
            parts = [part for at in range(len(self.lanes)) for part in self._lane_parts(at, order, first, shape)]
        rows = interleave(parts, shape=shape, like=self._no_rows)
        return _Window(first_step=step, stop_step=step + num_steps, rows=rows)

    def _lane_parts(self, at: int, order: EpochOrder, first_step: int, shape: WindowShape) -> list[LaneRows]:
        """The next rows of the `at`-th lane from a step of the epoch on, as many as fit the window; fewer at the lane's
        end.
        """
        lane = self.lanes[at]
        lane_bounds = self.plan.lane_bounds(lane)
        start, _ = self.plan.step_bounds(lane, first_step)
        stop = min(lane_bounds[1], start + shape.rows_per_lane)
        parts: list[LaneRows] = []
        for piece in order.pieces(lane=lane_bounds, span=(start, stop)):
            first = max(start, piece.position)
            last = min(stop, piece.position + piece.num_rows)
            parts.append(
                LaneRows(
                    block=self._decoded(lane, order.epoch, piece),
                    first_row=first - piece.position,
                    num_rows=last - first,
                    lane=at,
                    lane_row=first - start,
                )
            )
        return parts

    def _striped_parts(self, order: EpochOrder, first_step: int, shape: WindowShape) -> list[LaneRows]:
        """The rows of this reader's lanes in the window's steps; fewer at the end of the epoch."""
        epoch = self.plan.lane_bounds(0)
        steps = range(first_step, first_step + shape.num_steps)
        window = (steps.start * self.plan.batch_size, min(epoch[1], steps.stop * self.plan.batch_size))
        wanted = {piece.row_group for piece in order.pieces(lane=epoch, span=window)}
        self._kept = {at: kept for at, kept in self._kept.items() if at in wanted and kept.epoch == order.epoch}
        parts: list[LaneRows] = []
        for number, step in enumerate(steps):
            for at, lane in enumerate(self.lanes):
                start, stop = self.plan.step_bounds(lane, step)
                for piece in order.pieces(lane=epoch, span=(start, stop)):
                    first, last = max(start, piece.position), min(stop, piece.position + piece.num_rows)
                    kept = self._decoded_stripes(order.epoch, piece)
                    parts.append(
                        LaneRows(
                            block=kept.block,
                            first_row=kept.place_of(first - piece.position),
                            num_rows=last - first,
                            lane=at,
                            lane_row=number * shape.rows_per_step + first - start,
                        )
                    )
        return parts

    def _decoded_stripes(self, epoch: int, piece: LanePiece) -> _DecodedPiece:
        """The rows of a whole row group that belong to this reader's lanes."""
        kept = self._kept.get(piece.row_group)
        if kept is None:
            positions = np.arange(piece.position, piece.position + piece.num_rows)
            lanes = positions % self.plan.batch_size // self.plan.rows_per_lane_step
            # Other hosts decode the others, so that N hosts decode each row once, and each malformed row has one host
            # that met it.
            rows = np.flatnonzero(np.isin(lanes, self.lanes))
            block = self._decode(piece, self.plan.row_order(epoch, piece.row_group)[rows])
            kept = self._kept[piece.row_group] = _DecodedPiece(epoch=epoch, piece=piece, block=block, rows=rows)
        return kept

    def _decoded(self, lane: int, epoch: int, piece: LanePiece) -> Block:
        """The rows of a piece in the order in which the lane reads them; the last piece of each lane is kept."""
        kept = self._kept.get(lane)
        if kept is not None and (kept.epoch, kept.piece) == (epoch, piece):
            return kept.block
        # Given up before the next is decoded, so that a lane never holds two.
        self._kept.pop(lane, None)
        # Shuffled while the columns are in the processor's cache: from here on the lane reads them front to back.
        block = self._decode(piece, self.plan.row_order(epoch, piece.row_group)[piece.start : piece.stop])
        self._kept[lane] = _DecodedPiece(epoch=epoch, piece=piece, block=block)
        return block

    def _decode(self, piece: LanePiece, order: np.ndarray) -> Block:
        """Rows of a piece's row group, in that order."""
        group = self._row_groups[piece.row_group]
        opened = self._opened(group)
        try:
            raw = opened.read(group, self._decoder)
            block, bad_rows = self._decoder.decode(raw, first_position=group.first_position, order=order)
        except OSError as error:
            raise unreadable(group.file.path, error) from error
        finally:
            # Behind what was read, too: an open file may be replaced between two requests, and what then does not
            # decode is not damaged.
            check_unchanged(group.file, self._data)
        self._bad_rows.add(bad_rows)
        self._bad_rows.tell(self._decoder.take_unknown())
        return block

    def _opened(self, group: RowGroup) -> OpenedFile:
        path = group.file.path
        if path not in self._open_files:
            check_unchanged(group.file, self._data)
            self._open_files[path] = open_file(group.file, self._data)
            if len(self._open_files) > MAX_OPEN_FILES:
                _, oldest = self._open_files.popitem(last=False)
                oldest.close()
        self._open_files.move_to_end(path)
        return self._open_files[path]

    def _epoch_order(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order.epoch != epoch:
            self._order = self.plan.epoch_order(epoch)
        return self._order
