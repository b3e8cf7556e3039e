"""DCN-V2 against its formula in numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podembed.jobs.criteo import MODELS, criteo
from podembed.jobs.models.dcn_v2 import DCNv2
from podembed.jobs.models.dlrm import DLRM
from podembed.workers.job.job import JobError

WIDTHS = {"a": 4, "b": 3}


def inputs() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((5, 2)).astype(np.float32)
    return dense, {name: rng.standard_normal((5, width)).astype(np.float32) for name, width in WIDTHS.items()}


@pytest.mark.parametrize("rank", [None, 2])
def test_the_formula(rank: int | None) -> None:
    """x_{l+1} = x_0 * (W x_l + b) + x_l sample by sample, then the MLP."""
    model = DCNv2(cross_layers=2, rank=rank, deep=(6,))
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(lambda key: model.init(key, 2, WIDTHS), jax.random.key(1))
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(leaf.dtype), shapes)
    dense, activations = inputs()
    expected = []
    for sample in range(5):
        x0 = x = np.concatenate([dense[sample], activations["a"][sample], activations["b"][sample]]).astype(np.float64)
        for layer in params["cross"]:
            matrix = layer["weight"] if rank is None else np.asarray(layer["v"]) @ np.asarray(layer["u"])
            x = x0 * (np.asarray(matrix).T @ x + layer["bias"]) + x
        hidden = np.maximum(x @ np.asarray(params["deep"][0]["weight"]) + params["deep"][0]["bias"], 0)
        expected.append((hidden @ np.asarray(params["deep"][1]["weight"]) + params["deep"][1]["bias"])[0])
    np.testing.assert_allclose(jax.jit(model.apply)(params, dense, activations), expected, rtol=2e-4, atol=2e-4)


def test_low_rank_has_fewer_parameters() -> None:
    def count(model: DCNv2) -> int:
        made = jax.eval_shape(lambda key: model.init(key, 2, WIDTHS), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(made["cross"]))

    assert count(DCNv2(cross_layers=3)) == 3 * (9 * 9 + 9)
    assert count(DCNv2(cross_layers=3, rank=2)) == 3 * (2 * 9 * 2 + 9)


def test_the_job_takes_a_model_by_name() -> None:
    assert isinstance(criteo(data=["x"]).model, DLRM)
    assert isinstance(criteo(data=["x"], model="dcn_v2").model, DCNv2)
    with pytest.raises(JobError, match=rf"Found model='gbdt'\. Expected one of \['{sorted(MODELS)[0]}'"):
        criteo(data=["x"], model="gbdt")
