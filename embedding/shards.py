"""`ShardLayout`, `ShardedArray`: where the rows of tables with `place="sharded"` lie on the devices of all hosts.

A table is cut over the parts of the devices that share no samples. Buckets in a row go to one part, so that a host owns
the buckets of its own devices, however many devices it has. Rows never cross from one host to another for a commit. All
is arithmetic on the number of a row: no device needs a list of rows.

Tables with rows of one width and one rule lie one behind the other in one array. So a step looks all of them up at
once. With an array for each table there were as many times more operations, and each of them small.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.buckets import MOST_OVER_MEAN, BucketLayout
from podembed.embedding.table_spec import TableSpec

_FEWEST_BUCKETS = 256
"""Of a sharded table of a new run, if it has as many rows. Then the busiest of 32 devices has an even share."""

MOST_SLOTS = 2**31 - 2**20
"""Of an array: numbers of slots are int32, and those just behind the last are used for what is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The rows of one table on so many parts. The buckets of a part lie one after the other, each with room for the
    longest.

    Attributes:
      table: how the table is cut into buckets.
      num_parts: parts over all hosts.
    """

    table: BucketLayout
    num_parts: int

    @property
    def rows_per_part(self) -> int:
        """The places of a part, padding included."""
        return -(-self.table.num_buckets // self.num_parts) * self.table.rows_per_bucket

    @property
    def largest_share(self) -> float:
        """The part of all buckets that the busiest part has."""
        return -(-self.table.num_buckets // self.num_parts) / self.table.num_buckets

    def part_of(self, buckets: Any) -> Any:
        """The part of each bucket: an integer, or an array of numpy or JAX."""
        return buckets * self.num_parts // self.table.num_buckets

    def first_bucket(self, parts: Any) -> Any:
        """The first bucket of each part."""
        return (parts * self.table.num_buckets + self.num_parts - 1) // self.num_parts

    def begin_of(self, buckets: Any) -> Any:
        """Where each bucket begins among the table's places in its part."""
        return (buckets - self.first_bucket(self.part_of(buckets))) * self.table.rows_per_bucket


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """The tables of one array on the devices. A *slot* is a place in it: part * `rows_per_part` + place in the part.

    Attributes:
      tables: layout of each table by its name, on as many parts each.
      cores: SparseCores of a part, if they look it up; 0 if not. The rows of a table are dealt to them one by one, so
        that each core has as many. Slots of a core lie in a row, and their number is a multiple of 16.
    """

    tables: Mapping[str, ShardLayout]
    cores: int = 0

    @property
    def name(self) -> str:
        """Name of the array: that of its first table."""
        return next(iter(self.tables))

    @property
    def num_parts(self) -> int:
        """Parts over all hosts."""
        return self.tables[self.name].num_parts

    @property
    def rows_per_part(self) -> int:
        """The places of a part, of all tables."""
        multiple = max(1, 16 * self.cores)
        return -(-sum(layout.rows_per_part for layout in self.tables.values()) // multiple) * multiple

    @property
    def rows_per_core(self) -> int:
        """The places of a SparseCore; those of a part where there is none."""
        return self.rows_per_part // max(1, self.cores)

    @property
    def num_owners(self) -> int:
        """SparseCores of all parts; parts where there are no cores."""
        return self.num_parts * max(1, self.cores)

    @property
    def num_slots(self) -> int:
        """The slots of all parts."""
        return self.num_parts * self.rows_per_part

    @property
    def begins(self) -> dict[str, int]:
        """By table, where its rows begin in each part."""
        ends = itertools.accumulate((layout.rows_per_part for layout in self.tables.values()), initial=0)
        return dict(zip(self.tables, ends, strict=False))

    def slots_of(self, table: str, rows: Any) -> Any:
        """The slot of each row of a table: an array of numpy or JAX."""
        layout = self.tables[table]
        buckets = rows % layout.table.num_buckets
        place = self.begins[table] + layout.begin_of(buckets) + rows // layout.table.num_buckets
        return layout.part_of(buckets) * self.rows_per_part + self._dealt(place)

    def _dealt(self, places: Any) -> Any:
        """Each core has every so manieth of the places; those of a core lie in a row."""
        if not self.cores:
            return places
        return places % self.cores * self.rows_per_core + places // self.cores

    def rows_of_bucket(self, table: str, bucket: int) -> slice | np.ndarray:
        """The places of a bucket's rows in its part."""
        layout = self.tables[table]
        first = self.begins[table] + layout.begin_of(bucket)
        count = layout.table.num_rows_of(bucket)
        return self._dealt(first + np.arange(count)) if self.cores else slice(first, first + count)

    def rows_at(self, table: str, part: int, is_wanted: np.ndarray) -> np.ndarray:
        """int64, the rows of a table whose places in a part are wanted.

        Args:
          is_wanted: bool `[rows_per_part]`.
        """
        if self.cores:
            is_wanted = is_wanted.reshape(self.cores, -1).T.reshape(-1)
        layout, begin = self.tables[table], self.begins[table]
        places = np.flatnonzero(is_wanted[begin : begin + layout.rows_per_part])
        buckets = layout.first_bucket(part) + places // layout.table.rows_per_bucket
        rows = places % layout.table.rows_per_bucket * layout.table.num_buckets + buckets
        # Others are padding.
        return rows[(buckets < layout.first_bucket(part + 1)) & (rows < layout.table.num_rows)]


def sharded_arrays(specs: Sequence[TableSpec], num_parts: int) -> list[ShardedArray]:
    """The arrays of all sharded tables among `specs`: by width and rule, in the order of their first tables."""
    found: list[tuple[TableSpec, dict[str, ShardLayout]]] = []
    for spec in specs:
        if not spec.is_sharded:
            continue
        layout = ShardLayout(table=spec.layout, num_parts=num_parts)
        for first, tables in found:
            num_slots = num_parts * (layout.rows_per_part + sum(one.rows_per_part for one in tables.values()))
            if (first.dim, first.optimizer) == (spec.dim, spec.optimizer) and num_slots <= MOST_SLOTS:
                tables[spec.name] = layout
                break
        else:
            found.append((spec, {spec.name: layout}))
    return [ShardedArray(tables) for _, tables in found]


def fewest_buckets(num_rows: int) -> int:
    """The buckets that a sharded table needs. No bucket needs less than one row."""
    return min(_FEWEST_BUCKETS, 1 << (num_rows - 1).bit_length())


def cut_for_parts(spec: TableSpec, num_parts: int) -> TableSpec:
    """A sharded table with more buckets, if so many parts would not have an even share each."""
    num_buckets, most = spec.layout.num_buckets, fewest_buckets(spec.num_rows)
    while num_buckets < most and -(-num_buckets // num_parts) * num_parts > MOST_OVER_MEAN * num_buckets:
        num_buckets *= 2
    return replace(spec, layout=BucketLayout(num_rows=spec.num_rows, num_buckets=num_buckets))


def owners_of_shards(num_buckets: int, num_hosts: int) -> np.ndarray:
    """int32 `[num_buckets]`: the host of each bucket. It has the bucket's part, however many parts a host has."""
    return (np.arange(num_buckets, dtype=np.int64) * num_hosts // num_buckets).astype(np.int32)
