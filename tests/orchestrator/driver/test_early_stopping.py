"""A run whose evaluations do not get better ends, at the same step however often it was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed import (
    CheckpointConfig,
    ConfigurationError,
    EarlyStopping,
    Result,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    Trainer,
)
from podembed.orchestrator.commit import checkpoint
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.storage.store import Store
from tests.small_job import small_job

# No AUC is better by this much, so training ends `patience` evaluations after the first.
POLICY = EarlyStopping(patience=3, min_delta=1.0)


def train(data: str, folder: Path, *, policy: EarlyStopping | None = POLICY, **config: object) -> Result:
    job = replace(small_job(folder=data, audit=False, evaluate=True), early_stopping=policy)
    settings = {
        "storage_path": str(folder),
        "name": "run",
        "eval_every_steps": 4,
        "checkpoint_config": CheckpointConfig(every_steps=6),
    } | config
    return Trainer(
        job,
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(**settings),  # type: ignore[arg-type]
        reporter=SilentReporter(),
    ).fit()


def test_it_ends_with_a_commit_and_nothing_is_left(small_data: str, tmp_path: Path) -> None:
    result = train(small_data, tmp_path)
    assert (result.step, result.stopped_by) == (16, None)
    assert result.stopped_early is not None
    assert "auc was best at step 4" in result.stopped_early
    assert result.commit == "s000000016-g00000001"
    manifest = checkpoint.load(Store(result.path), result.commit)
    assert (manifest.counters["early_stopping_waited"], manifest.counters["early_stopping_best_step"]) == (3, 4)
    again = train(small_data, tmp_path)
    assert (again.step, again.num_windows, again.stopped_early) == (16, 0, result.stopped_early)
    patient = train(small_data, tmp_path, policy=replace(POLICY, patience=4))
    assert (patient.step, sorted(patient.losses)) == (20, [16, 17, 18, 19])
    assert patient.stopped_early is not None
    assert train(small_data, tmp_path, policy=None, max_steps=22).step == 22


def test_a_run_that_was_interrupted_ends_at_the_same_step(small_data: str, tmp_path: Path) -> None:
    """Between an evaluation and the next commit, with none of them at a commit, and at an evaluation."""
    for last in (7, 8, 13):
        assert train(small_data, tmp_path, max_steps=last).stopped_early is None
    result = train(small_data, tmp_path)
    assert result.step == 16
    assert result.stopped_early is not None
    assert "at step 4" in result.stopped_early


def test_the_best_commit_is_kept_while_training_waits_for_a_better_one(small_data: str, tmp_path: Path) -> None:
    """Also over an interruption, and by the metric that ends training: here the lowest AUC, since it goes up."""
    config = CheckpointConfig(every_steps=4, num_to_keep=2, keep_best=1, metric="auc", metric_order="min")
    policy = EarlyStopping(patience=4)
    assert train(small_data, tmp_path, policy=policy, checkpoint_config=config, max_steps=14).stopped_early is None
    result = train(small_data, tmp_path, policy=policy, checkpoint_config=config)
    assert result.stopped_early is not None
    commits = [one.manifest for one in checkpoint.list_commits(Store(result.path)) if one.manifest]
    steps = sorted(manifest.step for manifest in commits)
    (best,) = {manifest.counters["early_stopping_best_step"] for manifest in commits if manifest.step == result.step}
    assert steps == [best, result.step - 4, result.step]
    kept = next(manifest for manifest in commits if manifest.step == best)
    assert kept.metrics["auc"] == min(manifest.metrics["auc"] for manifest in commits if "auc" in manifest.metrics)


def test_it_is_refused_where_nothing_would_stop_it(small_data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no evaluations before the end"):
        train(small_data, tmp_path, eval_every_steps=None)
    with pytest.raises(ConfigurationError, match="Found metric='mrr'"):
        train(small_data, tmp_path, policy=EarlyStopping(metric="mrr"))
    job = replace(small_job(folder=small_data, audit=False), early_stopping=POLICY)
    with pytest.raises(ConfigurationError, match="no eval_paths"):
        Trainer(job, run_config=RunConfig(storage_path=str(tmp_path), eval_every_steps=4)).fit()
    assert not list(tmp_path.iterdir())


def test_evaluations_of_a_generation_that_was_lost_before_the_first_commit_do_not_count(
    small_data: str, tmp_path: Path
) -> None:
    """They are made again: counted twice, training would end too soon."""
    fault = Fault(point="step.update", action="raise", step=10, arguments={"type": "RuntimeError", "message": "lost"})
    (tmp_path / "faults").mkdir()
    result = train(
        small_data,
        tmp_path,
        checkpoint_config=CheckpointConfig(every_steps=100),
        fault_plan=FaultPlan(folder=str(tmp_path / "faults"), faults=(fault,)),
    )
    assert (len(result.recoveries), result.step) == (1, 16)
    assert result.commit is not None
    manifest = checkpoint.load(Store(result.path), result.commit)
    assert (manifest.counters["early_stopping_waited"], manifest.counters["early_stopping_best_step"]) == (3, 4)
