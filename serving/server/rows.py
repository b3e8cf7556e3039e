"""`TableRows`: the rows of a table in one version, and how the next version is made of them.

All versions of a table share one arena of rows. A version is an index from row numbers to places in it. The next
version copies the index and writes only rows with other bits, to places that no version uses. So a version costs the
rows that changed and four bytes for each row, and what an older version reads never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from podembed.embedding import initializers
from podembed.embedding.hashing import mix64
from podembed.embedding.kernels.arrays import aligned_empty, mapped_zeros
from podembed.embedding.kernels.key_map import find_rows, keys_in, lines_per_bucket, new_lines, rebuild_map
from podembed.embedding.kernels.pool import gather
from podembed.orchestrator.commit.verification import require_metadata
from podembed.serving.committed_rows import BATCH_BYTES, row_batches
from podembed.serving.row_form import decoded
from podembed.serving.served_files import SCALE
from podembed.serving.server.shares import ShardPlace, TableShare
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.checkpoint_files import ROWS, TableFiles
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.store import Store

_VERSIONS = 2
"""In an arena at once: the one that counts, and the one before or the next."""


class TableRows(Protocol):
    """Rows of a table in one version."""

    @property
    def arena(self) -> np.ndarray: ...

    def places_of(self, ids: np.ndarray) -> np.ndarray | None:
        """int32 `[n]`, where in the arena the row of each id lies; None where one has none, so that `values` must be
        asked.
        """
        ...

    def values(self, ids: np.ndarray) -> np.ndarray:
        """float32 `[n, dim]`, the row of each id, which the caller may change."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """What another process needs to read the same rows, by kind; nothing where they are not here."""
        ...


class TableMemory:
    """Where tables lie: in this process alone."""

    def rows(self, num_rows: int, dim: int) -> np.ndarray:
        """float32 zeros; memory is taken where they are written."""
        return mapped_zeros((num_rows, dim))

    def copy(self, places: np.ndarray) -> np.ndarray:
        """Places in an arena."""
        return places.copy()

    def lines(self, num_buckets: int, per_bucket: int) -> np.ndarray:
        """As `new_lines`."""
        return new_lines(num_buckets, per_bucket)


class Arena:
    """Rows of all versions of one table. Mutated by whoever makes versions.

    Args:
      values: float32 `[2 * num_rows, dim]`.
      memory: where they lie.
    """

    def __init__(self, values: np.ndarray, memory: TableMemory) -> None:
        self.values, self.memory = values, memory
        self._free: list[np.ndarray] = []
        self._end = 0

    def take(self, count: int) -> np.ndarray:
        """Places that no version uses, int32 `[count]`."""
        found = []
        while count and self._free:
            part = self._free.pop()
            found.append(part[:count])
            if len(part) > count:
                self._free.append(part[count:])
            count -= len(found[-1])
        if self._end + count > len(self.values):
            raise AssertionError("Versions are made one at a time, so two of them have room.")
        found.append(np.arange(self._end, self._end + count, dtype=np.int32))
        self._end += count
        return np.concatenate(found)

    def give_back(self, places: np.ndarray) -> None:
        """Takes places that no version uses any more."""
        if len(places):
            self._free.append(places)


class RowsByNumber:
    """Rows by their numbers, of a whole table or of a share of it. As `TableRows`.

    Attributes:
      places: int32, by local number.
      replaced: places of the version before that this one does not use.
    """

    def __init__(self, arena: Arena, places: np.ndarray, replaced: np.ndarray, share: TableShare) -> None:
        self._arena, self.places, self.replaced, self._share = arena, places, replaced, share

    @property
    def arena(self) -> np.ndarray:
        return self._arena.values

    @property
    def memory(self) -> TableMemory:
        return self._arena.memory

    def arrays(self) -> dict[str, np.ndarray]:
        """What another process needs to read the same rows, as `over` takes it."""
        return {"values": self.arena, "places": self.places}

    def held(self, ids: np.ndarray) -> np.ndarray:
        """bool `[n]`, whether each id is a row that is here."""
        return self._share.holds(ids)

    def places_of(self, ids: np.ndarray) -> np.ndarray | None:
        return self.places[self._share.local(ids)]

    def values(self, ids: np.ndarray) -> np.ndarray:
        found = aligned_empty((len(ids), self.arena.shape[1]))
        gather(self.arena, self.places[self._share.local(ids)].astype(np.int64), found)
        return found

    @staticmethod
    def over(values: np.ndarray, places: np.ndarray) -> RowsByNumber:
        """A whole table over the arrays of another process."""
        arena = Arena(values, TableMemory())
        share = TableShare(ShardPlace(), num_buckets=1, num_rows=len(places))
        found = RowsByNumber(arena, places, np.zeros(0, np.int32), share)
        # So that the kernel is loaded before a request, or the next version, waits for it.
        found.values(np.zeros(0, np.int64))
        return found

    @staticmethod
    def of(store: Store, files: TableFiles, share: TableShare, memory: TableMemory) -> RowsByNumber:
        """Reads what a share holds of a table.

        Raises:
          ChunkDamaged: a file is missing or is not what was committed.
        """
        arena = Arena(memory.rows(_VERSIONS * share.num_rows, files.dim), memory)
        places = memory.copy(arena.take(share.num_rows))
        start = 0
        for _, batch in _row_values(store, files, share):
            arena.values[start : start + len(batch)] = batch
            start += len(batch)
        return RowsByNumber(arena, places, np.zeros(0, np.int32), share)

    def next(self, store: Store, files: TableFiles, since: TableFiles) -> RowsByNumber:
        """The next version.

        Args:
          files: of its commit.
          since: of the commit of this version.

        Raises:
          ChunkDamaged: a file is missing or is not what was committed.
        """
        changes = _row_values(store, files, self._share, since)
        places, replaced = self.memory.copy(self.places), [np.zeros(0, np.int32)]
        try:
            for ids, rows in changes:
                # As bits: a number that is not one is equal to itself here, and zeros of both signs differ.
                differs = (self.values(ids).view(np.uint32) != rows.view(np.uint32)).any(axis=1)
                fresh = self._arena.take(int(differs.sum()))
                self._arena.values[fresh] = rows[differs]
                numbers = self._share.local(ids[differs])
                replaced.append(self.places[numbers])
                places[numbers] = fresh
        except BaseException:
            # The version will not be, so nobody uses what was written for it.
            self._arena.give_back(places[places != self.places])
            raise
        return RowsByNumber(self._arena, places, np.concatenate(replaced), self._share)

    def undo(self, before: RowsByNumber) -> None:
        """Gives back what only this version uses; it was never used, and `before` is the version before."""
        self._arena.give_back(self.places[self.places != before.places])

    def drop(self, following: RowsByNumber) -> None:
        """Gives back what only this version uses, after the last lookup in it."""
        self._arena.give_back(following.replaced)


class RowsByKey:
    """Rows by keys that come and go. As `TableRows`.

    Args:
      keys: int64, by bucket and position. Of buckets that a share does not hold nothing is written, so these take no
        memory.
      held: uint32 of the same, 0 where the row has no key.
      lines: as `new_lines`, with the keys that have a row.
      described: how keys without a row are answered, as a version's schema has it.
    """

    def __init__(
        self,
        rows: RowsByNumber,
        files: TableFiles,
        described: Mapping[str, Any],
        share: TableShare,
        *,
        keys: np.ndarray,
        held: np.ndarray,
        lines: np.ndarray,
    ) -> None:
        self.rows, self._files, self.described, self._share = rows, files, described, share
        self._keys, self._held = keys, held
        self._per_bucket = lines_per_bucket(files.rows_per_bucket)
        self.lines = lines
        self._small = lines.view(np.uint16)
        self._num_asked = self._num_unknown = 0

    @property
    def arena(self) -> np.ndarray:
        return self.rows.arena

    def arrays(self) -> dict[str, np.ndarray]:
        """As `RowsByNumber.arrays`."""
        return {**self.rows.arrays(), "lines": self.lines}

    def held(self, ids: np.ndarray) -> np.ndarray:
        """bool `[n]`, whether each key would have its row here."""
        return self._share.holds(mix64(ids).view(np.int64) % self._files.num_buckets)

    @property
    def num_held(self) -> int:
        """How many keys have a row."""
        return int(np.count_nonzero(self._held))

    def held_keys(self) -> np.ndarray:
        """int64, the keys that have a row, rising."""
        return keys_in(self.lines)

    def places_of(self, ids: np.ndarray) -> np.ndarray | None:
        numbers = self._numbers(ids)
        self._num_asked += len(ids)
        self._num_unknown += int(np.count_nonzero(numbers < 0))
        if self.described["default"] == "shared":
            # The first row of a bucket is that of all its keys without one.
            numbers = np.where(numbers < 0, -1 - numbers, numbers)
        return None if (numbers < 0).any() else self.rows.places_of(numbers)

    def take_counts(self) -> tuple[int, int]:
        """How many ids `places_of` was asked for since the last call, and how many of them have a row of their own."""
        asked, unknown = self._num_asked, self._num_unknown
        self._num_asked = self._num_unknown = 0
        return asked, asked - unknown

    def values(self, ids: np.ndarray) -> np.ndarray:
        numbers = self._numbers(ids)
        is_known = numbers >= 0
        found = self.rows.values(np.where(is_known, numbers, -1 - numbers))
        default = self.described["default"]
        if default == "zeros":
            found[~is_known] = 0
        elif default == "first" and not is_known.all():
            found[~is_known] = self._first(ids[~is_known])
        return found

    def _first(self, keys: np.ndarray) -> np.ndarray:
        declared = self.described["initializer"]
        values = np.empty((len(keys), self._files.dim), np.float32)
        source = initializers.row_source(
            getattr(initializers, declared["name"])(**declared["arguments"]),
            seed=declared["seed"],
            table_name=self._files.name,
            num_rows=self._files.num_rows,
            dim=self._files.dim,
        )
        source(keys, values)
        return values

    def _numbers(self, ids: np.ndarray) -> np.ndarray:
        found = np.empty(len(ids), np.int64)
        keys = np.ascontiguousarray(ids, np.int64)
        find_rows(self.lines, self._small, self._per_bucket, self._files.num_buckets, keys, found)
        return found

    @staticmethod
    def of(
        store: Store, files: TableFiles, described: Mapping[str, Any], share: TableShare, memory: TableMemory
    ) -> RowsByKey:
        """Reads what a share holds of a table.

        Raises:
          ChunkDamaged: a file is missing or is not what was committed.
        """
        rows = RowsByNumber.of(store, files, share, memory)
        size = files.num_buckets * files.rows_per_bucket
        found = RowsByKey(
            rows,
            files,
            described,
            share,
            keys=np.zeros(size, np.int64),
            held=np.zeros(size, np.uint32),
            lines=memory.lines(files.num_buckets, lines_per_bucket(files.rows_per_bucket)),
        )
        for bucket in found._take(_columns(store, files, share)):
            found._rebuild(bucket)
        return found

    @staticmethod
    def over(rows: RowsByNumber, files: TableFiles, described: Mapping[str, Any], lines: np.ndarray) -> RowsByKey:
        """A whole table over the arrays of another process. The next version cannot be made of it."""
        share = ShardPlace().in_table(files)
        return RowsByKey(
            rows, files, described, share, keys=np.zeros(0, np.int64), held=np.zeros(0, np.uint32), lines=lines
        )

    def next(self, store: Store, files: TableFiles, since: TableFiles) -> RowsByKey:
        """The next version.

        Raises:
          ChunkDamaged: a file is missing or is not what was committed.
        """
        made = RowsByKey(
            self.rows.next(store, files, since),
            files,
            self.described,
            self._share,
            keys=self._copied(self._keys, np.zeros_like(self._keys)),
            held=self._copied(self._held, np.zeros_like(self._held)),
            lines=self._copied(self.lines, self.rows.memory.lines(files.num_buckets, self._per_bucket)),
        )
        try:
            for bucket in made._take(_columns(store, files, self._share, since)):
                made._rebuild(bucket)
        except BaseException:
            made.rows.undo(self.rows)
            raise
        return made

    def drop(self, following: RowsByKey) -> None:
        """As `RowsByNumber.drop`."""
        self.rows.drop(following.rows)

    def undo(self, before: RowsByKey) -> None:
        """As `RowsByNumber.undo`."""
        self.rows.undo(before.rows)

    def _copied(self, values: np.ndarray, made: np.ndarray) -> np.ndarray:
        """What belongs to the buckets held, in a new array."""
        by_bucket = (self._files.num_buckets, -1)
        held = slice(None) if self._share.is_whole else self._share.buckets
        made.reshape(by_bucket)[held] = values.reshape(by_bucket)[held]
        return made

    def _take(self, columns: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
        """Writes keys of rows, and when they were named last. Returns the buckets that have others now."""
        files, changed = self._files, [np.zeros(0, np.int64)]
        for ids, keys, last in columns:
            buckets = ids % files.num_buckets
            at = buckets * files.rows_per_bucket + ids // files.num_buckets
            held = (last != 0).astype(np.uint32)
            differs = (self._keys[at] != keys) | (self._held[at] != held)
            self._keys[at], self._held[at] = keys, held
            changed.append(np.unique(buckets[differs]))
        return np.unique(np.concatenate(changed))

    def _rebuild(self, bucket: int) -> None:
        rows = self._files.rows_per_bucket
        rebuild_map(self.lines, self._small, self._per_bucket, self._keys, self._held, rows, bucket)


def _columns(
    store: Store, files: TableFiles, share: TableShare, since: TableFiles | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Numbers of rows, their keys, and when these were named last; of all rows held, or of those that may have
    changed.
    """
    found = (
        changed_rows(store, files, since, name, share) if since is not None else _all_rows(store, files, name, share)
        for name in ("key", "last")
    )
    for (ids, keys), (_, last) in zip(*found, strict=True):
        yield ids, keys[:, 0].copy(), last[:, 0].copy()


