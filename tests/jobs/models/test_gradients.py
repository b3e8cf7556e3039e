"""Gradients of the models with layers in common, in float32, against differences of the same losses in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed import Jagged, ModelBatch, ModelSpec, StepContext
from podembed.embedding.features.activations import Activations
from podembed.jobs.models import DIN, HSTU, SASRec
from podembed.jobs.models.mmoe import MMoE
from podembed.jobs.models.ple import PLE
from podembed.jobs.models.two_towers import TwoTowers
from tests.long_tests import long_case

NUM_SAMPLES, LONGEST, WIDTH = 6, 12, 4
LENGTHS = [12, 1, 5, 0, 7, 12]
SEQUENCES = ("history", "next", "other")
SPEC = ModelSpec(
    num_dense=2,
    activation_shapes={"item": (WIDTH,), "user": (WIDTH,), **dict.fromkeys(SEQUENCES, (LONGEST, WIDTH))},
    batch_size=NUM_SAMPLES,
    sequences=dict.fromkeys(SEQUENCES, LONGEST),
)
SHORT = {"dense": (2,), "item": (WIDTH,), "user": (WIDTH,)}
NEXT: dict[str, Any] = {"history": "history", "item": "item", "blocks": 2, "heads": 2, "dropout": 0.0}
MODELS = {
    "sasrec": SASRec(**NEXT, positives="next", negatives="other"),
    "sasrec of the last state": SASRec(**NEXT | {"blocks": 1}),
    "hstu": HSTU(**NEXT, positives="next", negatives="other"),
    "hstu of the last state": HSTU(**NEXT | {"blocks": 1}),
    "din": DIN(target="item", history="history"),
    "mmoe": MMoE(tasks=("a", "b"), num_experts=3, expert=(6, 5), tower=(4,)),
    "ple": PLE(tasks=("a", "b"), expert=(5,), tower=(4,)),
    "two towers": TwoTowers(user=("user",), item=("item",)),
}


def numbers(model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """First parameters, and the arrays of a batch, in float64."""
    random = np.random.default_rng(0)
    # DIN joins all vectors but those of its history.
    names = SEQUENCES[:1] if isinstance(model, DIN) else SEQUENCES if isinstance(model, (SASRec, HSTU)) else ()
    given = {**SHORT, **dict.fromkeys(names, (LONGEST, WIDTH))}
    spec = replace(SPEC, activation_shapes={name: shape for name, shape in given.items() if name != "dense"})
    init: Any = model.init
    if isinstance(model, TwoTowers):
        shapes = jax.eval_shape(lambda key: init(key, 0, spec.widths), jax.random.key(0))
    else:
        shapes = jax.eval_shape(lambda key: init(key, spec), jax.random.key(0))
    params = jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape), shapes)
    return params, {name: random.normal(0, 1, (NUM_SAMPLES, *shape)) for name, shape in given.items()}


def compact(padded: Any, lengths: jax.Array) -> Jagged:
    """Rows one after another, and three of filling that are no zeros."""
    mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    values = jnp.pad(padded[mask], ((0, 3), (0, 0)), constant_values=9.0)
    return Jagged.of(values, lengths, longest=LONGEST)


def loss_of(model: Any, params: Any, arrays: Any, *, is_compact: bool) -> Any:
    dense, named = arrays["dense"], {name: values for name, values in arrays.items() if name != "dense"}
    if isinstance(model, TwoTowers):
        return (model.apply(params, dense, named) ** 2).sum()
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    make = compact if is_compact else Jagged.of_padded
    sequences = {name: make(named[name], lengths) for name in SEQUENCES if name in named}
    batch = ModelBatch(
        dense=dense,
        activations=Activations(named),
        labels={"label": jnp.asarray([1, 0, 1, 1, 0, 0], dense.dtype)},
        weights=jnp.ones(NUM_SAMPLES, dense.dtype),
        lengths=dict.fromkeys(sequences, lengths),
        sequences=sequences,
    )
    context = StepContext.alone(NUM_SAMPLES)
    outputs = model.apply(params, batch, context)
    if hasattr(model, "loss"):
        return model.loss(outputs, batch, context).sum()
    return sum((one**2).sum() for one in jax.tree.leaves(outputs))


# Of models in two forms, the one with more layers; tests of formulas have the others, too.
LONG = {"sasrec of the last state", "hstu of the last state", "ple"}


# Models that have a form for rows one after another.
BY_ROW = ("sasrec", "hstu", "sasrec of the last state", "hstu of the last state")


@pytest.mark.parametrize(
    ("name", "is_compact"),
    [
        *(long_case(name, False) if name in LONG else (name, False) for name in MODELS),
        *(long_case(name, True) if name in LONG else (name, True) for name in BY_ROW),
    ],
)
def test_gradients_are_the_differences_of_the_loss_in_float64(name: str, is_compact: bool) -> None:
    model = MODELS[name]
    given = numbers(model)
    along = jax.tree.map(lambda leaf: np.random.default_rng(leaf.size).normal(size=leaf.shape), given)
    with jax.enable_x64(True):
        moved = jax.jit(
            lambda at: loss_of(
                model, *jax.tree.map(lambda leaf, to: leaf + at * to, given, along), is_compact=is_compact
            )
        )
        right = float(moved(1e-5) - moved(-1e-5)) / 2e-5
    narrow = jax.tree.map(lambda leaf: leaf.astype(np.float32), given)
    found = jax.jit(jax.grad(lambda given: loss_of(model, *given, is_compact=is_compact)))(narrow)
    total = jax.tree.map(lambda leaf, to: (np.asarray(leaf, np.float64) * to).sum(), found, along)
    assert sum(jax.tree.leaves(total)) == pytest.approx(right, rel=1e-3)
