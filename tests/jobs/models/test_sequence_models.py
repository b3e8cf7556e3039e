"""Models of histories against numpy, sample by sample: forward passes, what may not matter, and what must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podembed import Jagged, ModelBatch, ModelSpec, StepContext
from podembed.embedding.features.activations import Activations
from podembed.embedding.features.column_shape import ColumnShape
from podembed.jobs.models import DIN, HSTU, SASRec
from tests.long_tests import is_long, long_case

WIDTH, LONGEST, LENGTHS = 4, 5, [3, 0, 5, 1]
SPEC = ModelSpec(
    num_dense=2,
    activation_shapes={"item": (WIDTH,), "history": (LONGEST, WIDTH), "user": (3,)},
    batch_size=len(LENGTHS),
    sequences={"history": LONGEST, "next": LONGEST, "other": LONGEST},
    columns={name: ColumnShape((LONGEST,), "int32") for name in ("times", "sessions")},
)
# Also times that go back, and some that are far apart.
TIMES = np.array([[0, 5, 7, 0, 0], [0] * 5, [9, 8, 1 << 20, (1 << 20) + 3, 1 << 30], [4, 0, 0, 0, 0]], np.int32)
SESSIONS = np.array([[1, 1, 2, 0, 0], [0] * 5, [3, 3, 4, 4, 3], [1, 0, 0, 0, 0]], np.int32)


def batch_of(histories: list[np.ndarray], *, filling: int = 3, room: int = 0) -> ModelBatch:
    """With rows of filling behind the histories that are no zeros, and the room of a longer one."""
    random = np.random.default_rng(5)
    n, lengths = len(histories), np.array([len(one) for one in histories], np.int32)
    values = np.concatenate([*histories, np.full((filling, WIDTH), 9.0)]).astype(np.float32)
    longest = int(lengths.max()) + room
    return ModelBatch(
        dense=jnp.asarray(random.normal(size=(n, 2)), jnp.float32),
        activations=Activations(
            item=jnp.asarray(random.normal(size=(n, WIDTH)), jnp.float32),
            history=Jagged.of(jnp.asarray(values), jnp.asarray(lengths), longest=LONGEST).padded(),
            user=jnp.asarray(random.normal(size=(n, 3)), jnp.float32),
        ),
        labels={"label": jnp.ones(n)},
        weights=jnp.ones(n),
        lengths={"history": jnp.asarray(lengths)},
        columns={
            name: jnp.pad(column, ((0, 0), (0, room))) for name, column in (("times", TIMES), ("sessions", SESSIONS))
        },
        sequences={"history": Jagged.of(jnp.asarray(values), jnp.asarray(lengths), longest=longest)},
    )


def histories() -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.normal(size=(length, WIDTH)).astype(np.float32) for length in LENGTHS]


def scores(model: Any, params: Any, batch: ModelBatch, *, training: bool = False) -> np.ndarray:
    context = StepContext.alone(len(batch.weights), training=training)
    outputs = jax.jit(lambda params, batch: model.apply(params, batch, context))(params, batch)
    return np.asarray(outputs["scores"] if isinstance(outputs, dict) else outputs)


def params_of(model: Any, seed: int, spec: ModelSpec) -> Any:
    """Of the shapes that `init` gives, drawn here: to compile what JAX draws takes longer than all that is tested."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: model.init(key, spec), jax.random.key(0))
    return jax.tree.map(lambda leaf: random.normal(0, 0.3, leaf.shape).astype(leaf.dtype), shapes)


def states_of(model: Any, params: Any, batch: ModelBatch) -> np.ndarray:
    context = StepContext.alone(len(LENGTHS), training=False)
    return np.asarray(jax.jit(lambda params, batch: model.states(params, batch, context))(params, batch))


def relu_layers(layers: Any, x: np.ndarray) -> np.ndarray:
    for at, layer in enumerate(layers):
        x = x @ np.asarray(layer["weight"]) + np.asarray(layer["bias"])
        x = x if at == len(layers) - 1 else np.maximum(x, 0)
    return x


def test_din_weighs_each_item_of_a_history_by_the_target() -> None:
    model, batch = DIN(target="item", history="history"), batch_of(histories())
    params = params_of(model, 0, SPEC)
    expected = []
    for at, history in enumerate(histories()):
        item, interest = np.asarray(batch.activations["item"][at]), np.zeros(WIDTH)
        for one in history:
            interest += relu_layers(params["attention"], np.concatenate([one, item, one - item, one * item])) * one
        seen = np.concatenate([batch.dense[at], item, interest, batch.activations["user"][at]])
        expected.append(relu_layers(params["top"], seen)[0])
    np.testing.assert_allclose(scores(model, params, batch), expected, rtol=1e-4, atol=1e-5)


