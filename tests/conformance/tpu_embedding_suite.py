"""What a `TPUEmbedding` does under any strategy. Subclasses give a strategy; see `test_tpu_embedding_local.py` and
`test_tpu_embedding_pod.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    Lion,
    Momentum,
    Optimizer,
    RowWiseAdagrad,
)
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.engine.order import OrderError
from podembed.embedding.tf.features.inputs import Sparse
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.reduction import ReduceOp
from podembed.embedding.tf.replicas.strategies import get_replica_context
from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.send_gradients import send_tpu_embedding_gradients
from podembed.embedding.vocabulary.policies import LeastRecent
from podembed.workers.storage.storage_errors import StorageError
from tests.conformance import training_runs as runs

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.1),
    "sgd, every option": SGD(
        0.1, clip_weight_min=-0.3, clip_weight_max=0.4, weight_decay_factor=0.02, clipvalue=(-0.5, None)
    ),
    "sgd, one by one": SGD(0.1, use_gradient_accumulation=False),
    "adagrad": Adagrad(0.1),
    "adagrad, decay times rate": Adagrad(
        0.1, weight_decay_factor=0.3, multiply_weight_decay_factor_by_learning_rate=True, clipvalue=0.7
    ),
    "adagrad, one by one": Adagrad(0.1, use_gradient_accumulation=False),
    "row-wise adagrad": RowWiseAdagrad(0.1),
    "adagrad momentum": AdagradMomentum(0.1, momentum=0.9),
    "adagrad momentum, every option": AdagradMomentum(
        0.1, momentum=0.8, use_nesterov=True, exponent=3, beta2=0.9, epsilon=1e-3
    ),
    "momentum": Momentum(0.1),
    "momentum, every option": Momentum(0.1, 0.8, use_nesterov=True, clipvalue=0.7, weight_decay_factor=0.02),
    "lion": Lion(0.1, weight_decay_factor=0.3, multiply_weight_decay_factor_by_learning_rate=True),
    "ftrl": FTRL(0.1),
    "ftrl, every option": FTRL(0.1, -0.6, 0.01, 0.02, beta=0.5, initial_accumulator_value=0.3),
    "ftrl, times rate": FTRL(0.1, -0.5, 0.01, 0.02, beta=0.5, multiply_linear_by_learning_rate=True),
    "adam": Adam(0.1),
    "adam, sum outside": Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-4, sum_inside_sqrt=False),
    "adam, not lazy": Adam(0.1, lazy_adam=False),
}


RATE = [0.0]
"""Of this module, which a replica imports for itself: there nobody ever assigns it."""


def rate_of_module() -> float:
    return RATE[0]


class CountedRate:
    """0.5, then half of it, and so on: a rate by the number of its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> float:
        self.num_calls += 1
        return 0.5**self.num_calls


