"""The trackers and the search of docs/track.md work as they stand there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podembed import JobConfig
from podembed.embedding.optimizers import Adagrad
from tests.long_tests import is_long
from tests.pages import blocks
from tests.small_job import small_job
from tests.training import fit_job


def job_of(folder: str, learning_rate: float = 0.1) -> JobConfig:
    job = small_job(folder=folder, audit=False, evaluate=True, epochs=1)
    return replace(job, optimizer=Adagrad(learning_rate))


@pytest.fixture
def names(small_data: str) -> dict[str, Any]:
    """What the blocks of the page define."""
    found: dict[str, Any] = {"job": job_of(small_data), "make_job": partial(job_of, small_data)}
    for block in blocks("docs/track.md", fragments=True):
        block.run(found)
    return found


def test_early_stopping_as_on_the_page(names: dict[str, Any]) -> None:
    assert names["job"].early_stopping.patience == 3


def test_trackers_have_the_figures_of_a_run(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from mlflow import MlflowClient
    from tensorboardX.proto.event_pb2 import Event

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb.Run, "log", _seen(wandb.Run.log, logged))
    store = f"file:{tmp_path / 'mlruns'}"
    callbacks = (names["WandB"]("clicks"), names["MLflow"](store), names["TensorBoard"](str(tmp_path / "board")))
    result = fit_job(
        replace(names["job"], early_stopping=None, callbacks=callbacks), tmp_path, max_steps=6, eval_every_steps=3
    )
    aucs = {evaluation.step: evaluation.auc for evaluation in result.evaluations}
    assert sorted(aucs) == [3, 6]

    (offline,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert offline.stat().st_size > 0
    assert [data["evaluation/auc"] for data in logged if "evaluation/auc" in data] == list(aucs.values())

    client = MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert {made.step: made.value for made in client.get_metric_history(run.info.run_id, "auc")} == aucs
    assert [made.step for made in client.get_metric_history(run.info.run_id, "loss")][-1] == 6

    (board,) = (tmp_path / "board").glob("events.*")
    found = [Event.FromString(record) for record in _records(board.read_bytes())]
    values = {(event.step, value.tag): value.simple_value for event in found for value in event.summary.value}
    assert {step: value for (step, tag), value in values.items() if tag == "evaluation/auc"} == pytest.approx(aucs)


def _seen(log: Any, logged: list[dict[str, Any]]) -> Any:
    def wrapped(run: Any, data: dict[str, Any], **given: Any) -> Any:
        logged.append(data)
        return log(run, data, **given)

    return wrapped


def _records(data: bytes) -> list[bytes]:
    """The records of an event file: length, checksum, record, checksum."""
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(data[12 : 12 + size])
        data = data[16 + size :]
    return found


@is_long
@pytest.mark.ray
def test_a_search_finds_the_better_rate(ray_cluster: None, names: dict[str, Any], tmp_path: Path) -> None:
    results = names["search"](str(tmp_path))
    assert not results.errors
    aucs = {result.config["learning_rate"]: result.metrics["auc"] for result in results}
    assert sorted(aucs) == [0.003, 0.3]
    assert results.get_best_result().config["learning_rate"] == max(aucs, key=lambda rate: aucs[rate])
