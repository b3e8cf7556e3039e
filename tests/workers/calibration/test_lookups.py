"""Probes run the real lookups, and what they find is of the right size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.costs.constants import Caches, MemoryCurve
from podembed.embedding.costs.work import TableWay
from podembed.workers.calibration.lookups import (
    Probe,
    caches_of,
    caches_of_machine,
    measure_lookups,
    measure_memory,
    probes,
    skewed,
)

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


def test_the_sizes_of_caches_are_those_that_the_kernel_says(tmp_path: Path) -> None:
    assert caches_of_machine(str(tmp_path)) is None
    for at, (level, kind, size) in enumerate([("1", "Data", "48K"), ("2", "Unified", "1024K"), ("3", "Unified", "8M")]):
        folder = tmp_path / f"index{at}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    # A size in another unit is not understood, so the second cache is the last one.
    assert caches_of_machine(str(tmp_path)) == Caches(l2_bytes=1 << 20, l3_bytes=1 << 20)
    (tmp_path / "index2" / "size").write_text("8192K\n")
    assert caches_of_machine(str(tmp_path)) == Caches(l2_bytes=1 << 20, l3_bytes=8 << 20)


def test_without_the_kernel_a_curve_says_the_sizes() -> None:
    curve = MemoryCurve(size_bytes=(1 << 16, 1 << 20, 1 << 22, 1 << 25, 1 << 28), row_ns=(2.0, 2.1, 5.0, 6.0, 8.0))
    assert caches_of(curve) == Caches(l2_bytes=1 << 20, l3_bytes=1 << 25)
    flat = MemoryCurve(size_bytes=(1 << 16, 1 << 28), row_ns=(3.0, 3.0))
    assert caches_of(flat) == Caches(l2_bytes=1 << 28, l3_bytes=1 << 28)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.3])
def test_frequencies_follow_zipfs_law(skew: float) -> None:
    """Of continuous ranks up to n, those below r come with the chance (r^(1-s) - 1) / (n^(1-s) - 1)."""
    num_rows, count = 1_000, 200_000
    ids = skewed(np.random.default_rng(3), num_rows, count, skew)
    assert 0 <= ids.min() <= ids.max() < num_rows
    times = np.sort(np.bincount(ids, minlength=num_rows))[::-1]
    if not skew:
        assert times[0] < 1.5 * count / num_rows
        return
    most = (11 ** (1 - skew) - 1) / (num_rows ** (1 - skew) - 1)
    assert times[:10].sum() / count == pytest.approx(most, rel=0.05)