def test_din_scores_candidates_as_it_scores_items() -> None:
    model, batch = DIN(target="item", history="history"), batch_of(histories())
    params = params_of(model, 0, SPEC)
    items = jnp.stack([batch.activations["item"], -batch.activations["item"]], axis=1)

    def with_items(items: jax.Array) -> ModelBatch:
        return replace(batch, activations=Activations({**batch.activations, "item": items}))

    each = [scores(model, params, with_items(items[:, at])) for at in range(2)]
    np.testing.assert_allclose(scores(model, params, with_items(items)), np.stack(each, axis=1), rtol=1e-5)


def test_din_refuses_a_target_of_another_width() -> None:
    with pytest.raises(ValueError, match="Let them share a table"):
        DIN(target="user", history="history").init(jax.random.key(0), SPEC)


def sasrec_of_one(params: Any, history: np.ndarray, heads: int) -> np.ndarray:
    """`[length, width]`: the states of one history, as the paper writes them."""

    def normed(norm: Any, x: np.ndarray) -> np.ndarray:
        deviation = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-8)
        return norm["scale"] * (x - x.mean(axis=-1, keepdims=True)) / deviation + norm["shift"]

    def layer(layers: Any, x: np.ndarray) -> np.ndarray:
        return x @ np.asarray(layers[0]["weight"]) + np.asarray(layers[0]["bias"])

    length = len(history)
    x = history * WIDTH**0.5 + np.asarray(params["positions"])[:length][::-1]
    for block in params["blocks"]:
        query = normed(block["norm_1"], x)
        q, k, v = layer(block["query"], query), layer(block["key"], x), layer(block["value"], x)
        found = np.zeros_like(x)
        for head in np.split(np.arange(WIDTH), heads):
            for at in range(length):
                logits = k[: at + 1, head] @ q[at, head] / len(head) ** 0.5
                weights = np.exp(logits - logits.max())
                found[at, head] = weights / weights.sum() @ v[: at + 1, head]
        x = normed(block["norm_2"], query + found)
        x = x + layer(block["outer"], np.maximum(layer(block["inner"], x), 0))
    return normed(params["norm"], x)


def hstu_of_one(model: HSTU, params: Any, at: int) -> np.ndarray:
    """`[length, width]`: the states of sample `at`, position by position, as the paper writes them."""

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def normed(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-6)

    x = histories()[at] * WIDTH**0.5 + params["places"][: LENGTHS[at]]
    for block in params["blocks"]:
        uvqk, out = block["uvqk"][0], block["out"][0]
        u, v, q, k = np.split(silu(np.stack([normed(one) for one in x]) @ uvqk["weight"] + uvqk["bias"]), 4, axis=1)
        after = np.zeros_like(x)
        for here in range(len(x)):
            seen = np.zeros(WIDTH)
            for before in range(here + 1):
                if model.segments and SESSIONS[at, here] != SESSIONS[at, before]:
                    continue
                bias = block["place_bias"][here - before]
                if model.times:
                    between = abs(int(TIMES[at, here]) - int(TIMES[at, before]))
                    bias = bias + block["time_bias"][max(between, 1).bit_length() - 1]
                for head in np.split(np.arange(WIDTH), model.heads):
                    seen[head] += silu(q[here, head] @ k[before, head] + bias) * v[before, head] / LONGEST
            after[here] = x[here] + (normed(seen) * u[here]) @ out["weight"] + out["bias"]
        x = after
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize(
    "given",
    [long_case({}), {"times": "times", "heads": 2}, long_case({"times": "times", "segments": "sessions"})],
    ids=str,
)
def test_hstu_has_the_states_of_the_paper(given: dict[str, Any]) -> None:
    model, batch = HSTU(history="history", item="item", **given), batch_of(histories(), room=4)
    params = params_of(model, 1, SPEC)
    found, judged = states_of(model, params, batch), scores(model, params, batch)
    for at, length in enumerate(LENGTHS):
        assert not found[at, length:].any()
        if length:
            states = hstu_of_one(model, params, at)
            item = np.asarray(batch.activations["item"])
            np.testing.assert_allclose(found[at, :length], states, rtol=1e-3, atol=1e-5)
            cosine = states[-1] @ item[at] / np.linalg.norm(item[at])
            assert judged[at] == pytest.approx(cosine / model.temperature, rel=1e-3, abs=1e-3)
        else:
            assert judged[at] == 0


@is_long
def test_hstu_tells_the_next_item_of_every_position_from_its_negatives() -> None:
    model = HSTU(history="history", item="item", positives="next", negatives="other", dropout=0.0)
    batch, random = batch_of(histories()), np.random.default_rng(8)
    spec = replace(SPEC, negatives={"other": 2}, sequences={**SPEC.sequences, "other": 2 * LONGEST})
    params = params_of(model, 1, spec)
    up, down = (random.normal(size=(len(LENGTHS), room * LONGEST, WIDTH)).astype(np.float32) for room in (1, 2))
    lengths = jnp.asarray([2, 0, 5, 1], jnp.int32)
    batch = replace(
        batch,
        activations=Activations({**batch.activations, "next": jnp.asarray(up), "other": jnp.asarray(down)}),
        lengths={**batch.lengths, "next": lengths, "other": 2 * lengths},
    )
    context = StepContext.alone(len(LENGTHS))
    found = jax.jit(lambda params: model.loss(model.apply(params, batch, context), batch, context))(params)
    for at, length in enumerate(lengths.tolist()):
        losses = []
        for here, state in enumerate(hstu_of_one(model, params, at)[:length] if length else []):
            items = np.stack([up[at, here], down[at, 2 * here], down[at, 2 * here + 1]])
            logits = items / np.linalg.norm(items, axis=1, keepdims=True) @ state / model.temperature
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[0])
        assert float(found[at]) == pytest.approx(np.mean(losses) if losses else 0.0, rel=1e-3, abs=1e-4)


