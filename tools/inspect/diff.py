"""What differs between two committed states, of one run or of two: tables row by row, dense leaves, the step and the
counters.

Tables are compared bucket by bucket, also where the two are cut into different numbers of buckets, so memory stays at
one bucket of each. Buckets with equal digests hold equal rows and are not read: whether the files still are what was
committed is asked of `fsck`. Tables whose keys come and go are compared key by key (`key_difference`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.vocabulary.dynamic_index import SHARED_KEY
from podembed.orchestrator.api.text import columns, number, printable
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.run.reference import CommittedState
from podembed.tools.inspect.key_difference import KeyDifference, key_difference
from podembed.tools.inspect.row_difference import RowDifference, absolute_differences, differing
from podembed.workers.checkpoint.arrays import DenseFile, read_dense
from podembed.workers.checkpoint.bucket_overlap import Cut, overlap, partners
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, TableFiles
from podembed.workers.checkpoint.files import read_bucket_array
from podembed.workers.storage.store import Store

_INFORMATION = ("run_id", "generation", "hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDifference:
    """Rows or one slot of a table that both states have. `max_abs` and the row numbers as in `RowDifference`. Where
    keys come and go, keys are in their place.
    """

    array: str
    num_rows: int
    num_changed: int
    max_abs: float
    max_row: int | None
    first_row: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDifference:
    """One table that both states have.

    Attributes:
      shapes: what differs of the number of rows, and of type and width of rows and slots; None for a slot that only the
        other has.
      buckets: how each is cut, which says nothing about the state.
      num_changed: rows of which the row or a slot differs, among those that both have.
      arrays: arrays that both have with equal width.
      keys: which keys differ, where they come and go; None elsewhere.
    """

    table: str
    shapes: Mapping[str, tuple[Any, Any]]
    buckets: tuple[int, int]
    num_changed: int
    arrays: tuple[ArrayDifference, ...]
    keys: KeyDifference | None = None

    @property
    def is_equal(self) -> bool:
        keys = self.keys
        return not (self.shapes or self.num_changed or (keys and (keys.removed or keys.added or keys.waiting)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDifference:
    """One dense leaf that differs. `shapes` are set if shape or type differ, else the counts and the largest difference
    of an element.
    """

    key: str
    shapes: tuple[str, str] | None
    num_changed: int
    num_elements: int
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """What `diff` found, from `one` to `other`.

    Attributes:
      values: step, counters and cursor that differ, by name.
      information: what differs and is no part of the trained state: run, generation, hosts.
      removed, added: tables and dense keys that only `one`, or only `other` has.
    """

    one: str
    other: str
    values: Mapping[str, tuple[Any, Any]]
    information: Mapping[str, tuple[Any, Any]]
    removed_tables: tuple[str, ...]
    added_tables: tuple[str, ...]
    tables: tuple[TableDifference, ...]
    removed_dense: tuple[str, ...]
    added_dense: tuple[str, ...]
    num_dense: int
    dense: tuple[DenseDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether training would go on from both in the same way, as far as the files tell."""
        apart = (self.removed_tables, self.added_tables, self.removed_dense, self.added_dense, self.dense)
        return not self.values and not any(apart) and all(table.is_equal for table in self.tables)


def diff(one: CommittedState, other: CommittedState) -> RunDifference:
    """Compares two commits.

    Raises:
      ChunkDamaged: a file that had to be read is not what was committed.
    """
    tables_of_one = {table.name: table for table in one.manifest.tables}
    tables_of_other = {table.name: table for table in other.manifest.tables}
    dense_of_one = {leaf.key: leaf for leaf in one.manifest.dense}
    dense_of_other = {leaf.key: leaf for leaf in other.manifest.dense}
    return RunDifference(
        one=one.location,
        other=other.location,
        values=_unequal(_values(one.manifest), _values(other.manifest)),
        information=_unequal(
            {name: getattr(one.manifest, name) for name in _INFORMATION},
            {name: getattr(other.manifest, name) for name in _INFORMATION},
        ),
        removed_tables=tuple(name for name in tables_of_one if name not in tables_of_other),
        added_tables=tuple(name for name in tables_of_other if name not in tables_of_one),
        tables=tuple(
            _diff_table(one.store, table, other.store, tables_of_other[name])
            for name, table in tables_of_one.items()
            if name in tables_of_other
        ),
        removed_dense=tuple(key for key in dense_of_one if key not in dense_of_other),
        added_dense=tuple(key for key in dense_of_other if key not in dense_of_one),
        num_dense=len(dense_of_one.keys() & dense_of_other.keys()),
        dense=tuple(
            found
            for key, leaf in dense_of_one.items()
            if key in dense_of_other
            and (found := _diff_dense(one.store, leaf, other.store, dense_of_other[key])) is not None
        ),
    )