class TPUEmbeddingConformance:
    """Tests that hold for every strategy."""

    @pytest.fixture
    def strategy(self) -> Any:
        """A strategy without a running engine."""
        raise NotImplementedError

    @pytest.fixture
    def make(self, strategy: Any) -> Iterator[Any]:
        """Makes embeddings in the strategy's scope and closes them."""
        made: list[TPUEmbedding] = []

        def make(*arguments: Any, **keywords: Any) -> TPUEmbedding:
            with strategy.scope():
                made.append(TPUEmbedding(*arguments, **keywords))
            return made[-1]

        yield make
        for embedding in made:
            embedding.close()

    def test_training_runs_follow_the_oracle(self, make, strategy, optimizer_name, is_pipelined):
        config, users, items = runs.declare(OPTIMIZERS[optimizer_name])
        embedding = make(config, runs.BATCH_SIZE, None, is_pipelined)
        oracle = runs.oracle_of(embedding, users, items)
        run = runs.Run(embedding, oracle, lambda step: 0.1, is_pipelined=is_pipelined)
        for _ in range(runs.NUM_STEPS):
            run.step()
        run.compare_tables(users, items)

    def test_a_pipeline_drained_in_the_middle_goes_on_from_every_update(self, make, tmp_path):
        config, users, items = runs.declare(Adagrad(0.1))
        embedding = make(config, runs.BATCH_SIZE, None, True)
        run = runs.Run(embedding, runs.oracle_of(embedding, users, items), lambda step: 0.1, is_pipelined=True)
        run.step()
        run.step()
        # A checkpoint holds every update, and so what follows sees it.
        embedding.save(str(tmp_path / "saved"))
        run.drain_oracle()
        run.step()
        run.step()
        run.compare_tables(users, items)

    def test_rates_are_read_in_apply_gradients_and_shown(self, make):
        calls: list[int] = []

        def shared() -> float:
            calls.append(1)
            return 0.5 / len(calls)

        first = TableConfig(4, 2, optimizer=SGD(shared), name="first")
        second = TableConfig(4, 2, optimizer=SGD(shared), name="second")
        third = TableConfig(4, 2, optimizer=SGD(lambda step: 0.25 * (step + 1)), name="third")
        fourth = TableConfig(4, 2, optimizer=SGD(0.125), name="fourth")
        config = [FeatureConfig(table) for table in (first, second, third, fourth)]
        embedding = make(config, 2)
        before = embedding.read_tables()
        assert embedding.metrics.learning_rates == {}
        assert not calls
        for number, rates in ((1, (0.5, 0.5, 0.25, 0.125)), (2, (0.25, 0.25, 0.5, 0.125))):
            embedding.enqueue([np.array([0, 1])] * 4)
            embedding.dequeue()
            embedding.apply_gradients([jnp.ones((2, 2))] * 4)
            assert len(calls) == number
            assert tuple(embedding.metrics.learning_rates.values()) == rates
        assert embedding.metrics.num_steps == 2
        after = embedding.read_tables()
        for table, total in zip((first, second, third, fourth), (0.75, 0.75, 0.75, 0.25), strict=True):
            np.testing.assert_allclose(before[table]["rows"][:2] - after[table]["rows"][:2], total, rtol=1e-5)
            assert np.array_equal(before[table]["rows"][2:], after[table]["rows"][2:])

    @pytest.fixture(params=["driver", "replicas"])
    def update(self, request, strategy):
        """Makes one update of every row of the batch by -1 times its rate, on the driver or in a function."""

        def update(embedding: TPUEmbedding) -> None:
            embedding.apply_gradients(jax.tree.map(jnp.ones_like, embedding.dequeue()))

        return update if request.param == "driver" else lambda embedding: strategy.run(update, args=(embedding,))

    @staticmethod
    def moved(embedding: TPUEmbedding, before: Any, table: TableConfig) -> np.ndarray:
        return (before[table]["rows"] - embedding.read_tables()[table]["rows"])[:4, 0]

    def test_rates_are_those_of_the_driver_wherever_gradients_are_applied(self, make, update):
        driver = os.getpid()

        def rate_elsewhere() -> float:
            return float(os.getpid() != driver)

        one = TableConfig(40, 2, combiner="sum", optimizer=SGD(rate_of_module), name="one")
        other = TableConfig(40, 2, combiner="sum", optimizer=SGD(rate_elsewhere), name="b")
        embedding = make([FeatureConfig(one), FeatureConfig(other)], 4)
        before = embedding.read_tables()
        for rate, total in ((0.5, 0.5), (0.25, 0.75), (0.0, 0.75)):
            RATE[0] = rate
            embedding.enqueue([np.arange(4)] * 2)
            update(embedding)
            assert embedding.metrics.learning_rates == {"one": rate, "b": 0.0}
            np.testing.assert_allclose(self.moved(embedding, before, one), total, rtol=1e-5)
        np.testing.assert_allclose(self.moved(embedding, before, other), 0.0)

    def test_a_rate_is_called_once_an_update_and_for_no_other_call(self, make, update, tmp_path):
        rate = CountedRate()
        one = TableConfig(40, 2, combiner="sum", optimizer=SGD(rate), name="one")
        other = TableConfig(40, 2, combiner="sum", optimizer=SGD(rate), name="other")
        by_step = TableConfig(40, 2, combiner="sum", optimizer=SGD(lambda step: float(step)), name="by step")
        embedding = make([FeatureConfig(table) for table in (one, other, by_step)], 4)
        before = embedding.read_tables()
        embedding.enqueue([np.arange(4)] * 3, training=False)
        with pytest.raises(RuntimeError, match="training=False"):
            update(embedding)
        assert rate.num_calls == 0
        embedding.enqueue([np.arange(4)] * 3)
        update(embedding)
        embedding.enqueue([np.arange(4)] * 3)
        update(embedding)
        assert rate.num_calls == 2
        assert embedding.metrics.learning_rates == {"one": 0.25, "other": 0.25, "by step": 1.0}
        for table, total in ((one, 0.75), (other, 0.75), (by_step, 1.0)):
            np.testing.assert_allclose(self.moved(embedding, before, table), total, rtol=1e-5)
        # After a restore steps go on as saved, and a rate by calls goes on with its next call.
        embedding.save(str(tmp_path / "saved"))
        embedding.enqueue([np.arange(4)] * 3)
        update(embedding)
        embedding.restore(str(tmp_path / "saved"))
        embedding.enqueue([np.arange(4)] * 3)
        update(embedding)
        assert embedding.metrics.learning_rates == {"one": 0.0625, "other": 0.0625, "by step": 2.0}

    def test_functions_of_many_steps_and_of_none_call_rates_as_often_as_they_update(self, make, strategy):
        rate = CountedRate()
        table = TableConfig(40, 2, combiner="sum", optimizer=SGD(rate), name="t")
        embedding = make([FeatureConfig(table)], 4)
        before = embedding.read_tables()

        def steps(ids: np.ndarray, num_steps: int) -> int:
            for _ in range(num_steps):
                embedding.enqueue([ids])
                embedding.apply_gradients([jnp.ones_like(embedding.dequeue()[0])])
            embedding.enqueue([ids], training=False)
            embedding.dequeue()
            return embedding.metrics.num_steps

        for num_steps, calls in ((0, 0), (3, 3), (1, 4)):
            found = strategy.run(steps, args=(strategy.split(np.arange(4)), num_steps))
            assert set(strategy.local_results(found)) == {calls}
            assert rate.num_calls == calls
        np.testing.assert_allclose(self.moved(embedding, before, table), 0.9375, rtol=1e-5)

    def test_a_rate_that_raises_costs_no_step(self, make, update):
        rates: list[Any] = [-1.0, "fast", 0.5]
        table = TableConfig(40, 2, combiner="sum", optimizer=SGD(lambda: rates[0]), name="t")
        embedding = make([FeatureConfig(table)], 4)
        before = embedding.read_tables()
        for error, message in ((ValueError, "-1.0 from the learning rate"), (TypeError, "'fast' from the learning")):
            embedding.enqueue([np.arange(4)])
            with pytest.raises(error, match=message):
                update(embedding)
            embedding.discard()
            del rates[0]
        embedding.enqueue([np.arange(4)])
        update(embedding)
        assert embedding.metrics.num_steps == 1
        np.testing.assert_allclose(self.moved(embedding, before, table), 0.5, rtol=1e-5)

    def test_gradients_are_summed_over_samples_and_features_never_averaged(self, make):
        table = TableConfig(5, 2, combiner="sum", name="t")
        embedding = make({"a": FeatureConfig(table), "b": FeatureConfig(table)}, 4, SGD(1.0))
        before = embedding.read_tables()[table]["rows"]
        embedding.enqueue({"a": np.array([1, 1, 2, 3]), "b": np.array([[1], [1], [3], [0]])})
        activations = embedding.dequeue()
        assert activations["a"].shape == activations["b"].shape == (4, 2)
        embedding.apply_gradients(jax.tree.map(jnp.ones_like, activations))
        moved = before - embedding.read_tables()[table]["rows"]
        np.testing.assert_allclose(moved[:, 0], [1, 4, 1, 2, 0], atol=1e-5)

    def test_above_rank_2_all_ids_of_a_row_are_combined_whatever_the_length(self, make, strategy, caplog):
        def rows(shape: tuple[int, int], dtype: Any) -> np.ndarray:
            return np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)

        table = TableConfig(8, 4, rows, combiner="sum", name="t")
        embedding = make({"s": FeatureConfig(table, max_sequence_length=2)}, 2, SGD(1.0))
        before = embedding.read_tables()[table]["rows"]
        indices = [[0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 2]]
        ids = np.array([1, 2, 2, 5, 0, 6, 7])
        first = before[:, 0]
        pooled = [[first[1], 2 * first[2]], [first[5], first[[0, 6, 7]].sum()]]
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                embedding.enqueue({"s": Sparse(indices, ids, (2, 2, 3))}, training=False)
                assert np.asarray(embedding.dequeue()["s"])[..., 0].tolist() == pooled
        assert caplog.text.count("max_sequence_length=2 is ignored") == 1
        embedding.enqueue({"s": Sparse(indices, ids, (2, 2, 3))})
        embedding.apply_gradients(jax.tree.map(jnp.ones_like, embedding.dequeue()))
        moved = before - embedding.read_tables()[table]["rows"]
        assert moved[:, 0].tolist() == [1, 1, 2, 0, 0, 1, 1, 1]

        # The same where a replica enqueues its own part: the first half of the samples on the first of two.
        def in_replica() -> Any:
            replica, replicas = (
                get_replica_context().replica_id_in_sync_group,
                get_replica_context().num_replicas_in_sync,
            )
            own = [at for at, place in enumerate(indices) if place[0] // (2 // replicas) == replica]
            places = [[indices[at][0] % (2 // replicas), *indices[at][1:]] for at in own]
            embedding.enqueue({"s": Sparse(places, ids[own], (2 // replicas, 2, 3))})
            activations = embedding.dequeue()["s"]
            embedding.apply_gradients({"s": jnp.ones_like(activations)})
            return np.asarray(activations)[..., 0]

        after = embedding.read_tables()[table]["rows"][:, 0]
        found = np.concatenate(strategy.local_results(strategy.run(in_replica)))
        assert found.tolist() == [[after[1], 2 * after[2]], [after[5], after[[0, 6, 7]].sum()]]
        moved = after - embedding.read_tables()[table]["rows"][:, 0]
        assert moved.tolist() == [1, 1, 2, 0, 0, 1, 1, 1]

    def test_deadlocks_raise_at_once_and_leave_the_engine_usable(self, make):
        table = TableConfig(5, 2, name="t")
        embedding = make(FeatureConfig(table), 2, SGD(1.0))
        ids, ones = np.array([1, 2]), jnp.ones((2, 2))
        with pytest.raises(RuntimeError, match="without an enqueued"):
            embedding.apply_gradients(ones)
        with pytest.raises(RuntimeError, match="without an enqueued"):
            embedding.dequeue()
        embedding.enqueue(ids, training=False)
        with pytest.raises(RuntimeError, match="waiting for dequeue"):
            embedding.enqueue(ids)
        embedding.dequeue()
        with pytest.raises(RuntimeError, match="training=False"):
            embedding.apply_gradients(ones)
        before = embedding.read_tables()[table]["rows"]
        embedding.enqueue(ids)
        embedding.dequeue()
        with pytest.raises(RuntimeError, match="waiting for apply_gradients"):
            embedding.enqueue(ids)
        embedding.apply_gradients(ones)
        with pytest.raises(RuntimeError, match="without an enqueued"):
            embedding.apply_gradients(ones)
        np.testing.assert_allclose((before - embedding.read_tables()[table]["rows"])[:, 0], [0, 1, 1, 0, 0], atol=1e-6)

    @pytest.mark.parametrize(
        ("optimizer", "word"),
        [
            (SGD(0.1), "stay"),
            (Adagrad(0.1), "stay"),
            (Adam(0.1), "Adam"),
            (AdagradMomentum(0.1, 0.9), "AdagradMomentum"),
            (Momentum(0.1), "Momentum still decays"),
            (Lion(0.1), "Lion"),
            (FTRL(0.1), "FTRL"),
        ],
        ids=["sgd", "adagrad", "adam", "adagrad momentum", "momentum", "lion", "ftrl"],
    )
    def test_none_stands_for_zeros_with_a_warning(self, make, caplog, optimizer, word):
        table = TableConfig(5, 8, name="t")
        embedding = make({"x": FeatureConfig(table)}, 2, optimizer)
        first = embedding.read_tables()[table]["rows"]
        embedding.enqueue({"x": np.array([1, 2])})
        embedding.dequeue()
        with caplog.at_level(logging.WARNING):
            embedding.apply_gradients({"x": None})
        assert "feature x" in caplog.text
        assert word in caplog.text
        rows = embedding.read_tables()[table]["rows"]
        untouched = [0, 3, 4]
        assert np.array_equal(rows[untouched], first[untouched])
        # A fresh FTRL row is lost; a fresh Adam or momentum row has nothing to move by.
        expected = np.zeros((2, 8)) if isinstance(optimizer, FTRL) else first[1:3]
        np.testing.assert_array_equal(rows[1:3], expected)
        embedding.enqueue({"x": np.array([1, 2])})
        embedding.dequeue()
        with caplog.at_level(logging.WARNING):
            embedding.apply_gradients({"x": None})
        assert caplog.text.count("feature x") == 1

    @pytest.mark.parametrize("optimizer", [Adam(0.1), AdagradMomentum(0.1, momentum=0.9)], ids=["adam", "momentum"])
    def test_none_moves_rows_that_have_momentum(self, make, optimizer):
        table = TableConfig(5, 2, name="t")
        embedding = make({"x": FeatureConfig(table)}, 2, optimizer)
        for gradient in (jnp.ones((2, 2)), None):
            before = embedding.read_tables()[table]["rows"]
            embedding.enqueue({"x": np.array([1, 2])})
            embedding.dequeue()
            embedding.apply_gradients({"x": gradient})
        after = embedding.read_tables()[table]["rows"]
        assert (np.abs(after - before)[1:3] > 0.01).all()

    def test_quantized_values_are_looked_up_and_exact_ones_trained(self, make):
        table = TableConfig(
            6, 2, initializer=lambda shape, dtype: np.linspace(-2, 2, 12, dtype=dtype).reshape(shape), name="t",
            combiner="sum", quantization_config=QuantizationConfig(5, -1.0, 1.0),
        )  # fmt: skip
        embedding = make(FeatureConfig(table), 6, SGD(1.0))
        rows = embedding.read_tables()[table]["rows"]
        embedding.enqueue(np.arange(6))
        clipped = np.clip(rows, -1, 1)
        expected = np.floor((clipped + 1) / 0.5 + 0.5) * 0.5 - 1
        np.testing.assert_allclose(embedding.dequeue(), expected, atol=1e-6)
        embedding.apply_gradients(jnp.full((6, 2), 0.25))
        np.testing.assert_allclose(embedding.read_tables()[table]["rows"], rows - 0.25, atol=1e-6)

    def test_names_tie_calls_together(self, make):
        table = TableConfig(5, 2, name="t")
        embedding = make(FeatureConfig(table), 2, SGD(1.0))
        ids, ones = np.array([1, 2]), jnp.ones((2, 2))
        embedding.enqueue(ids, name="train")
        with pytest.raises(RuntimeError, match="name"):
            embedding.dequeue()
        embedding.dequeue(name="train")
        with pytest.raises(RuntimeError, match="name"):
            embedding.apply_gradients(ones, name="other")
        embedding.apply_gradients(ones, name="train")
        # With a name, a batch without gradients turns out to have been one of inference.
        embedding.enqueue(ids, name="score")
        embedding.dequeue(name="score")
        before = embedding.read_tables()[table]["rows"]
        embedding.enqueue(ids, training=False, name="late")
        embedding.dequeue(name="late")
        # And one with gradients one of training.
        embedding.apply_gradients(ones, name="late")
        np.testing.assert_allclose((before - embedding.read_tables()[table]["rows"])[1:3], 1.0, atol=1e-6)
        assert embedding.metrics.num_steps == 2

    def test_save_and_restore_hold_rows_slots_and_steps(self, make, tmp_path):
        path = str(tmp_path / "saved")
        config, users, items = runs.declare(Adam(0.1))
        embedding = make(config, runs.BATCH_SIZE, None, True)
        run = runs.Run(embedding, runs.oracle_of(embedding, users, items), lambda step: 0.1, is_pipelined=True)
        run.step()
        run.step()
        embedding.save(path)
        run.drain_oracle()
        saved = embedding.read_tables()
        run.step()
        embedding.restore(path)
        again = embedding.read_tables()
        for table, arrays in saved.items():
            assert list(arrays) == ["rows", "momentum", "velocity"]
            for name, values in arrays.items():
                assert np.array_equal(values, again[table][name])
        assert embedding.metrics.num_steps == 2
        embedding.close()
        # Restored before it is built, on this strategy and outside any.
        later_config, later_users, _ = runs.declare(Adam(0.1))
        later = make(later_config)
        later.restore(path)
        later.build(runs.BATCH_SIZE)
        for name, values in later.read_tables()[later_users].items():
            assert np.array_equal(values, saved[users][name])
        assert later.metrics.num_steps == 2
        outside_config, outside_users, outside_items = runs.declare(Adam(0.1))
        outside = TPUEmbedding(outside_config)
        outside.restore(path)
        assert np.array_equal(outside.embedding_tables[outside_users].value, saved[users]["rows"])
        assert np.array_equal(outside.embedding_tables[outside_items].value, saved[items]["rows"])

    def test_keys_come_and_go_in_training_alone(self, make, tmp_path):
        """Three rows: what a step named, or the one before, stays; the key that was not named for longest goes."""
        table = TableConfig(capacity=3, dim=2, name="t", initializer=Constant(0.5), combiner="sum", evict=LeastRecent())
        largest = np.uint64(2**64 - 1)

        def train(embedding: TPUEmbedding, *keys: int) -> np.ndarray:
            embedding.enqueue(np.array(keys))
            found = embedding.dequeue()
            embedding.apply_gradients(jnp.ones_like(found))
            return np.asarray(found)[:, 0]

        def look_up(embedding: TPUEmbedding, *keys: int) -> np.ndarray:
            embedding.enqueue(np.array(keys), training=False)
            return np.asarray(embedding.dequeue())[:, 0]

        embedding = make(FeatureConfig(table), 2, SGD(1.0))
        assert train(embedding, 10, -1).tolist() == [0.5, 0.5]
        assert look_up(embedding, 10, 77).tolist() == [-0.5, 0.5]
        assert train(embedding, largest, largest).tolist() == [-0.5, -0.5]
        assert train(embedding, 5, 5).tolist() == [0.5, 0.5]
        # 77 was looked up and has no row; 10 loses its row to -2^63, and begins anew as one without.
        assert train(embedding, -(2**63), 5).tolist() == [0.5, -1.5]
        assert look_up(embedding, 10, -1).tolist() == [0.5, -2.5]
        (found,) = embedding.read_tables().values()
        assert found["key"].tolist() == [-(2**63), -1, 5]
        assert found["rows"][:, 0].tolist() == [-0.5, -2.5, -2.5]
        assert found["count"].tolist() == [1, 3, 3]
        assert found["last"].tolist() == [4, 2, 4]
        path = str(tmp_path / "saved")
        embedding.save(path)
        expected = train(embedding, 11, 11), train(embedding, 12, -1)
        embedding.restore(path)
        assert [train(embedding, 11, 11).tolist(), train(embedding, 12, -1).tolist()] == [e.tolist() for e in expected]
        # Of three keys that were named just now, none goes for another one.
        assert look_up(embedding, 12, -1).tolist() == [expected[1][0] - 1, expected[1][1] - 1]
        with pytest.raises(ValueError, match=r"'t' with capacity=3 outside the scope of a strategy"):
            TPUEmbedding(FeatureConfig(table)).build()

    def test_gradients_of_a_batch_enqueued_for_inference_reach_no_other_key(self, make):
        """In a pipeline they would wait for the next forward, which may give the row to another key."""
        table = TableConfig(capacity=2, dim=2, name="t", initializer=Constant(0.0), combiner="sum", evict=LeastRecent())
        embedding = make(FeatureConfig(table), 1, SGD(1.0), True)
        embedding.enqueue(np.array([1]))
        embedding.apply_gradients(jnp.zeros_like(embedding.dequeue()))
        for _ in range(2):
            embedding.enqueue(np.array([7]))
            embedding.apply_gradients(jnp.zeros_like(embedding.dequeue()))
        embedding.enqueue(np.array([1]), training=False, name="a")
        embedding.apply_gradients(100 * jnp.ones_like(embedding.dequeue("a")), name="a")
        embedding.enqueue(np.array([3]))
        embedding.apply_gradients(jnp.zeros_like(embedding.dequeue()))
        embedding.drain()
        (found,) = embedding.read_tables().values()
        assert found["key"].tolist() == [3, 7]
        assert not found["rows"].any()

    def test_sent_gradients_update_as_applied_ones(self, make, strategy):
        rates = [0.5, 0.25]
        results = []
        for send in (False, True):
            first = TableConfig(8, 2, optimizer=SGD(lambda: rates[0]), name="first")
            second = TableConfig(8, 3, optimizer=SGD(lambda: rates[1]), name="second")
            config = (FeatureConfig(first), FeatureConfig(second, max_sequence_length=2), FeatureConfig(first))
            embedding = make(config, 4)
            embedding.enqueue((np.arange(4), runs.ragged([[1, 2], [3], [], [4, 5, 6]]), np.array([0, 0, 1, 1])))
            activations = embedding.dequeue()
            gradients = jax.tree.map(
                lambda leaf: 1.0 + jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape), activations
            )
            if send:
                send_tpu_embedding_gradients(
                    list(gradients), [np.float32(rate) for rate in rates], embedding.serialized_config
                )
            else:
                embedding.apply_gradients(gradients)
            results.append([arrays["rows"] for arrays in embedding.read_tables().values()])
            embedding.close()
        for applied, sent in zip(*results, strict=True):
            assert np.array_equal(applied, sent)

    def test_a_function_that_the_strategy_runs_trains_on_its_share(self, make, strategy):
        table = TableConfig(9, 2, combiner="sum", name="t")
        embedding = make({"x": FeatureConfig(table)}, 4, SGD(1.0))
        before = embedding.read_tables()[table]["rows"]
        share = 4 // strategy.num_replicas_in_sync

        def step(scale: float) -> tuple[int, tuple[int, ...], int]:
            context = get_replica_context()
            activations = embedding.dequeue()
            embedding.apply_gradients({"x": scale * jnp.ones_like(activations["x"])})
            context.state["steps"] = context.state.get("steps", 0) + 1
            return context.replica_id_in_sync_group, activations["x"].shape, context.state["steps"]

        embedding.enqueue({"x": np.array([1, 2, 2, 3])})
        results = strategy.local_results(strategy.run(step, args=(2.0,)))
        first_steps = results[0][2]
        assert [result[:2] for result in results] == [(at, (share, 2)) for at in range(len(results))]
        moved = before - embedding.read_tables()[table]["rows"]
        np.testing.assert_allclose(moved[:, 0], [0, 2, 4, 2, 0, 0, 0, 0, 0], atol=1e-5)
        embedding.enqueue({"x": np.array([1, 2, 2, 3])})
        assert strategy.local_results(strategy.run(step, args=(2.0,)))[0][2] == first_steps + 1

        def evaluate() -> float:
            return float(jnp.sum(embedding.dequeue()["x"]))

        embedding.enqueue({"x": np.array([4, 5, 6, 7])}, training=False)
        scores = strategy.local_results(strategy.run(evaluate))
        np.testing.assert_allclose(sum(scores), before[4:8].sum(), rtol=1e-5)
        assert get_replica_context() is None

    @pytest.mark.parametrize("num_samples", [4, 5])
    def test_a_split_batch_is_the_batch(self, make, strategy, num_samples):
        table = TableConfig(60, 2, combiner="sum", name="t")
        feature = FeatureConfig(table, max_sequence_length=2)
        embedding = make({"pair": (feature, FeatureConfig(table)), "one": FeatureConfig(table)}, num_samples, SGD(1.0))
        rng = np.random.default_rng(3)
        rows = [rng.integers(0, 60, size).tolist() for size in (2, 0, 3, 1, 2)[:num_samples]]

        def in_replica(batch, weights):
            embedding.enqueue(batch, weights, training=False)
            return jax.tree.map(np.asarray, embedding.dequeue())

        for form in ("ragged", "sparse", "csr", "coo", "pyarrow"):
            values, weights = runs.in_form(form, rows)
            batch = {"pair": (values, values), "one": rng.integers(0, 60, num_samples)}
            weights = {"pair": (None, weights), "one": None}
            embedding.enqueue(batch, weights, training=False)
            whole = embedding.dequeue()
            embedding.enqueue(strategy.split(batch), strategy.split(weights), training=False)
            jax.tree.map(np.testing.assert_array_equal, embedding.dequeue(), whole)
            parts = strategy.local_results(strategy.run(in_replica, (strategy.split(batch), strategy.split(weights))))
            together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
            jax.tree.map(np.testing.assert_array_equal, together, whole)

    def test_a_first_batch_without_samples_leaves_the_size_open(self, make):
        table = TableConfig(9, 2, combiner="sum", name="t", initializer=Constant(0.0))
        features = {"bag": FeatureConfig(table), "pair": FeatureConfig(table, max_sequence_length=2)}
        embedding = make(features, None, SGD(1.0))

        def step(rows):
            embedding.enqueue({"bag": Ragged.of_lists(rows), "pair": Ragged.of_lists(rows)})
            shapes = jax.tree.map(lambda one: one.shape, found := embedding.dequeue())
            embedding.apply_gradients(jax.tree.map(jnp.ones_like, found))
            return shapes

        def rows():
            return embedding.read_tables()[table]["rows"][:, 0].tolist()

        assert step([]) == {"bag": (0, 2), "pair": (0, 2, 2)}
        assert rows() == [0.0] * 9
        assert step([[0], [1, 2], [3], []]) == {"bag": (4, 2), "pair": (4, 2, 2)}
        assert step([]) == {"bag": (0, 2), "pair": (0, 2, 2)}
        assert step([[4], [], [], [4]]) == {"bag": (4, 2), "pair": (4, 2, 2)}
        assert rows() == [-2.0, -2.0, -2.0, -2.0, -4.0, 0.0, 0.0, 0.0, 0.0]

    @pytest.mark.parametrize("name", [None, "named"])
    def test_uneven_batches_in_flight_get_their_own_gradients(self, make, strategy, name):
        """Of several replicas each gets more samples of one batch and fewer of the other."""
        num_replicas = strategy.num_replicas_in_sync
        table = TableConfig(20, 2, name="t", initializer=Constant(0.0))
        feature = FeatureConfig(table)
        embedding = make(feature, 7, SGD(1.0), True)

        def parts(first, sizes):
            ends = np.cumsum([0, *sizes])
            values = tuple(np.arange(first + start, first + end) for start, end in pairwise(ends))
            return PerReplica(values) if num_replicas > 1 else np.concatenate(values)

        def gradients_of(batch):
            return jnp.asarray(np.arange(14, dtype=np.float32).reshape(7, 2) + 100 * batch)

        def of_driver():
            for first, sizes in ((0, (3, 4)), (7, (5, 2))):
                embedding.enqueue(parts(first, sizes), name=name)
            embedding.dequeue(name)
            embedding.dequeue(name)
            for batch in range(2):
                embedding.apply_gradients(gradients_of(batch), name)

        def in_replicas():
            def dequeue():
                embedding.dequeue(name)

            def apply(gradients):
                embedding.apply_gradients(gradients, name)

            def cut(whole, sizes):
                of_replicas = tuple(np.split(whole, np.cumsum(sizes)[:-1]))
                return PerReplica(of_replicas) if num_replicas > 1 else whole

            for first, sizes in ((0, (3, 4)), (7, (5, 2))):
                embedding.enqueue(parts(first, sizes), name=name)
            strategy.run(dequeue)
            strategy.run(dequeue)
            for batch, sizes in enumerate(((3, 4), (5, 2))):
                strategy.run(apply, (cut(gradients_of(batch), sizes),))

        expected = np.zeros((20, 2), np.float32)
        for way in (of_driver, in_replicas):
            way()
            expected[:14] -= np.concatenate([gradients_of(0), gradients_of(1)])
            np.testing.assert_array_equal(embedding.read_tables()[table]["rows"], expected)

    def test_restore_refuses_while_a_batch_is_in_flight(self, make, tmp_path):
        table = TableConfig(4, 2, name="t", initializer=Constant(0.0))
        embedding = make(FeatureConfig(table), 2, SGD(1.0))
        saved = str(tmp_path / "saved")
        embedding.enqueue(np.array([0, 1]))
        gradient = jnp.ones_like(embedding.dequeue())
        embedding.save(saved)
        with pytest.raises(OrderError, match="restore was called while 1 batch is in flight.*discard"):
            embedding.restore(saved)
        embedding.apply_gradients(gradient)
        assert embedding.read_tables()[table]["rows"][:, 0].tolist() == [-1.0, -1.0, 0.0, 0.0]
        embedding.enqueue(np.array([2, 3]))
        embedding.discard()
        embedding.restore(saved)
        assert not embedding.read_tables()[table]["rows"].any()
        # With a name, a batch that was dequeued may have been one of inference: then none is in flight, and no gradient
        # of it comes through.
        embedding.enqueue(np.array([2, 3]), name="n")
        embedding.dequeue("n")
        embedding.restore(saved)
        with pytest.raises(OrderError, match="apply_gradients was called"):
            embedding.apply_gradients(gradient, "n")
        assert not embedding.read_tables()[table]["rows"].any()

    def test_values_of_replicas_are_reduced(self, strategy):
        def step(labels, scale):
            return {"sum": jnp.sum(labels) * scale, "each": labels * scale}

        labels = np.arange(5, dtype=np.float32)
        results = strategy.run(step, args=(strategy.split(labels), 2.0))
        of_replicas = strategy.experimental_local_results(results)
        assert len(of_replicas) == strategy.num_replicas_in_sync
        sums = strategy.reduce(ReduceOp.SUM, PerReplica(tuple(one["sum"] for one in of_replicas)), axis=None)
        assert isinstance(sums, jax.Array)
        assert float(sums) == 20.0
        each = PerReplica(tuple(one["each"] for one in of_replicas))
        assert float(strategy.reduce("mean", each, axis=0)) == 4.0

    def test_training_from_distributed_iterables(self, make, strategy):
        """Whole batches that the strategy cuts, and batches that come for each replica, train as whole ones do."""
        table = TableConfig(60, 2, name="t", initializer=Constant(1.0))
        rng = np.random.default_rng(1)
        data = [({"x": rng.integers(0, 60, 4)}, rng.random((4, 2)).astype(np.float32)) for _ in range(3)]

        def train(batches, split):
            embedding = make({"x": FeatureConfig(table)}, 4, SGD(0.5))

            def step(gradient):
                embedding.dequeue()
                embedding.apply_gradients({"x": jnp.asarray(gradient)})

            for features, gradient in batches:
                embedding.enqueue(features)
                strategy.run(step, args=(strategy.split(gradient) if split else gradient,))
            rows = embedding.read_tables()[table]["rows"]
            embedding.close()
            return rows

        def own(context):
            each = context.get_per_replica_batch_size(4)
            start = context.input_pipeline_id * each
            return [jax.tree.map(lambda leaf: leaf[start : start + each], batch) for batch in data]

        expected = train(data, split=True)
        assert not np.array_equal(expected, np.ones_like(expected))
        cut = strategy.experimental_distribute_dataset(data)
        np.testing.assert_array_equal(train(cut, split=False), expected)
        apart = strategy.experimental_distribute_datasets_from_function(own)
        np.testing.assert_array_equal(train(apart, split=False), expected)

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ((5,), "Found 5 as fn of strategy.run. Expected a function"),
            ((abs, 5), r"Found a int as args of strategy.run. .*Write args=\(value,\)"),
            ((abs, "5"), "Found a str as args of strategy.run"),
            ((abs, {"x": 5}), "Found a dict as args of strategy.run"),
            ((abs, np.arange(1)), "Found a ndarray as args of strategy.run"),
            ((abs, (), 5), "Found 5 as kwargs of strategy.run. Expected a dict"),
            ((abs, (), {1: 5}), "Found {1: 5} as kwargs of strategy.run"),
        ],
    )
    def test_what_cannot_be_called_is_refused_before_any_replica_is_asked(self, strategy, call, said):
        with pytest.raises(TypeError, match=f"^{said}"):
            strategy.run(*call)

    def test_a_place_where_nothing_can_be_saved_is_refused_by_the_storage(self, make):
        config, _, _ = runs.declare(SGD(0.1))
        embedding = make(config, runs.BATCH_SIZE)
        embedding.build()
        before = embedding.read_tables()
        for save in (embedding.save, Checkpoint(embedding=embedding).save):
            with pytest.raises(StorageError, match=r"/proc/nope/x.* failed: No such file"):
                save("/proc/nope/x")
        for table, arrays in embedding.read_tables().items():
            assert np.array_equal(arrays["rows"], before[table]["rows"])
