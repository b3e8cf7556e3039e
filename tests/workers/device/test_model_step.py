"""`DeviceWorker` through a real shared-memory channel in one process, against the same step written in plain JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.activations import Activations
from podembed.workers.device.dense_half import sigmoid_binary_cross_entropy
from podembed.workers.device.measures import step_measures as measures_of_step
from podembed.workers.device.model_step import DenseStateError, DeviceWindow, DeviceWorker
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.process import DeviceProcess, _not_finite
from podembed.workers.device.shared_memory import ChannelEnd, ChannelServer, ChannelTimeout, Record, RecordKind
from podembed.workers.device.transfers import ways
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS
from podembed.workers.job.window_figures import LabelCounts, figures_of
from tests.small_job import small_job
from tests.workers.device.shared_memory_process import PATIENCE_S, channel_layout
from tests.workers.job.counts import counts

NUM_SAMPLES = 24


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False)


class Pair:
    """A built worker, and the host's end of its channel."""

    def __init__(
        self, job: JobConfig, *, is_restored_later: bool = False, options: DeviceOptions | None = None
    ) -> None:
        self.job = job
        layout = channel_layout(NUM_SAMPLES, job.data.num_dense, list(job.widths.values()))
        server = ChannelServer(layout, generation=1)
        ends: list[ChannelEnd] = []
        joining = threading.Thread(target=lambda: ends.append(server.invitation.connect(timeout_s=PATIENCE_S)))
        joining.start()
        self.host = server.accept(timeout_s=PATIENCE_S)
        joining.join(PATIENCE_S)
        (self.device,) = ends
        self.worker = DeviceWorker(job=job, num_samples=NUM_SAMPLES, options=options or DeviceOptions())
        self.compile_s = self.worker.build(is_restored_later=is_restored_later)

    def put(self, batch: dict[str, Any]) -> None:
        arrays = self.host.buffers[0]
        for name in ("dense", "labels", "weights"):
            arrays[name][...] = batch[name]
        blocks = self.host.layout.activations.blocks(arrays["activations"])
        for block, values in zip(blocks, batch["activations"].values(), strict=True):
            block[...] = values

    def window(self, batches: list[dict[str, Any]], kind: RecordKind, *, weight_sum: float = 0.0) -> DeviceWindow:
        """One window of these batches; after each, `take` has seen the answer."""
        windows: list[DeviceWindow] = []
        serving = threading.Thread(
            target=lambda: windows.append(self.worker.serve_window(self.device, timeout_s=PATIENCE_S))
        )
        serving.start()
        self.answers = []
        for step, batch in enumerate(batches):
            self.put(batch)
            self.host.send(Record(kind=kind, step=step, weight_sum=weight_sum or float(batch["weights"].sum())))
            record = self.host.receive(timeout_s=PATIENCE_S)
            assert (record.kind, record.step) == (RecordKind.DONE, step)
            arrays = self.host.buffers[0]
            gradients = self.host.layout.activations.blocks(arrays["gradients"])
            self.answers.append(([g.copy() for g in gradients], arrays["scores"].copy()))
        self.host.send(Record(kind=RecordKind.END, step=len(batches)))
        serving.join(PATIENCE_S)
        return windows[0]

    def close(self) -> None:
        self.host.close()
        self.device.close()


@pytest.fixture(scope="module")
def shared(job: JobConfig) -> Iterator[Pair]:
    """One for the tests that do not care what it has been trained on."""
    pair = Pair(job)
    yield pair
    pair.close()


@pytest.fixture
def paired(request: pytest.FixtureRequest) -> Callable[..., Pair]:
    def make(job: JobConfig, **options: bool) -> Pair:
        pair = Pair(job, **options)
        request.addfinalizer(pair.close)
        return pair

    return make


