"""MMoE and PLE against their formulas in numpy, sample by sample; and the job on two tasks learns them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from podembed.jobs.models.mmoe import MMoE
from podembed.jobs.models.ple import PLE
from podembed.jobs.papers import mmoe as job_module
from podembed.workers.job.job import JobError
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import ModelSpec
from tests.long_tests import is_long, long_case
from tests.training import fit_job

SPEC = ModelSpec(num_dense=2, activation_shapes={"a": (4,), "history": (3, 2)}, batch_size=5)
TASKS = ("click", "buy")


def filled() -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), SPEC.example(5))


def applied(model: Any, batch: Any) -> tuple[Any, Any]:
    """Parameters and outputs. To compile what JAX draws takes longer than all that is tested, so numpy draws here."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda key: model.init(key, SPEC), jax.random.key(1))
    params = jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape).astype(leaf.dtype), shapes)
    return params, jax.jit(lambda params: model.apply(params, batch, StepContext.alone(5)))(params)


def layers_of(layers: Any, x: np.ndarray) -> np.ndarray:
    for layer in layers:
        x = np.maximum(x @ np.asarray(layer["weight"]) + np.asarray(layer["bias"]), 0)
    return x


def gated(gate: Any, x: np.ndarray, experts: list[np.ndarray]) -> np.ndarray:
    odds = np.exp(x @ np.asarray(gate["weight"]) + np.asarray(gate["bias"]))
    return sum(share * expert for share, expert in zip(odds / odds.sum(), experts, strict=True))


def tower_of(tower: Any, x: np.ndarray) -> float:
    x = layers_of(tower[:-1], x)
    return float((x @ np.asarray(tower[-1]["weight"]) + np.asarray(tower[-1]["bias"]))[0])


def rows_of(batch: Any) -> np.ndarray:
    blocks = [np.asarray(block).reshape(5, -1) for block in batch.activations.values()]
    return np.concatenate([np.asarray(batch.dense), *blocks], axis=1)


def test_mmoe_is_its_formula() -> None:
    """f_k(x) = h_k(sum_i g_k(x)_i f_i(x)), with a softmax gate."""
    model, batch = MMoE(tasks=TASKS, num_experts=3, expert=(6, 5), tower=(4,)), filled()
    params, found = applied(model, batch)
    for row, x in enumerate(rows_of(batch)):
        experts = [layers_of(layers, x) for layers in params["experts"]]
        for name in TASKS:
            expected = tower_of(params["towers"][name], gated(params["gates"][name], x, experts))
            assert found[name][row] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("levels", [long_case(1), 3])
def test_ple_is_its_formula(levels: int) -> None:
    model, batch = PLE(tasks=TASKS, levels=levels, own_experts=2, shared_experts=1, expert=(5,), tower=(4,)), filled()
    params, found = applied(model, batch)
    assert "shared" not in params["levels"][-1]["gates"]
    for row, x in enumerate(rows_of(batch)):
        state = dict.fromkeys(("click", "buy", "shared"), x)
        for level in params["levels"]:
            experts = {name: [layers_of(e, state[name]) for e in level["experts"][name]] for name in state}
            seen = {name: experts[name] + experts["shared"] for name in TASKS}
            seen["shared"] = experts["click"] + experts["buy"] + experts["shared"]
            state = {name: gated(level["gates"][name], state[name], seen[name]) for name in level["gates"]}
        for name in TASKS:
            expected = tower_of(params["towers"][name], state[name])
            assert found[name][row] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A smaller set than that of the job."""
    folder = tmp_path_factory.mktemp("two-tasks") / "set"
    spec = job_module.TwoTasksSpec(train_rows=40_000, eval_rows=5_000, users=60, items=40)
    job_module.write_two_tasks(folder, spec)
    return str(folder)


# In make test, models are their formulas above, and jobs with several tasks train in test_write_a_job_page.py.
@is_long
@pytest.mark.parametrize("model", ["mmoe", "ple"])
def test_the_job_learns_both_tasks(folder: str, tmp_path: Path, model: str) -> None:
    job = job_module.mmoe(folder=folder, model=model, epochs=2, learning_rate=0.2)
    result = fit_job(job, tmp_path)
    figures = result.evaluations[-1].values
    assert job.baseline is not None
    for name, reachable in job.baseline.figures.items():
        assert figures[name] - 0.5 > 0.7 * (reachable - 0.5), (name, figures, reachable)


def test_an_unknown_model_is_refused(folder: str) -> None:
    with pytest.raises(JobError, match="model='moe'. Expected one of"):
        job_module.mmoe(folder=folder, model="moe")
    assert replace(job_module.mmoe(folder=folder), seed=4).seed == 4
