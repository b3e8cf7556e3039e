"""Whole runs in this process, with faults of a plan: the driver and `podembed health` say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.table_spec import TableSpec
from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, MetricsConfig
from podembed.orchestrator.driver import windows
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.reference import open_commit
from podembed.tools.health import machines, speed
from podembed.tools.inspect.extract import extract
from podembed.tools.metrics.reading import StreamReader
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.host import row_norms
from podembed.workers.host.row_norms import QUANTILES, sampled_ids
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.long_tests import is_long, long_case
from tests.small_job import small_job
from tests.training import fit_job

SMALL_JOB = "tests.small_job:small_job"
HASTY_JOB = "tests.tools.health.hasty_job:hasty_job"


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


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at every window."""
    monkeypatch.setattr(windows, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(windows, "LOOK_SHARE", 0.0)
    monkeypatch.setattr(row_norms, "FIRST_LOOK", 0)
    monkeypatch.setattr(row_norms, "LOOK_EVERY", 1)


def trained(
    folder: str,
    where: Path,
    *,
    faults: Sequence[Fault] = (),
    every: int = 30,
    epochs: int = 3,
    metrics: MetricsConfig | None = None,
    job: str = SMALL_JOB,
    **arguments: object,
) -> Heard:
    heard = Heard()
    (where / "faults").mkdir(exist_ok=True)
    arguments |= {"folder": folder, "epochs": epochs} | ({"audit": False} if job == SMALL_JOB else {})
    reference = JobReference(function=job, arguments=arguments)
    fit_job(
        reference,
        where,
        checkpoint_config=CheckpointConfig(every_steps=every),
        fault_plan=FaultPlan(folder=str(where / "faults"), faults=tuple(faults)) if faults else None,
        metrics_config=metrics or MetricsConfig(),
        reporter=heard,
    )
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


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("rule", "place"),
    [("adam", "host"), long_case("sgd", "host"), long_case("adagrad", "host"), long_case("adagrad", "device")],
)
def test_rates_a_hundred_times_too_high(
    small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, place: str
) -> None:
    heard = trained(small_data, tmp_path, epochs=14, every=20, job=HASTY_JOB, rule=rule, factor=100.0, place=place)
    assert {one.subject for one in heard.alarms if one.alarm == "table_rate_too_high"} == {
        *("table a", "table b", "table bags")
    }
    code, out, _ = asked(tmp_path / "run", capsys)
    assert code == 1
    assert "times their first norm or more" in out


@is_long
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("rule", ["adam", "adagrad"])
@pytest.mark.parametrize("seed", range(4))
def test_adaptive_rules_with_sound_rates_have_no_alarm(small_data: str, tmp_path: Path, rule: str, seed: int) -> None:
    heard = trained(small_data, tmp_path, epochs=25, every=20, job=HASTY_JOB, rule=rule, factor=1.0, seed=seed)
    assert [one for one in heard.alarms if one.alarm.startswith("table")] == []


@pytest.mark.usefixtures("often")
def test_a_clean_run_is_healthy(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard = trained(small_data, tmp_path)
    assert heard.alarms == []
    check_table_figures(tmp_path / "run", small_data)
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


def check_table_figures(run: Path, folder: str) -> None:
    """Those of the last step are those of the rows that were committed after it."""
    state, job = open_commit(str(run)), small_job(folder=folder, audit=False)
    point = StreamReader(Store(str(run))).read().windows[-1]
    for declared in job.tables:
        spec = TableSpec.of(declared, seed=job.seed)
        ids = sampled_ids(spec)
        found = extract(state, spec.name, ids.tolist()).values
        slots = [(found[slot.name] != slot.initial_value).any(axis=1) for slot in spec.optimizer.slots]  # type: ignore[union-attr]
        is_trained, rows = np.logical_or.reduce(slots), found["rows"]
        assert point.value("table_trained_ratio", table=spec.name) == pytest.approx(is_trained.mean())
        norms = np.linalg.norm(rows[is_trained], axis=1)
        for quantile in QUANTILES:
            told = point.value("table_row_norm", table=spec.name, quantile=f"{quantile:g}")
            assert told == pytest.approx(np.quantile(norms, quantile), rel=1e-5)


def test_bad_input_is_said(small_data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = asked(tmp_path / "nothing", capsys)
    assert code == 87
    assert "Found no run" in error
    trained(small_data, tmp_path, epochs=1, metrics=MetricsConfig(in_run=False))
    code, _, error = asked(tmp_path / "run", capsys)
    assert code == 87
    assert "Found no measurements" in error