def render(difference: RunDifference) -> str:
    """Text of a difference, ready to print."""
    parts = [f"- {difference.one}\n+ {difference.other}"]
    values = [*difference.values.items(), *difference.information.items()]
    values += [(f"buckets of '{t.table}'", t.buckets) for t in difference.tables if t.buckets[0] != t.buckets[1]]
    if values:
        parts.append(columns([(name, _change(pair)) for name, pair in values]))
    lines = [("table", "array", "rows changed", "max |difference|", "at", "first at")]
    for table in difference.tables:
        lines += _table_lines(table)
    if difference.tables:
        parts.append("Tables\n" + columns(lines))
    shapes = [(t.table, name, _change(pair)) for t in difference.tables for name, pair in t.shapes.items()]
    if shapes:
        parts.append("Shapes\n" + columns(shapes))
    lists = {
        "Tables removed": difference.removed_tables,
        "Tables added": difference.added_tables,
        "Dense leaves removed": difference.removed_dense,
        "Dense leaves added": difference.added_dense,
    }
    parts += [f"{title}: {', '.join(names)}" for title, names in lists.items() if names]
    parts.append(_dense_text(difference))
    # Buckets of equal digests are not read, so damage to their files does not show here.
    equal = "The states are equal, as the commits say; whether their files are whole is podembed fsck's question"
    parts.append(equal if difference.is_equal else "The states differ")
    return printable("\n\n".join(parts))


def _change(pair: tuple[Any, Any]) -> str:
    before, after = ("none" if value is None else value for value in pair)
    return f"{before} -> {after}"


def _values(manifest: Manifest) -> dict[str, Any]:
    counters = {f"counter {name}": value for name, value in manifest.counters.items()}
    return {"step": manifest.step} | counters | {f"cursor {name}": value for name, value in manifest.cursor.items()}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*one, *(name for name in other if name not in one)]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _diff_table(store: Store, table: TableFiles, other_store: Store, other: TableFiles) -> TableDifference:
    arrays = {array.name: array for array in table.arrays}
    common = [
        (arrays[array.name], array)
        for array in other.arrays
        if array.name in arrays and array.width == arrays[array.name].width
    ]
    if table.is_dynamic and other.is_dynamic:
        return _diff_keys(store, table, other_store, other, common)
    if table.is_dynamic or other.is_dynamic:
        # Equal rows need not be of the same id, so nothing but their shapes is compared.
        return _table_difference(table, other, 0, {})
    found = {array.name: RowDifference() for array, _ in common}
    num_changed = 0
    for rows in _shared_rows(store, table, other_store, other, common):
        num_changed += rows.count_changed()
        for name, (one_values, other_values) in rows.values.items():
            found[name].add(one_values, other_values, first_row=rows.first_row, row_stride=rows.row_stride)
    return _table_difference(table, other, num_changed, found)


def _diff_keys(
    store: Store, table: TableFiles, other_store: Store, other: TableFiles, common: list[tuple[ArrayFiles, ArrayFiles]]
) -> TableDifference:
    names = [array.name for array, _ in common if array.name != "key" and not array.name.startswith("waiting_")]
    keys = key_difference(store, table, other_store, other, names, skips_equal=_are_comparable(table, other))
    return replace(_table_difference(table, other, keys.num_changed, keys.arrays), keys=keys)


def _table_difference(
    table: TableFiles, other: TableFiles, num_changed: int, found: Mapping[str, RowDifference]
) -> TableDifference:
    return TableDifference(
        table=table.name,
        shapes=_unequal(_shapes(table), _shapes(other)),
        buckets=(table.num_buckets, other.num_buckets),
        num_changed=num_changed,
        arrays=tuple(
            ArrayDifference(
                array=name,
                num_rows=min(table.num_rows, other.num_rows),
                num_changed=sums.num_changed,
                max_abs=sums.max_abs,
                max_row=sums.max_row,
                first_row=sums.first_row,
            )
            for name, sums in found.items()
        ),
    )


def _shapes(table: TableFiles) -> dict[str, Any]:
    rows, *slots = (f"{array.dtype}[{array.width}]" for array in table.arrays)
    described = {f"slot {slot.name}": text for slot, text in zip(table.arrays[1:], slots, strict=True)}
    return {"number of rows": table.num_rows, "row": rows} | described


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedRows:
    """The same rows in both states. `values`: array name → the two versions, `[rows, width]`."""

    first_row: int
    row_stride: int
    values: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def count_changed(self) -> int:
        changed = [differing(one, other).any(axis=1) for one, other in self.values.values()]
        return int(np.logical_or.reduce(changed).sum()) if changed else 0


