"""Whole runs in this process, with faults of a plan: the driver and `podembed health` say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, MetricsConfig, RunConfig, ScalingConfig
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.health import machines, speed
from podembed.orchestrator.trainer import Trainer
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.job.reference import JobReference
from tests.long_tests import is_long


class Heard(SilentReporter):
    """Keeps alarms that begin."""

    def __init__(self) -> None:
        self.alarms: list[AlarmBegan] = []

    def event(self, event: Event) -> None:
        if isinstance(event, AlarmBegan):
            self.alarms.append(event)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alarms within seconds."""
    monkeypatch.setattr(speed, "EVIDENCE_S", 2.0)
    monkeypatch.setattr(speed, "LEAST_WINDOWS", 2)
    monkeypatch.setattr(machines, "COMMITS_EVIDENCE_S", 1.0)
    monkeypatch.setattr(machines, "SLOW_COMMIT_S", 0.3)


def trained(
    folder: str,
    where: Path,
    *,
    faults: Sequence[Fault] = (),
    every: int = 30,
    epochs: int = 3,
    metrics: MetricsConfig | None = None,
) -> Heard:
    heard = Heard()
    (where / "faults").mkdir(exist_ok=True)
    reference = JobReference(
        function="tests.small_job:small_job", arguments={"folder": folder, "audit": False, "epochs": epochs}
    )
    config = RunConfig(
        name="run",
        storage_path=str(where),
        checkpoint_config=CheckpointConfig(every_steps=every),
        fault_plan=FaultPlan(folder=str(where / "faults"), faults=tuple(faults)) if faults else None,
        metrics_config=metrics or MetricsConfig(),
    )
    Trainer(
        reference, scaling_config=ScalingConfig(in_process=True, threads_per_host=1), run_config=config, reporter=heard
    ).fit()
    return heard


def asked(run: Path | str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["health", str(run)])
    out, error = capsys.readouterr()
    return left.value.code, out, error


@pytest.mark.usefixtures("soon")
def test_a_run_that_waits_for_its_input(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Fault(point="step.read", action="delay", times=100_000, arguments={"seconds": 0.1})
    heard = trained(small_data, tmp_path, faults=[slow])
    assert "input_bound" in [one.alarm for one in heard.alarms]
    code, out, _ = asked(tmp_path / "run", capsys)
    assert code == 1
    assert "ALARM input_bound" in out
    assert "Give hosts more processors" in out


@is_long
@pytest.mark.usefixtures("soon")
def test_a_run_on_a_slow_disk(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Fault(point="save.file", action="delay", times=100_000, arguments={"seconds": 0.2})
    heard = trained(small_data, tmp_path, faults=[slow], every=4)
    assert "slow_storage" in [one.alarm for one in heard.alarms]
    code, out, _ = asked(tmp_path / "run", capsys)
    assert code == 1
    assert "ALARM slow_storage" in out


def test_a_clean_run_is_healthy(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard = trained(small_data, tmp_path)
    assert heard.alarms == []
    code, out, _ = asked(tmp_path / "run", capsys)
    assert code == 0
    assert "healthy: no alarm stands" in out
    assert "step 60 of 60" in out
    # Lines of another version, and a damaged one, are said and left out.
    segment = next((tmp_path / "run" / "metrics").rglob("*.jsonl"))
    later = {"number": 9999, "kind": "point", "unix_s": 1.0, "generation": 1, "first_step": 60, "step": 60}
    with segment.open("a") as file:
        file.write(json.dumps(later | {"values": [["of_next_year", 1.0]]}) + '\n{"number": 10000, "ki\n')
    code, out, _ = asked(tmp_path / "run", capsys)
    assert code == 0
    assert "1 line could not be read" in out


def test_bad_input_is_said(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = asked(tmp_path / "nothing", capsys)
    assert code == 87
    assert "Found no run" in error
    trained(small_data, tmp_path, epochs=1, metrics=MetricsConfig(in_run=False))
    code, _, error = asked(tmp_path / "run", capsys)
    assert code == 87
    assert "Found no measurements" in error
