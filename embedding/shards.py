"""`ShardLayout`: where the rows of a table with `place="sharded"` lie on the devices of all hosts.

The table is cut over the parts of the devices that share no samples. Buckets in a row go to one part, so that a host
owns the buckets of its own devices, however many devices it has. Rows never cross from one host to another for a
commit. All is arithmetic on the number of a row: no device needs a list of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from podembed.embedding.buckets import BucketLayout

FEWEST_BUCKETS = 256
"""Of a sharded table of a new run, if it has as many rows. Then the busiest of 32 devices has an even share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The rows of one table on so many parts. A *slot* is a place on the devices: part * `rows_per_part` + local place.

    The buckets of a part lie one after the other, each with room for the longest.

    Attributes:
      table: how the table is cut into buckets.
      num_parts: parts over all hosts.
    """

    table: BucketLayout
    num_parts: int

    @property
    def rows_per_part(self) -> int:
        """The slots of a part, padding included."""
        return -(-self.table.num_buckets // self.num_parts) * self.table.rows_per_bucket

    @property
    def num_slots(self) -> int:
        """The slots of all parts."""
        return self.num_parts * self.rows_per_part

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

    def local_slot(self, bucket: int) -> int:
        """Where a bucket begins within its part."""
        return (bucket - self.first_bucket(self.part_of(bucket))) * self.table.rows_per_bucket

    def slots_of(self, rows: Any) -> Any:
        """The slot of each row: an array of numpy or JAX."""
        buckets = rows % self.table.num_buckets
        parts = self.part_of(buckets)
        within = (buckets - self.first_bucket(parts)) * self.table.rows_per_bucket
        return parts * self.rows_per_part + within + rows // self.table.num_buckets


def owners_of_shards(num_buckets: int, num_hosts: int) -> np.ndarray:
    """int32 `[num_buckets]`: the host of each bucket. It has the bucket's part, however many parts a host has."""
    return (np.arange(num_buckets, dtype=np.int64) * num_hosts // num_buckets).astype(np.int32)
