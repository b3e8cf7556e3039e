"""Forecasts of a job: what would be faster, memory, and the text of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.costs.work import TableWay
from podembed.embedding.initializers import Constant
from podembed.orchestrator.api.result import Prediction
from podembed.orchestrator.decisions.table_plan import plan
from podembed.orchestrator.prediction.choices import proposals, setting_choices
from podembed.orchestrator.prediction.demand import DenseHalf
from podembed.orchestrator.prediction.forecast import Forecast, forecast, setting_of
from podembed.orchestrator.prediction.memory import PROCESS_BYTES
from podembed.orchestrator.prediction.report import render_comparison, render_forecast, render_profiles
from podembed.workers.data.config import ParquetData
from podembed.workers.input.profile import assumed_profiles
from tests.small_job import NUM_LANES, small_job
from tests.workers.calibration.constants import CALIBRATION


def found_for(folder: Path, num_hosts: int) -> Forecast:
    # Overlap is open, as where a job says nothing.
    job = replace(small_job(folder=str(folder)), overlap=None)
    return forecast(
        job,
        setting_of(job, num_hosts=num_hosts, hosts_a_machine=1, reads_files=False),
        assumed_profiles(job, [None] * len(job.features)),
        plan=lambda hosts: plan(job, num_hosts=hosts),
        calibration=CALIBRATION,
        dense=DenseHalf(step_s=1e-4, sample_s=0.0),
        undo_share=0.1,
    )


def test_other_numbers_of_hosts_are_predicted_as_if_they_were_declared(tmp_path: Path) -> None:
    found = found_for(tmp_path, 2)
    others = dict(found.others)
    assert {"1 host", "3 hosts", "4 hosts", "threads 2"} == set(others)
    assert others["3 hosts"] == found_for(tmp_path, 3).step
    assert found.step.setting.num_hosts == 2
    assert not found.is_measured


def test_every_part_of_a_setting_is_chosen_with_its_alternatives(tmp_path: Path) -> None:
    found = found_for(tmp_path, 2)
    choices = {choice.name: choice for choice in found.choices}
    assert {name: choice.chosen for name, choice in choices.items() if name != "overlap"} == {
        "staleness": "0",
        "wire_dtype": "float32",
    }
    assert {name: [alternative for alternative, _ in choice.steps] for name, choice in choices.items()} == {
        "overlap": ["off", "on"],
        "staleness": ["0", "1"],
        "wire_dtype": ["float32", "bfloat16"],
    }
    for choice in found.choices:
        assert dict(choice.steps)[choice.chosen].step_s == found.step.step_s
    overlap = dict(choices["overlap"].steps)
    assert found.step.step_s == min(step.step_s for step in overlap.values())
    assert choices["overlap"].why.startswith("auto: ")
    assert "wire_dtype" not in {choice.name for choice in found_for(tmp_path, 1).choices}


def test_what_is_declared_is_not_chosen(tmp_path: Path) -> None:
    job = small_job(folder=str(tmp_path))
    setting = setting_of(job, num_hosts=2, hosts_a_machine=1, reads_files=False)
    found = found_for(tmp_path, 2)
    for overlap, staleness, chosen, why in [
        (False, 0, "off", "declared"),
        (True, 0, "on", "declared"),
        (None, 1, "on", "with staleness a lookup waits for no update"),
    ]:
        declared = replace(setting, overlap=overlap, staleness=staleness)
        choice = setting_choices(declared, lambda one: replace(found.step, setting=one))[0]
        assert (choice.chosen, choice.why) == (chosen, why)


def test_each_way_of_a_table_has_its_cost(tmp_path: Path) -> None:
    found = found_for(tmp_path, 2)
    tables = {table.name: table for table in found.tables}
    assert set(tables) == {table.spec.name for table in plan(small_job(folder=str(tmp_path)), num_hosts=2).tables}
    for table in tables.values():
        costs = dict(table.costs)
        assert table.way in costs
        assert table.why
        assert all(cost.host_s > 0 for cost in costs.values())
        assert costs[table.cheapest].host_s == min(cost.host_s for cost in costs.values())
        if TableWay.WHOLE in costs:
            # An owner does all of what falls to the hosts in the mean, and more.
            assert (costs[TableWay.WHOLE].owner_s or 0.0) > costs[TableWay.WHOLE].host_s
    alone = found_for(tmp_path, 1)
    assert all(len(table.costs) == 1 and table.cost.sent_bytes == 0 for table in alone.tables)


def test_places_by_predicted_time_are_compared_with_the_drivers_own() -> None:
    """One table has nearly all of the work, so the others should lie elsewhere. A driver counts features."""
    tables = {
        name: TableConfig(100_000, 16, name=name, combiner="sum", initializer=Constant(0.0))
        for name in ("long", "short one", "short two", "short three")
    }
    job = replace(
        small_job(folder="."),
        features={name.replace(" ", "_"): FeatureConfig(table) for name, table in tables.items()},
        data=ParquetData("none", label="label", features={name.replace(" ", "_"): name for name in tables}),
        overlap=None,
    )
    profiles = assumed_profiles(job, [400.0, 20.0, 20.0, 20.0])
    setting = setting_of(job, num_hosts=2, hosts_a_machine=1, reads_files=False)
    found = forecast(
        job,
        setting,
        profiles,
        plan=lambda hosts: plan(job, num_hosts=hosts),
        calibration=CALIBRATION,
        dense=DenseHalf(step_s=1e-4, sample_s=0.0),
        undo_share=0.1,
        placed=lambda chosen: plan(job, num_hosts=2, chosen=chosen),
    )
    others = dict(found.others)
    shared = others["tables shared by predicted work"]
    assert shared.step_s < found.step.step_s
    assert others["all tables cut"].sent_bytes != found.step.sent_bytes
    by_work = plan(job, num_hosts=2, chosen=proposals(found.tables)["tables shared by predicted work"])
    long, *short = [table.hosts for table in by_work.tables]
    assert all(table.is_whole for table in by_work.tables)
    assert {*short} == {(1 - long[0],)}


def test_no_more_hosts_than_lanes_are_proposed(tmp_path: Path) -> None:
    found = found_for(tmp_path, NUM_LANES - 1)
    assert max(step.setting.num_hosts for _, step in found.others) == NUM_LANES


def test_memory_is_that_of_the_fullest_host(tmp_path: Path) -> None:
    memory = found_for(tmp_path, 2).memory
    hosts = plan(small_job(folder=str(tmp_path)), num_hosts=2).hosts
    assert memory.table_bytes == max(host.shard_bytes for host in hosts)
    assert memory.undo_bytes >= 4 << 20
    assert memory.hash_slot_bytes > 0
    assert memory.save_bytes >= 4 << 20
    beside = memory.mark_bytes + memory.hash_slot_bytes + memory.undo_bytes + memory.save_bytes + memory.batch_bytes
    assert memory.total_bytes == memory.table_bytes + beside + PROCESS_BYTES


def test_the_text_has_phases_memory_and_what_is_faster(tmp_path: Path) -> None:
    text = render_forecast(found_for(tmp_path, 2))
    for words in ("dedup", "undo log, when full", "hash slots", "staleness 1", "spread evenly", "samples/s", "auto: "):
        assert words in text
    job = small_job(folder=str(tmp_path))
    profiles = assumed_profiles(job, [3.0] * len(job.features))
    assert "3.00" in render_profiles(job.table_names, profiles)
    assert "more tables" in render_profiles(job.table_names, profiles, most=1)


def test_predicted_and_measured_stand_side_by_side() -> None:
    found = Prediction(
        step_s=0.003,
        phase_s={"update": 0.001, "device": 0.002, "split": 1e-5},
        measured_step_s=0.004,
        measured_phase_s={"update": 0.002, "read": 0.002, "split": 0.0},
    )
    lines = {line.split("  ")[1]: line for line in render_comparison(found).splitlines()}
    assert lines["update"].endswith("-50%")
    assert lines["device"].endswith("-")
    assert set(lines) == {"part of a step", "update", "device", "read", "all"}
    assert lines["all"].split() == ["all", "3.00", "4.00", "-25%"]
    assert "save" not in render_comparison(found)
    assert found.off == pytest.approx(-0.25)
    assert found.phases_off == {"update": pytest.approx(-0.5), "read": -1.0}


@pytest.mark.parametrize(
    ("share", "is_beside_saves", "line"),
    [
        (0.25, False, "25% of the steps were beside a save of host 0 and took 5.10 ms each; the table has the others"),
        (0.003, False, "under 1% of the steps were beside"),
        (0.996, True, "over 99% of the steps were beside"),
        (1.0, True, "100% of the steps were beside a save of host 0 and took 5.10 ms each; the table has all steps"),
    ],
)
def test_the_comparison_says_what_steps_beside_a_save_took(share: float, is_beside_saves: bool, line: str) -> None:
    found = Prediction(
        step_s=0.003,
        phase_s={},
        measured_step_s=0.004,
        measured_phase_s={},
        saving_step_s=0.0051,
        saving_share=share,
        is_beside_saves=is_beside_saves,
    )
    assert render_comparison(found).splitlines()[-1].startswith(line)
