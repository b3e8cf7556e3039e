"""A second kind of store: rows in memory-mapped files, without addresses that anybody else could know.

Everything is as plain as can be. Rows are copied out of the file, worked on, and copied back. A moment is a copy of the
whole file. Many tables are worked on one by one.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.kernels import pool as kernels
from podembed.embedding.kernels.bag_frames import DIVISORS, NUM_BAGS, NUM_IDS, ROWS, SPLITS, WEIGHTS
from podembed.embedding.kernels.many_tables import BagLists
from podembed.embedding.kernels.threads import Threads
from podembed.embedding.lookup.pooled_frames import denominators
from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.row_optimizers.row_step import TouchedRows
from podembed.embedding.table.stores.store import GroupedRows, PooledFeature, ScaledGradients
from podembed.embedding.table.table import Table
from podembed.workers.job.job import JobConfig
from tests.small_job import small_job


class MappedStore:
    """As `RowStore`, in a file that is gone with the process."""

    def __init__(self, widths: Mapping[str, int], num_rows: int, num_spare: int = 0) -> None:
        self.num_rows, num_kept = num_rows, num_rows
        num_rows += num_spare
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        # No file of no bytes can be mapped.
        self._file.truncate(4 * num_rows * sum(widths.values()) + 4)
        self._parts: dict[str, np.ndarray] = {}
        offset = 0
        for name, width in widths.items():
            some = np.memmap(self._file, np.float32, "r+", offset, num_rows * width or 1)
            self._parts[name] = some[: num_rows * width].reshape(num_rows, width).view(np.ndarray)
            offset += 4 * num_rows * width
        self._num_all = num_rows
        self._kept = {name: part[:num_kept] for name, part in self._parts.items()}

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in self._kept.values())

    def view(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: part[start:stop] for name, part in self._parts.items()}

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: part[self._checked(rows)] for name, part in self._parts.items()}

    def write(self, rows: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            self._parts[name][rows] = value

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = self.read(rows)["rows"]

    def gather_to(self, rows: np.ndarray, addresses: np.ndarray) -> None:
        copied = self.read(rows)["rows"]
        kernels.gather_to(copied, np.arange(len(rows)), addresses)

    def pool(
        self,
        index: np.ndarray,
        row_splits: np.ndarray,
        weights: np.ndarray | None,
        combiner: str,
        out: np.ndarray,
        **some: Any,
    ) -> None:
        used, places = np.unique(index, return_inverse=True)
        copied = np.ascontiguousarray(self.read(used)["rows"])
        kernels.pool(copied, places.astype(np.int32), row_splits, weights, combiner, out, **some)

    def update(
        self,
        optimizer: Optimizer,
        touched: TouchedRows,
        gradients: Sequence[np.ndarray] | np.ndarray,
        learning_rate: float,
    ) -> None:
        used, places = np.unique(touched.rows, return_inverse=True)
        copied = self.read(used)
        rows, *slots = [*copied.values()][: 1 + len(optimizer.slots)]
        moved = replace(touched, rows=places.astype(np.int64))
        optimizer.apply(rows=rows, slots=slots, touched=moved, gradients=gradients, learning_rate=learning_rate)
        self.write(used, copied)

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._num_all:
            raise ValueError(f"Found local row {rows.max()} on a host that holds {self.num_rows} rows.")
        return rows

    def copied(self) -> dict[str, np.ndarray]:
        return {name: part.copy() for name, part in self._kept.items()}


def at_address(address: int, shape: tuple[int, ...], dtype: type, stride: int | None = None) -> np.ndarray:
    """An array that lies there."""
    size = np.dtype(dtype).itemsize
    strides = (stride or size * int(np.prod(shape[1:])), *((size,) if len(shape) > 1 else ()))
    count = shape[0] * strides[0] if 0 not in shape else 0
    if not count:
        return np.empty(shape, dtype)
    count = strides[0] * (shape[0] - 1) + size * int(np.prod(shape[1:]))
    return np.ndarray(shape, dtype, (ctypes.c_char * count).from_address(address), 0, strides)


class MappedGroup:
    """As `StoreGroup`: table by table, host by host."""

    def __init__(self, tables: Sequence[Table], features: Sequence[PooledFeature]) -> None:
        self._tables, self._features = tables, features
        self.dims = np.array([tables[feature.table].spec.dim for feature in features], np.int64)

    def pool(self, asked: Sequence[np.ndarray], out: Sequence[np.ndarray], thread_pool: Threads) -> None:
        for bags, blocks in zip(asked, out, strict=True):
            for feature, line, block in zip(self._features, bags.tolist(), blocks.tolist(), strict=True):
                rows = at_address(line[ROWS], (line[NUM_IDS],), np.int32)
                splits = at_address(line[SPLITS], (line[NUM_BAGS] + 1,), np.int64)
                weights = at_address(line[WEIGHTS], (line[NUM_IDS],), np.float32) if line[WEIGHTS] else None
                vectors = at_address(block[0], (block[2], block[3]), np.float32, block[1])
                self._tables[feature.table].store.pool(rows, splits, weights, feature.pooling, vectors)

    def group(
        self, asked: Sequence[np.ndarray], gradients: Sequence[np.ndarray], thread_pool: Threads
    ) -> tuple[dict[int, GroupedRows], ScaledGradients]:
        lists = {feature.table: [] for feature in self._features}
        bags_in_all = sum(int((bags[:, NUM_BAGS] * self.dims).sum()) for bags in asked)
        where, lines, memory = [], [], np.zeros(bags_in_all, np.float32)
        begin = memory.ctypes.data
        for host, (bags, blocks) in enumerate(zip(asked, gradients, strict=True)):
            for at, (feature, line) in enumerate(zip(self._features, bags.tolist(), strict=True)):
                dim, gradient = int(self.dims[at]), blocks[at, :2].tolist()
                if feature.combiner != "sum":
                    gradient = [begin, 4 * dim]
                    where.append((host, at))
                    lines.append(gradient)
                    begin += 4 * dim * line[NUM_BAGS]
                lists[feature.table].append([*line[: WEIGHTS + 1], *gradient])
        grouped = {
            table: self._tables[table].group(BagLists(np.array(own, np.int64).reshape(-1, 7)))
            for table, own in lists.items()
        }
        numbers = [np.array(own, np.int64).reshape(-1, 2) for own in (where, lines)]
        return grouped, ScaledGradients(*numbers, memory)

    def scale(
        self,
        scaled: ScaledGradients,
        asked: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        thread_pool: Threads,
    ) -> None:
        for at, (host, number) in enumerate(scaled.where.tolist()):
            line, block = asked[host][number].tolist(), gradients[host][number].tolist()
            source = at_address(block[0], (block[2], block[3]), np.float32, block[1])
            target = at_address(int(scaled.lines[at, 0]), (block[2], block[3]), np.float32)
            splits = at_address(line[SPLITS], (line[NUM_BAGS] + 1,), np.int64)
            weights = at_address(line[WEIGHTS], (line[NUM_IDS],), np.float32) if line[WEIGHTS] else None
            if line[DIVISORS]:
                lengths = at_address(line[DIVISORS], (line[NUM_BAGS],), np.float32)
            else:
                lengths = denominators(splits, weights, self._features[number].combiner)
            target[...] = np.divide(source, lengths[:, None], where=lengths[:, None] != 0, out=np.zeros_like(source))

    def update(self, grouped: Mapping[int, GroupedRows], learning_rates: Sequence[float], thread_pool: Threads) -> None:
        for table in sorted(grouped):
            self._tables[table].update_grouped(grouped[table], learning_rates[table])


class MappedUndoLog:
    """As `UndoLog`: copies of everything, so nothing is ever lost."""

    buffers: tuple[np.ndarray, ...] = ()

    def __init__(self, store: MappedStore) -> None:
        self._store, self._older, self._newer = store, store.copied(), None
        self.size_bytes = 2 * store.size_bytes

    def begin(self) -> None:
        self._older, self._newer = self._store.copied(), None

    def freeze(self) -> None:
        self._newer = self._store.copied()

    def advance(self) -> None:
        assert self._newer is not None
        self._older, self._newer = self._newer, None

    def undo(self, *, to_newer: bool = False) -> np.ndarray:
        values = self._newer if to_newer else self._older
        assert values is not None
        self._store.write(np.arange(self._store.num_rows), values)
        return np.empty(0, np.int64)


class MappedSnapshot:
    """As `RowSnapshot`: a copy of everything, so no buffer is ever full."""

    taken = all_taken = 0.0

    def __init__(self, store: MappedStore) -> None:
        self._store, self._frozen, self._released = store, store.copied(), 0
        self.changing = np.zeros(store.num_rows, bool)
        self._changed = self.changing.copy()

    @property
    def is_released(self) -> bool:
        return self._released >= self._store.num_rows

    def freeze(self, *, joins_before: bool = False, reads_log: bool = False) -> None:
        self._changed = self.changing | (self._changed & joins_before)
        self.changing = np.zeros_like(self.changing)
        self._frozen, self._released = self._store.copied(), 0

    def read(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        assert start >= self._released
        for values, frozen in zip(out, self._frozen.values(), strict=True):
            values[...] = frozen[start:stop]

    def changed(self, start: int, stop: int) -> np.ndarray:
        return np.flatnonzero(self._changed[start:stop])

    def release(self, stop: int) -> None:
        self._released = max(self._released, stop)


class MappedPreImages:
    """As `PreImages`: only which rows change."""

    size_bytes, taken, buffers = 0, 0.0, ()

    def __init__(self, stores: Sequence[MappedStore]) -> None:
        self.snapshots = [MappedSnapshot(store) for store in stores]

    @staticmethod
    def touched(rows: np.ndarray) -> list[np.ndarray]:
        return [rows]

    def keep(
        self,
        numbers: Sequence[int],
        touched: Sequence[np.ndarray],
        begin: tuple[int, int] = (0, 0),
        *,
        logs: bool = True,
        freezes: bool = True,
    ) -> tuple[int, int]:
        for number, rows in zip(numbers, touched, strict=True):
            if freezes:
                self.snapshots[number].changing[rows[rows < len(self.snapshots[number].changing)]] = True
        return len(numbers), 0

    def settle(self) -> None:
        pass


@dataclass(frozen=True)
class MappedStores:
    """As `StoreKind`."""

    def new(self, widths: Mapping[str, int], num_rows: int, num_spare: int = 0) -> MappedStore:
        return MappedStore(widths, num_rows, num_spare)

    def group(self, tables: Sequence[Table], features: Sequence[PooledFeature], *, num_hosts: int) -> MappedGroup:
        return MappedGroup(tables, features)

    def undo_logs(self, stores: Sequence[MappedStore], *, budget_bytes: int) -> list[MappedUndoLog]:
        return [MappedUndoLog(store) for store in stores]

    def pre_images(self, stores: Sequence[MappedStore], logs: Sequence[Any], *, buffer_bytes: int) -> MappedPreImages:
        return MappedPreImages(stores)


def mapped_job(**arguments: Any) -> JobConfig:
    """The small job, with all rows in files."""
    job = small_job(**arguments)
    for table in job.tables:
        table.stores = MappedStores()
    return job
