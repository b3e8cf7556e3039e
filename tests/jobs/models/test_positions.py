"""Both forms of the positions of a history: the same numbers, and rows on CPUs alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed import Jagged, ModelBatch, StepContext
from podembed.jobs.models import HSTU, SASRec
from podembed.jobs.models.positions import ByRow, Padded, on_positions
from tests.jobs.models.test_sequence_models import LENGTHS, LONGEST, SPEC, WIDTH, batch_of, histories, params_of
from tests.long_tests import long_case


def with_filling(batch: ModelBatch, *, filling: int) -> ModelBatch:
    """With so many rows behind the history that are no zeros."""
    history = batch.sequences["history"]
    values = jnp.pad(history.values[: sum(LENGTHS)], ((0, filling), (0, 0)), constant_values=9.0)
    return replace(batch, sequences={"history": Jagged.of(values, history.lengths, longest=LONGEST)})


@pytest.mark.parametrize("filling", [0, 6, 7, 30])
def test_rows_are_chosen_where_they_are_clearly_fewer(filling: int) -> None:
    history = with_filling(batch_of(histories()), filling=filling).sequences["history"]
    seen = []

    def function(at: Padded) -> jax.Array:
        seen.append(type(at))
        return at.padded(at.values)

    found = jax.jit(lambda history: on_positions(history, function))(history)
    np.testing.assert_array_equal(found, history.padded())
    assert set(seen) == ({ByRow, Padded} if sum(LENGTHS) + filling <= 0.75 * len(LENGTHS) * LONGEST else {Padded})


@pytest.mark.parametrize(
    "model",
    [long_case(SASRec(history="history", item="item", heads=2)), HSTU(history="history", item="item", times="times")],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_both_forms_have_the_same_states_in_training(model: Any, is_last: bool) -> None:
    """Dropout leaves the same numbers out."""
    params, batch = params_of(model, 1, SPEC), batch_of(histories())
    context = StepContext.alone(len(LENGTHS), training=True)

    def states(batch: ModelBatch) -> np.ndarray:
        found = jax.jit(lambda params, batch: model.states(params, batch, context, is_last=is_last))(params, batch)
        return np.asarray(found)

    by_row, padded = (states(with_filling(batch, filling=filling)) for filling in (2, 30))
    assert by_row.any()
    np.testing.assert_allclose(by_row, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_for_accelerators_have_the_padded_form(platform: str) -> None:
    model = SASRec(history="history", item="item", dropout=0.0)
    params, batch = params_of(model, 1, SPEC), with_filling(batch_of(histories()), filling=2)
    context = StepContext.alone(len(LENGTHS), training=True)

    def total(params: Any) -> jax.Array:
        return model.states(params, batch, context).sum()

    def products(platform: str) -> str:
        text = jax.jit(jax.grad(total)).trace(params).lower(lowering_platforms=(platform,)).as_text()
        return "\n".join(line for line in text.splitlines() if "dot_general" in line)

    rows, padded = f"1x{sum(LENGTHS) + 2}x{WIDTH}xf32", f"{len(LENGTHS)}x{LONGEST}x{WIDTH}xf32"
    assert rows not in products(platform)
    assert padded in products(platform)
    assert rows in products("cpu")


def test_an_exported_model_takes_any_number_of_samples() -> None:
    (n,) = jax.export.symbolic_shape("n")

    def values(padded: jax.Array, lengths: jax.Array) -> jax.Array:
        return on_positions(Jagged.of_padded(padded, lengths), lambda at: at.padded(at.values))

    shapes = jax.ShapeDtypeStruct((n, LONGEST, WIDTH), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    exported = jax.export.export(jax.jit(values))(*shapes)
    found = exported.call(jnp.ones((3, LONGEST, WIDTH)), jnp.asarray([2, 0, 5], jnp.int32))
    np.testing.assert_array_equal(found.sum(axis=(1, 2)), [2 * WIDTH, 0, 5 * WIDTH])
