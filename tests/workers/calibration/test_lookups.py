"""Probes run the real lookups, and what they find is of the right size."""

from __future__ import annotations

import pytest

from podembed.embedding.costs.work import TableWay
from podembed.workers.calibration.lookups import Probe, measure_lookups, measure_memory, probes

PHASES = {
    TableWay.WHOLE: {"dedup/pooled", "id exchange/pooled", "group/pooled", "split/pooled", "pool/pooled"}
    | {"update/pooled"},
    TableWay.PARTIAL: {"dedup/partial", "sums/partial", "id exchange/pooled", "group/pooled", "split/pooled"}
    | {"pool/pooled", "update/pooled"},
    TableWay.ROWS: {"dedup/rows", "id exchange/rows", "split/rows", "gather/rows", "pool/rows", "update/rows"}
    | {"gradient sum/rows"},
}


@pytest.mark.parametrize("way", list(TableWay))
def test_a_probe_measures_every_phase_of_its_way(way: TableWay) -> None:
    probe = Probe(way=way, dim=16, table_bytes=1 << 16, ids_per_bag=3, bags=64, num_hosts=2, combiner="mean")
    found = measure_lookups(num_processes=1, chosen=[probe])
    assert set(found.factors_ns) == PHASES[way]
    for key, factors in found.factors_ns.items():
        assert sum(factors) > 0, key
        # One step has one solution without an error.
        assert found.errors[key] < 1e-6


def test_the_probes_have_every_way_near_and_far() -> None:
    for way in TableWay:
        sizes = {probe.table_bytes for probe in probes() if probe.way is way}
        assert max(sizes) >= 64 << 20 > min(sizes)
        assert {probe.num_hosts for probe in probes() if probe.way is way} >= {2, 16}


def test_memory_gets_slower_as_it_grows() -> None:
    curve = measure_memory()
    assert list(curve.row_ns) == sorted(curve.row_ns)
    assert 0 < curve.row_ns[0] < 1000
    assert curve.far_share(1 << 40) in (0.0, 1.0)
