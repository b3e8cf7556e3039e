"""`Activations` keep the order of the features wherever JAX takes them apart."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podembed.embedding
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.activations import Activations
from podembed.embedding.features.feature_order import FeatureOrder
from podembed.embedding.optimizers import SGD
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding

NAMES = ["user", "c10", "c2", "age"]


def activations(num_samples: int = 3) -> Activations:
    rng = np.random.default_rng(0)
    return Activations((name, jnp.asarray(rng.random((num_samples, 2)), jnp.float32)) for name in NAMES)


def side_by_side(values: Any) -> jax.Array:
    """A model that reads in order, with a weight a column so that the order shows."""
    columns = jnp.concatenate(list(values.values()), axis=-1)
    return columns @ jnp.arange(1.0, 1 + columns.shape[-1])


def test_it_is_a_read_only_mapping():
    found = Activations({"b": 1, "a": 2}, c=3)
    assert (list(found), list(found.values()), len(found), found["a"]) == (["b", "a", "c"], [1, 2, 3], 3, 2)
    assert "a" in found
    assert "z" not in found
    assert found == {"a": 2, "b": 1, "c": 3}
    assert dict(found) == {"b": 1, "a": 2, "c": 3}
    assert repr(found) == "Activations({'b': 1, 'a': 2, 'c': 3})"
    assert podembed.embedding.Activations is Activations
    with pytest.raises(TypeError):
        found["a"] = 1  # type: ignore[index]
    with pytest.raises(KeyError, match=r"no feature 'z' among the activations. Expected one of \['b', 'a', 'c'\]"):
        found["z"]


TRANSFORMATIONS = {
    "jit": lambda values: jax.jit(side_by_side)(values),
    "vmap": lambda values: jax.vmap(side_by_side)(values),
    "grad": lambda values: jax.value_and_grad(lambda v: side_by_side(v).sum(), has_aux=False)(values)[0],
    "scan": lambda values: jax.lax.scan(lambda carry, v: (carry, side_by_side(v)), 0, values)[1],
    "checkpoint": lambda values: jax.checkpoint(side_by_side)(values),
    "tree.map": lambda values: side_by_side(jax.tree.map(lambda one: one, values)),
    "device_put": lambda values: side_by_side(jax.device_put(values)),
    "pickle": lambda values: side_by_side(pickle.loads(pickle.dumps(values))),  # noqa: S301  # made here
    "unflatten": lambda values: side_by_side(jax.tree.unflatten(jax.tree.structure(values), jax.tree.leaves(values))),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_the_order_stays(transformation):
    found = TRANSFORMATIONS[transformation](activations())
    expected = side_by_side(activations())
    np.testing.assert_allclose(found, expected if found.ndim else expected.sum(), rtol=1e-6)


def test_gradients_and_states_made_of_it_have_its_order_and_type():
    values = activations()
    gradients = jax.jit(jax.grad(lambda v: side_by_side(v).sum()))(values)
    assert isinstance(gradients, Activations)
    assert [float(one[0, 0]) for one in gradients.values()] == [1.0, 3.0, 5.0, 7.0]
    state = optax.sgd(0.1).init(values)
    updates, _ = optax.sgd(0.1).update(gradients, state, values)
    assert isinstance(updates, Activations)
    assert list(updates) == NAMES


def test_another_order_is_another_structure_and_paths_show_names():
    values = activations()
    assert jax.tree.structure(values) != jax.tree.structure(Activations({name: values[name] for name in sorted(NAMES)}))
    assert jax.tree.structure(values) == jax.tree.structure(activations())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(values)]
    assert paths == ["['user']", "['c10']", "['c2']", "['age']"]
    with pytest.raises(ValueError, match="'c2'"):
        jax.vmap(side_by_side)(Activations({**values, "c2": jnp.ones((4, 2))}))
    assert jax.tree.leaves(Activations()) == []


@pytest.mark.parametrize("container", [Activations, OrderedDict])
def test_a_step_by_step_model_may_read_in_order(container):
    """Activations of a plain configuration are wrapped; those of an ordered one come back ordered."""
    tables = {name: FeatureConfig(TableConfig(5, 2, name=name)) for name in NAMES}
    ids = {name: np.arange(3) for name in NAMES}
    for config, wrap_ids, wrap in ((tables, dict, Activations), (container(tables), container, lambda values: values)):
        with LocalStrategy().scope():
            embedding = TPUEmbedding(config, 3, SGD(0.1))
        embedding.enqueue(wrap_ids(ids))
        values = wrap(embedding.dequeue())
        score = jax.value_and_grad(lambda v: side_by_side(v).sum())
        (plain, gradients), (jitted, _) = score(values), jax.jit(score)(values)
        np.testing.assert_allclose(jitted, plain, rtol=1e-5)
        np.testing.assert_allclose(plain, side_by_side({name: values[name] for name in NAMES}).sum(), rtol=1e-5)
        embedding.apply_gradients(gradients)


class TestFeatureOrder:
    def order(self, *orders: list[str]) -> FeatureOrder:
        order = FeatureOrder()
        for one in orders:
            order.tell(one)
        return order

    def test_activations_are_read_in_the_order_that_was_told_and_otherwise_in_their_own(self):
        assert self.order().read(Activations(b=1, a=2)) == [1, 2]
        assert self.order(["a", "b"]).read(Activations(b=1, a=2)) == [2, 1]
        assert self.order(["a", "b"], ["b", "a"]).read(Activations(b=1, a=2)) == [1, 2]

    def test_a_plain_dict_is_read_in_the_order_that_was_told(self):
        order = self.order(["b", "a"], ["b", "a"], ["a", "b", "c"])
        assert order.read({"a": 2, "b": 1}) == order.read({"b": 1, "a": 2}) == [1, 2]
        assert order.read({"c": 3, "b": 1, "a": 2}) == [2, 1, 3]

    def test_one_feature_has_one_order(self):
        assert self.order().read({"a": 1}) == [1]

    @pytest.mark.parametrize(
        ("orders", "known"),
        [
            ([], "no order"),
            ([["a", "c"]], r"\['a', 'c'\]"),
            ([["a", "b"], ["b", "a"]], r"\['a', 'b'\] and \['b', 'a'\]"),
        ],
    )
    def test_a_plain_dict_without_one_order_is_refused(self, orders, known):
        with pytest.raises(
            ValueError, match=f"activations of .* in a dict, and a model that knows {known}. Expected one"
        ):
            self.order(*orders).read({"a": 1, "b": 2})
