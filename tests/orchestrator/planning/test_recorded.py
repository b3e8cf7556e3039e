"""Plans that a run of an older version recorded are followed, damaged ones are named, and no new ones are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.commit.run_record import read_run
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import NotPlanned, TablesPlanned
from podembed.orchestrator.planning.recorded import RecordedPlans
from podembed.orchestrator.planning.recorded_plans import ChosenRecord, PlanRecord, plan_file, plan_names
from podembed.orchestrator.run.opening import create_run
from podembed.orchestrator.run.run import OpenRun
from podembed.tools.fsck.run_records import record_findings
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.records import encode
from podembed.workers.storage.strict_json import seal
from tests.small_job import small_job

TWO = ScalingConfig(num_hosts=2)
# Owners of the table that is cut pool, though bags of one id would let its rows travel.
PLAN = PlanRecord(
    step=0,
    num_hosts=2,
    why="all tables cut",
    step_s=1e-3,
    other_s=2e-3,
    tables=tuple(
        ChosenRecord(name=name, is_whole=False, pools=True, work=1 / 3, reason="predicted ms: partial 1.000")
        for name in small_job(folder="nowhere").table_names
    ),
)
OLD_PLANNING = {"calibration": {"format": 7, "kernels": []}, "threads": 1, "profiles": []}


@pytest.fixture
def run(small_data: str, tmp_path: Path) -> OpenRun:
    """One that recorded a plan for two hosts from its beginning."""
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
    run = create_run(str(tmp_path / "run"), reference.resolve(), reference)
    run.store.create_exclusive("PLANNING.json", seal(OLD_PLANNING))
    record(run, PLAN)
    return run


def record(run: OpenRun, plan: PlanRecord) -> None:
    run.store.create_exclusive(plan_file(plan.step, plan.num_hosts), encode(plan))


def test_a_recorded_plan_is_followed_and_said(run: OpenRun) -> None:
    heard: list[Event] = []
    plans = RecordedPlans(run, TWO, emit=heard.append)
    assert plans.begin(num_hosts=2, step=10) == plans.chosen == PLAN.chosen
    (event,) = heard
    assert isinstance(event, TablesPlanned)
    tables = {table.table: table for table in event.tables}
    assert [*tables] == list(run.job.table_names)
    assert (tables["b"].is_pooled, tables["b"].num_hosts) == (True, 2)
    # Memory goes before what was chosen.
    assert tables["b"].why.startswith("above a host's fair share")
    assert "plan of the tables from step 0 on: all tables cut" in event.sentence()
    assert list(record_findings(run.store, read_run(run.store), [])) == []


def test_a_generation_ends_where_the_next_plan_is_recorded(run: OpenRun) -> None:
    later = replace(PLAN, step=20, tables=tuple(replace(one, pools=False) for one in PLAN.tables))
    record(run, later)
    plans = RecordedPlans(run, TWO, emit=lambda event: None)
    assert plans.begin(num_hosts=2, step=10) == PLAN.chosen
    assert plans.leaves(19) is None
    assert plans.leaves(20) == "the plan of step 20 is recorded"
    assert plans.begin(num_hosts=2, step=20) == later.chosen
    assert plans.leaves(30) is None


def test_on_other_hosts_the_rule_decides_and_nothing_is_recorded(run: OpenRun) -> None:
    heard: list[Event] = []
    plans = RecordedPlans(run, TWO, emit=heard.append)
    before = plan_names(run.store)
    assert plans.begin(num_hosts=3, step=10) is None
    assert plans.leaves(10) is None
    (event,) = heard
    assert isinstance(event, NotPlanned)
    assert "no plan is recorded for 3 hosts" in event.sentence()
    assert plan_names(run.store) == before
    # One host has all tables.
    assert plans.begin(num_hosts=1, step=10) is None
    assert RecordedPlans(run, replace(TWO, plan="rule"), emit=heard.append).begin(num_hosts=2, step=0) is None
    assert len(heard) == 1


def test_a_run_without_plans_has_the_rule_and_says_nothing(run: OpenRun, tmp_path: Path) -> None:
    (tmp_path / "run" / plan_file(0, 2)).unlink()
    heard: list[Event] = []
    assert RecordedPlans(run, TWO, emit=heard.append).begin(num_hosts=2, step=0) is None
    assert heard == []


def test_a_plan_of_another_job_is_refused(run: OpenRun, tmp_path: Path) -> None:
    (tmp_path / "run" / plan_file(0, 2)).unlink()
    record(run, replace(PLAN, tables=PLAN.tables[:-1]))
    with pytest.raises(ConfigurationError, match=r"Found tables .* in plans/s000000000-h00002.json"):
        RecordedPlans(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)


def test_a_damaged_record_ends_the_run_in_words_and_is_found(run: OpenRun, tmp_path: Path) -> None:
    path = tmp_path / "run" / plan_file(0, 2)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(ConfigurationError, match=r"Restore it from a copy, or go on with ScalingConfig\(plan='rule'\)"):
        RecordedPlans(run, TWO, emit=lambda event: None).begin(num_hosts=2, step=0)
    assert RecordedPlans(run, replace(TWO, plan="rule"), emit=lambda event: None).begin(num_hosts=2, step=0) is None
    assert [finding.place for finding in record_findings(run.store, read_run(run.store), [])] == ["how tables lie"]
