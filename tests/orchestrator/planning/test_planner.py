"""Which plan a run follows: what constants say, once and for all; and what a damaged record leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podembed.embedding.costs.constants import Counts
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.plans import NotPlanned, TablesPlanned
from podembed.orchestrator.events.sentences import sentence
from podembed.orchestrator.planning.best import Candidate, candidates
from podembed.orchestrator.planning.planner import Planner
from podembed.orchestrator.planning.records import (
    PLANNING_FILE,
    plan_file,
    plan_steps,
    read_plan,
    read_planning,
    write_plan,
    write_planning,
)
from podembed.orchestrator.run.opening import create_run
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.fsck.records import record_findings
from podembed.workers.calibration.record import this_machine, write_calibration
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.strict_json import seal
from tests.workers.calibration.constants import CALIBRATION, KEYS

TWO = ScalingConfig(num_hosts=2)


@pytest.fixture
def run(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenRun:
    """On a machine without constants."""
    monkeypatch.setenv("HOME", str(tmp_path))
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
    return create_run(str(tmp_path / "run"), reference.resolve(), reference)


def calibrate(home: Path, **factors: Counts) -> None:
    """Constants of a machine where nothing takes time but this, by phase."""
    every = {key: factors.get(key.replace("/", "_"), Counts()).values for key in KEYS}
    kernels = tuple(replace(one, factors_ns=every) for one in CALIBRATION.kernels)
    found = replace(CALIBRATION, machine=this_machine(), kernels=kernels)
    write_calibration(home / ".podembed" / "calibration.json", found)


# Rows that travel take long, so the owners of the table that is cut pool instead.
SLOW_ROWS = Counts(rows=1e6)


def test_a_run_follows_the_fastest_plan_and_says_why(run: OpenRun, tmp_path: Path) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    heard: list[Event] = []
    chosen = Planner(run, TWO, emit=heard.append).begin(num_hosts=2, step=0)
    assert chosen is not None
    (event,) = heard
    assert isinstance(event, TablesPlanned)
    assert event.step_s < 0.95 * event.other_s
    tables = {table.table: table for table in event.tables}
    assert [*tables] == list(run.job.table_names)
    assert tables["b"].is_pooled
    assert tables["b"].num_hosts == 2
    # Memory goes before costs.
    assert tables["b"].why.startswith("above a host's fair share")


def test_a_run_keeps_its_plan_whatever_is_measured_later(run: OpenRun, tmp_path: Path) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    first = Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    calibrate(tmp_path, dedup_partial=Counts(ids=1e6))
    again = Planner(run, TWO, emit=lambda event: None)
    assert again.begin(num_hosts=2, step=0) == first
    # A commit later, and on other hosts, it plans with what it began with.
    assert again.begin(num_hosts=2, step=10) == first
    assert again.begin(num_hosts=3, step=20) is not None
    assert again.recorded(num_hosts=2, step=20) == first
    (tmp_path / ".podembed" / "calibration.json").unlink()
    assert Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=20) == first


def test_a_plan_follows_from_the_threads_of_the_first_start(run: OpenRun, tmp_path: Path) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    first = Planner(run, TWO, emit=lambda event: None)
    chosen = first.begin(num_hosts=2, step=0)
    # What it follows is known without the storage.
    assert first.chosen == chosen
    later = Planner(run, replace(TWO, threads_per_host=8), emit=lambda event: None)
    assert later.tables(2).threads == 8
    assert later.begin(num_hosts=2, step=10) == chosen
    assert later.tables(2).threads == 1


def test_a_plan_of_another_version_is_followed_and_its_constants_are_not_used(run: OpenRun, tmp_path: Path) -> None:
    """What was planned decides in which order numbers are added, so it stays. Nothing new is planned."""
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    chosen = Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    assert chosen is not None
    planning = read_planning(run.store)
    assert planning is not None
    profiles = [one.profile for one in planning.profiles]
    path = tmp_path / "run" / PLANNING_FILE
    older = {"calibration": {"format": 4, "kernels": [{"far_rows": 1.0}]}, "threads": 1, "profiles": []}
    path.write_bytes(seal(older))
    assert read_planning(run.store) is None
    assert list(record_findings(run.store, read_run(run.store), [])) == []
    later = Planner(run, TWO, emit=lambda event: None)
    assert later.begin(num_hosts=2, step=10) == chosen
    assert later.leaves(10, profiles) is None
    # Another driver recorded the next plan, and was lost before its commit.
    plan = read_plan(run.store, step=0, num_hosts=2)
    assert plan is not None
    write_plan(run.store, replace(plan, step=20))
    assert later.begin(num_hosts=2, step=10) == chosen
    assert later.leaves(20, profiles) == "the plan of step 20 is recorded"
    heard: list[Event] = []
    assert Planner(run, TWO, emit=heard.append).begin(num_hosts=3, step=10) is None
    (event,) = heard
    assert isinstance(event, NotPlanned)
    assert "another version" in event.reason
    assert plan_steps(run.store, num_hosts=3) == []


def test_a_plan_is_not_looked_for_again_where_the_data_ask_the_same(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts wait at a commit while a plan is looked for."""
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    planner = Planner(run, TWO, emit=lambda event: None)
    planner.begin(num_hosts=2, step=0)
    planning = read_planning(run.store)
    assert planning is not None
    same = [one.profile for one in planning.profiles]
    looked: list[int] = []

    def noted(*given: Any) -> list[Candidate]:
        looked.append(1)
        return candidates(*given)

    monkeypatch.setattr("podembed.orchestrator.planning.planner.candidates", noted)
    assert planner.leaves(10, same) is None
    assert not looked
    longer = [replace(one, ids_per_sample=tuple(2 * length for length in one.ids_per_sample)) for one in same]
    planner.leaves(10, longer)
    assert len(looked) == 1
    # A later plan was made for other profiles, which no record has.
    plan = read_plan(run.store, step=0, num_hosts=2)
    assert plan is not None
    write_plan(run.store, replace(plan, step=20))
    planner.begin(num_hosts=2, step=20)
    planner.leaves(30, same)
    assert len(looked) == 2