def _row_values(
    store: Store, files: TableFiles, share: TableShare, since: TableFiles | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers and float32 values of all rows held, or of those that may have changed, whatever form files have."""
    names = (ROWS, SCALE) if files.arrays[0].dtype == "int8" else (ROWS,)
    at_once = max(1, BATCH_BYTES // (4 * files.dim))
    found = (
        changed_rows(store, files, since, name, share)
        if since is not None
        else _all_rows(store, files, name, share, at_once)
        for name in names
    )
    for parts in zip(*found, strict=True):
        yield parts[0][0], decoded({name: values for name, (_, values) in zip(names, parts, strict=True)})


def _all_rows(
    store: Store, files: TableFiles, name: str, share: TableShare, at_once: int = 1 << 20
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    array = next(array for array in files.arrays if array.name == name)
    # The same rows at once, whatever the type.
    start = 0
    item = DTYPES[array.dtype].itemsize * array.width
    for batch in row_batches(store, files, array, batch_bytes=at_once * item, buckets=share.buckets):
        yield share.ids(start, start + len(batch)), batch
        start += len(batch)


def changed_rows(
    store: Store, files: TableFiles, since: TableFiles, name: str, share: TableShare
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers and values of all rows held that may have changed from one commit to another; each number once.

    Where the later commit is the earlier one with more deltas, these alone are read.

    Args:
      name: of the array.

    Raises:
      ChunkDamaged: a file is missing or is not what was committed.
    """
    array = next(array for array in files.arrays if array.name == name)
    is_longer = files.deltas[: len(since.deltas)] == since.deltas
    if files.arrays != since.arrays or files.chunks != since.chunks or not is_longer:
        yield from _all_rows(store, files, name, share)
        return
    require_metadata(store, files)
    at = 1 + files.arrays.index(array)
    parts = [part for delta in files.deltas[len(since.deltas) :] for part in delta.parts]
    if not parts:
        return
    # A part has rows of many buckets, so hardly one has none of those held.
    ids = np.concatenate([read_dense(store, part.files[0]) for part in parts])
    values = np.concatenate([read_dense(store, part.files[at]) for part in parts])
    outside = ids[(ids < 0) | (ids >= files.num_rows)]
    if len(outside):
        raise ValueError(f"Found changed row {outside[0]} of table '{files.name}'. Expected 0 to {files.num_rows - 1}.")
    if not share.is_whole:
        held = share.holds(ids)
        ids, values = ids[held], values[held]
    # The last of a row counts.
    distinct, first = np.unique(ids[::-1], return_index=True)
    yield distinct.astype(np.int64), np.ascontiguousarray(values[::-1][first])