def random_batch(job: JobConfig, seed: int, *, num_padding: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weights = rng.random(NUM_SAMPLES).astype(np.float32) + 0.5
    weights[NUM_SAMPLES - num_padding :] = 0.0
    return {
        "dense": rng.standard_normal((NUM_SAMPLES, job.data.num_dense)).astype(np.float32),
        "labels": (rng.random(NUM_SAMPLES) < 0.4).astype(np.float32),
        "weights": weights,
        "activations": {
            name: rng.standard_normal((NUM_SAMPLES, width)).astype(np.float32) for name, width in job.widths.items()
        },
    }


class Plain:
    """The step as the documentation describes it. Mutated: parameters, state, and the norms of all steps."""

    def __init__(self, job: JobConfig, *, is_restored_later: bool = False) -> None:
        self.job = job
        self.optimizer = job.dense_optimizer or optax.adam(1e-3)
        # Of gradients, their update, and the parameters before it.
        self.norms: list[list[float]] = []

        def initial() -> tuple[Any, Any]:
            params = job.model.init(jax.random.key(job.seed), job.data.num_dense, job.widths)
            return params, self.optimizer.init(params)

        # Compiled, since operation by operation takes three times as long.
        self.params, self.state = jax.jit(initial)()
        self._compiled = jax.jit(self._step)

    def counts(self, batch: dict[str, Any]) -> LabelCounts:
        scores = self.job.model.apply(self.params, batch["dense"], batch["activations"])
        return counts(np.asarray(scores, np.float64), batch["labels"], batch["weights"])

    def step(self, batch: dict[str, Any], weight_sum: float) -> tuple[float, list[np.ndarray]]:
        found = self._compiled(self.params, self.state, batch, weight_sum)
        loss, gradients, self.params, self.state, norms = found
        self.norms.append([float(norm) for norm in norms])
        return float(loss), [np.asarray(gradients[name]) for name in batch["activations"]]

    def _step(self, params: Any, state: Any, batch: dict[str, Any], weight_sum: jax.Array) -> tuple[Any, ...]:
        def loss_of(params: Any, activations: dict[str, jax.Array]) -> jax.Array:
            scores = self.job.model.apply(params, batch["dense"], activations)
            per_sample = (self.job.loss or optax.sigmoid_binary_cross_entropy)(scores, batch["labels"])
            return (per_sample * batch["weights"]).sum() / weight_sum

        loss, (dense, gradients) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, batch["activations"])
        updates, state = self.optimizer.update(dense, state, params)
        norms = [optax.global_norm(tree) for tree in (dense, updates, params)]
        return loss, gradients, optax.apply_updates(params, updates), state, norms


def squared_error(scores: jax.Array, labels: jax.Array) -> jax.Array:
    return (scores - labels) ** 2


