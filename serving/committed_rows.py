"""Reading rows of a committed table: all of them in order a batch at a time, or those of given numbers.

Neither needs the table in memory. In order means one piece of every bucket per batch. The checksum of each chunk
therefore grows piece by piece and is compared at its end. The last batch arrives only if every byte of the array was
what was committed. Rows of deltas are put over them; of those only the numbers are in memory, 8 bytes a changed row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np

from podembed.embedding.hashing import mix64
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit.verification import require_metadata
from podembed.workers.checkpoint.arrays import DenseFile, read_dense
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, TableFiles
from podembed.workers.checkpoint.chunks import CRC_BYTES, ChunkDamaged, first_byte
from podembed.workers.checkpoint.deltas import DeltaPart, read_part, read_slice
from podembed.workers.checkpoint.files import describe_bucket, naming_changes, read_bucket, read_bucket_array
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.storage_errors import NameNotFound, WrongSize
from podembed.workers.storage.store import Store

BATCH_BYTES = 64 << 20
_MAX_IDS_SHOWN = 5


def row_batches(
    store: Store,
    table: TableFiles,
    array: ArrayFiles,
    *,
    batch_bytes: int = BATCH_BYTES,
    buckets: Sequence[int] | np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """All rows of one array in order, `[rows, width]` at a time; the buffer is used again for the next batch.

    Args:
      batch_bytes: memory to use. One row of each bucket is the least.
      buckets: rising; the rows of these alone. None for all.

    Raises:
      ChunkDamaged: a file is missing or differs from the manifest; at the latest instead of the last batch.
    """
    require_metadata(store, table)
    dtype = DTYPES[array.dtype]
    position_bytes = array.width * dtype.itemsize
    wanted = np.arange(table.num_buckets) if buckets is None else np.asarray(buckets, np.int64)
    at_once = min(table.rows_per_bucket, max(1, batch_bytes // (position_bytes * max(1, len(wanted)))))
    buffer = np.empty((at_once, len(wanted), array.width), dtype)
    checksums = [0] * len(wanted)
    changed = _ChangedRows(store, table, array)
    for start in range(0, table.rows_per_bucket, at_once):
        num_positions = min(at_once, table.rows_per_bucket - start)
        is_last = start + num_positions == table.rows_per_bucket
        for at, bucket in enumerate(wanted.tolist()):
            data = _read_piece(
                store,
                table,
                array,
                bucket,
                start=start * position_bytes,
                length=num_positions * position_bytes + (CRC_BYTES if is_last else 0),
            )
            payload = data[: num_positions * position_bytes]
            checksums[at] = google_crc32c.extend(checksums[at], payload)
            if is_last:
                _check(table.chunk(array, bucket).name, checksums[at], data[-CRC_BYTES:], table, array, bucket)
            values = np.frombuffer(payload, dtype.newbyteorder("<"))
            buffer[:num_positions, at] = values.reshape(num_positions, array.width)
            changed.apply(bucket, buffer[:num_positions, at], start=start)
        # Rows that only pad the longest buckets come last.
        left = table.num_rows - (start + num_positions - 1) * table.num_buckets
        num_rows = (num_positions - 1) * len(wanted) + int(np.count_nonzero(wanted < left))
        yield buffer[:num_positions].reshape(-1, array.width)[:num_rows]


class _ChangedRows:
    """The places of the rows of a table's deltas, for one array. All files are verified when this is made.

    Raises:
      ChunkDamaged: one of them is missing or differs from the manifest.
    """

    def __init__(self, store: Store, table: TableFiles, array: ArrayFiles) -> None:
        self._store = store
        # Per bucket, oldest first: positions of rows, the file with their values, and where in it they begin.
        self._pieces: dict[int, list[tuple[np.ndarray, DenseFile, int]]] = {}
        for delta in table.deltas:
            for part in delta.parts:
                with naming_changes(table, delta, part):
                    self._take(table, part, part.files[1 + table.arrays.index(array)])

    def _take(self, table: TableFiles, part: DeltaPart, file: DenseFile) -> None:
        read_dense(self._store, file)
        changes = read_part(
            self._store, part, num_buckets=table.num_buckets, num_positions=table.rows_per_bucket, with_values=False
        )
        first = 0
        for bucket, positions, _ in changes:
            self._pieces.setdefault(bucket, []).append((positions, file, first))
            first += len(positions)

    def apply(self, bucket: int, values: np.ndarray, *, start: int) -> None:
        """Replaces those of the positions `start` and following of a bucket that changed."""
        for positions, file, first in self._pieces.get(bucket, ()):
            low, high = np.searchsorted(positions, (start, start + len(values)))
            if low < high:
                values[positions[low:high] - start] = read_slice(self._store, file, slice(first + low, first + high))


def read_rows(
    store: Store, table: TableFiles, ids: Sequence[int] | np.ndarray, *, with_slots: bool = True
) -> dict[str, np.ndarray]:
    """Rows of given numbers, or keys where those come and go: array name → `[len(ids), width]` in the order of `ids`;
    an id may come twice.

    Reads only the buckets in which they lie, one at a time, and verifies them.

    Args:
      ids: row numbers, 0 to num_rows - 1, or keys.
      with_slots: else only `rows`, whose chunks are read alone.

    Raises:
      ConfigurationError: an id is not a row of the table, or a key has none.
      ChunkDamaged: a bucket is not what was committed.
    """
    numbers = rows_of_keys(store, table, ids) if table.is_dynamic else check_ids(table, ids)
    require_metadata(store, table)
    arrays = table.arrays if with_slots else table.arrays[:1]
    found = {array.name: np.empty((len(numbers), array.width), DTYPES[array.dtype]) for array in arrays}
    buckets = table.layout.buckets_of(numbers)
    for bucket in np.unique(buckets):
        wanted = np.flatnonzero(buckets == bucket)
        positions = table.layout.positions_of(numbers[wanted])
        if with_slots:
            values = read_bucket(store, table, int(bucket))
        else:
            values = [read_bucket_array(store, table, table.arrays[0], int(bucket))]
        for array, value in zip(arrays, values, strict=True):
            found[array.name][wanted] = value[positions]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class HeldKeys:
    """The keys of one bucket that have a row, where keys come and go.

    Attributes:
      keys: int64 `[n]`, rising.
      places: int64 `[n]`, the position of the row of each.
    """

    keys: np.ndarray
    places: np.ndarray

    @staticmethod
    def of(store: Store, table: TableFiles, bucket: int, *, min_count: int = 0) -> HeldKeys:
        """Args:
          min_count: keys that were seen less often are left out.

        Raises:
          ChunkDamaged: a file is not what was committed.
        """
        arrays = {array.name: array for array in table.arrays}
        keys, last = (read_bucket_array(store, table, arrays[name], bucket)[:, 0] for name in ("key", "last"))
        held = np.flatnonzero(last)
        if min_count:
            counts = read_bucket_array(store, table, arrays["count"], bucket)[:, 0]
            held = held[counts[held] >= min_count]
        order = held[np.argsort(keys[held])]
        return HeldKeys(keys[order], order)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.places.nbytes

    def positions(self, wanted: np.ndarray) -> np.ndarray:
        """int64 `[m]`, the position of the row of each wanted key; -1 of one that has none."""
        if not len(self.keys):
            return np.full(len(wanted), -1, np.int64)
        number = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[number] == wanted, self.places[number], -1)


def find_keys(store: Store, table: TableFiles, keys: Sequence[int] | np.ndarray) -> np.ndarray:
    """The row numbers of keys of a table whose keys come and go, int64; -1 of one that has none.

    Raises:
      ChunkDamaged: a bucket is not what was committed.
    """
    wanted = np.array([int(key) for key in keys], np.int64)
    buckets = table.layout.buckets_of(mix64(wanted).view(np.int64))
    numbers = np.full(len(wanted), -1, np.int64)
    for bucket in np.unique(buckets).tolist():
        at = np.flatnonzero(buckets == bucket)
        positions = HeldKeys.of(store, table, bucket).positions(wanted[at])
        numbers[at] = np.where(positions >= 0, table.layout.ids_of(bucket, positions), -1)
    return numbers


def rows_of_keys(store: Store, table: TableFiles, keys: Sequence[int] | np.ndarray) -> np.ndarray:
    """As `find_keys`, of keys that all have a row.

    Raises:
      ConfigurationError: one has none.
      ChunkDamaged: a bucket is not what was committed.
    """
    ends = np.iinfo(np.int64)
    if wrong := [int(key) for key in keys if not ends.min <= int(key) <= ends.max]:
        raise ConfigurationError(
            f"Found key {wrong[0]} for table '{table.name}'. Expected integers of 64 bits. Pass one of its keys."
        )
    numbers = find_keys(store, table, keys)
    missing = [int(key) for key, number in zip(keys, numbers, strict=True) if number < 0]
    if missing:
        more = f" and {len(missing) - _MAX_IDS_SHOWN} more" if len(missing) > _MAX_IDS_SHOWN else ""
        raise ConfigurationError(
            f"Found no row for key {', '.join(map(str, missing[:_MAX_IDS_SHOWN]))}{more} in table '{table.name}'. "
            "Expected keys that have one: they were not admitted, or are forgotten. podembed export writes all that "
            "there are."
        )
    return numbers


def check_ids(table: TableFiles, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The ids as int64.

    Raises:
      ConfigurationError: one is not a row of the table.
    """
    wrong = [int(row) for row in ids if not 0 <= int(row) < table.num_rows]
    if wrong:
        more = f" and {len(wrong) - _MAX_IDS_SHOWN} more" if len(wrong) > _MAX_IDS_SHOWN else ""
        raise ConfigurationError(
            f"Found row numbers {', '.join(map(str, wrong[:_MAX_IDS_SHOWN]))}{more} for table '{table.name}'. "
            f"Expected 0 to {table.num_rows - 1}. Pass numbers of rows, after any hashing of raw ids."
        )
    return np.fromiter((int(row) for row in ids), np.int64, count=len(ids))


def _read_piece(store: Store, table: TableFiles, array: ArrayFiles, bucket: int, *, start: int, length: int) -> bytes:
    chunk, place = table.chunk(array, bucket), describe_bucket(table, array.name, bucket)
    begin = first_byte(table.metadata(array), (bucket, 0, 0))
    try:
        if start == 0 and (size_bytes := store.size(chunk.name)) != chunk.size_bytes:
            raise ChunkDamaged(chunk.name, f"{size_bytes} bytes", f"{chunk.size_bytes} bytes as written", place=place)
        return store.read_range(chunk.name, start=begin + start, length=length)
    except (NameNotFound, WrongSize) as error:
        raise ChunkDamaged(chunk.name, error.found, f"{chunk.size_bytes} bytes as written", place=place) from error


def _check(name: str, checksum: int, trailer: bytes, table: TableFiles, array: ArrayFiles, bucket: int) -> None:
    expected = table.chunk(array, bucket).receipt(bucket).crc32c
    if checksum != expected or struct.unpack("<I", trailer)[0] != expected:
        place = describe_bucket(table, array.name, bucket)
        raise ChunkDamaged(name, f"bytes with CRC-32C {checksum:08x}", f"{expected:08x} as written", place=place)
