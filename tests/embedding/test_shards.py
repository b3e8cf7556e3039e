"""Where rows of sharded tables lie: each at a place of its own, with the host that owns its bucket."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.shards import ShardLayout, owners_of_shards


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 12, 512])
@pytest.mark.parametrize(("num_rows", "num_buckets"), [(1, 1), (12, 16), (1_000, 8), (997, 64), (70_000, 65_536)])
def test_every_row_has_a_slot_of_its_own_in_the_part_of_its_bucket(
    num_rows: int, num_buckets: int, num_parts: int
) -> None:
    layout = ShardLayout(table=BucketLayout(num_rows=num_rows, num_buckets=num_buckets), num_parts=num_parts)
    rows = np.arange(num_rows, dtype=np.int32)
    slots = layout.slots_of(rows)
    assert slots.dtype == np.int32
    assert len(np.unique(slots)) == num_rows
    assert slots.min() >= 0
    assert slots.max() < layout.num_slots == num_parts * layout.rows_per_part
    buckets = layout.table.buckets_of(rows)
    np.testing.assert_array_equal(slots // layout.rows_per_part, layout.part_of(buckets))
    counts = np.bincount(layout.part_of(np.arange(num_buckets)), minlength=num_parts)
    assert counts.max() - counts.min() <= 1
    assert layout.largest_share == counts.max() / num_buckets
    # The rows of a bucket follow each other, as hosts give and take them.
    for bucket in {0, num_buckets // 3, num_buckets - 1}:
        own = layout.slots_of(layout.table.ids_of(bucket))
        first = layout.part_of(bucket) * layout.rows_per_part + layout.local_slot(bucket)
        np.testing.assert_array_equal(own, first + np.arange(len(own)))


@pytest.mark.parametrize(("num_hosts", "parts_per_host"), [(1, 8), (2, 4), (3, 4), (5, 1)])
@pytest.mark.parametrize("num_buckets", [1, 4, 256])
def test_a_host_owns_the_buckets_of_its_devices(num_buckets: int, num_hosts: int, parts_per_host: int) -> None:
    table = BucketLayout(num_rows=10_000, num_buckets=num_buckets)
    layout = ShardLayout(table=table, num_parts=num_hosts * parts_per_host)
    owners = owners_of_shards(num_buckets, num_hosts)
    np.testing.assert_array_equal(owners, layout.part_of(np.arange(num_buckets)) // parts_per_host)