def test_records_of_another_run_are_refused(run: OpenRun, tmp_path: Path) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    planning, plan = read_planning(run.store), read_plan(run.store, step=0, num_hosts=2)
    assert planning is not None
    assert plan is not None
    path = tmp_path / "run" / plan_file(0, 2)
    path.unlink()
    write_plan(run.store, replace(plan, tables=plan.tables[:-1]))
    with pytest.raises(ConfigurationError, match=r"Found tables .* in plans/s000000000-h00002.json"):
        Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    (tmp_path / "run" / PLANNING_FILE).unlink()
    write_planning(run.store, replace(planning, profiles=planning.profiles[1:]))
    with pytest.raises(ConfigurationError, match="Found profiles of 3 tables in PLANNING.json"):
        Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)


def test_without_constants_or_by_request_the_rule_stays(run: OpenRun, tmp_path: Path) -> None:
    heard: list[Event] = []
    planner = Planner(run, TWO, emit=heard.append)
    assert planner.begin(num_hosts=2, step=0) is None
    assert not planner.is_active
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    # What was trained without a plan goes on without one.
    assert planner.begin(num_hosts=2, step=10) is None
    assert Planner(run, replace(TWO, plan="rule"), emit=heard.append).begin(num_hosts=2, step=0) is None
    assert planner.begin(num_hosts=1, step=0) is None
    assert heard == []
    assert not run.store.exists(PLANNING_FILE)


def test_constants_that_cannot_be_used_are_named(run: OpenRun, tmp_path: Path) -> None:
    path = tmp_path / ".podembed" / "calibration.json"
    path.parent.mkdir()
    path.write_bytes(b"{")
    heard: list[Event] = []
    assert Planner(run, TWO, emit=heard.append).begin(num_hosts=2, step=0) is None
    (event,) = heard
    assert isinstance(event, NotPlanned)
    assert str(path) in event.reason


def test_tables_on_devices_have_no_part_in_what_hosts_take(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    monkeypatch.setattr(run.job.tables[0], "place", "device")
    heard: list[Event] = []
    chosen = Planner(run, TWO, emit=heard.append).begin(num_hosts=2, step=0)
    assert chosen is not None
    assert chosen[0].work == 0
    assert sum(one.work for one in chosen) == pytest.approx(1.0)
    (event,) = heard
    assert isinstance(event, TablesPlanned)
    assert event.tables[0].is_on_devices
    assert f"{run.job.table_names[0]} on the devices: place='device'; " in sentence(event)


@pytest.mark.parametrize("name", [PLANNING_FILE, "plans/s000000000-h00002.json"])
def test_a_damaged_record_ends_the_run_in_words_and_is_found(run: OpenRun, tmp_path: Path, name: str) -> None:
    calibrate(tmp_path, dedup_rows=SLOW_ROWS)
    Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    assert read_plan(run.store, step=5, num_hosts=2) is not None
    assert list(record_findings(run.store, read_run(run.store), [])) == []
    path = tmp_path / "run" / name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(ConfigurationError, match=r"Restore it from a copy, or go on with ScalingConfig\(plan='rule'\)"):
        Planner(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    assert Planner(run, replace(TWO, plan="rule"), emit=lambda event: None).begin(num_hosts=2, step=0) is None
    assert [finding.place for finding in record_findings(run.store, read_run(run.store), [])] == ["how tables lie"]