def test_hstu_refuses_columns_that_do_not_stand_beside_the_history() -> None:
    spec = replace(SPEC, columns={"times": ColumnShape((3,), "int32")})
    with pytest.raises(ValueError, match="Declare ListColumn\\('times', 5, 'int32'\\)"):
        HSTU(history="history", item="item", times="times").init(jax.random.key(0), spec)
    with pytest.raises(ValueError, match="3 heads for the width 4"):
        HSTU(history="history", item="item", heads=3).init(jax.random.key(0), SPEC)


@pytest.mark.parametrize("model", [SASRec, HSTU])
def test_negatives_of_other_positions_are_refused(model: Any) -> None:
    made = model(history="history", item="item", positives="next", negatives="other")
    with pytest.raises(ValueError, match="Write max_sequence_length=10 for 'other'"):
        made.init(jax.random.key(0), replace(SPEC, negatives={"other": 2}))


@pytest.mark.parametrize("heads", [long_case(1), 2])
def test_sasrec_has_the_states_of_the_paper(heads: int) -> None:
    model, batch = SASRec(history="history", item="item", heads=heads), batch_of(histories())
    params = params_of(model, 1, SPEC)
    found = scores(model, params, batch)
    for at, history in enumerate(histories()):
        last = sasrec_of_one(params, history, heads)[-1] if len(history) else np.zeros(WIDTH)
        assert found[at] == pytest.approx(float(last @ np.asarray(batch.activations["item"][at])), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("make", [SASRec, HSTU])
def test_a_later_item_changes_no_earlier_state(make: Any) -> None:
    model = make(history="history", item="item")
    params = params_of(model, 1, SPEC)
    changed = histories()
    changed[2][3] += 1.0
    before, after = (states_of(model, params, batch_of(one)) for one in (histories(), changed))
    np.testing.assert_array_equal(before[2, :3], after[2, :3])
    assert not np.allclose(before[2, 3:], after[2, 3:])
    np.testing.assert_array_equal(np.delete(before, 2, axis=0), np.delete(after, 2, axis=0))


@pytest.mark.parametrize(
    "model",
    [
        DIN(target="item", history="history"),
        long_case(SASRec(history="history", item="item")),
        HSTU(history="history", item="item", times="times", segments="sessions"),
    ],
)
def test_the_room_of_a_batch_changes_no_score(model: Any) -> None:
    """Also with dropout, which belongs to the samples and their positions."""
    params = params_of(model, 0, SPEC)
    expected = scores(model, params, batch_of(histories()))
    np.testing.assert_allclose(scores(model, params, batch_of(histories(), filling=9, room=4)), expected, rtol=1e-5)
    assert np.isfinite(scores(model, params, batch_of(histories()), training=True)).all()


@pytest.mark.parametrize("each", [long_case(1), 2])
def test_sasrec_trains_every_position_that_has_a_next_item(each: int) -> None:
    model = SASRec(history="history", item="item", positives="next", negatives="other", dropout=0.0)
    batch, random = batch_of(histories()), np.random.default_rng(8)
    spec = replace(SPEC, negatives={"other": each}, sequences={**SPEC.sequences, "other": each * LONGEST})
    params = params_of(model, 1, spec)
    ups, downs = (random.normal(size=(len(LENGTHS), n * LONGEST, WIDTH)).astype(np.float32) for n in (1, each))
    lengths = jnp.asarray([2, 0, 5, 1], jnp.int32)
    batch = replace(
        batch,
        activations=Activations({**batch.activations, "next": jnp.asarray(ups), "other": jnp.asarray(downs)}),
        lengths={**batch.lengths, "next": lengths, "other": each * lengths},
    )
    context = StepContext.alone(len(LENGTHS))
    found = jax.jit(lambda params: model.loss(model.apply(params, batch, context), batch, context))(params)
    for at, history in enumerate(histories()):
        states = sasrec_of_one(params, history, 1)[: int(lengths[at])] if len(history) else np.zeros((0, WIDTH))
        losses = np.log1p(np.exp(-(states * ups[at, : len(states)]).sum(axis=1)))
        for first in range(each):
            losses += np.log1p(np.exp((states * downs[at, first::each][: len(states)]).sum(axis=1)))
        assert float(found[at]) == pytest.approx(losses.mean() if len(losses) else 0.0, rel=1e-4)
