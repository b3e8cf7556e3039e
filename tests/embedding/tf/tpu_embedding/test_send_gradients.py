"""`send_tpu_embedding_gradients`: both layouts, rates by tag, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_config.serialized import serialize_config, to_config
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.send_gradients import send_tpu_embedding_gradients

BATCH_SIZE = 3


@pytest.fixture
def strategy():
    return LocalStrategy()


def declared():
    """Two tables; the first has a dense feature, a sequence of two and another dense feature, in this order."""
    first = TableConfig(8, 2, optimizer=SGD(lambda: 1 / 0), name="first", combiner="sum")
    second = TableConfig(8, 3, optimizer=SGD(0.5), name="second", combiner="sum")
    config = [
        FeatureConfig(first),
        FeatureConfig(second),
        FeatureConfig(first, max_sequence_length=2),
        FeatureConfig(first),
    ]
    return config, first, second


def enqueued(strategy, config, **keywords):
    with strategy.scope():
        embedding = TPUEmbedding(config, BATCH_SIZE, **keywords)
    sequence = Ragged.of_lists([[1, 2], [3], []])
    embedding.enqueue([np.array([0, 1, 2]), np.array([0, 1, 2]), sequence, np.array([7, 7, 6])])
    return embedding, embedding.dequeue()


def gradients_like(activations):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=one.shape), jnp.float32) for one in activations]


def moves(embedding, before):
    return [before[table]["rows"] - arrays["rows"] for table, arrays in embedding.read_tables().items()]


def expected_moves(gradients, rates):
    dense, other, sequence, last = (np.asarray(one, np.float64) for one in gradients)
    first, second = np.zeros((8, 2)), np.zeros((8, 3))
    np.add.at(first, [0, 1, 2], dense)
    np.add.at(first, [1, 2, 3], sequence[[0, 0, 1], [0, 1, 0]])
    np.add.at(first, [7, 7, 6], last)
    np.add.at(second, [0, 1, 2], other)
    return [first * rates[0], second * rates[1]]


def test_one_gradient_per_feature_with_the_given_rates(strategy):
    config, _, _ = declared()
    embedding, activations = enqueued(strategy, config)
    before, gradients = embedding.read_tables(), gradients_like(activations)
    # The callable of the table is not called: the rate comes with the gradients.
    send_tpu_embedding_gradients(gradients, [0.25], embedding.serialized_config)
    for found, expected in zip(moves(embedding, before), expected_moves(gradients, (0.25, 0.5)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert embedding.metrics.learning_rates == {"first": 0.25, "second": 0.5}


def test_one_gradient_per_table_with_samples_side_by_side(strategy):
    config, _, _ = declared()
    embedding, activations = enqueued(strategy, config)
    before, gradients = embedding.read_tables(), gradients_like(activations)
    by_table = [
        jnp.concatenate([gradients[0][:, None], gradients[2], gradients[3][:, None]], axis=1).reshape(-1, 2),
        gradients[1],
    ]
    assert by_table[0].shape == (BATCH_SIZE * 4, 2)
    old = serialize_config(to_config(config, num_hosts=1, num_tensor_cores=1, batch_size=BATCH_SIZE, generation="2.3"))
    send_tpu_embedding_gradients(by_table, [np.float32(0.25)], old)
    for found, expected in zip(moves(embedding, before), expected_moves(gradients, (0.25, 0.5)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    embedding.enqueue([np.array([0, 1, 2]), np.array([0, 1, 2]), Ragged.of_lists([[], [], []]), np.array([7, 7, 6])])
    embedding.dequeue()
    with pytest.raises(ValueError, match=r"Found 4 inputs\. Expected 2, one per table"):
        send_tpu_embedding_gradients(gradients, [0.25], old)
    with pytest.raises(ValueError, match=r"batch \* 4, 2"):
        send_tpu_embedding_gradients([gradients[0], gradients[1]], [0.25], old)


def test_what_does_not_fit_is_refused_and_the_batch_still_waits(strategy):
    config, _, _ = declared()
    embedding, activations = enqueued(strategy, config)
    gradients, serialized = gradients_like(activations), embedding.serialized_config
    for inputs, rates, error, text in [
        (gradients[:3], [0.1], ValueError, "Found 3 inputs. Expected 4, one per feature"),
        (gradients, [], ValueError, "none for tag 0"),
        (gradients, [0.1, 0.2], ValueError, "no table has tag 1"),
        ([None, *gradients[1:]], [0.1], TypeError, "Found <class 'NoneType'> as input 0"),
        ([gradients[0].astype(jnp.bfloat16), *gradients[1:]], [0.1], TypeError, "bfloat16"),
        ([gradients[0][:, :1], *gradients[1:]], [0.1], ValueError, "Found input 0 of shape"),
        ([gradients[0][:2], *gradients[1:]], [0.1], ValueError, "Found gradients of shapes"),
    ]:
        with pytest.raises(error, match=text):
            send_tpu_embedding_gradients(inputs, rates, serialized)
    send_tpu_embedding_gradients(gradients, [0.1], serialized)
    with pytest.raises(RuntimeError, match="without an enqueued training batch"):
        send_tpu_embedding_gradients(gradients, [0.1], serialized)


def test_the_engine_is_found_by_its_configuration(strategy):
    config, _, _ = declared()
    embedding, activations = enqueued(strategy, config)
    with LocalStrategy().scope():
        other = TPUEmbedding(FeatureConfig(TableConfig(5, 2, name="other")), 2, Adagrad(0.1))
        send_tpu_embedding_gradients(gradients_like(activations), [0.1], embedding.serialized_config)
    foreign = other.serialized_config
    other.close()
    with pytest.raises(ValueError, match=r"none of [0-9]+ running engines"):
        send_tpu_embedding_gradients([jnp.ones((2, 2))], [], foreign)
    with pytest.raises(ValueError, match=r"none of [0-9]+ running engines"):
        # Before the rates are counted by a configuration that is not meant.
        send_tpu_embedding_gradients([jnp.ones((2, 2))], [0.1], b"")


def test_names_and_pipelines_go_through(strategy):
    config, _, _ = declared()
    embedding, activations = enqueued(strategy, config, pipeline_execution_with_tensor_core=True)
    before = embedding.read_tables()
    send_tpu_embedding_gradients(gradients_like(activations), [0.1], embedding.serialized_config)
    embedding.enqueue(
        [np.array([0, 1, 2]), np.array([0, 1, 2]), Ragged.of_lists([[1, 2], [3], []]), np.array([7, 7, 6])], name="n"
    )
    stale = embedding.dequeue(name="n")
    np.testing.assert_array_equal(np.asarray(stale[1]), list(before.values())[1]["rows"][:3])
    # The name of the operation ties it to no batch.
    send_tpu_embedding_gradients(jax.tree.map(jnp.ones_like, stale), [0.1], embedding.serialized_config, name="other")
    with pytest.raises(RuntimeError, match="without an enqueued"):
        send_tpu_embedding_gradients(jax.tree.map(jnp.ones_like, stale), [0.1], embedding.serialized_config, name="n")
