"""A run that ended, beside what was predicted for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result, UndisturbedSteps
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.run import NotPredicted
from podembed.orchestrator.planning.of_run import prediction_of, with_prediction
from podembed.orchestrator.run.finished import untrained
from podembed.orchestrator.run.opening import create_run
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.calibration.record import this_machine, write_calibration
from podembed.workers.job.reference import JobReference
from tests.small_job import BATCH_SIZE
from tests.workers.calibration.constants import CALIBRATION

ONE = ScalingConfig(num_hosts=1)


@pytest.fixture
def run(small_data: str, tmp_path: Path) -> OpenRun:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
    return create_run(str(tmp_path / "run"), reference.resolve(), reference)


@pytest.fixture
def result(run: OpenRun) -> Result:
    """Of ten steps of 20 ms, all of it in the update, which had a processor for three quarters of that."""
    empty = untrained(run, RunConfig(), None)
    return replace(
        empty,
        num_samples=10 * BATCH_SIZE,
        trained_s=100.0,
        num_windows=100,
        median_samples_per_s=BATCH_SIZE / 0.02,
        phase_s={"update": 0.2},
        phase_cpu_s={"update": 0.15},
    )


@pytest.fixture
def constants(tmp_path: Path) -> Path:
    path = tmp_path / "constants.json"
    write_calibration(path, replace(CALIBRATION, machine=this_machine()))
    return path


def test_phases_stand_beside_those_that_were_predicted(run: OpenRun, result: Result, constants: Path) -> None:
    found = prediction_of(run, result, ONE, calibration_path=constants)
    assert found is not None
    assert found.measured_step_s == pytest.approx(0.02)
    took = {part: seconds for part, seconds in found.measured_phase_s.items() if seconds > 1e-9}
    assert took == {"update": pytest.approx(0.015), "waiting for the device or a processor": pytest.approx(0.005)}
    assert sum(found.phase_s.values()) == pytest.approx(found.step_s)
    assert found.phase_s["update"] > 0
    assert found.step_s >= found.phase_s["update"]
    assert found.phases_off["update"] == pytest.approx(found.phase_s["update"] / 0.015 - 1)


def test_steps_without_a_save_are_compared_where_there_are_some(run: OpenRun, result: Result, constants: Path) -> None:
    steps = UndisturbedSteps(
        step_s=0.01, phase_s={"update": 0.008}, phase_cpu_s={"update": 0.006}, saving_step_s=0.03, saving_share=0.5
    )
    found = prediction_of(run, replace(result, undisturbed=steps), ONE, calibration_path=constants)
    assert found is not None
    assert found.measured_step_s == pytest.approx(0.01)
    assert found.measured_phase_s["update"] == pytest.approx(0.006)
    assert (found.saving_step_s, found.saving_share) == (0.03, 0.5)
    only_saves = replace(steps, step_s=None, phase_s={}, phase_cpu_s={}, saving_share=1.0)
    found = prediction_of(run, replace(result, undisturbed=only_saves), ONE, calibration_path=constants)
    assert found is not None
    assert found.measured_step_s == pytest.approx(0.02)
    assert found.saving_share == 1.0


def test_what_has_no_one_setting_is_not_compared(run: OpenRun, result: Result, constants: Path) -> None:
    def is_compared(run: OpenRun, result: Result, scaling: ScalingConfig = ONE, path: Path = constants) -> bool:
        return prediction_of(run, result, scaling, calibration_path=path) is not None

    assert not is_compared(run, result, path=constants.with_name("none.json"))
    assert not is_compared(replace(run, reference=None), result)
    assert not is_compared(run, replace(result, num_windows=1))
    assert not is_compared(run, replace(result, stopped_by="SIGTERM"))
    assert not is_compared(run, result, ScalingConfig(num_hosts=(1, 2)))


def test_constants_of_no_use_end_no_run_in_an_error(
    run: OpenRun, result: Result, constants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    monkeypatch.setenv("HOME", str(constants.parent))
    path = constants.parent / ".podembed" / "calibration.json"
    path.parent.mkdir()
    path.write_bytes(b"{")
    assert with_prediction(run, result, ONE, emit=told.append) is result
    (event,) = told
    assert isinstance(event, NotPredicted)
    assert str(path) in event.reason


def test_a_storage_that_fails_afterwards_ends_no_run_in_an_error(
    run: OpenRun, result: Result, constants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    folder = constants.parent / ".podembed"
    folder.mkdir()
    constants.rename(folder / "calibration.json")
    monkeypatch.setenv("HOME", str(constants.parent))
    run.store.write_new("lease/g00000001.claim", [b"{"])
    run.store.write_new("lease/g00000001.base.json", [b"{"])
    assert with_prediction(run, result, ONE, emit=told.append) is result
    (event,) = told
    assert isinstance(event, NotPredicted)
    assert "lease/g00000001.base.json" in event.reason
