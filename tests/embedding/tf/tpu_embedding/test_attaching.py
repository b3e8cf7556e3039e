"""`initialize_tpu_embedding=False`: an object that uses the engine of another one, if it declares what that engine was
started with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, CustomRowOptimizer, Optimizer, SlotSpec
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding

IDS = {"a": np.array([1, 2]), "b": np.array([3, 3])}


@pytest.fixture
def strategy() -> Iterator[LocalStrategy]:
    strategy = LocalStrategy()
    with strategy.scope():
        yield strategy


def features(
    *, sequence: int = 0, output_shape: Any = None, combiner: str | None = None, **table: Any
) -> dict[str, Any]:
    config = TableConfig(**{"vocabulary_size": 10, "dim": 4, "name": "t", "combiner": "sum", **table})
    first = FeatureConfig(config, max_sequence_length=sequence, output_shape=output_shape, combiner=combiner)
    return {"a": first, "b": FeatureConfig(config)}


def attached(
    config: Any, batch_size: int | None = 2, optimizer: Optimizer | None = None, **keywords: Any
) -> TPUEmbedding:
    return TPUEmbedding(config, batch_size, optimizer or Adagrad(0.5), initialize_tpu_embedding=False, **keywords)


def test_without_an_engine_it_is_refused_when_it_is_made(strategy):
    for batch_size in (2, None):
        with pytest.raises(RuntimeError, match="no engine is running in this strategy.*Build that one first"):
            attached(features(), batch_size)
    TPUEmbedding(features(), optimizer=Adagrad(0.5))
    with pytest.raises(RuntimeError, match="no engine is running"):  # made, but not built
        attached(features())


@pytest.mark.parametrize("batch_size", [2, None])
def test_it_trains_the_tables_of_the_other(strategy, batch_size):
    config = features()
    first = TPUEmbedding(config, 2, Adagrad(0.5))
    # The same declaration, made a second time; first values are used up.
    second = attached(features(initializer=lambda shape, dtype: np.ones(shape, dtype)), batch_size)
    before = first.read_tables()[config["a"].table]["rows"]
    second.enqueue(IDS)
    assert second.dequeue()["a"].shape == (2, 4)
    second.apply_gradients({"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))})
    moved = first.read_tables()[config["a"].table]["rows"] != before
    assert moved.all(axis=1).tolist() == [False, True, True, True] + [False] * 6
    # It does not own the engine.
    second.close()
    first.enqueue(IDS, training=False)


def test_shapes_come_from_the_engine_where_nothing_else_gives_them(strategy):
    TPUEmbedding(features(), 2, Adagrad(0.5))
    second = attached(features(), None)
    second.build()
    second.enqueue(IDS, training=False)
    assert second.dequeue()["b"].shape == (2, 4)


OTHERS: dict[str, tuple[Any, str]] = {
    "name": (lambda: attached(features(name="u")), "the order of tables is \\['u'\\] here and \\['t'\\] in the engine"),
    "vocabulary": (lambda: attached(features(vocabulary_size=11)), "vocabulary_size of table 't' is 11 here and 10"),
    "dim": (lambda: attached(features(dim=8)), "dim of table 't' is 8 here and 4"),
    "combiner": (lambda: attached(features(combiner="mean")), "combiner of feature 'a' is 'mean' here and 'sum'"),
    "combiner of the table": (lambda: attached(_of_tables("mean")), "combiner of table 't' is 'mean' here and 'sum'"),
    "optimizer": (
        lambda: attached(features(), optimizer=SGD(0.5)),
        "optimizer of table 't' is SGD here and Adagrad in the engine",
    ),
    "option of an optimizer": (
        lambda: attached(features(), optimizer=Adagrad(0.5, clip_weight_max=1.0)),
        "clip_weight_max of the optimizer of table 't' is 1.0 here and None in the engine",
    ),
    "pass of an optimizer": (
        lambda: attached(features(), optimizer=Adagrad(0.5, use_gradient_accumulation=False)),
        "use_gradient_accumulation of the optimizer of table 't' is False here and True",
    ),
    "rate": (
        lambda: attached(features(), optimizer=Adagrad(0.25)),
        "learning_rate of table 't' is 0.25 here and 0.5 in the engine",
    ),
    "kind of rate": (
        lambda: attached(features(), optimizer=Adagrad(lambda: 0.5)),
        "learning_rate of table 't' is 'a callable' here and 0.5",
    ),
    "quantization": (
        lambda: attached(features(quantization_config=QuantizationConfig(4, 0.0, 1.0))),
        "quantization_config of table 't' is QuantizationConfig",
    ),
    "policy": (lambda: attached(features(invalid_ids="drop")), "invalid_ids of table 't' is 'drop' here and 'error'"),
    "place": (lambda: attached(features(place="sharded")), "place of table 't' is 'sharded' here and 'host'"),
    "sequence": (lambda: attached(features(sequence=3)), "max_sequence_length of feature 'a' is 3 here and 1"),
    "features": (
        lambda: attached({**features(), "c": FeatureConfig(TableConfig(3, 2, name="c"))}),
        "the order of features is \\['a', 'b', 'c'\\] here and \\['a', 'b'\\] in the engine",
    ),
    "nesting": (lambda: attached(tuple(features().values())), "the order of features is \\['0', '1'\\] here"),
    "pipelining": (
        lambda: attached(features(), pipeline_execution_with_tensor_core=True),
        "pipeline_execution_with_tensor_core is True here and False",
    ),
    "batch": (
        lambda: attached(features(), 4),
        "output shape of feature 'a' is \\(4,\\) here and \\(2,\\) in the engine",
    ),
    "output shape": (
        lambda: attached(features(output_shape=(2, 2))),
        "output shape of feature 'a' is \\(2, 2\\) here and \\(2,\\) in the engine",
    ),
}


def _of_tables(combiner: str) -> dict[str, Any]:
    """The features pool as those of the engine, whose table has another combiner."""
    table = TableConfig(10, 4, name="t", combiner=combiner)
    return {"a": FeatureConfig(table, combiner="sum"), "b": FeatureConfig(table, combiner="sum")}


@pytest.mark.parametrize("other", OTHERS)
def test_another_configuration_is_refused_with_what_differs(strategy, other):
    make, text = OTHERS[other]
    first = TPUEmbedding(features(), 2, Adagrad(0.5))
    with pytest.raises(ValueError, match=f"another configuration than that of the running engine.*{text}"):
        make()
    first.enqueue(IDS)


def test_all_differences_are_named(strategy):
    TPUEmbedding(features(), 2, Adagrad(0.5))
    with pytest.raises(ValueError, match="vocabulary_size.*dim.*optimizer of table 't' is Adam here.*output shape"):
        attached(features(vocabulary_size=3, dim=2), 4, optimizer=Adam(0.5))


def test_an_optimizer_that_the_first_has_written_into_a_shared_table_is_not_the_declared_one(strategy):
    config = features()
    TPUEmbedding(config, 2, Adagrad(0.5))
    with pytest.raises(ValueError, match=r"learning_rate of table 't' is 0.25 here and 0.5 in the engine"):
        attached(config, optimizer=Adagrad(0.25))
    with pytest.raises(ValueError, match="optimizer of table 't' is Adam here and Adagrad"):
        attached(config, optimizer=Adam(0.5))
    attached(config, optimizer=Adagrad(0.5)).enqueue(IDS, training=False)
    TPUEmbedding(config, initialize_tpu_embedding=False)  # declares none


def test_an_optimizer_of_the_table_itself_goes_before_the_one_of_the_object(strategy):
    config = features(optimizer=Adagrad(0.5))
    TPUEmbedding(config, 2, Adam(0.1))
    attached(config, optimizer=Adam(0.3)).enqueue(IDS)


def test_the_batch_is_compared_when_it_is_known(strategy):
    TPUEmbedding(features(), 2, Adagrad(0.5))
    second = attached(features(), None)
    with pytest.raises(ValueError, match=r"output shape of feature 'a' is \(3,\) here and \(2,\)"):
        second.enqueue({"a": np.array([1, 2, 3]), "b": np.array([1, 2, 3])})
    with pytest.raises(ValueError, match=r"output shape of feature 'a' is \(4,\)"):
        attached(features(), None).build(4)
    second.enqueue(IDS)


def test_an_engine_that_takes_the_place_of_the_first_is_compared_as_well(strategy):
    first = TPUEmbedding(features(), 2, Adagrad(0.5))
    second = attached(features())
    first.close()
    with pytest.raises(RuntimeError, match="not running"):
        second.enqueue(IDS)
    third = TPUEmbedding(features(combiner="mean"), 2, Adagrad(0.5))
    with pytest.raises(ValueError, match="another configuration"):
        second.enqueue(IDS)
    third.close()
    TPUEmbedding(features(), 2, Adagrad(0.5))
    second.enqueue(IDS)


def test_functions_of_the_user_are_the_same_if_they_are_one_object(strategy):
    def update(gradient, row, slots, learning_rate, hyperparameters):
        return row - learning_rate * gradient, slots

    def optimizer() -> CustomRowOptimizer:
        return CustomRowOptimizer(update, slots=(SlotSpec(name="s", width="row"),), learning_rate=0.5)

    TPUEmbedding(features(), 2, optimizer())
    attached(features(), optimizer=optimizer()).enqueue(IDS)
    with pytest.raises(ValueError, match="of the optimizer of table 't' is <function"):
        attached(features(), optimizer=replace(optimizer(), update=lambda *values: update(*values)))


def test_a_restore_before_it_is_built_fills_the_engine(strategy, tmp_path):
    config = features()
    first = TPUEmbedding(config, 2, Adagrad(0.5))
    first.save(str(tmp_path / "s"))
    saved = first.read_tables()[config["a"].table]["rows"]
    first.enqueue(IDS)
    first.dequeue()
    first.apply_gradients({"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))})
    second = attached(features(), None)
    second.restore(str(tmp_path / "s"))
    second.build(2)
    np.testing.assert_array_equal(first.read_tables()[config["a"].table]["rows"], saved)


def test_outside_a_strategy_there_is_no_engine_to_compare_with():
    assert len(attached(features(), None).embedding_tables) == 1
