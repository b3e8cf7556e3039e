"""Rows that changed since the commit before, as files: what an incremental commit adds to the chunks of an older one.

The changed rows of some buckets of a table form a part. It holds the numbers of the rows and, for rows and each slot,
their values. Each is a Zarr array of one chunk below `data/<commit name>/tables/<table>/delta-<first bucket>/`. A
bucket's rows lie in one part, side by side, so that a reader of a bucket finds them by counting. The digests of buckets
decide whether what was read is right; here only places and shapes are checked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.workers.checkpoint.arrays import DenseFile, read_dense, safe_segment, write_array
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.storage_errors import NameNotFound, WrongSize
from podembed.workers.storage.store import Store

IDS = "ids"
PART_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class DeltaPart:
    """The changed rows of some buckets.

    Attributes:
      buckets: rising; their rows follow each other, each bucket's by rising number.
      counts: rows of each bucket, at least 1.
      files: `ids`, int64 `[n]`, the numbers of the rows; then, in the order of the table's arrays, their values `[n,
        width]`.
    """

    buckets: tuple[int, ...]
    counts: tuple[int, ...]
    files: tuple[DenseFile, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    def place_of(self, bucket: int) -> slice | None:
        """The place of a bucket's rows, or None if it has none here."""
        at = bisect_left(self.buckets, bucket)
        if at == len(self.buckets) or self.buckets[at] != bucket:
            return None
        end = self._ends[at]
        return slice(end - self.counts[at], end)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The end of each bucket's rows. Counted once: readers ask for one bucket after another."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFiles:
    """Changed rows of a table in one incremental commit. `commit` is its name; a bucket is in one part at most."""

    commit: str
    parts: tuple[DeltaPart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for part in self.parts for file in part.files)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def find(self, bucket: int) -> tuple[DeltaPart, slice] | None:
        """The part with a bucket's rows and their place in it."""
        for part in self.parts:
            place = part.place_of(bucket)
            if place is not None:
                return part, place
        return None


@dataclass(slots=True, eq=False)
class PartWriter:
    """Collects the changed rows of a table, bucket by bucket, and writes a part whenever there is enough. Mutated by
    `add` and `finish`.

    Attributes:
      folder: folder of the table in the attempt.
      names: names of the table's arrays, in order.
      threads: write parts meanwhile, one at a time, so that no more than two are in memory; None writes them at once.
    """

    store: Store
    folder: str
    names: Sequence[str]
    threads: FileThreads | None = None
    _parts: list[Future[DeltaPart]] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)
    _ids: list[np.ndarray] = field(default_factory=list)
    _values: list[list[np.ndarray]] = field(default_factory=list)
    _size_bytes: int = 0

    def add(self, bucket: int, ids: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Takes the changed rows of the next bucket, which it keeps.

        Args:
          ids: int64 `[n]`, n at least 1, rising.
          values: per array `[n, width]`.
        """
        self._counts[bucket] = len(ids)
        self._ids.append(ids)
        self._values.append(list(values))
        self._size_bytes += ids.nbytes + sum(value.nbytes for value in values)
        if self._size_bytes >= PART_BYTES:
            self._flush()

    def finish(self) -> tuple[DeltaPart, ...]:
        """Writes what is left. Returns all parts."""
        if self._counts:
            self._flush()
        return tuple(part.result() for part in self._parts)

    def _flush(self) -> None:
        counts, ids, values = self._counts, self._ids, self._values
        self._counts, self._ids, self._values, self._size_bytes = {}, [], [], 0
        if self._parts:
            self._parts[-1].result()
        if self.threads is None:
            written: Future[DeltaPart] = Future()
            written.set_result(self._write(counts, ids, values))
        else:
            written = self.threads.submit(lambda: self._write(counts, ids, values))
        self._parts.append(written)

    def _write(self, counts: dict[int, int], ids: list[np.ndarray], values: list[list[np.ndarray]]) -> DeltaPart:
        folder = f"{self.folder}/delta-{next(iter(counts))}"
        with self.threads.writes() if self.threads is not None else nullcontext():
            files = [write_array(self.store, f"{folder}/{IDS}", IDS, np.concatenate(ids))]
            for name, pieces in zip(self.names, zip(*values, strict=True), strict=True):
                path = f"{folder}/arrays/{safe_segment(name)}"
                files.append(write_array(self.store, path, name, np.concatenate(pieces)))
        return DeltaPart(buckets=tuple(counts), counts=tuple(counts.values()), files=tuple(files))


def read_part(
    store: Store, part: DeltaPart, *, num_buckets: int, num_positions: int, with_values: bool = True
) -> Iterator[tuple[int, np.ndarray, list[np.ndarray]]]:
    """Reads a part whole, with its checksums. Yields bucket, positions in it, rising, and the values of each array.

    Args:
      with_values: else the numbers of the rows alone are read.

    Raises:
      ChunkDamaged: a file is missing or is not what was committed.
    """
    ids, *arrays = (read_dense(store, file) for file in (part.files if with_values else part.files[:1]))
    start = 0
    for bucket, count in zip(part.buckets, part.counts, strict=True):
        place = slice(start, start + count)
        positions = _positions(part, bucket, ids[place], num_buckets=num_buckets, num_positions=num_positions)
        yield bucket, positions, [array[place] for array in arrays]
        start += count


def read_changes(
    store: Store, part: DeltaPart, place: slice, bucket: int, *, num_buckets: int, num_positions: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Reads the changed rows of one bucket and nothing else: positions in the bucket, and the values of each array.

    Their bytes are verified by the bucket's digest alone.

    Args:
      part, place: answer of `DeltaFiles.find`.

    Raises:
      ChunkDamaged: a file is missing, has another size, or names rows of other buckets.
    """
    ids, *arrays = (read_slice(store, file, place) for file in part.files)
    return _positions(part, bucket, ids, num_buckets=num_buckets, num_positions=num_positions), arrays


def read_slice(store: Store, file: DenseFile, rows: slice) -> np.ndarray:
    """Some rows of an array of one chunk, without its checksum.

    Raises:
      ChunkDamaged: it is missing or has another size.
    """
    dtype, shape = DTYPES[file.dtype], (rows.stop - rows.start, *file.shape[1:])
    row_bytes = dtype.itemsize * int(np.prod(file.shape[1:], dtype=np.int64))
    try:
        if (found := store.size(file.chunk_file)) != file.size_bytes:
            raise ChunkDamaged(file.chunk_file, f"{found} bytes", f"{file.size_bytes} bytes as written")
        data = store.read_range(file.chunk_file, start=rows.start * row_bytes, length=shape[0] * row_bytes)
    except (NameNotFound, WrongSize) as error:
        raise ChunkDamaged(file.chunk_file, error.found, f"{file.size_bytes} bytes as written") from error
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)


def _positions(part: DeltaPart, bucket: int, ids: np.ndarray, *, num_buckets: int, num_positions: int) -> np.ndarray:
    """Positions of rows in their bucket, rising. A row of another bucket would be written over one of this bucket."""
    layout = BucketLayout(num_rows=num_buckets * num_positions, num_buckets=num_buckets)
    positions = layout.positions_of(ids)
    is_inside = (ids >= 0) & (layout.buckets_of(ids) == bucket) & (positions < num_positions)
    is_inside[1:] &= positions[1:] > positions[:-1]
    if not is_inside.all():
        wrong = int(ids[~is_inside][0])
        raise ChunkDamaged(
            part.files[0].chunk_file, f"row {wrong}", f"rows of bucket {bucket} of {num_buckets}, rising"
        )
    return positions


def problems_of(
    delta: DeltaFiles, *, num_buckets: int, rows_per_bucket: int, arrays: Mapping[str, tuple[int, str]]
) -> list[str]:
    """The inconsistencies of one delta of a table; opens no file.

    Args:
      arrays: name of each array of the table, in order → its width and element type.
    """
    seen: set[int] = set()
    for part in delta.parts:
        numbers = part.buckets
        rising = all(one < other for one, other in pairwise(numbers))
        if not numbers or not rising or not 0 <= numbers[0] <= numbers[-1] < num_buckets or seen & {*numbers}:
            return [f"buckets {list(numbers[:5])} of a delta twice, out of order or beyond {num_buckets}"]
        seen |= {*numbers}
        if len(part.counts) != len(numbers) or not all(0 < count <= rows_per_bucket for count in part.counts):
            return [f"{list(part.counts[:5])} changed rows for buckets {list(numbers[:5])} of {rows_per_bucket} rows"]
        found = [(file.key, file.shape, file.dtype) for file in part.files]
        expected = [(IDS, (part.num_rows,), "int64")]
        expected += [(name, (part.num_rows, width), dtype) for name, (width, dtype) in arrays.items()]
        if found != expected:
            return [f"arrays {[(key[:40], shape[:3], dtype[:20]) for key, shape, dtype in found[:5]]} of changed rows"]
    return []
