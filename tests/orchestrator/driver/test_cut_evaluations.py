"""A signal cuts an evaluation between two blocks. What is resumed then ends as if nobody had sent one: the bytes, the
evaluations, the best commit and the step at which early stopping ends it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import EvaluationCut, WindowReport, WindowTrained
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.group.worker_group import WorkerGroup
from podembed.orchestrator.run.history_record import read_history
from podembed.workers.control.callback import Callback
from podembed.workers.control.stopping import EarlyStopping
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job

# No AUC is better than the first by this much, so training ends at the fourth evaluation.
POLICY = EarlyStopping(patience=3, min_delta=1.0)


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def cut_steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, EvaluationCut)]


class SignalIn:
    """Sends this process a signal in an evaluation: after its first block, or before it if that is how it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, *, evaluation: int, after_block: int = 1) -> None:
        self.blocks: list[int] = []
        evaluate = WorkerGroup.evaluate

        def interrupted(group: WorkerGroup, *batches: Any) -> Any:
            if batches[0] == 0:
                self.blocks.append(0)
            found = evaluate(group, *batches)
            self.blocks[-1] += 1
            if (len(self.blocks), self.blocks[-1]) == (evaluation, after_block):
                os.kill(os.getpid(), number)
            return found

        patch.setattr(WorkerGroup, "evaluate", interrupted)


def train(data: str, folder: Path, *, policy: EarlyStopping | None = None, job: Any = None, **given: Any) -> Result:
    listener = given.pop("listener", None) or Listener()
    scaling = given.pop("scaling", ScalingConfig(in_process=True))
    settings: dict[str, Any] = {
        "storage_path": str(folder),
        "name": "run",
        "eval_every_steps": 4,
        "max_steps": 14,
        "checkpoint_config": CheckpointConfig(every_steps=6),
    } | given
    job = job or replace(small_job(folder=data, audit=False, evaluate=True), early_stopping=policy)
    return Trainer(job, scaling_config=scaling, run_config=RunConfig(**settings), reporter=listener).fit()


def evaluations(path: str) -> list[tuple[int, float, float]]:
    return [
        (made.step, made.metrics["auc"], made.metrics["log_loss"]) for made in read_history(Store(path)).evaluations
    ]


def head(path: str) -> Manifest:
    found = checkpoint.load_head(Store(path))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def undisturbed(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small_data, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("number", "evaluation", "step"), [(signal.SIGTERM, 2, 8), (signal.SIGINT, 3, 12), (signal.SIGTERM, 4, 14)]
)
def test_a_cut_evaluation_is_made_first_by_who_goes_on(
    number: int, evaluation: int, step: int, undisturbed: Result, small_data: str, tmp_path: Path
) -> None:
    """On the way, with a commit due at that step (12) and without; and after the last step, when all is committed."""
    listener = Listener()
    with pytest.MonkeyPatch.context() as patch:
        sent = SignalIn(patch, number, evaluation=evaluation)
        stopped = train(small_data, tmp_path, listener=listener)
    assert sent.blocks[-1] == 1, "it ended with the block in which the signal came"
    assert (stopped.step, stopped.stopped_by) == (step, signal.Signals(number).name)
    assert [made.step for made in stopped.evaluations] == [4, 8, 12][: evaluation - 1]
    assert listener.cut_steps() == [step]
    kept = head(stopped.path)
    assert (kept.step, dict(kept.metrics)) == (step, {})
    assert ("owes_evaluation" in kept.counters) == (step < 14)
    resumed = train(small_data, tmp_path)
    assert (resumed.step, resumed.stopped_by) == (14, None)
    assert [made.step for made in resumed.evaluations] == [4, 8, 12, 14][evaluation - 1 :]
    assert_same_bytes(committed_state(resumed.path), committed_state(undisturbed.path))
    assert evaluations(resumed.path) == evaluations(undisturbed.path)
    assert head(resumed.path).counters == head(undisturbed.path).counters
    again = train(small_data, tmp_path)
    assert (again.evaluations, again.num_windows) == ((), 0), "nothing is left"


@pytest.mark.parametrize("last_step", [8, 14])
def test_a_signal_in_the_window_before_begins_no_evaluation(
    last_step: int, undisturbed: Result, small_data: str, tmp_path: Path
) -> None:
    class Sender(Listener):
        def event(self, event: Event) -> None:
            super().event(event)
            if isinstance(event, WindowTrained) and event.report.step == last_step:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(small_data, tmp_path, listener=Sender())
    assert (stopped.step, stopped.stopped_by) == (last_step, "SIGTERM")
    assert last_step not in [made.step for made in stopped.evaluations]
    resumed = train(small_data, tmp_path)
    assert resumed.stopped_by is None
    assert_same_bytes(committed_state(resumed.path), committed_state(undisturbed.path))
    assert evaluations(resumed.path) == evaluations(undisturbed.path)


