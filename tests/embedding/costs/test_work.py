"""What hosts do in a step: the counts follow what each way of a table does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.embedding.costs.constants import MemoryCurve
from podembed.embedding.costs.work import TableTraffic, TableWay, Work, footprint_bytes, table_work

CURVE = MemoryCurve(size_bytes=(1 << 16, 1 << 28), row_ns=(2.0, 10.0))
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
    found = table_work(table, num_hosts=num_hosts, footprint=footprint_bytes([table], num_hosts), memory=CURVE)
    return found.every_host.counts, found.owner.counts


def test_the_owner_of_a_whole_table_works_for_all_hosts() -> None:
    every, owner = work(TABLE, 4)
    assert set(every) == {"dedup/pooled"}
    assert every["dedup/pooled"].ids == 1000.0
    assert owner["group/pooled"].ids == owner["pool/pooled"].ids == owner["update/pooled"].ids == 4000.0
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
            assert counts.far_rows >= one[key].far_rows
    key = "gather/rows" if way is TableWay.ROWS else "pool/pooled"
    near, far = ({**every, **owner}[key] for every, owner in (work(small, 2), work(large, 2)))
    assert far.far_rows > near.far_rows


def test_what_a_phase_costs_once_does_not_grow_with_the_tables() -> None:
    found = Work()
    for _ in range(3):
        found.merge(table_work(TABLE, num_hosts=4, footprint=0.0, memory=CURVE).owner)
    counts = found.of_host(4)["group/pooled"]
    assert (counts.steps, counts.peers, counts.ids) == (1.0, 3.0, 12000.0)