@pytest.mark.parametrize(
    ("changes", "weight_sum"),
    [
        ({}, 0.0),
        ({"dense_optimizer": None}, 80.0),
        (
            {"loss": squared_error, "dense_optimizer": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))},
            0.0,
        ),
    ],
    ids=["alone", "among other hosts", "own loss and a chain"],
)
def test_losses_gradients_and_parameters_are_those_of_plain_jax(
    job: JobConfig,
    paired: Callable[[JobConfig], Pair],
    changes: dict[str, Any],
    weight_sum: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (measures_of_step, ways):
        monkeypatch.setattr(module, "NORMS_EVERY", 8)
    job = replace(job, data=replace(job.data, sample_weight="importance"), **changes)
    pair, plain = paired(job), Plain(job)
    batches = [random_batch(job, seed, num_padding=seed) for seed in range(10)]
    counted: list[LabelCounts] = []
    window = pair.window(batches, RecordKind.TRAIN, weight_sum=weight_sum)
    assert window.num_steps == len(window.losses) == 10
    for batch, loss, (gradients, _) in zip(batches, window.losses, pair.answers, strict=True):
        counted.append(plain.counts(batch))
        expected_loss, expected = plain.step(batch, weight_sum or float(batch["weights"].sum()))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for found, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)
    for found, wanted in zip(jax.tree.leaves(pair.worker.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert_counted(window, counted, has_logits="loss" not in changes)
    assert_norms(window, plain.norms)


def assert_norms(window: DeviceWindow, expected: list[list[float]]) -> None:
    """Of gradients in each step, and of the rest in steps 0 and 8."""
    gradients, updates, params = np.transpose(expected)
    assert window.norms is not None
    assert asdict(window.norms) == pytest.approx(
        {
            "gradient": gradients.mean(),
            "update": updates[[0, 8]].mean(),
            "params": params[8],
            "largest_gradient": gradients.max(),
        },
        rel=1e-3,
    )


def assert_counted(window: DeviceWindow, counted: list[LabelCounts], *, has_logits: bool) -> None:
    """A window has counted the scores that samples had before it trained on them."""
    if not has_logits:
        assert window.quality == ()
        return
    (found,), (expected,) = figures_of([window.quality]), figures_of([[one] for one in counted])
    # The last bits of a score may put it into the next bin.
    for name in ("weight", "positives", "predicted", "normalized_entropy", "calibration"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4), name
    assert abs(found.auc - expected.auc) <= 0.02


class InOrder:
    """Reads activations in their order, each column with another weight, and notes how they came."""

    def __init__(self) -> None:
        self.seen: list[tuple[type, list[str]]] = []

    def init(self, key: jax.Array, num_dense: int, widths: dict[str, int]) -> dict[str, jax.Array]:
        return {"weights": jnp.arange(1.0, 1 + sum(widths.values()))}

    def apply(self, params: Any, dense: jax.Array, activations: Any) -> jax.Array:
        self.seen.append((type(activations), list(activations)))
        return jnp.concatenate(list(activations.values()), axis=1) @ params["weights"]


def test_a_model_gets_activations_in_the_order_of_the_features(
    job: JobConfig, paired: Callable[[JobConfig], Pair]
) -> None:
    """In training, in an evaluation, and when it is compiled by hand, with the same scores."""
    model = InOrder()
    backwards = {name: job.features[name] for name in reversed(list(job.features))}
    assert list(backwards) != sorted(backwards)
    declared = replace(job, features=backwards, model=model)
    pair, batch = paired(declared), random_batch(declared, 0)
    pair.window([batch], RecordKind.EVALUATE)
    ((_, scores),) = pair.answers
    pair.window([batch], RecordKind.TRAIN)
    assert model.seen
    assert all(one == (Activations, list(backwards)) for one in model.seen)
    by_hand = jax.jit(InOrder().apply)(model.init(None, 0, declared.widths), None, Activations(batch["activations"]))  # type: ignore[arg-type]
    np.testing.assert_allclose(scores, by_hand, rtol=1e-5)
    np.testing.assert_array_equal(pair.host.layout.activations.widths, list(declared.widths.values()))


def test_padding_has_no_gradient(job: JobConfig, shared: Pair) -> None:
    shared.window([random_batch(job, 1, num_padding=5)], RecordKind.TRAIN)
    ((gradients, _),) = shared.answers
    assert all((gradient[-5:] == 0).all() for gradient in gradients)
    assert all((gradient[:-5] != 0).any(axis=1).all() for gradient in gradients)


def test_a_batch_of_nothing_but_padding_changes_no_loss_to_nan(job: JobConfig, shared: Pair) -> None:
    window = shared.window([random_batch(job, 1, num_padding=NUM_SAMPLES)], RecordKind.TRAIN)
    assert window.losses == (0.0,)
    assert all((gradient == 0).all() for gradient in shared.answers[0][0])


def test_evaluation_scores_and_changes_nothing(job: JobConfig, shared: Pair) -> None:
    before = {key: values.copy() for key, values in shared.worker.dense_arrays().items()}
    batches = [random_batch(job, seed) for seed in range(3)]
    window = shared.window(batches, RecordKind.EVALUATE)
    assert (window.losses, window.num_steps) == ((), 3)
    for batch, (_, scores) in zip(batches, shared.answers, strict=True):
        activations = {name: jnp.asarray(values) for name, values in batch["activations"].items()}
        expected = job.model.apply(shared.worker.params, batch["dense"], activations)
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)
    after = shared.worker.dense_arrays()
    assert all(after[key].tobytes() == values.tobytes() for key, values in before.items())


def test_a_restored_worker_goes_on_with_the_same_bytes(job: JobConfig, paired: Callable[..., Pair]) -> None:
    batches = [random_batch(job, seed) for seed in range(6)]
    whole, first, second = paired(job), paired(job), paired(job, is_restored_later=True)
    losses = whole.window(batches, RecordKind.TRAIN).losses
    early = first.window(batches[:3], RecordKind.TRAIN).losses
    arrays = {key: values.copy() for key, values in first.worker.dense_arrays().items()}
    second.worker.load_dense_arrays(arrays)
    late = second.window(batches[3:], RecordKind.TRAIN).losses
    assert early + late == losses
    expected = whole.worker.dense_arrays()
    assert {k: v.tobytes() for k, v in second.worker.dense_arrays().items()} == {
        k: v.tobytes() for k, v in expected.items()
    }


def test_a_random_key_of_the_optimizer_is_stored_as_its_numbers(job: JobConfig, paired: Callable[..., Pair]) -> None:
    """The noise after a restore is the noise that would have come."""
    noisy = replace(job, dense_optimizer=optax.chain(optax.add_noise(0.1, 0.5, 3), optax.adam(1e-2)))
    batches = [random_batch(job, seed) for seed in range(4)]
    whole, first, second = paired(noisy), paired(noisy), paired(noisy, is_restored_later=True)
    whole.window(batches, RecordKind.TRAIN)
    begun = first.worker.dense_arrays()["optimizer/0/rng_key"].copy()
    first.window(batches[:2], RecordKind.TRAIN)
    arrays = {key: values.copy() for key, values in first.worker.dense_arrays().items()}
    stored = arrays["optimizer/0/rng_key"]
    assert (stored.dtype, stored.shape) == (np.uint32, (2,))
    assert stored.tolist() != begun.tolist()
    second.worker.load_dense_arrays(arrays)
    second.window(batches[2:], RecordKind.TRAIN)
    expected = whole.worker.dense_arrays()
    assert {k: v.tobytes() for k, v in second.worker.dense_arrays().items()} == {
        k: v.tobytes() for k, v in expected.items()
    }
    with pytest.raises(DenseStateError, match=r"'optimizer/0/rng_key' as int64\[\]. Expected uint32\[2\]"):
        second.worker.load_dense_arrays(arrays | {"optimizer/0/rng_key": np.int64(3)})  # type: ignore[operator]


@pytest.mark.parametrize("key", ["params", "params/w"])
def test_a_parameter_that_is_not_finite_is_found_also_when_it_is_the_only_one(key: str) -> None:
    spoilt = np.array([1.0, np.nan], np.float32)
    assert _not_finite({key: spoilt, "optimizer/0/mu": spoilt}) == [key]


def test_dense_arrays_are_named_by_their_place(shared: Pair) -> None:
    arrays = shared.worker.dense_arrays()
    assert {"params/hidden", "params/out", "optimizer/0/count"} <= set(arrays)
    assert all(isinstance(values, np.ndarray) for values in arrays.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop("params/out"), "Found dense arrays without 'params/out'"),
        (lambda arrays: arrays.update({"params/extra": np.zeros(3)}), "'params/extra' that the job does not have"),
        (lambda arrays: arrays.update({"params/out": np.zeros(17, np.float32)}), r"'params/out' as float32\[17\]"),
        (lambda arrays: arrays.update({key: np.zeros(17, np.float32) for key in arrays}), "Found 'params/"),
        (lambda arrays: arrays.update({"params/out": np.zeros(16)}), r"'params/out' as float64\[16\]"),
    ],
)
def test_arrays_of_another_model_are_refused_and_nothing_changes(
    shared: Pair, change: Callable[[dict[str, np.ndarray]], Any], words: str
) -> None:
    worker = shared.worker
    before = {key: values.tobytes() for key, values in worker.dense_arrays().items()}
    arrays = dict(worker.dense_arrays())
    change(arrays)
    with pytest.raises(DenseStateError, match=words):
        worker.load_dense_arrays(arrays)
    assert {key: values.tobytes() for key, values in worker.dense_arrays().items()} == before


