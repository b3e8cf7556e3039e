"""The members of `tf.Module` that embeddings and optimizers have."""

import jax
import jax.numpy as jnp
import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.tf.keras import keras_optimizers
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing


def declared():
    users, items = TableConfig(6, 2, name="users"), TableConfig(4, 3, name="items")
    return {"u": FeatureConfig(users), "i": FeatureConfig(items)}, users, items


def test_outside_a_strategy_the_tables_are_the_variables():
    config, users, items = declared()
    embedding = TPUEmbedding(config, optimizer=Adagrad(0.1))
    assert [variable.name for variable in embedding.variables] == ["items", "users"]
    assert embedding.trainable_variables == embedding.variables
    assert embedding.non_trainable_variables == ()
    # The same objects as by their declaration, so an assignment is seen.
    assert embedding.variables[1] is embedding.embedding_tables[users]
    embedding.variables[0].assign(np.ones((4, 3), np.float32))
    assert embedding.read_tables()[items]["rows"].min() == 1.0


def test_those_for_serving_have_them_too():
    embedding = TPUEmbeddingForServing(declared()[0], SGD(0.1))
    assert embedding.trainable_variables == tuple(embedding.embedding_tables.values())


def test_under_a_strategy_the_hosts_hold_the_rows():
    with LocalStrategy().scope():
        embedding = TPUEmbedding(declared()[0], 2, SGD(0.1))
    assert embedding.variables == embedding.trainable_variables == embedding.non_trainable_variables == ()
    embedding.close()


def test_names():
    embedding = TPUEmbedding(declared()[0])
    assert (embedding.name, embedding.submodules) == ("tpu_embedding", ())

    assert TPUEmbeddingForServing(declared()[0], SGD(0.1)).name == "tpu_embedding_for_serving"

    class Named(TPUEmbedding):
        @TPUEmbedding.with_name_scope
        def twice(self, value):
            """Doubles."""
            return value * 2

    named = Named(declared()[0])
    assert (named.twice(3), named.twice.__doc__) == (6, "Doubles.")
    compiled = jax.jit(named.twice).lower(jnp.ones(2)).as_text(debug_info=True)
    assert "named/" in compiled

    def scoped(value):
        with named.name_scope:
            value = value + 1
        with named.name_scope:
            return value * 3

    assert "named/add" in jax.jit(scoped).lower(jnp.ones(2)).as_text(debug_info=True)


def test_an_optimizer_has_them_and_keeps_its_own_name():
    class Halving(keras_optimizers.SGD):
        @keras_optimizers.SGD.with_name_scope
        def halved(self, value):
            return value / 2

    optimizer, variable = Halving(0.1, momentum=0.9, name="mine"), Variable([1.0], name="w")
    optimizer.apply_gradients([([1.0], variable)])
    assert (optimizer.name, optimizer.submodules, optimizer.trainable_variables) == ("mine", (), ())
    names = [one.name for one in optimizer.non_trainable_variables]
    assert names == [one.name for one in optimizer.variables]
    assert sorted(names) == ["iteration", "learning_rate", "mine/m/w"]
    compiled = jax.jit(lambda value: optimizer.halved(value)).lower(jnp.ones(2)).as_text(debug_info=True)
    assert "mine/" in compiled
