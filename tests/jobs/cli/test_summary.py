"""The words at the end of a run: rates that say what they are, and lines that fit a terminal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

import pytest
import tyro

from podembed.jobs.cli.main import Resume
from podembed.jobs.cli.settings import scaling_config
from podembed.jobs.cli.summary import summary
from podembed.orchestrator.api.config import CheckpointConfig, ScalingConfig
from podembed.orchestrator.api.result import Evaluation, Recovery, Result
from podembed.orchestrator.run.history_record import HistoryRecord, RecordedEvaluation
from podembed.workers.job.job import JobConfig
from tests.small_job import small_job


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data)


def result(**changes: object) -> Result:
    base = Result(
        path="/runs/x",
        step=10_000_000,
        total_steps=10_000_000,
        num_samples=1_000_000_000,
        samples_per_s=27_777.7,
        losses=dict.fromkeys(range(20), 0.5),
        evaluations=(Evaluation(step=10_000_000, auc=0.7, log_loss=0.5, num_samples=10),),
        recoveries=(),
        phase_s={
            "activation exchange": 10.0,
            "gradient exchange": 5.0,
            "wait for device": 3.0,
            "vector exchange": 2.0,
            "x": 1.0,
        },
        commit="s010000000-g00000001",
        trained_s=36_000.0,
        median_samples_per_s=31_111.1,
        num_windows=18_000,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def lines(job: JobConfig, result: Result, *, is_whole: bool = True, scaling: ScalingConfig | None = None) -> list[str]:
    made = [
        RecordedEvaluation(generation=1, step=step, num_samples=10, metrics={"auc": auc, "log_loss": 0.5})
        for step, auc in ((5_000_000, 0.71), (7_500_000, 0.74), (10_000_000, 0.7))
    ]
    history = HistoryRecord(evaluations=tuple(made))
    commits = ["s010000000-g00000001", "s007500000-g00000001"]
    told = summary(
        job,
        result,
        history,
        commits,
        seconds=36_100.0,
        is_whole=is_whole,
        config=CheckpointConfig(),
        scaling=scaling or ScalingConfig(),
    )
    return [*told]


def test_the_rate_is_told_with_its_seconds_and_the_median_beside_it(job: JobConfig) -> None:
    told = "\n".join(lines(job, result()))
    assert "1,000,000,000 samples in 36000.0 s: 27,778 samples/s" in told
    assert "31,111 samples/s in the median step" in told
    assert "short run" not in told
    recovery = Recovery(
        generation=2,
        cause="",
        base_step=0,
        discarded_steps=9,
        detect_s=0,
        stop_s=0,
        start_s=0,
        restore_s=0,
        compile_s=0,
    )
    told = "\n".join(lines(job, result(recoveries=(recovery, recovery))))
    assert "first step to last, with 2 recoveries; starting and evaluating left out" in told


@pytest.mark.parametrize("changes", [{"num_windows": 2}, {"trained_s": 3.0}])
def test_a_short_run_says_that_it_was_short(job: JobConfig, changes: dict[str, object]) -> None:
    assert any("a short run" in line for line in lines(job, result(**changes)))


def test_a_call_that_trained_nothing_tells_no_rate(job: JobConfig) -> None:
    told = "\n".join(lines(job, result(num_windows=0, num_samples=0, trained_s=0.0)))
    assert "samples/s" not in told


@pytest.mark.parametrize(
    ("step", "commit", "told"),
    [
        (0, None, ["stopped by SIGTERM before a step was trained: none is trained", "  commit       none yet: "]),
        (
            40,
            "s000000040-g00000001",
            [
                "stopped by SIGTERM before a step was trained: the run stands at step 40 of 100",
                "  commit       s000000040-g00000001",
            ],
        ),
    ],
)
def test_a_call_that_was_stopped_before_its_first_step_says_where_the_run_stands(
    job: JobConfig, step: int, commit: str | None, told: list[str]
) -> None:
    nothing = {"num_windows": 0, "num_samples": 0, "trained_s": 0.0, "losses": {}, "evaluations": (), "phase_s": {}}
    stopped = result(step=step, total_steps=100, commit=commit, stopped_by="SIGTERM", **nothing)
    shown = lines(job, stopped)
    for words in told:
        assert any(line.startswith(words) for line in shown), shown
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    ("step", "told"), [(0, "no step of it is committed"), (40, "the run stands at step 40 of 100")]
)
def test_a_call_that_was_stopped_in_a_recovery_does_not_say_that_it_trained_nothing(
    job: JobConfig, step: int, told: str
) -> None:
    """The steps that it had trained were lost, and would have been done again."""
    lost = {"num_windows": 0, "num_samples": 0, "trained_s": 9.0, "losses": {}, "evaluations": (), "phase_s": {}}
    shown = lines(job, result(step=step, total_steps=100, stopped_by="SIGTERM", **lost))
    assert shown[0] == f"stopped by SIGTERM in a recovery: {told}"


def test_the_best_evaluation_is_told_with_its_commit_and_not_only_the_last(job: JobConfig) -> None:
    told = "\n".join(lines(job, result()))
    assert "evaluation   AUC 0.7000, log loss 0.5000 after step 10000000" in told
    assert "best         AUC 0.7400 after step 7500000, commit s007500000-g00000001" in told


def test_a_call_with_nothing_to_do_tells_what_is_stored(job: JobConfig) -> None:
    told = lines(job, result(num_windows=0, num_samples=0, trained_s=0.0, losses={}, evaluations=(), phase_s={}))
    assert told[0] == "nothing left to train: all 10,000,000 steps are done"
    assert any("evaluation   AUC 0.7000, log loss 0.5000 after step 10000000" in line for line in told)
    assert any("commit       s010000000-g00000001" in line for line in told)


@pytest.mark.parametrize(("loss", "told"), [(0.500001, ""), (0.7, ", loss 0.7000")])
def test_a_stored_loss_that_is_the_log_loss_is_told_once(job: JobConfig, loss: float, told: str) -> None:
    made = RecordedEvaluation(generation=1, step=9, num_samples=10, metrics={"auc": 0.7, "log_loss": 0.5, "loss": loss})
    nothing = result(num_windows=0, num_samples=0, trained_s=0.0, losses={}, evaluations=(), phase_s={})
    shown = summary(
        job,
        nothing,
        HistoryRecord(evaluations=(made,)),
        [],
        seconds=1.0,
        is_whole=True,
        config=CheckpointConfig(),
        scaling=ScalingConfig(),
    )
    assert f"  evaluation   AUC 0.7000, log loss 0.5000{told} after step 9" in [*shown]


def test_lines_fit_a_terminal(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["podembed"])
    assert max(map(len, lines(job, result()))) <= 80


def test_the_command_that_goes_on_has_the_flags_of_slices(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["podembed"])
    stopped = result(step=40, stopped_by="SIGTERM")
    scaling = ScalingConfig(topology="2x2x2", accelerator_type="TPU-V4", num_slices=(1, 2), platform="cpu")
    told = lines(job, stopped, is_whole=False, scaling=scaling)
    assert max(map(len, told)) <= 80
    at = next(number for number, line in enumerate(told) if "resume" in line)
    words = shlex.split("\n".join(told[at:-1]))
    command = tyro.cli(Resume, args=[word for word in words if word.strip()][2:])
    assert (command.run, scaling_config(command, 1)) == ("/runs/x", scaling)
    assert told[-1].strip() == "(--slices N for another number, MIN-MAX for a range)"
    told = lines(job, stopped, is_whole=False)
    assert told[-2:] == [
        "               podembed resume /runs/x",
        "               (--hosts N for another number, MIN-MAX for a range)",
    ]