class Slow:
    """Takes a while for each step."""

    def init(self, key: jax.Array, num_dense: int, widths: dict[str, int]) -> dict[str, jax.Array]:
        return {"w": jnp.eye(256)}

    def apply(self, params: Any, dense: jax.Array, activations: Activations) -> jax.Array:
        slow = jax.lax.fori_loop(0, 100, lambda _, rows: jnp.tanh(rows @ params["w"]), jnp.ones((256, 256)))
        return dense[:, 0] + jnp.mean(slow)


def test_a_step_without_gradients_for_the_host_is_over_once_it_is_computed(
    job: JobConfig, paired: Callable[..., Pair]
) -> None:
    """Of a job whose tables are all frozen. The host then writes the memory again, which the device reads in place."""
    frozen = {
        name: FeatureConfig(TableConfig(feature.table.vocabulary_size, feature.table.dim, name=name, trainable=False))
        for name, feature in job.features.items()
    }
    pair = paired(replace(job, features=frozen, model=Slow()))
    pair.put(random_batch(job, 0))
    begun = pair.worker.begin_training(pair.worker._batches.of(pair.device, 0, LARGEST_LEVELS), weight_sum=1.0)
    assert begun.arrays.gradients == ()
    begun.finish()
    last: Any = begun.last
    assert last.is_ready()