def test_early_stopping_and_the_best_commit_are_those_of_an_undisturbed_run(small_data: str, tmp_path: Path) -> None:
    """Whichever evaluation is cut, the first one, the best one or the last one, and if it is cut twice."""
    config = CheckpointConfig(every_steps=4, num_to_keep=2, keep_best=1, metric="auc", metric_order="min")
    given: dict[str, Any] = {"policy": POLICY, "checkpoint_config": config, "max_steps": None}
    whole = train(small_data, tmp_path / "whole", **given)
    assert (whole.step, whole.stopped_early is not None) == (16, True)
    for evaluation in (1, 2, 4):
        folder = tmp_path / f"cut {evaluation}"
        for nth in (evaluation, 1):
            with pytest.MonkeyPatch.context() as patch:
                SignalIn(patch, signal.SIGTERM, evaluation=nth)
                stopped = train(small_data, folder, **given)
            assert (stopped.step, stopped.stopped_early, stopped.stopped_by) == (4 * evaluation, None, "SIGTERM")
        resumed = train(small_data, folder, **given)
        assert (resumed.step, resumed.stopped_early) == (whole.step, whole.stopped_early)
        assert_same_bytes(committed_state(resumed.path), committed_state(whole.path))
        assert evaluations(resumed.path) == evaluations(whole.path)
        assert head(resumed.path).counters == head(whole.path).counters
        assert _best(resumed.path) == _best(whole.path)


def _best(path: str) -> tuple[int, dict[str, float]]:
    return min((made for made in _kept(path) if "auc" in made[1]), key=lambda made: made[1]["auc"])


def _kept(path: str) -> list[tuple[int, dict[str, float]]]:
    commits = [one.manifest for one in checkpoint.list_commits(Store(path)) if one.manifest]
    return [(manifest.step, dict(manifest.metrics)) for manifest in commits]


def test_a_commit_on_the_best_metric_is_made_as_ever(small_data: str, tmp_path: Path) -> None:
    config = CheckpointConfig(every_steps=None, on_best=True, metric="log_loss", num_to_keep=9)
    whole = train(small_data, tmp_path / "whole", checkpoint_config=config)
    with pytest.MonkeyPatch.context() as patch:
        SignalIn(patch, signal.SIGTERM, evaluation=2)
        train(small_data, tmp_path / "cut", checkpoint_config=config)
    resumed = train(small_data, tmp_path / "cut", checkpoint_config=config)
    assert _with_metrics(resumed.path) == _with_metrics(whole.path)


def _with_metrics(path: str) -> list[tuple[int, float]]:
    return sorted((step, metrics["log_loss"]) for step, metrics in _kept(path) if metrics)


def test_a_callback_that_asks_for_a_stop_gets_the_evaluation_of_that_step(small_data: str, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_window(self, report: WindowReport) -> str | None:
            return "enough" if report.step == 8 else None

    job = replace(small_job(folder=small_data, audit=False, evaluate=True), callbacks=(Stop(),))
    result = train(small_data, tmp_path, job=job)
    assert (result.step, result.stopped_by) == (8, "Stop (enough)")
    assert [made.step for made in result.evaluations] == [4, 8]


def test_twice_leaves_at_once(small_data: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        evaluate = WorkerGroup.evaluate

        def interrupted(group: WorkerGroup, *batches: Any) -> Any:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            return evaluate(group, *batches)

        patch.setattr(WorkerGroup, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small_data, tmp_path)


@is_long
@pytest.mark.ray
def test_on_two_hosts(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    job = JobReference(
        function="tests.small_job:small_job", arguments={"folder": small_data, "audit": False, "evaluate": True}
    )
    given: dict[str, Any] = {"job": job, "scaling": ScalingConfig(num_hosts=2)}
    whole = train(small_data, tmp_path / "whole", **given)
    with pytest.MonkeyPatch.context() as patch:
        sent = SignalIn(patch, signal.SIGTERM, evaluation=2)
        stopped = train(small_data, tmp_path / "cut", **given)
    assert sent.blocks[-1] == 1
    assert (stopped.step, stopped.stopped_by) == (8, "SIGTERM")
    resumed = train(small_data, tmp_path / "cut", **given)
    assert_same_bytes(committed_state(resumed.path), committed_state(whole.path))
    assert evaluations(resumed.path) == evaluations(whole.path)
