"""A strategy in one process stands where one over hosts may stand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding import SGD, FeatureConfig, LocalStrategy, TableConfig, TPUEmbedding, get_replica_context


def test_it_is_used_like_a_strategy_over_hosts() -> None:
    with LocalStrategy() as strategy:
        with strategy.scope():
            embedding = TPUEmbedding({"a": FeatureConfig(TableConfig(5, 2, name="t"))}, 3, SGD(0.1))
        embedding.enqueue({"a": np.arange(3)}, training=True)
        activations = embedding.dequeue()
        embedding.apply_gradients({"a": jnp.ones((3, 2))})
    assert activations["a"].shape == (3, 2)


def made(strategy: LocalStrategy) -> TPUEmbedding:
    with strategy.scope():
        return TPUEmbedding({"a": FeatureConfig(TableConfig(5, 2, name="t"))}, 3, SGD(0.1))


def test_closed_it_frees_the_tables_and_may_begin_anew() -> None:
    strategy = LocalStrategy()
    strategy.close()
    embedding = made(strategy)
    strategy.run(lambda: get_replica_context().state.update(old=1))  # type: ignore[union-attr]
    strategy.close()
    strategy.close()
    for call in (embedding.read_tables, lambda: embedding.enqueue({"a": np.arange(3)})):
        with pytest.raises(RuntimeError, match="are freed"):
            call()
    embedding.close()
    other = made(strategy)
    other.enqueue({"a": np.arange(3)})
    assert other.dequeue()["a"].shape == (3, 2)
    assert strategy.run(lambda: dict(get_replica_context().state)) == {}  # type: ignore[union-attr]


def test_an_embedding_is_closed_on_the_driver_alone(caplog: pytest.LogCaptureFixture) -> None:
    strategy = LocalStrategy()
    embedding = made(strategy)
    strategy.run(embedding.close)
    assert "close does nothing inside a function" in caplog.text
    embedding.enqueue({"a": np.arange(3)}, training=False)
    assert embedding.dequeue()["a"].shape == (3, 2)
    embedding.close()
    assert strategy.running is None
