"""One checkpoint of model, optimizer and embedding: what comes back is what was there, and nothing else is taken for
it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam
from podembed.embedding.tf.keras.keras_optimizers import Adam as KerasAdam
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint, CheckpointPartsMismatch, latest_checkpoint
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.stepwise.saved_index import AlreadySaved, NothingSaved


def declared(optimizer=None, *, num_rows=50, dim=3):
    table = TableConfig(num_rows, dim, name="t", optimizer=optimizer or Adagrad(0.1))
    return {"x": FeatureConfig(table)}, table


def embedding_of(config, batch_size=4):
    with LocalStrategy().scope():
        return TPUEmbedding(config, batch_size)


def first_params():
    return {
        "kernel": jnp.arange(6.0).reshape(3, 2),
        "layers": [jnp.ones(2, jnp.bfloat16), np.arange(3, dtype=np.int64)],
    }


class Training:
    """A loop over an embedding and a dense model with optax, as a user would write it."""

    def __init__(self):
        self.config, self.table = declared()
        self.embedding = embedding_of(self.config)
        self.params = {"kernel": jnp.ones((3, 2))}
        self.optimizer = optax.adam(0.1)
        self.state = self.optimizer.init(self.params)
        self.checkpoint = Checkpoint(model=self.params, optimizer=self.state, embedding=self.embedding, step=0)

    def train(self, steps):
        def loss(params, activations):
            return jnp.mean((activations["x"] @ params["kernel"] - 1.0) ** 2)

        for step in steps:
            self.embedding.enqueue({"x": np.arange(4) + step})
            activations = self.embedding.dequeue()
            dense, rows = jax.grad(loss, argnums=(0, 1))(self.params, activations)
            self.embedding.apply_gradients(rows)
            updates, self.state = self.optimizer.update(dense, self.state, self.params)
            self.params = optax.apply_updates(self.params, updates)
            self.checkpoint.step = step + 1
        self.checkpoint.model, self.checkpoint.optimizer = self.params, self.state

    def restore(self, path):
        restored = self.checkpoint.restore(path)
        self.params, self.state = restored["model"], restored["optimizer"]
        return restored["step"]

    def values(self):
        return self.params, self.state, self.embedding.read_tables()[self.table], self.embedding.metrics.num_steps


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_was_not_interrupted(tmp_path):
    whole = Training()
    whole.train(range(6))
    first = Training()
    first.train(range(3))
    path = first.checkpoint.save(tmp_path / "checkpoints")
    saved = first.values()
    first.train(range(3, 5))
    # Back to the checkpoint in the same process, and in one that starts.
    first.restore(path)
    equal(first.values(), saved)
    second = Training()
    step = second.restore(latest_checkpoint(tmp_path / "checkpoints"))
    assert step == 3
    equal(second.values(), saved)
    second.train(range(step, 6))
    equal(second.values(), whole.values())


def test_every_kind_of_part_comes_back_as_it_was(tmp_path):
    variables = [Variable(np.ones(2, np.float32), name="a"), Variable(np.zeros((), np.int64), name="b")]
    optimizer = KerasAdam(0.1)
    optimizer.build(variables[:1])
    optimizer.apply_gradients([(jnp.ones(2), variables[0])])
    config, _ = declared()
    parts = {
        "model": first_params(),
        "variables": variables,
        "single": Variable(np.float32(3.0), name="single"),
        "optimizer": optimizer,
        "numbers": (7, 0.5, True, np.float32(1.5)),
        "nothing": optax.EmptyState(),
        "replicas": PerReplica(({"a": np.array([np.nan])}, {"a": np.array([np.nan])})),
        "embedding": embedding_of(config),
    }
    path = Checkpoint(**parts).save(tmp_path)
    before = [variable.numpy().copy() for variable in (*variables, parts["single"], *optimizer.variables)]
    for variable in (*variables, parts["single"], *optimizer.variables):
        variable.assign(variable.value * 0)
    again = Checkpoint(**parts)
    restored = again.restore(path)
    equal(restored["model"], parts["model"])
    assert isinstance(restored["model"]["kernel"], jax.Array)
    assert type(restored["model"]["layers"][1]) is np.ndarray
    assert restored["numbers"] == (7, 0.5, True, np.float32(1.5))
    assert [type(number) for number in restored["numbers"]] == [int, float, bool, np.float32]
    assert restored["nothing"] == optax.EmptyState()
    assert np.isnan(restored["replicas"]["a"]).all()
    assert (restored["optimizer"], restored["variables"][0]) == (optimizer, variables[0])
    after = [variable.numpy() for variable in (*variables, parts["single"], *optimizer.variables)]
    equal(after, before)
    assert again.model is restored["model"]


def test_a_part_may_be_restored_alone_and_from_shapes(tmp_path):
    config, table = declared()
    embedding = embedding_of(config)
    path = Checkpoint(model=first_params(), embedding=embedding, step=3).save(tmp_path)
    shapes = jax.eval_shape(lambda: {"kernel": jnp.zeros((3, 2))})
    with pytest.raises(CheckpointPartsMismatch, match="model/layers/0: in the checkpoint alone"):
        Checkpoint(model=shapes).restore(path)
    assert Checkpoint(step=0).restore(path) == {"step": 3}
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), first_params())
    equal(Checkpoint(model=template).restore(path)["model"], first_params())
    with pytest.raises(TypeError, match="shape without values at 'model/kernel'"):
        Checkpoint(model=template).save(tmp_path)
    # Tables alone, by everything that restores tables.
    rows = embedding.read_tables()[table]["rows"]
    outside = TPUEmbedding(config, optimizer=None)
    outside.restore(path)
    np.testing.assert_array_equal(outside.embedding_tables[table].value, rows)
    serving = TPUEmbeddingForServing(config)
    Checkpoint(embedding=serving).restore(path)
    np.testing.assert_array_equal(serving.embedding_tables[table].value, rows)
    unbuilt = embedding_of(config, batch_size=None)
    Checkpoint(embedding=unbuilt).restore(path)
    unbuilt.build(4)
    np.testing.assert_array_equal(unbuilt.read_tables()[table]["rows"], rows)


def test_every_difference_is_listed_and_nothing_is_changed(tmp_path):
    config, _ = declared()
    embedding = embedding_of(config)
    path = Checkpoint(model=first_params(), optimizer=optax.adam(1.0).init(first_params()), embedding=embedding).save(
        tmp_path
    )
    other_config, other_table = declared(num_rows=60)
    other = embedding_of(other_config)
    before = other.read_tables()[other_table]
    model = {"kernel": jnp.zeros((2, 3)), "layers": [jnp.ones(2, jnp.float32)], "bias": jnp.zeros(1)}
    checkpoint = Checkpoint(model=model, optimizer=optax.sgd(1.0).init(model), embedding=other, extra=1)
    with pytest.raises(CheckpointPartsMismatch) as raised:
        checkpoint.restore(path)
    lines = str(raised.value).split("\n  ")
    assert "model/kernel: float32[3, 2] in the checkpoint, float32[2, 3] here" in lines
    assert "model/layers/0: bfloat16[2] in the checkpoint, float32[2] here" in lines
    assert "model/bias: not in the checkpoint" in lines
    assert "model/layers/1: in the checkpoint alone" in lines
    assert "optimizer/0/count: in the checkpoint alone" in lines
    assert any(line.startswith("embedding: table 't' with 50 rows") and "60 rows" in line for line in lines)
    assert any(line.startswith("extra: not in the checkpoint, which has model, optimizer, embedding") for line in lines)
    assert "Expected the parts as they were saved" in str(raised.value)
    equal(other.read_tables()[other_table], before)
    assert checkpoint.model is model
    other_slots, _ = declared(Adam(0.1))
    with pytest.raises(CheckpointPartsMismatch, match="columns.*velocity.* here"):
        Checkpoint(embedding=embedding_of(other_slots)).restore(path)
    without = Checkpoint(model=first_params()).save(tmp_path)
    with pytest.raises(CheckpointPartsMismatch, match="embedding: the checkpoint has no embedding"):
        Checkpoint(embedding=embedding).restore(without)
    with pytest.raises(NothingSaved, match="checkpoint without an embedding"):
        embedding.restore(without)


def test_many_differences_are_counted(tmp_path):
    path = Checkpoint(model={f"{at:02}": np.zeros(1) for at in range(30)}).save(tmp_path)
    with pytest.raises(CheckpointPartsMismatch, match="model/19.*\n  and 10 more"):
        Checkpoint(model={f"{at:02}": np.zeros(2) for at in range(30)}).restore(path)


def test_damage_is_found_before_anything_changes(tmp_path):
    variable = Variable(np.ones(3, np.float32), name="v")
    config, table = declared()
    embedding = embedding_of(config)
    path = Checkpoint(model=[variable], embedding=embedding).save(tmp_path)
    variable.assign(np.zeros(3, np.float32))
    (chunk,) = [file for file in (tmp_path / "ckpt-1").rglob("c/0") if "parts" in file.parts]
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    before = embedding.read_tables()[table]
    with pytest.raises(ChunkDamaged):
        Checkpoint(model=[variable], embedding=embedding).restore(path)
    equal(embedding.read_tables()[table], before)
    assert variable.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ({}, ValueError, "without parts"),
        ({"save": 1}, ValueError, r"parts called \['save'\]"),
        ({"_names": 1}, ValueError, "_names"),
        ({"model": {"a": "text"}}, TypeError, "Found <class 'str'> at 'model/a'"),
        ({"model": {"a": {"b": 1}, "a/b": 2}}, ValueError, r"several arrays called \['model/a/b'\]"),
        ({"model": np.array(["a"])}, TypeError, "Found elements of <U1 at 'model'"),
        ({"model": np.array([object()])}, TypeError, "Found elements of object"),
        ({"model": 1j * np.ones(2)}, TypeError, "complex128"),
        ({"key": jax.random.key(0)}, TypeError, "random key at 'key'.*key_data"),
        ({"model": PerReplica((1, 2))}, ValueError, "different values at 'model' of replicas 0 and 1"),
        ({"model": PerReplica(({"a": 1}, {"b": 1}))}, ValueError, "replica 1 has another structure"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_no_trace(tmp_path, parts, error, text):
    with pytest.raises(error, match=text):
        Checkpoint(**parts).save(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_inside_a_traced_function_nothing_is_saved_or_restored(tmp_path):
    variable = Variable(np.ones(2, np.float32), name="v")
    checkpoint = Checkpoint(model=variable)
    path = checkpoint.save(tmp_path)
    for call in (lambda value: checkpoint.save(tmp_path), lambda value: checkpoint.restore(path)):
        with pytest.raises(RuntimeError, match=r"Checkpoint\.\w+ was called inside a function that JAX traces"):
            jax.jit(call)(1.0)
    assert latest_checkpoint(tmp_path) == path


def test_two_embeddings_and_unbuilt_ones(tmp_path):
    config, _ = declared()
    first, second = embedding_of(config), embedding_of(config, batch_size=None)
    with pytest.raises(ValueError, match=r"several embeddings: \['a', 'b'\]"):
        Checkpoint(a=first, b=second)
    with pytest.raises(RuntimeError, match="unbuilt"):
        Checkpoint(embedding=second).save(tmp_path)
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(AttributeError, match="no part 'modle'"):
        Checkpoint(model=1).modle  # noqa: B018


def test_nothing_saved_is_replaced(tmp_path):
    checkpoint = Checkpoint(model=np.zeros(1))
    checkpoint.write(tmp_path / "a")
    with pytest.raises(AlreadySaved):
        checkpoint.write(tmp_path / "a")
    config, _ = declared(SGD(0.1))
    embedding = embedding_of(config)
    with pytest.raises(AlreadySaved):
        embedding.save(str(tmp_path / "a"))
    embedding.save(str(tmp_path / "b"))
    with pytest.raises(AlreadySaved):
        checkpoint.write(tmp_path / "b")
    assert [checkpoint.save(tmp_path / "c") for _ in range(2)] == [f"{tmp_path}/c/ckpt-{at}" for at in (1, 2)]


def test_gradients_that_wait_are_saved_as_applied(tmp_path):
    config, table = declared(SGD(1.0))
    with LocalStrategy().scope():
        embedding = TPUEmbedding(config, 4, None, True)
    before = embedding.read_tables()[table]["rows"]
    embedding.enqueue({"x": np.arange(4)})
    embedding.apply_gradients({"x": jnp.ones_like(embedding.dequeue()["x"])})
    path = Checkpoint(embedding=embedding).save(tmp_path)
    outside = TPUEmbedding(config)
    outside.restore(path)
    np.testing.assert_allclose(outside.embedding_tables[table].value[:4], before[:4] - 1.0, rtol=1e-6)
