"""Hosts and devices of a calibration are those of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from podembed.workers.calibration.measure import MeasuringFailed
from podembed.workers.calibration.pod import measure_pods
from podembed.workers.calibration.pod_jobs import PROBES, ids_of, probe_job, reference_of, write_files
from podembed.workers.data.config import ParquetData
from podembed.workers.input.reader import build_index
from podembed.workers.input.sources import job_plan, open_reader
from tests.long_tests import is_long

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


@is_long
def test_two_hosts_train_one_job_after_another(tmp_path: Path) -> None:
    names = ["few", "sequence"]
    found = measure_pods(
        [(reference_of(name, str(tmp_path)), PROBES[name].is_cut) for name in names],
        num_hosts=2,
        environment=ENVIRONMENT,
        windows=4,
        window_s=0.02,
    )
    for steps in found:
        assert len(steps.phase_s) == len(steps.device_s) == 2
        assert all(phases["update"] > 0 and phases["id exchange"] > 0 for phases in steps.phase_s)
        assert all(seconds > 0 for seconds in (*steps.device_s, *steps.device_cpu_s))
        assert all(phases["update"] > 0 and phases["between phases"] > 0 for phases in steps.phase_cpu_s)
        assert steps.gradient_bytes > 0
        # Phases are parts of the step.
        assert sum(steps.phase_s[0].values()) <= steps.step_s
    # Rows are gathered only where sequences need them.
    assert found[1].phase_s[0]["gradient sum"] > 0


def test_a_process_that_fails_is_reported(tmp_path: Path) -> None:
    files = reference_of("files", str(tmp_path))
    write_files("files", tmp_path)
    with pytest.raises(MeasuringFailed, match="process of a pod"):
        measure_pods([(files, False)], num_hosts=1, environment={**ENVIRONMENT, "JAX_PLATFORMS": "none such"})


def test_files_hold_the_ids_of_the_batches(tmp_path: Path) -> None:
    write_files("files", tmp_path)
    job = probe_job(probe="files", folder=str(tmp_path))
    assert isinstance(job.data, ParquetData)
    index = build_index(job.resolved_data)
    probe = PROBES["files"]
    assert index.num_rows == 8 * probe.batch_size
    reader = open_reader(job.resolved_data, index, job_plan(job, index), range(job.num_lanes))
    try:
        batch = reader.read(0)
    finally:
        reader.close()
    assert batch.num_samples == probe.batch_size
    known = {tuple(bag) for number in range(8) for bag in ids_of(probe, number)[0].tolist()}
    ids = batch.features["f000"].values.reshape(-1, probe.lengths[0])
    assert {tuple(bag) for bag in ids.tolist()} <= known
