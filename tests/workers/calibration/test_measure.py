"""Children measure, and one that fails is reported with its exit status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from podembed.workers.calibration.exchange import SIZES_BYTES, wire_of
from podembed.workers.calibration.measure import MeasuringFailed, answers_of, measure_exchanges, measure_models
from podembed.workers.calibration.reading import costs_of, measure_reading
from podembed.workers.job.reference import JobReference


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_children_exchange(num_hosts: int) -> None:
    found = measure_exchanges(num_hosts, dict(os.environ))
    assert len(found) == len(SIZES_BYTES)
    assert all(1e-6 < seconds < 10.0 for seconds in found)


def test_a_child_that_fails_is_reported() -> None:
    with pytest.raises(MeasuringFailed, match="exit status 1 of a measuring process"):
        answers_of([{"measure": "nothing of the kind"}], dict(os.environ))


def test_a_byte_costs_what_large_messages_take_longer() -> None:
    pair = [1e-4, 0.0, 1e-4 + 1e-9 * SIZES_BYTES[2], 1e-4 + 1e-9 * SIZES_BYTES[3]]
    wire = wire_of(pair, [1.6e-4], num_hosts=4, cpus=4)
    assert wire.seconds(peers=1, num_bytes=1e6) == pytest.approx(1e-4 + 1e-3)
    assert wire.seconds(peers=3, num_bytes=0.0) == pytest.approx(1.6e-4)
    assert wire.seconds(peers=0, num_bytes=0.0) == 0.0
    # Four hosts on two processors take twice as long as they would on four.
    assert wire_of(pair, [3.2e-4], num_hosts=4, cpus=2) == wire


def test_the_dense_half_of_a_job_is_measured(tmp_path: Path) -> None:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": str(tmp_path)})
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"}
    few, many, moved = measure_models(
        [(reference, 8), (reference, 16), (reference, 16)],
        num_processes=1,
        environment=environment,
        on_devices=[(), (), ("a", "bags")],
        ids_per_bag={"bag": 2.5},
    )
    assert (few.num_samples, many.num_samples, moved.num_samples) == (8, 16, 16)
    assert 0 < few.step_s < 10
    assert few.gradient_bytes == many.gradient_bytes == moved.gradient_bytes > 0
    assert 0 < moved.step_s < 10


def test_reading_costs_something() -> None:
    sample_s, id_s = measure_reading()
    assert 0 < sample_s + id_s < 1e-2


def test_ids_cost_what_longer_lists_take_longer() -> None:
    sample_s, id_s = costs_of(6e-6, 6e-6 + 28 * 1e-7)
    assert id_s == pytest.approx(1e-7)
    assert sample_s == pytest.approx(6e-6 - 4e-7)
    assert costs_of(6e-6, 5e-6) == (6e-6, 0.0), "a busy machine can make longer lists faster, but nothing negative"
