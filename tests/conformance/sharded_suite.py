"""The conformance suite with tables cut over the devices of this process, which `test_tpu_embedding_sharded.py` starts
with several.
"""

from __future__ import annotations

import os
from functools import partialmethod
from typing import Any

import jax
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import FTRL, Adagrad, Adam, Momentum, Optimizer
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from tests.conformance import training_runs as runs
from tests.conformance.test_from_tpuembedding import test_in_one_process as test_the_page  # noqa: F401
from tests.conformance.tpu_embedding_suite import OPTIMIZERS, TPUEmbeddingConformance
from tests.long_tests import is_long, long_case

SHORT = "adam, not lazy"
ACCUMULATING = [name for name, rule in OPTIMIZERS.items() if rule.use_gradient_accumulation]


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are cut where a test does not say anything else."""
    monkeypatch.setattr(TableConfig, "__init__", partialmethod(TableConfig.__init__, place="sharded"))


class TestSharded(TPUEmbeddingConformance):
    @pytest.fixture
    def strategy(self):
        return LocalStrategy(seed=5)

    @pytest.fixture(params=[False, long_case(True)], ids=["sequential", "pipelined"])
    def is_pipelined(self, request):
        return request.param

    @pytest.fixture(params=[name if name == SHORT else long_case(name, id=name) for name in ACCUMULATING])
    def optimizer_name(self, request):
        return request.param


@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(0.1),
        long_case(Adagrad(0.1)),
        long_case(FTRL(0.1)),
        long_case(Momentum(0.1)),
        long_case(Adam(0.1, lazy_adam=False)),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_all_places_have_the_same_numbers(optimizer: Optimizer) -> None:
    """Beside tables on the host, and with tables of both places in one embedding."""

    def trained(*places: Any) -> list[Any]:
        users, items, other = (
            TableConfig(num_rows, dim, name=name, combiner=combiner, optimizer=optimizer, place=place)
            for (num_rows, dim, name, combiner), place in zip(
                ((170, 3, "users", "mean"), (290, 8, "items", "sqrtn"), (90, 8, "other", "sum")), places, strict=True
            )
        )
        config = {
            "user": FeatureConfig(users),
            "friends": FeatureConfig(users, max_sequence_length=3),
            "items": (FeatureConfig(items), FeatureConfig(items, combiner="sum")),
            "other": FeatureConfig(other),
        }
        with LocalStrategy(seed=5).scope():
            embedding = TPUEmbedding(config, 8)
        random, seen = np.random.default_rng(4), []
        for _ in range(4):
            bags, weights = runs.in_form(
                "ragged", [random.integers(0, 90, size).tolist() for size in (2, 0, 3, 1, 9, 1, 0, 4)]
            )
            batch = {"user": random.integers(0, 170, 8), "friends": bags, "items": (bags, bags), "other": bags}
            embedding.enqueue(batch, {"user": None, "friends": None, "items": (weights, None), "other": weights})
            activations = embedding.dequeue()
            together = jax.jit(lambda leaves: jax.tree.map(lambda leaf: leaf * leaf - 0.5 * leaf, leaves))
            embedding.apply_gradients(together(activations))
            seen.append(jax.tree.map(np.asarray, activations))
        return [seen, [*embedding.read_tables().values()]]

    expected = trained("host", "host", "host")
    for places in (("sharded", "sharded", "sharded"), ("sharded", "host", "sharded")):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6), trained(*places), expected
        )


@is_long
def test_more_rows_than_messages_have_room_for_come_in_several_rounds() -> None:
    """Rooms are found by batches 1, 2, 4 and so on, which name few rows here. Batch 3 names 1,024 rows, and batch 5 as
    many of a single device.
    """
    few, many = np.repeat(np.arange(16), 64), np.arange(1024)

    def trained(place: Any) -> list[Any]:
        table = TableConfig(4096, 4, name="t", place=place)
        with LocalStrategy(seed=2).scope():
            embedding = TPUEmbedding(FeatureConfig(table), 16, Adagrad(0.1))
        seen = []
        for ids in (few, few, many, few, 4 * many):
            embedding.enqueue(Ragged(ids, np.arange(0, 1025, 64)))
            activations = embedding.dequeue()
            embedding.apply_gradients(activations - 0.3)
            seen.append(np.asarray(activations))
        return [seen, embedding.read_tables()[table]]

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6),
        trained("sharded"),
        trained("host"),
    )


def test_one_array_has_one_rate() -> None:
    """Also where a program gives a table another optimizer when it lies there already."""
    first, second = (TableConfig(10, 4, name=name, optimizer=Adagrad(0.1)) for name in ("first", "second"))
    with LocalStrategy().scope():
        embedding = TPUEmbedding([FeatureConfig(first), FeatureConfig(second)], 4)
    embedding.enqueue([np.arange(4)] * 2)
    activations = embedding.dequeue()
    second.optimizer = Adagrad(0.2)
    with pytest.raises(ValueError, match="learning rates 0.1 and 0.2 of tables 'first' and 'second'"):
        embedding.apply_gradients(activations)


def test_activations_and_rows_lie_over_all_devices() -> None:
    num_devices = int(os.environ["PODEMBED_TEST_DEVICES"])
    table = TableConfig(1000, 4, name="t")
    with LocalStrategy().scope():
        embedding = TPUEmbedding(FeatureConfig(table), 2 * num_devices, Adagrad(0.1))
    embedding.enqueue(np.arange(2 * num_devices))
    activations = embedding.dequeue()
    assert [shard.data.shape for shard in activations.addressable_shards] == [(2, 4)] * num_devices
