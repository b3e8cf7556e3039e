"""Each oracle can fail: runs that lost a sample, differ, are damaged or leave something are not taken for good."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.chaos.jobs import AUDIT, NUM_ROWS
from podembed.jobs.chaos.oracles import Judgement, Measure, judge, times_of, visits
from podembed.jobs.chaos.round import Round
from podembed.jobs.chaos.schedule import Schedule, Told, kill
from podembed.jobs.chaos.table import as_json, render
from podembed.jobs.event_log import LoggedEvent
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.run.reference import open_commit
from podembed.workers.faults.inject import FaultRecord
from podembed.workers.job.reference import JobReference
from tests.training import fit_job

STEPS = 40
FAULT = kill("step.update", "host 0", step=12)


def train(folder: Path, name: str, **settings: Any) -> str:
    settings = {"folder": str(folder / "data"), **settings}
    arguments = {"function": "podembed.jobs.chaos.jobs:tiny", "arguments": settings, "num_rows": NUM_ROWS}
    return fit_job(
        JobReference(function="podembed.jobs.chaos.jobs:audited", arguments=arguments),
        folder,
        name=name,
        max_steps=STEPS,
        checkpoint_config=CheckpointConfig(every_steps=20, num_to_keep=None),
    ).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("chaos")
    found = {name: train(folder, name) for name in ("undisturbed", "same", "damaged")}
    found["other"] = train(folder, "other", seed=8)
    victim = max(Path(found["damaged"]).glob("data/s000000040*/tables/b/rows/c.*.*.*"), key=lambda path: path.name)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    return found


def event(kind: str, unix_s: float, process: int = 1, **values: Any) -> LoggedEvent:
    return LoggedEvent(kind=kind, unix_s=unix_s, process=process, values=values)


EVENTS = (
    event("begin", 99.0),
    event("generation_lost", 102.0, cause="host 0 died"),
    event("recovery", 108.0),
    event("window", 109.5),
    event("end", 120.0),
)
RECORD = FaultRecord(
    fault=0, strike=0, point="step.update", action="kill", rank="host 0", step=12, detail="", process=7, unix_s=100.0
)


def a_round(url: str, **changes: Any) -> Round:
    schedule = Schedule(number="F1", title="killed", faults=(FAULT,))
    found = Round(
        schedule=schedule,
        url=url,
        folder=url,
        exit_code=0,
        rival_exit_code=None,
        attempts=1,
        seconds=1.0,
        events=EVENTS,
        records=(RECORD,),
        output="fault: host 0 died",
    )
    return replace(found, **changes)


def judged(runs: dict[str, str], name: str, *, mark: bytes = b"NOBODY=1", **changes: Any) -> Judgement:
    measure = Measure(reference=runs["undisturbed"], audit=AUDIT, mark=mark, detect_s=5.0, recover_s=10.0)
    return judge(a_round(runs[name], **changes), measure)


def failed(judgement: Judgement) -> set[str]:
    return {verdict.oracle for verdict in judgement.verdicts if verdict.is_met is False}


def test_an_equal_run_is_met_and_every_sample_was_trained_twice_in_two_epochs(runs: dict[str, str]) -> None:
    judgement = judged(runs, "same")
    assert failed(judgement) == set()
    assert [judgement.of(oracle) for oracle in ("O1", "O2", "O3", "O4", "O5", "O6")] == [True] * 6
    assert (judgement.detect_s, judgement.recover_s) == (2.0, 7.5)
    counted = visits(open_commit(runs["same"]), AUDIT)
    assert len(counted) == NUM_ROWS
    assert set(counted.tolist()) == {2}


def test_other_bytes_are_found(runs: dict[str, str]) -> None:
    assert failed(judged(runs, "other")) == {"O1"}


def test_damage_is_found_and_may_be_what_is_expected(runs: dict[str, str]) -> None:
    assert "O3" in failed(judged(runs, "damaged"))
    schedule = Schedule(number="F20", title="flipped", faults=(FAULT,), damages=True)
    assert "O3" not in failed(judged(runs, "damaged", schedule=schedule))
    assert "O3" in failed(judged(runs, "same", schedule=schedule))


def test_a_sample_that_was_trained_once_more_is_found(runs: dict[str, str], tmp_path: Path) -> None:
    """A run of another order of samples, cut within an epoch, has other samples behind it at that step."""
    run = train(tmp_path, "order", seed=9)
    for commit in (Path(run) / "commit").glob("s000000040*"):
        commit.unlink()
    undisturbed = train(tmp_path, "reference")
    judgement = judged({"undisturbed": undisturbed, "cut": run}, "cut")
    # At step 20 an epoch is complete: the counts agree, the bytes do not.
    assert failed(judgement) == {"O1"}


def test_a_slow_notice_and_a_slow_recovery_are_found(runs: dict[str, str]) -> None:
    late = [replace(entry, unix_s=entry.unix_s + 10) if entry.kind != "begin" else entry for entry in EVENTS]
    assert failed(judged(runs, "same", events=late)) == {"O4"}
    slow = [replace(entry, unix_s=entry.unix_s + 10) if entry.kind == "window" else entry for entry in EVENTS]
    assert failed(judged(runs, "same", events=slow)) == {"O4"}


def test_a_driver_is_missed_when_the_next_one_begins(runs: dict[str, str]) -> None:
    record = replace(RECORD, rank="driver", process=1)
    events = (event("begin", 99.0), event("begin", 103.0, process=2), event("window", 106.0, process=2))
    assert times_of(a_round(runs["same"], records=(record,), events=events)) == (3.0, 3.0)


def test_endings_events_and_faults_that_never_struck_are_found(runs: dict[str, str]) -> None:
    assert failed(judged(runs, "same", exit_code=88)) == {"end"}
    assert failed(judged(runs, "same", exit_code=None)) == {"end"}
    assert failed(judged(runs, "same", records=())) == {"struck"}
    wanted = Told("host_slow", {"host": 0, "phase": frozenset({"gather", "pool"})})
    schedule = Schedule(number="F5", title="slow", faults=(FAULT,), tells=(wanted,))
    assert failed(judged(runs, "same", schedule=schedule)) == {"told"}
    for host, phase, is_met in ((1, "gather", False), (0, "update", False), (0, "pool", True)):
        told = [*EVENTS, event("host_slow", 109.0, host=host, phase=phase)]
        assert judged(runs, "same", schedule=schedule, events=told).of("told") is is_met


def test_a_run_that_committed_nothing_is_not_finished(runs: dict[str, str], tmp_path: Path) -> None:
    assert "end" in failed(judged({**runs, "empty": str(tmp_path)}, "empty"))


def test_what_is_left_is_found(runs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podembed.jobs.chaos.oracles.GONE_WITHIN_S", 0.0)
    (Path(runs["same"]) / "commit" / ".tmp-1").write_bytes(b"")
    delayed = replace(RECORD, action="delay")
    try:
        assert failed(judged(runs, "same", records=(delayed,))) == {"O5"}
        assert failed(judged(runs, "same")) == set(), "a killed writer may leave its file"
    finally:
        os.unlink(Path(runs["same"]) / "commit" / ".tmp-1")


def test_the_table_says_what_is_not_met_and_why(runs: dict[str, str]) -> None:
    good, bad = judged(runs, "same"), judged(runs, "same", exit_code=88)
    text = render([good, bad])
    assert text.count("NOT MET") == 1
    assert "exit code 88, expected [0]" in text
    assert '"is_met": false' in as_json([good, bad])
    assert "All oracles hold" in render([good])
