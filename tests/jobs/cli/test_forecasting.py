"""`podembed plan` with constants of this machine: predicted times, or a sentence that says what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.jobs.cli.forecasting import comparison
from podembed.orchestrator.decisions.table_plan import plan as plan_tables
from podembed.workers.calibration.record import this_machine, write_calibration
from podembed.workers.input.index import build_index
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from tests.jobs.cli.test_main import run
from tests.workers.calibration.constants import CALIBRATION


@pytest.fixture
def constants(tmp_path: Path) -> Path:
    path = tmp_path / "constants.json"
    write_calibration(path, replace(CALIBRATION, machine=this_machine()))
    return path


def plan(folder: str, constants: Path, *more: str) -> tuple[int, str, str]:
    job = ["--job", "tests.small_job:small_job", "--set", f"folder={folder}"]
    return run("plan", *job, "--calibration", str(constants), *more)


def test_a_plan_predicts_the_step_of_a_job(small_data: str, constants: Path) -> None:
    code, out, err = plan(small_data, constants, "--hosts", "2")
    assert (code, err) == (0, "")
    for words in ("untouched before", "phase of a step, host 0", "dedup", "undo log, when full", "against the plan"):
        assert words in out
    assert "spread evenly" not in out


def test_without_constants_a_plan_says_how_to_get_them(small_data: str, tmp_path: Path) -> None:
    code, out, _ = plan(small_data, tmp_path / "none.json")
    assert code == 0
    assert "podembed calibrate measures this machine" in out
    assert "predicted ms" not in out


def test_damaged_constants_are_refused(small_data: str, constants: Path) -> None:
    constants.write_bytes(constants.read_bytes()[:-5])
    code, _, err = plan(small_data, constants)
    assert code == 87
    assert "Measure again with podembed calibrate" in err


def test_the_phases_of_a_run_stand_beside_the_predicted_ones(small_data: str, constants: Path) -> None:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
    job = reference.resolve()
    index = build_index(job.resolved_data)
    found = plan_tables(job, num_hosts=1, index=index)

    def compared(path: Path, named: JobReference | JobConfig = reference) -> str | None:
        return comparison(
            job, named, index, found=found, phase_s={"update": 20.0}, num_steps=10.0, calibration_path=path
        )

    text = compared(constants)
    assert text is not None
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["update"]]
    assert "2000.00" in line
    assert compared(constants.with_name("none.json")) is None
    assert compared(constants, job) is None
    constants.write_bytes(b"")
    assert "not compared with a prediction" in (compared(constants) or "")
