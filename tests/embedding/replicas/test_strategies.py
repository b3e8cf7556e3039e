"""A strategy in one process stands where one over hosts may stand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from podembed.embedding import SGD, FeatureConfig, LocalStrategy, TableConfig, TPUEmbedding


def test_it_is_used_like_a_strategy_over_hosts() -> None:
    with LocalStrategy() as strategy:
        with strategy.scope():
            embedding = TPUEmbedding({"a": FeatureConfig(TableConfig(5, 2, name="t"))}, 3, SGD(0.1))
        embedding.enqueue({"a": np.arange(3)}, training=True)
        activations = embedding.dequeue()
        embedding.apply_gradients({"a": jnp.ones((3, 2))})
    assert activations["a"].shape == (3, 2)