def _shared_rows(
    store: Store,
    table: TableFiles,
    other_store: Store,
    other: TableFiles,
    common: list[tuple[ArrayFiles, ArrayFiles]],
) -> Iterator[_SharedRows]:
    """Walks over the buckets of the coarser cut, and within over those of the finer one, so each file is read once."""
    num_rows = min(table.num_rows, other.num_rows)
    may_skip = _are_comparable(table, other)
    for coarse in range(min(table.num_buckets, other.num_buckets)):
        mine, theirs = _Buffered(store, table), _Buffered(other_store, other)
        for bucket in partners(Cut(min(table.num_buckets, other.num_buckets), coarse), table.num_buckets):
            for other_bucket in partners(Cut(table.num_buckets, bucket), other.num_buckets):
                if may_skip and table.digests[bucket] == other.digests[other_bucket]:
                    continue
                shared = overlap(
                    Cut(table.num_buckets, bucket), Cut(other.num_buckets, other_bucket), num_rows=num_rows
                )
                if shared.num_rows == 0:
                    continue
                yield _SharedRows(
                    first_row=shared.first_row,
                    row_stride=shared.row_stride,
                    values={
                        array.name: (
                            mine.read(array, bucket)[shared.one],
                            theirs.read(other_array, other_bucket)[shared.other],
                        )
                        for array, other_array in common
                    },
                )


def _are_comparable(table: TableFiles, other: TableFiles) -> bool:
    """Whether equal digests mean equal rows: they cover all arrays of a bucket, so both must be cut and shaped
    alike.
    """
    shape = [(array.name, array.width, array.dtype) for array in table.arrays]
    other_shape = [(array.name, array.width, array.dtype) for array in other.arrays]
    return (table.num_rows, table.num_buckets, shape) == (other.num_rows, other.num_buckets, other_shape)


class _Buffered:
    """The last bucket of each array that was read, so that the bucket of the coarser cut is read once. Mutated by
    `read`.
    """

    def __init__(self, store: Store, table: TableFiles) -> None:
        self._store = store
        self._table = table
        self._held: dict[str, tuple[int, np.ndarray]] = {}

    def read(self, array: ArrayFiles, bucket: int) -> np.ndarray:
        held = self._held.get(array.name)
        if held is None or held[0] != bucket:
            self._held.pop(array.name, None)
            held = (bucket, read_bucket_array(self._store, self._table, array, bucket))
            self._held[array.name] = held
        return held[1]


def _diff_dense(store: Store, leaf: DenseFile, other_store: Store, other: DenseFile) -> DenseDifference | None:
    if (leaf.shape, leaf.dtype) != (other.shape, other.dtype):
        shapes = (f"{leaf.dtype}{list(leaf.shape)}", f"{other.dtype}{list(other.shape)}")
        return DenseDifference(key=leaf.key, shapes=shapes, num_changed=0, num_elements=0, max_abs=0.0)
    one_values, other_values = read_dense(store, leaf).reshape(-1), read_dense(other_store, other).reshape(-1)
    differs = differing(one_values, other_values)
    if not differs.any():
        return None
    return DenseDifference(
        key=leaf.key,
        shapes=None,
        num_changed=int(differs.sum()),
        num_elements=one_values.size,
        max_abs=float(absolute_differences(one_values, other_values, differs).max()),
    )


def _table_lines(table: TableDifference) -> list[tuple[str, ...]]:
    lines = []
    for array in table.arrays:
        changed = f"{array.num_changed:,} of {array.num_rows:,}"
        where = ("", "", "")
        if array.num_changed:
            where = (number(array.max_abs), *(_place(table, row) for row in (array.max_row, array.first_row)))
        lines.append((table.table, array.array, changed, *where))
    if (keys := table.keys) is not None:
        lines.append((table.table, "keys", f"{keys.removed:,} removed, {keys.added:,} added", "", "", ""))
        lines.append((table.table, "waiting keys", f"{keys.waiting:,}", "", "", ""))
    return lines


def _place(table: TableDifference, row: int | None) -> str:
    """Where keys come and go, a row is named by its key."""
    if table.keys is None:
        return f"row {row}"
    return "shared row" if row == SHARED_KEY else f"key {row}"


def _dense_text(difference: RunDifference) -> str:
    if not difference.dense:
        return f"Dense: none of {difference.num_dense} common leaves differs"
    lines = [("leaf", "elements changed", "max |difference|")]
    for leaf in difference.dense:
        if leaf.shapes:
            lines.append((leaf.key, f"{leaf.shapes[0]} -> {leaf.shapes[1]}", ""))
        else:
            lines.append((leaf.key, f"{leaf.num_changed:,} of {leaf.num_elements:,}", number(leaf.max_abs)))
    return f"Dense: {len(difference.dense)} of {difference.num_dense} common leaves differ\n" + columns(lines)
