"""Forecasts of a job: what would be faster, memory, and the text of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.orchestrator.decisions.table_plan import plan
from podembed.orchestrator.prediction.demand import DenseHalf
from podembed.orchestrator.prediction.forecast import Forecast, forecast, setting_of
from podembed.orchestrator.prediction.report import render_comparison, render_forecast, render_profiles
from podembed.workers.input.profile import assumed_profiles
from podembed.workers.liveness.progress import Phase
from tests.small_job import NUM_LANES, small_job
from tests.workers.calibration.constants import CALIBRATION


def found_for(folder: Path, num_hosts: int) -> Forecast:
    job = small_job(folder=str(folder))
    return forecast(
        job,
        setting_of(job, num_hosts=num_hosts, hosts_a_machine=1, reads_files=False),
        assumed_profiles(job, [None] * len(job.features)),
        plan=lambda hosts: plan(job, num_hosts=hosts),
        calibration=CALIBRATION,
        dense=DenseHalf(step_s=1e-4, sample_s=0.0),
        undo_share=0.1,
    )


def test_other_settings_are_predicted_as_if_they_were_declared(tmp_path: Path) -> None:
    found = found_for(tmp_path, 2)
    others = dict(found.others)
    assert {"1 host", "3 hosts", "4 hosts", "staleness 1", "overlap where it pays", "bfloat16 on the wire"} == set(
        others
    )
    assert others["3 hosts"] == found_for(tmp_path, 3).step
    assert found.step.setting.num_hosts == 2
    assert not found.is_measured


def test_overlap_that_is_measured_is_predicted_as_the_faster_way(tmp_path: Path) -> None:
    declared = found_for(tmp_path, 2)
    auto = dict(declared.others)["overlap where it pays"]
    assert auto.setting.overlap in (True, False)
    assert auto.step_s <= declared.step.step_s


def test_no_more_hosts_than_lanes_are_proposed(tmp_path: Path) -> None:
    found = found_for(tmp_path, NUM_LANES)
    assert max(step.setting.num_hosts for _, step in found.others) == NUM_LANES


def test_memory_is_that_of_the_fullest_host(tmp_path: Path) -> None:
    memory = found_for(tmp_path, 2).memory
    hosts = plan(small_job(folder=str(tmp_path)), num_hosts=2).hosts
    assert memory.table_bytes == max(host.shard_bytes for host in hosts)
    assert memory.undo_bytes >= 4 << 20
    assert memory.hash_slot_bytes > 0
    parts = memory.table_bytes, memory.mark_bytes, memory.hash_slot_bytes, memory.undo_bytes, memory.batch_bytes
    assert memory.total_bytes == sum(parts)


def test_the_text_has_phases_memory_and_what_is_faster(tmp_path: Path) -> None:
    text = render_forecast(found_for(tmp_path, 2))
    for words in ("dedup", "undo log, when full", "hash slots", "staleness 1", "spread evenly", "samples/s"):
        assert words in text
    job = small_job(folder=str(tmp_path))
    profiles = assumed_profiles(job, [3.0] * len(job.features))
    assert "3.00" in render_profiles(job.table_names, profiles)
    assert "more tables" in render_profiles(job.table_names, profiles, most=1)


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    found = found_for(tmp_path, 2).step
    measured = {Phase.UPDATE: 2 * found.phase_s[Phase.UPDATE], Phase.READ: found.step_s}
    lines = {line.split("  ")[1]: line for line in render_comparison(found, measured).splitlines()}
    assert lines["update"].endswith("-50%")
    assert "read" in lines
    assert float(lines["all"].split()[1]) == pytest.approx(1e3 * found.step_s, abs=0.01)
