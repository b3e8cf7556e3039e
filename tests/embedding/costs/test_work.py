"""What hosts do in a step: the counts follow what each way of a table does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.costs.constants import Caches
from podembed.embedding.costs.work import TableTraffic, TableWay, Touched, Work, footprint_bytes, table_work

CACHES = Caches(l2_bytes=1 << 20, l3_bytes=1 << 25)
TABLE = TableTraffic(
    dim=16,
    slot_floats=1,
    num_rows=1_000_000,
    way=TableWay.WHOLE,
    features=2,
    bags=200.0,
    ids=1000.0,
    host_rows=900.0,
    all_rows=3000.0,
)


def work(table: TableTraffic, num_hosts: int) -> tuple[dict, dict]:
    found = table_work(table, num_hosts=num_hosts, touched=Touched.of([table], num_hosts), caches=CACHES)
    return found.every_host.counts, found.owner.counts


def test_the_owner_of_a_whole_table_works_for_all_hosts() -> None:
    every, owner = work(TABLE, 4)
    assert set(every) == {"dedup/pooled"}
    assert every["dedup/pooled"].ids == 1000.0
    assert owner["group/pooled"].hashed_ids == owner["pool/pooled"].ids == owner["update/pooled"].ids == 4000.0
    assert owner["pool/pooled"].bags == 800.0
    assert owner["update/pooled"].rows == 3000.0
    assert owner["pool/pooled"].calls == 8.0


def test_of_a_cut_table_each_host_pools_its_part_of_every_bag() -> None:
    every, owner = work(replace(TABLE, way=TableWay.PARTIAL), 4)
    assert owner == {}
    assert every["pool/pooled"].ids == 1000.0
    assert every["pool/pooled"].bags == 800.0
    assert every["update/pooled"].rows == 750.0
    assert every["sums/partial"].floats == 16 * 800.0


def test_rows_that_travel_are_found_once_a_host() -> None:
    every, owner = work(replace(TABLE, way=TableWay.ROWS), 4)
    assert owner == {}
    assert every["dedup/rows"].ids == every["pool/rows"].ids == every["gradient sum/rows"].ids == 1000.0
    assert every["gather/rows"].rows == 900.0
    assert every["update/rows"].rows == 750.0


@pytest.mark.parametrize("way", list(TableWay))
def test_a_table_out_of_the_caches_costs_more(way: TableWay) -> None:
    small, large = (replace(TABLE, way=way, num_rows=rows) for rows in (3000, 100_000_000))
    for one, other in zip(work(small, 2), work(large, 2), strict=True):
        for key, counts in other.items():
            assert counts.rows_from_memory >= one[key].rows_from_memory
    key = "gather/rows" if way is TableWay.ROWS else "pool/pooled"
    near, far = ({**every, **owner}[key] for every, owner in (work(small, 2), work(large, 2)))
    assert far.rows_from_memory > near.rows_from_memory


def test_what_a_phase_costs_once_does_not_grow_with_the_tables() -> None:
    found, touched = Work(), Touched(step_bytes=0.0, held_bytes=0.0)
    for _ in range(3):
        found.merge(table_work(TABLE, num_hosts=4, touched=touched, caches=CACHES).owner)
    counts = found.of_host(4)["group/pooled"]
    assert (counts.steps, counts.peers, counts.hashed_ids) == (1.0, 3.0, 12000.0)


@pytest.mark.parametrize(
    ("num_rows", "ids", "way"),
    [
        (4_000, 1_000.0, "counted_ids"),
        (1_000_000, 1_000.0, "hashed_ids"),
        (1_000_000, 100_000.0, "marked_ids"),
    ],
)
def test_grouping_is_counted_by_the_way_that_it_takes(num_rows: int, ids: float, way: str) -> None:
    """Up to four rows an id all are counted. Up to 65,536 ids are hashed, and more find marks."""
    counts = work(replace(TABLE, num_rows=num_rows, ids=ids, all_rows=900.0), 1)[1]["group/pooled"]
    found = {name: getattr(counts, name) for name in ("counted_ids", "marked_ids", "hashed_ids")}
    assert found == {**dict.fromkeys(found, 0.0), way: ids}


def test_a_footprint_counts_cache_lines() -> None:
    """A sparse row of 8 floats takes a line, and so does its slot. Where all rows are touched, rows share lines."""
    narrow = replace(TABLE, dim=8, bags=0.0, ids=0.0, host_rows=0.0)
    assert footprint_bytes([replace(narrow, num_rows=1_000_000, all_rows=1000.0)], 1) == 1000 * (64 + 64)
    assert footprint_bytes([replace(narrow, num_rows=1000, all_rows=1000.0)], 1) == 1000 * 4 * (8 + 1)


def test_what_is_divided_does_not_depend_on_lengths() -> None:
    """`FeatureTables` makes divided gradients for every feature that does not sum, also of bags of one id."""
    mean = replace(TABLE, divided_bags=200.0)
    for ids in (200.0, 201.0, 1000.0):
        counts = work(replace(mean, ids=ids), 2)[1]
        assert counts["group/pooled"].divided_bags == counts["update/pooled"].divided_bags == 400.0


def test_rows_of_a_table_on_the_devices_are_not_in_the_way() -> None:
    """However many they are: hosts do not touch them in a step."""
    beside = replace(TABLE, num_rows=50_000_000, dim=64, features=0, bags=0.0, ids=0.0, host_rows=0.0, all_rows=0.0)
    assert Touched.of([TABLE, beside], 1) == Touched.of([TABLE], 1)