def test_a_silent_host_is_given_up(shared: Pair) -> None:
    with pytest.raises(ChannelTimeout, match="host process sent nothing"):
        shared.worker.serve_window(shared.device, timeout_s=0.1)


@pytest.mark.parametrize("score", [-200.0, -30.0, -1.0, 0.0, 1.0, 30.0, 200.0])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.25])
def test_the_loss_is_stable_for_large_scores(score: float, label: float) -> None:
    found = sigmoid_binary_cross_entropy(jnp.asarray([score]), jnp.asarray([label]))
    expected = optax.sigmoid_binary_cross_entropy(jnp.asarray([score]), jnp.asarray([label]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    gradient = jax.grad(lambda s: sigmoid_binary_cross_entropy(s, jnp.asarray([label]))[0])(jnp.asarray([score]))
    np.testing.assert_allclose(gradient, 1 / (1 + np.exp(-np.float64(score))) - label, atol=1e-6)


def test_calls_out_of_order_say_what_was_expected() -> None:
    process = DeviceProcess()
    with pytest.raises(RuntimeError, match="Expected start first"):
        process.serve_window()
    assert process.status().phase == "idle"
    address, port = process.reserve_coordinator("127.0.0.1").rsplit(":", 1)
    assert (address, 0 < int(port) < 65536) == ("127.0.0.1", True)
    process.close()
    process.close()


def test_an_error_of_the_model_names_the_shapes_that_it_got(small_data: str) -> None:
    class Wrong:
        def init(self, key, num_dense, widths):
            return {"w": jnp.zeros((99,))}

        def apply(self, params, dense, activations):
            return jnp.concatenate(list(activations.values()), 1) @ params["w"]

    job = replace(small_job(folder=small_data), model=Wrong())
    with pytest.raises(TypeError, match="dot_general") as raised:
        DeviceWorker(job=job, num_samples=8).build()
    notes = "\n".join(raised.value.__notes__)
    assert "model.apply got dense of shape (8, 2), activations['a'] of shape (8, " in notes


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        ("column", None, r"model.apply returning shape \[8, 1\] for 8 samples"),
        ("flat", lambda scores, labels: (scores - labels).mean(), r"loss returning shape \[\] for 8 samples"),
    ],
)
def test_a_model_or_loss_of_another_shape_is_refused(small_data: str, model: str, loss, said: str) -> None:
    class Wide:
        def init(self, key, num_dense, widths):
            return {"w": jnp.zeros((num_dense, 1))}

        def apply(self, params, dense, activations):
            scores = dense @ params["w"]
            return scores if model == "column" else scores[:, 0]

    job = replace(small_job(folder=small_data), model=Wide(), loss=loss)
    with pytest.raises(DenseStateError, match=said):
        DeviceWorker(job=job, num_samples=8).build()


def test_parameters_with_one_key_are_refused(small_data: str) -> None:
    class Doubled:
        def init(self, key, num_dense, widths):
            return {"a/b": {"c": jnp.zeros(2)}, "a": {"b/c": jnp.zeros(3)}}

        def apply(self, params, dense, activations):
            return dense[:, 0] + params["a"]["b/c"].sum()

    job = replace(small_job(folder=small_data), model=Doubled())
    with pytest.raises(DenseStateError, match="several parameters with the key '.*a/b/c'"):
        DeviceWorker(job=job, num_samples=8).build()
