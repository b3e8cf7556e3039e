"""Where rows of sharded tables lie: each at a place of its own, with the host that owns its bucket."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding import shards
from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD
from podembed.embedding.shards import ShardedArray, ShardLayout, cut_for_parts, owners_of_shards, sharded_arrays
from podembed.embedding.table_spec import TableSpec


@pytest.mark.parametrize("cores", [0, 2, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 12, 512])
@pytest.mark.parametrize(("num_rows", "num_buckets"), [(1, 1), (12, 16), (1_000, 8), (997, 64), (70_000, 65_536)])
def test_every_row_has_a_slot_of_its_own_in_the_part_of_its_bucket(
    num_rows: int, num_buckets: int, num_parts: int, cores: int
) -> None:
    layout = ShardLayout(table=BucketLayout(num_rows=num_rows, num_buckets=num_buckets), num_parts=num_parts)
    other = ShardLayout(table=BucketLayout(num_rows=10, num_buckets=4), num_parts=num_parts)
    array = ShardedArray({"before": other, "table": layout, "behind": other}, cores=cores)
    rows = np.arange(num_rows, dtype=np.int32)
    slots = array.slots_of("table", rows)
    assert slots.dtype == np.int32
    everyone = np.concatenate([slots, *(array.slots_of(name, np.arange(10)) for name in ("before", "behind"))])
    assert len(np.unique(everyone)) == num_rows + 20
    assert everyone.min() >= 0
    assert everyone.max() < array.num_slots == num_parts * array.rows_per_part
    buckets = layout.table.buckets_of(rows)
    np.testing.assert_array_equal(slots // array.rows_per_part, layout.part_of(buckets))
    counts = np.bincount(layout.part_of(np.arange(num_buckets)), minlength=num_parts)
    assert counts.max() - counts.min() <= 1
    assert layout.largest_share == counts.max() / num_buckets
    # The rows of a bucket follow each other, as hosts give and take them.
    for bucket in {0, num_buckets // 3, num_buckets - 1}:
        own, places = array.slots_of("table", layout.table.ids_of(bucket)), array.rows_of_bucket("table", bucket)
        expected = np.arange(array.rows_per_part)[places]
        np.testing.assert_array_equal(own, layout.part_of(bucket) * array.rows_per_part + expected)
        part = int(layout.part_of(bucket))
        is_wanted = np.isin(np.arange(array.rows_per_part), expected)
        np.testing.assert_array_equal(np.sort(array.rows_at("table", part, is_wanted)), layout.table.ids_of(bucket))
    if cores:
        # Each core has as many rows as the others.
        in_first = slots[slots < array.rows_per_part] // array.rows_per_core
        counts = np.bincount(in_first, minlength=cores)
        assert len(counts) == cores
        assert counts.max() - counts.min() <= -(-num_buckets // num_parts)


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "num_buckets"),
    [(5_000, 1, 1), (5_000, 8, 8), (5_000, 3, 128), (5_000, 6, 256), (5, 8, 8)],
)
def test_a_table_is_cut_as_finely_as_its_parts_need(num_rows: int, num_parts: int, num_buckets: int) -> None:
    """Files have a bucket each, so no finer."""
    spec = TableSpec.of(TableConfig(num_rows, 4, name="t"), seed=1, most_hosts=1)
    assert spec.layout.num_buckets == 1
    assert cut_for_parts(spec, num_parts).layout == BucketLayout(num_rows=num_rows, num_buckets=num_buckets)


def test_tables_of_one_width_and_rule_share_an_array_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(name: str, dim: int = 4, rate: float | None = 0.1, *, is_sharded: bool = True) -> TableSpec:
        table = TableConfig(100, dim, name=name, optimizer=SGD(rate or 1.0), trainable=rate is not None)
        found = TableSpec.of(table, seed=1, name=name, optimizer=SGD(1.0), num_buckets=4, most_hosts=4)
        return replace(found, is_sharded=is_sharded)

    specs = [
        spec("a"),
        spec("b", 8),
        spec("c"),
        spec("read", rate=None),
        spec("host", is_sharded=False),
        spec("d", rate=0.2),
    ]
    named = [[*array.tables] for array in sharded_arrays([*specs, spec("e")], 2)]
    assert named == [["a", "c", "e"], ["b"], ["read"], ["d"]]
    monkeypatch.setattr(shards, "MOST_SLOTS", 250)
    assert [[*array.tables] for array in sharded_arrays([*specs, spec("e")], 2)][:2] == [["a", "c"], ["b"]]


@pytest.mark.parametrize(("num_hosts", "parts_per_host"), [(1, 8), (2, 4), (3, 4), (5, 1)])
@pytest.mark.parametrize("num_buckets", [1, 4, 256])
def test_a_host_owns_the_buckets_of_its_devices(num_buckets: int, num_hosts: int, parts_per_host: int) -> None:
    table = BucketLayout(num_rows=10_000, num_buckets=num_buckets)
    layout = ShardLayout(table=table, num_parts=num_hosts * parts_per_host)
    owners = owners_of_shards(num_buckets, num_hosts)
    np.testing.assert_array_equal(owners, layout.part_of(np.arange(num_buckets)) // parts_per_host)
