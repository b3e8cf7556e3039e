"""Tables that begin from a user's rows and are not trained: no slots, no gradients, the same bytes for ever."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.orchestrator.api.result import Result
from podembed.serving.predict.evaluate import evaluate
from podembed.workers.data.input_errors import InputError
from podembed.workers.host.vectors import VectorExchange
from podembed.workers.job.job import JobConfig
from podembed.workers.mesh.frames import Tag
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import B_ROWS, DIM, small_job
from tests.training import fit_job
from tests.workers.host.test_host import pod

# Of tables a, b and bags.
BUCKETS = (1, 8, 4)
NUM_STEPS = 4


def rows_of(num_rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(size=(num_rows, dim)).astype(np.float32)


def frozen_job(folder: str, path: str, *, evaluate: bool = False) -> JobConfig:
    """Table a begins from an array and b from a file; neither is trained, as bags are."""
    job = small_job(folder=folder, audit=False, evaluate=evaluate)
    tables = {
        "a": TableConfig(50, DIM, name="a", combiner="sum", initial_rows=rows_of(50, DIM), trainable=False),
        "b": TableConfig(
            # The optimizer says nothing here.
            B_ROWS,
            2 * DIM,
            name="b",
            combiner="sum",
            initial_rows=path,
            trainable=False,
            optimizer=Adagrad(0.1),
        ),
    }
    return replace(job, features=job.features | {name: FeatureConfig(table) for name, table in tables.items()})


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.save(tmp_path / "b.npy", rows_of(B_ROWS, 2 * DIM))
    return str(tmp_path / "b.npy")


def check_rows(state: dict[str, np.ndarray]) -> None:
    assert {name for name in state if not name.startswith("dense/")} == {
        "a/rows",
        "b/rows",
        "bags/rows",
        "bags/accumulator",
    }
    np.testing.assert_array_equal(state["a/rows"], rows_of(50, DIM))
    np.testing.assert_array_equal(state["b/rows"], rows_of(B_ROWS, 2 * DIM))


def test_hosts_send_no_gradients_of_them(
    small_data: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device writes some all the same, and the trained table has the numbers of one host."""
    sent: list[list[tuple[int, ...]]] = []
    begin = VectorExchange._begin

    def counting(exchange: VectorExchange, tag: Tag, number: int, send: Any, arrivals: Any) -> None:
        if tag is Tag.GRADIENTS:
            sent.extend([array.shape for array in arrays] for arrays in send.values())
        begin(exchange, tag, number, send, arrivals)

    monkeypatch.setattr(VectorExchange, "_begin", counting)
    job, states = frozen_job(small_data, path), []
    for num_hosts in (1, 2):
        with pod(job, tmp_path / str(num_hosts), num_hosts, buckets=BUCKETS, shares_memory=False) as hosts:
            hosts.all("restore", [(None,)] * num_hosts)
            hosts.train(0, NUM_STEPS)
            states.append(hosts.state("first"))
    one, two = states
    for state in states:
        check_rows(state)
    for name in ("bags/rows", "bags/accumulator"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-7)
    # Of one group a host and step, that of the bags. The others are b, of twice the width, and a.
    assert len(sent) == 2 * NUM_STEPS
    assert {(len(shapes), shapes[0][1]) for shapes in sent} == {(1, DIM)}


def trained(job: JobConfig, folder: Path, name: str, steps: int) -> Result:
    return fit_job(job, folder, name=name, max_steps=steps)


def test_a_run_goes_on_without_the_file(small_data: str, path: str, tmp_path: Path) -> None:
    job = frozen_job(small_data, path, evaluate=True)
    whole = trained(job, tmp_path, "whole", NUM_STEPS)
    trained(job, tmp_path, "cut", NUM_STEPS // 2)
    Path(path).unlink()
    cut = trained(job, tmp_path, "cut", NUM_STEPS)
    assert {step: whole.losses[step] for step in cut.losses} == cut.losses
    state = committed_state(cut.path)
    check_rows(state)
    assert_same_bytes(state, committed_state(whole.path))
    assert math.isfinite(evaluate(cut.path, job=job).evaluation.loss)
    with pytest.raises(InputError, match=r"Found no file .*b.npy"):
        trained(job, tmp_path, "new", NUM_STEPS)
    assert not (tmp_path / "new").exists(), "no folder of a run that cannot begin"
