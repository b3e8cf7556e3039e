"""Gradients that a step has side by side: which ones are found, and that they reach the host as others do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.device_step import host_arrays
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.workers.data.config import NpyData
from podembed.workers.device import step_programs
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.options import DeviceOptions, Transfers
from podembed.workers.device.transfers import ways
from podembed.workers.device.transfers.side_by_side import Run, SideBySide, Together
from podembed.workers.job.job import JobConfig
from podembed.workers.thread_pool import ThreadPool
from tests.long_tests import long_case
from tests.processes import said_by

PATIENCE_S = 120.0
# Large enough that threads share the work and that the kernel streams.
NUM_SAMPLES = 2048
WIDTHS = {"a": 8, "b": 16, "c": 3, "d": 1024, "e": 32}
NUM_STEPS = 3
NUM_COLUMNS = sum(WIDTHS.values())
SOME_NUMBERS = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
MANY_NUMBERS = np.linspace(0.5, 1, 1 + NUM_COLUMNS, dtype=np.float32)

Joining = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


def all_of(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([dense, *by_name.values()], axis=1)


def in_another_order(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([by_name[name] for name in "dba"] + [dense] + [by_name[name] for name in "ec"], axis=1)


def in_two_arrays(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    first, second = (jnp.concatenate([by_name[name] for name in names], axis=1) for names in ("ab", "de"))
    return jnp.concatenate([dense, jnp.tanh(first), jnp.sin(second), by_name["c"] ** 2], axis=1)


def with_one_used_twice(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return all_of(dense, by_name) * jnp.sum(by_name["b"], axis=1, keepdims=True)


def all_stacked(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.hstack([*by_name.values(), dense])


def all_compiled(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jax.jit(all_of)(dense, dict(by_name))


halves_compiled = jax.jit(lambda left, right: jnp.concatenate([left, right], axis=1))


def compiled_twice(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    """The same compiled function for two pairs of one shape: what its variables are differs from call to call."""
    pairs = [halves_compiled(by_name[name], 2.0 * by_name[name]) for name in "ab"]
    twice = [halves_compiled(by_name["e"], by_name["a"] @ SOME_NUMBERS), halves_compiled(by_name["e"] ** 2, pairs[0])]
    return jnp.concatenate([dense, *pairs, *twice, by_name["c"], by_name["d"]], axis=1)


def compiled_in_parts(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    """One compiled function within another, of which one hands its argument through."""

    @jax.jit
    def squared(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return values, jnp.tanh(values) ** 2

    @jax.jit
    def joined(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
        values, others = squared(all_of(dense, by_name))
        return values * others + jax.jit(jnp.sin)(values)

    return joined(dense, dict(by_name))


def with_noise_for_each(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    """The same compiled function for each, and the same gradient for two of them."""
    noisy = {
        name: jnp.where(jax.random.bernoulli(jax.random.key(at), 0.5, one.shape), one, 0.0)
        for at, (name, one) in enumerate(by_name.items())
    }
    both = by_name["a"] + by_name["b"][:, :8]
    return jnp.hstack([all_of(dense, by_name), both, jax.nn.relu(noisy["c"]), jax.nn.relu(noisy["e"])])


def remembered_again(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jax.checkpoint(all_of)(dense, dict(by_name))


def with_numbers_of_its_own(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return all_of(dense, by_name) * MANY_NUMBERS


def with_noise(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    values = all_of(dense, by_name)
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, values.shape), values, 0.0)


def mostly_dense(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    """An array of which gradients are a small part."""
    few = jnp.concatenate([dense @ jnp.ones((1, 100)), by_name["a"], by_name["b"]], axis=1)
    return jnp.concatenate([few, jnp.sin(by_name["c"]), jnp.sin(by_name["d"]), jnp.sin(by_name["e"])], axis=1)


def apart(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.tanh(values) for values in by_name.values()], axis=1)


def job_of(joining: Joining, *, frozen: str = "") -> JobConfig:
    class Model:
        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            return jax.random.normal(key, (num_dense + 2 * sum(widths.values()),))

        def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
            values = joining(dense, activations)
            return values @ params[: values.shape[1]]

    tables = {name: TableConfig(10, width, name=name, trainable=name != frozen) for name, width in WIDTHS.items()}
    return JobConfig(
        name="side-by-side",
        features={name: FeatureConfig(table) for name, table in tables.items()},
        model=Model(),
        data=NpyData("unread", label="label", dense=("x",)),
        batch_size=NUM_SAMPLES,
    )


def gradients_of(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch, *, threads: int = 1, looks: bool = True
) -> tuple[Together, int, list[bytes]]:
    """What is found to lie side by side, into how many copies a step cuts that, and the bytes of all gradients and
    parameters.
    """
    found: list[SideBySide] = []
    copied: list[slice] = []
    look, copy = step_programs.side_by_side, ways._cut_to_host

    def looked(*arguments: Any) -> SideBySide:
        found.append(look(*arguments) if looks else SideBySide())
        return found[-1]

    def counted(*arguments: Any) -> None:
        copied.append(arguments[1].rows)
        copy(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(step_programs, "side_by_side", looked)
        patched.setattr(ways, "_cut_to_host", counted)
        thread_pool = ThreadPool(threads)
        worker = DeviceWorker(
            job=job,
            num_samples=NUM_SAMPLES,
            options=DeviceOptions(transfers=Transfers.SEPARATE),
            thread_pool=thread_pool,
        )
        worker.build()
        batches = [host_arrays(job, NUM_SAMPLES, buffer=buffer) for buffer in (0, 1)]
        taken = []
        for step in range(NUM_STEPS):
            worker.begin_training(batches[step % 2], weight_sum=float(NUM_SAMPLES), step=step).finish()
            taken += [block.tobytes() for block in batches[step % 2].gradients]
        thread_pool.close()
    (one,) = found
    return one.together, len(copied) // NUM_STEPS, taken + [array.tobytes() for array in worker.dense_arrays().values()]


A, B, C, D, E = range(5)
# Of these, threads share the copies. How they are cut depends on the runs alone: one of all, several in one array, and
# one in each of two.
SHARED: list[tuple[Joining, str]] = [(all_of, ""), (all_of, "c"), (in_two_arrays, "")]


@pytest.mark.parametrize(
    ("joining", "frozen", "expected"),
    [
        (all_of, "", {(Run(1, (A, B, C, D, E)),)}),
        long_case(all_stacked, "", {(Run(0, (A, B, C, D, E)),)}),
        # Those below have each of these among others.
        long_case(all_compiled, "", {(Run(1, (A, B, C, D, E)),)}),
        (compiled_in_parts, "", {(Run(1, (A, B, C, D, E)),)}),
        (with_noise_for_each, "", {(Run(28, (D,)),)}),
        (remembered_again, "", set()),
        long_case(with_numbers_of_its_own, "", {(Run(1, (A, B, C, D, E)),)}),
        long_case(with_noise, "", {(Run(1, (A, B, C, D, E)),)}),
        # What lies between two pieces parts them. A frozen table has no position.
        (all_of, "c", {(Run(1, (A, B)), Run(28, (2, 3)))}),
        (in_another_order, "", {(Run(0, (D, B, A)), Run(1049, (E, C)))}),
        (in_two_arrays, "", {(Run(0, (A, B)),), (Run(0, (D, E)),)}),
        (with_one_used_twice, "", {(Run(1, (A,)), Run(25, (C, D, E)))}),
        (compiled_twice, "", {(Run(145, (C, D)),)}),
        (mostly_dense, "", set()),
        long_case(apart, "", set()),
    ],
)
def test_gradients_are_the_same_bits_as_of_one_array_each(
    joining: Joining, frozen: str, expected: set[tuple[Run, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(joining, frozen=frozen)
    together, num_copies, found = gradients_of(job, monkeypatch)
    assert {*together} == expected
    assert num_copies == sum(map(len, expected))
    assert all(np.frombuffer(one, np.float32).any() for one in found)
    # Where nothing is found, the step is the one that nobody has looked at.
    if expected:
        assert found == gradients_of(job, monkeypatch, looks=False)[2]
    if (joining, frozen) in SHARED:
        _, num_shared, shared = gradients_of(job, monkeypatch, threads=3)
        assert found == shared
        assert num_shared > num_copies


def test_copies_go_to_the_memory_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(all_of)
    worker = DeviceWorker(job=job, num_samples=NUM_SAMPLES, options=DeviceOptions(transfers=Transfers.SEPARATE))
    worker.build()
    first, second = (host_arrays(job, NUM_SAMPLES) for _ in range(2))
    worker.begin_training(first, weight_sum=float(NUM_SAMPLES)).finish()
    before = [block.copy() for block in first.gradients]
    worker.begin_training(second, weight_sum=float(NUM_SAMPLES), step=1).finish()
    for kept, block, other in zip(before, first.gradients, second.gradients, strict=True):
        np.testing.assert_array_equal(block, kept)
        assert other.any()


def test_several_devices_give_the_gradients_of_one() -> None:
    # Which imports this module.
    from tests.workers.device.transfers import several_devices_process

    several = said_by(
        "tests.workers.device.transfers.several_devices_process",
        timeout_s=PATIENCE_S,
        environment={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
    )
    alone = several_devices_process.step_here()
    assert (alone["devices"], several["devices"]) == (1, 4)
    assert several["together"] == [[[1, [A, B, C, D, E]]]]
    assert alone["together"] == ((Run(1, (A, B, C, D, E)),),)
    for one, spread in zip(alone["sums"], several["sums"], strict=True):
        np.testing.assert_allclose(spread, one, rtol=1e-4)
