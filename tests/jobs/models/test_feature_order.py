"""Models give the scores of their training however they are called: with `jit` or without, with `Activations` or a
plain dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.activations import Activations
from podembed.jobs.chaos.jobs import AUDIT, Audited, TinyModel
from podembed.jobs.models.dcn_v2 import DCNv2
from podembed.jobs.models.dlrm import DLRM
from podembed.jobs.models.two_towers import TwoTowers
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from tests.long_tests import long_case

# Sorted, these are c10, c2, c9, user.
NAMES = ("user", "c9", "c10", "c2")
WIDTH = 8
MODELS: dict[str, Callable[[], Any]] = {
    "dlrm": lambda: DLRM(bottom=(8,), top=(8,)),
    "dcn_v2": lambda: DCNv2(cross_layers=2, deep=(8,)),
    "tiny": TinyModel,
    "two towers": lambda: TwoTowers(user=("user", "c9"), item=("c10", "c2")),
}


def inputs(num_samples: int = 6) -> tuple[jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((num_samples, 3)), jnp.float32)
    return dense, {name: jnp.asarray(rng.standard_normal((num_samples, WIDTH)), jnp.float32) for name in NAMES}


def declare(model: Any) -> JobConfig:
    features = {name: FeatureConfig(TableConfig(10, WIDTH, name=name)) for name in NAMES}
    data = ParquetData("none-*.parquet", label="label", dense=("x", "y", "z"), features={n: IdColumn(n) for n in NAMES})
    return JobConfig(name="order", features=features, model=model, data=data, batch_size=16)


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


@pytest.mark.parametrize("name", ["two towers", *map(long_case, ["dlrm", "dcn_v2", "tiny"])])
def test_scores_do_not_depend_on_how_a_model_is_called(name: str) -> None:
    make = MODELS[name]
    model, (dense, plain) = make(), inputs()
    params = model.init(jax.random.key(0), 3, dict.fromkeys(NAMES, WIDTH))
    expected = make().apply(params, dense, Activations(plain))  # as in a run
    by_name = {name: plain[name] for name in sorted(plain)}
    for values in (plain, by_name, Activations(plain), Activations(by_name)):
        found = {
            "as it is": model.apply(params, dense, values),
            "jit": jax.jit(model.apply)(params, dense, values),
            "vmap": jax.vmap(lambda d, v: model.apply(params, d[None], jax.tree.map(lambda x: x[None], v))[0])(
                dense, values
            ),
            "grad": jax.value_and_grad(lambda v: jnp.sum(model.apply(params, dense, v)))(values)[0],
        }
        for how, scores in found.items():
            wanted = expected if scores.ndim else expected.sum()
            np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{how}, {type(values).__name__}")


def test_a_job_tells_its_model_the_order(make: Callable[[], Any]) -> None:
    """Parameters may come from a commit, and `init` need not be called."""
    dense, plain = inputs()
    params = make().init(jax.random.key(0), 3, dict.fromkeys(NAMES, WIDTH))
    model = declare(make()).model
    expected = model.apply(params, dense, Activations(plain))
    np.testing.assert_allclose(jax.jit(model.apply)(params, dense, plain), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["dlrm", "dcn_v2", "tiny"])
def test_a_model_that_knows_no_order_refuses_a_plain_dict(model: str) -> None:
    dense, plain = inputs()
    params = MODELS[model]().init(jax.random.key(0), 3, dict.fromkeys(NAMES, WIDTH))
    with pytest.raises(ValueError, match="knows no order.*Pass podembed.embedding.Activations"):
        jax.jit(MODELS[model]().apply)(params, dense, plain)


def test_the_audit_is_left_out_and_the_order_of_the_others_stays() -> None:
    dense, plain = inputs()
    inner = DLRM(bottom=(8,), top=(8,))
    params = inner.init(jax.random.key(0), 3, dict.fromkeys(NAMES, WIDTH))
    with_audit = Activations({AUDIT: jnp.zeros((6, 1)), **plain})
    found = jax.jit(Audited(DLRM(bottom=(8,), top=(8,))).apply)(params, dense, with_audit)
    np.testing.assert_allclose(found, inner.apply(params, dense, Activations(plain)), rtol=1e-4, atol=1e-5)


def test_a_model_is_the_same_value_whatever_it_was_told() -> None:
    model = DLRM()
    model.order.tell(NAMES)
    assert model == DLRM()
    assert hash(model) == hash(DLRM())
    assert repr(model) == repr(DLRM())
