"""Objects that change refuse to be changed inside functions that JAX traces, and are as before afterwards; in
`embedding.tracing`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD as RowSGD
from podembed.embedding.tf.keras import keras_optimizers
from podembed.embedding.tf.keras.keras_optimizers import SGD, Adam, AdamW
from podembed.embedding.tf.keras.schedules import ExponentialDecay
from podembed.embedding.tf.keras.tape import GradientTape
from podembed.embedding.tf.keras.variable import Variable
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.send_gradients import send_tpu_embedding_gradients
from podembed.embedding.tf.tpu_embedding.serving import TPUEmbeddingForServing

TRACED = "inside a function that JAX traces"


def _scanned(function: Callable[[Any], Any]) -> Any:
    return jax.lax.scan(lambda carry, x: (function(x) + carry, x), 0.0, jnp.ones(2))


# Each runs a function of one float while JAX traces it.
TRACES = {
    "jit": lambda function: jax.jit(function)(1.0),
    "grad": lambda function: jax.grad(function)(1.0),
    "vmap": lambda function: jax.vmap(function)(jnp.ones(2)),
    "scan": _scanned,
    "cond": lambda function: jax.lax.cond(True, function, lambda x: x, 1.0),
    "eval_shape": lambda function: jax.eval_shape(function, 1.0),
}


@pytest.fixture(params=TRACES)
def traced(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Any]], Any]:
    """Traces a function that does something with a placeholder."""

    def run(act: Callable[[Any], Any]) -> None:
        def function(x: Any) -> Any:
            act(x)
            return x

        TRACES[request.param](function)

    return run


@pytest.mark.parametrize(
    "act",
    [
        lambda variable, x: variable.assign(x),
        lambda variable, x: variable.assign_add(x),
        lambda variable, x: variable.assign_sub(x),
        lambda variable, x: variable.assign(5.0),
    ],
    ids=["assign", "assign_add", "assign_sub", "a number"],
)
def test_assignments_are_refused_at_the_call(traced, act):
    variable = Variable(2.0, name="w")
    with pytest.raises(RuntimeError, match=f"assignment to variable 'w' {TRACED}.*as_optax"):
        traced(lambda x: act(variable, x))
    assert variable.numpy() == 2.0
    assert variable.assign_add(1.0).numpy() == 3.0


CHANGES: dict[str, Callable[[Any, Variable, Any], Any]] = {
    "apply_gradients": lambda optimizer, variable, x: optimizer.apply_gradients([(x, variable)]),
    "minimize": lambda optimizer, variable, x: optimizer.minimize(lambda: variable * x, [variable]),
    "build": lambda optimizer, variable, x: optimizer.build([variable]),
    "add_variable": lambda optimizer, variable, x: optimizer.add_variable(None),
    "add_variable_from_reference": lambda optimizer, variable, x: optimizer.add_variable_from_reference(variable, "a"),
    "finalize_variable_values": lambda optimizer, variable, x: optimizer.finalize_variable_values([variable]),
    "iterations = ...": lambda optimizer, variable, x: setattr(optimizer, "iterations", 3),
    "exclude_from_weight_decay": lambda optimizer, variable, x: optimizer.exclude_from_weight_decay([variable]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rate", [0.1, ExponentialDecay(0.1, 10, 0.5)], ids=["fixed", "schedule"])
def test_what_changes_an_optimizer_is_refused_at_the_call(traced, change, rate):
    optimizer, variable = AdamW(rate, use_ema=True), Variable(2.0, name="w")
    with pytest.raises(RuntimeError, match=f"{change} of optimizer 'AdamW' {TRACED}.*as_optax"):
        traced(lambda x: CHANGES[change](optimizer, variable, x))
    # Nothing has changed: it goes on as one that was never called so.
    other, twin = AdamW(rate, use_ema=True), Variable(2.0)
    optimizer.apply_gradients([(1.0, variable)])
    other.apply_gradients([(1.0, twin)])
    assert [one.numpy() for one in [variable, *optimizer.variables]] == [
        one.numpy() for one in [twin, *other.variables]
    ]


def test_a_built_optimizer_is_refused_as_well_and_keeps_its_slots(traced):
    optimizer, variable = Adam(0.1), Variable(2.0)
    optimizer.apply_gradients([(1.0, variable)])
    before = [one.numpy() for one in [variable, *optimizer.variables]]
    with pytest.raises(RuntimeError, match=TRACED):
        traced(lambda x: optimizer.apply_gradients([(x, variable)]))
    for name in ("learning_rate", "lr"):
        with pytest.raises(RuntimeError, match=TRACED):
            traced(lambda x, name=name: setattr(optimizer, name, x))
    with pytest.raises(RuntimeError, match=TRACED):
        traced(lambda x: optimizer.iterations.assign(7))
    assert [one.numpy() for one in [variable, *optimizer.variables]] == before


def test_what_is_made_inside_may_change_inside_and_not_outside():
    kept = []

    @jax.jit
    def step(weight, gradient):
        optimizer, variable = SGD(0.5), Variable(weight)
        optimizer.apply_gradients([(gradient, variable)])
        kept.extend([optimizer, variable])
        return variable.value

    assert float(step(2.0, 1.0)) == 1.5
    with pytest.raises(RuntimeError, match="which was made inside a function that JAX traces"):
        kept[1].assign(1.0)
    with pytest.raises(RuntimeError, match="which was made inside a function that JAX traces"):
        kept[0].apply_gradients([(1.0, Variable(1.0))])


@pytest.mark.parametrize("cls", [SGD, Adam, keras_optimizers.RMSprop, keras_optimizers.Ftrl])
def test_the_pure_form_still_runs_inside(cls):
    transformation = cls(0.1, use_ema=True, ema_overwrite_frequency=2).as_optax()
    params = {"w": jnp.ones(2)}

    def step(carry, gradient):
        params, state = carry
        updates, state = transformation.update({"w": gradient}, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    carry = (params, transformation.init(params))
    gradients = jnp.asarray([[1.0, -1.0], [0.5, 2.0], [1.0, 1.0]])
    scanned, _ = jax.lax.scan(step, carry, gradients)
    for gradient in gradients:
        carry, _ = step(carry, gradient)
    np.testing.assert_allclose(scanned[0]["w"], carry[0]["w"], rtol=1e-6)


def test_a_compiled_update_of_a_step_still_runs():
    optimizer, variable = Adam(0.1), Variable([1.0, 2.0])
    optimizer.jit_compile = True
    for _ in range(2):
        optimizer.apply_gradients([([1.0, -1.0], variable)])
    assert variable.assign_add([1.0, 1.0]).shape == (2,)
    assert int(optimizer.iterations) == 2


def test_variables_travel():
    variable = pickle.loads(pickle.dumps(Variable([1.0], name="w")))  # noqa: S301  # made here
    assert variable.assign([2.0]).numpy() == [2.0]


def test_a_tape_from_outside_keeps_no_placeholders(traced):
    tape, variable = GradientTape(), Variable(3.0)
    for method in ("record", "watch"):
        with pytest.raises(RuntimeError, match=f"{method} of a GradientTape {TRACED}"):
            traced(
                lambda x, method=method: (
                    tape.record(lambda: variable * x) if method == "record" else tape.watch(variable)
                )
            )
    loss = tape.record(lambda: variable * variable)
    assert float(tape.gradient(loss, variable)) == 6.0


def test_a_tape_made_inside_works_inside():
    variable = Variable(3.0)

    @jax.jit
    def gradient(scale):
        tape = GradientTape()
        return tape.gradient(tape.record(lambda: variable * variable * scale), variable)

    assert float(gradient(2.0)) == 12.0


def _features() -> dict[str, FeatureConfig]:
    return {"x": FeatureConfig(TableConfig(8, 4, combiner="sum", name="t"))}


@pytest.mark.parametrize("method", ["build", "drain", "discard", "read_tables", "save", "restore", "close"])
def test_an_embedding_is_neither_built_nor_changed_while_tracing(method, tmp_path):
    with LocalStrategy().scope():
        embedding = (
            TPUEmbedding(_features(), 2, RowSGD(1.0))
            if method != "build"
            else TPUEmbedding(_features(), optimizer=RowSGD(1.0))
        )
    arguments = {"build": (None, 2), "save": (str(tmp_path / "s"),), "restore": (str(tmp_path / "s"),)}.get(method, ())

    @jax.jit
    def step(x):
        getattr(embedding, method)(*arguments)
        return x

    with pytest.raises(RuntimeError, match=f"{method} was called {TRACED}"):
        step(1.0)
    assert not (tmp_path / "s").exists()
    embedding.enqueue({"x": np.array([1, 2])})
    assert embedding.dequeue()["x"].shape == (2, 4)


def test_gradients_are_not_sent_once_while_tracing():
    with LocalStrategy().scope():
        embedding = TPUEmbedding(_features(), 2, RowSGD(1.0))
    embedding.enqueue({"x": np.array([1, 2])})
    gradient = np.ones(embedding.dequeue()["x"].shape, np.float32)
    (table,) = embedding.read_tables().values()

    @jax.jit
    def step(x):
        send_tpu_embedding_gradients([gradient], [], embedding.serialized_config)
        return x

    with pytest.raises(RuntimeError, match=f"send_tpu_embedding_gradients was called {TRACED}"):
        step(1.0)
    (after,) = embedding.read_tables().values()
    np.testing.assert_array_equal(after["rows"], table["rows"])


@pytest.mark.parametrize("make", [TPUEmbeddingForServing, TPUEmbedding], ids=["serving", "outside a strategy"])
def test_tables_are_not_made_of_placeholders(traced, make):
    serving = make(_features(), optimizer=RowSGD(1.0))
    with pytest.raises(RuntimeError, match=f"the making of the tables {TRACED}"):
        traced(lambda x: serving.embedding_tables)
    (table,) = serving.embedding_tables.values()
    assert table.assign_add(np.ones((8, 4), np.float32)).shape == (8, 4)
    with pytest.raises(RuntimeError, match=TRACED):
        traced(lambda x: table.assign(table * x))
