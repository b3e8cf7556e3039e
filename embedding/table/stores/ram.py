"""`RAM`: rows in the memory of the host's process. `RamStore` is that of one table.

Arrays keep their place as long as the store lives, since groups of stores and what is kept of them know where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from podembed.embedding.kernels.arrays import aligned_zeros, mapped_zeros
from podembed.embedding.kernels.pool import gather, gather_to, pool
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.table.stores.ram_group import RamGroup
from podembed.embedding.table.stores.ram_kept import RamPreImages, RamUndoLog, undo_logs
from podembed.embedding.table.stores.store import PooledFeature

if TYPE_CHECKING:
    from podembed.embedding.table.table import Table


class RamStore:
    """As `RowStore`. Several threads may read at once.

    Args:
      widths: columns of "rows" and of each slot, in the order of checkpoints.
      num_rows: of each array.
      num_spare: further rows.

    Attributes:
      arrays: by name float32 `[num_rows + num_spare, width]`, 64-byte aligned. For this package alone.
      kept: the same, `[num_rows, width]`.
    """

    def __init__(self, widths: Mapping[str, int], num_rows: int, num_spare: int = 0) -> None:
        self.num_rows, count = num_rows, num_rows + num_spare
        # Most of the spare rows are never used.
        new = mapped_zeros if num_spare else aligned_zeros
        self.arrays = MappingProxyType({name: new((count, width)) for name, width in widths.items()})
        self.kept = tuple(array[:num_rows] for array in self.arrays.values())

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.kept)

    def view(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: array[start:stop] for name, array in self.arrays.items()}

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[rows] for name, array in self.arrays.items()}

    def write(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            self.arrays[name][rows] = value

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        gather(self.arrays["rows"], rows, out)

    def gather_to(self, rows: np.ndarray, addresses: np.ndarray) -> None:
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
        pool(self.arrays["rows"], index, row_splits, weights, combiner, out, **some)

    def update(
        self,
        optimizer: Optimizer,
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
    ) -> None:
        # What an index keeps of each row comes behind the slots.
        rows, *slots = [*self.arrays.values()][: 1 + len(optimizer.slots)]
        optimizer.apply(rows=rows, slots=slots, touched=touched, gradients=gradients, learning_rate=learning_rate)


class _Ram:
    """As `StoreKind`."""

    def new(self, widths: Mapping[str, int], num_rows: int, num_spare: int = 0) -> RamStore:
        return RamStore(widths, num_rows, num_spare)

    def group(self, tables: Sequence[Table], features: Sequence[PooledFeature], *, num_hosts: int) -> RamGroup:
        return RamGroup(tables, features, num_hosts=num_hosts)

    def undo_logs(self, stores: Sequence[RamStore], *, budget_bytes: int) -> list[RamUndoLog]:
        return undo_logs([store.kept for store in stores], budget_bytes=budget_bytes)

    def pre_images(
        self, stores: Sequence[RamStore], logs: Sequence[RamUndoLog | None], *, buffer_bytes: int
    ) -> RamPreImages:
        return RamPreImages.of([store.kept for store in stores], logs, buffer_bytes=buffer_bytes)


RAM = _Ram()
