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
from podembed.workers.crew import ThreadCrew
from podembed.workers.data.config import NpyData
from podembed.workers.device import step_programs
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.options import DeviceOptions, Transfers
from podembed.workers.device.transfers import ways
from podembed.workers.device.transfers.side_by_side import Together
from podembed.workers.job.job import JobConfig
from tests.processes import said_by

PATIENCE_S = 120.0
# Large enough that threads share the work and that the kernel streams.
NUM_SAMPLES = 2048
WIDTHS = {"a": 8, "b": 16, "c": 3, "d": 1024, "e": 32}
NUM_STEPS = 3

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


def apart(dense: jax.Array, by_name: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.tanh(values) for values in by_name.values()], axis=1)


def job_of(joining: Joining, *, frozen: str = "") -> JobConfig:
    class Model:
        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            return jax.random.normal(key, (num_dense + sum(widths.values()),))

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
    found: list[Together] = []
    copied: list[slice] = []
    look, copy = step_programs.cut_from_one, ways._cut_to_host

    def looked(*arguments: Any) -> Together:
        found.append(look(*arguments) if looks else ())
        return found[-1]

    def counted(*arguments: Any) -> None:
        copied.append(arguments[1].rows)
        copy(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(step_programs, "cut_from_one", looked)
        patched.setattr(ways, "_cut_to_host", counted)
        crew = ThreadCrew(threads)
        worker = DeviceWorker(
            job=job, num_samples=NUM_SAMPLES, options=DeviceOptions(transfers=Transfers.SEPARATE), crew=crew
        )
        worker.build()
        batches = [host_arrays(job, NUM_SAMPLES, buffer=buffer) for buffer in (0, 1)]
        taken = []
        for step in range(NUM_STEPS):
            worker.begin_training(batches[step % 2], weight_sum=float(NUM_SAMPLES), step=step).finish()
            taken += [block.tobytes() for block in batches[step % 2].gradients]
        crew.close()
    (together,) = found
    return together, len(copied) // NUM_STEPS, taken + [values.tobytes() for values in worker.dense_arrays().values()]


@pytest.mark.parametrize(
    ("joining", "frozen", "expected"),
    [
        (all_of, "", ((0, 1, 2, 3, 4),)),
        (all_stacked, "", ((0, 1, 2, 3, 4),)),
        (all_compiled, "", ((0, 1, 2, 3, 4),)),
        # What lies between two pieces parts them. A frozen table has no position.
        (all_of, "c", ((0, 1), (2, 3))),
        (in_another_order, "", ((3, 1, 0), (4, 2))),
        (in_two_arrays, "", ((0, 1), (3, 4))),
        (with_one_used_twice, "", ((2, 3, 4),)),
        (apart, "", ()),
    ],
)
def test_gradients_are_the_same_bits_as_of_one_array_each(
    joining: Joining, frozen: str, expected: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(joining, frozen=frozen)
    together, num_copies, found = gradients_of(job, monkeypatch)
    assert sorted(together) == sorted(expected)
    assert num_copies == len(expected)
    assert found == gradients_of(job, monkeypatch, looks=False)[2]
    assert all(np.frombuffer(one, np.float32).any() for one in found)
    _, num_shared, shared = gradients_of(job, monkeypatch, threads=3)
    assert found == shared
    assert num_shared > len(expected) or not expected


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
    gradients = [
        said_by(
            "tests.workers.device.transfers.several_devices_process",
            timeout_s=PATIENCE_S,
            environment={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            },
        )
        for count in (1, 4)
    ]
    assert [found["together"] for found in gradients] == [[[0, 1, 2, 3, 4]]] * 2
    assert gradients[0]["devices"] == 1
    assert gradients[1]["devices"] == 4
    for alone, spread in zip(gradients[0]["sums"], gradients[1]["sums"], strict=True):
        np.testing.assert_allclose(spread, alone, rtol=1e-4)
