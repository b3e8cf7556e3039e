"""`RowStore`: the memory behind a `Table`, float32 rows and slots by local row number.

Callers of the kernels come through here and know no arrays. Only `feature_tables` and `together` know where they lie,
so arrays keep their place as long as the store lives. Which id a row belongs to is the business of `row_index`, when a
row changes that of `Table`. A store that keeps rows elsewhere has these methods and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from podembed.embedding.kernels.arrays import aligned_zeros
from podembed.embedding.kernels.pool import gather, gather_to, pool
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.table.snapshot import Snapshot, SnapshotRoom
from podembed.embedding.table.undo_log import UndoLog


class RowStore:
    """Rows and slots, which always change together. Mutable; not safe for two threads to change at once.

    Args:
      widths: columns of "rows" and of each slot, in the order of checkpoints.
      num_rows: of each array.

    Attributes:
      arrays: by name float32 `[num_rows, width]`, 64-byte aligned, zero at first. For this package and for tests.
    """

    def __init__(self, widths: Mapping[str, int], num_rows: int) -> None:
        self.num_rows = num_rows
        self.arrays = MappingProxyType({name: aligned_zeros((num_rows, width)) for name, width in widths.items()})

    @property
    def size_bytes(self) -> int:
        """Bytes of rows and slots."""
        return sum(array.nbytes for array in self.arrays.values())

    def view(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Views of the rows `start` to `stop - 1` and of their slots. Writing to them changes the store."""
        return {name: array[start:stop] for name, array in self.arrays.items()}

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of some rows (int64 `[n]`) and of their slots, `[n, width]` each."""
        return {name: array[rows] for name, array in self.arrays.items()}

    def write(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Replaces some rows (int64 `[n]`), or some of their slots, by `[n, width]` values each."""
        for name, value in values.items():
            self.arrays[name][rows] = value

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """See `Table.gather`."""
        gather(self.arrays["rows"], rows, out)

    def gather_to(self, rows: np.ndarray, addresses: np.ndarray) -> None:
        """See `Table.gather_to`."""
        gather_to(self.arrays["rows"], rows, addresses)

    def pool(
        self,
        index: np.ndarray,
        row_splits: np.ndarray,
        weights: np.ndarray | None,
        combiner: str,
        out: np.ndarray,
        **some: Any,
    ) -> None:
        """Combines rows where they lie; arguments as `kernels.pool.pool`, `index` being local rows."""
        pool(self.arrays["rows"], index, row_splits, weights, combiner, out, **some)

    def update(
        self,
        optimizer: Optimizer,
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
    ) -> None:
        """Applies one step of an optimizer; arguments as `Optimizer.apply`."""
        # What an index keeps of each row comes behind the slots.
        rows, *slots = [*self.arrays.values()][: 1 + len(optimizer.slots)]
        optimizer.apply(rows=rows, slots=slots, touched=touched, gradients=gradients, learning_rate=learning_rate)

    def freeze(self, *, room: SnapshotRoom) -> Snapshot:
        """A frozen view of all arrays, with room for rows that change meanwhile."""
        return Snapshot([*self.arrays.values()], room=room)

    def undo_log(self, *, max_rows: int) -> UndoLog:
        """A log that gives all arrays the values of an earlier moment again."""
        return UndoLog([*self.arrays.values()], max_rows=max_rows)
