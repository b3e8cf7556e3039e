"""Gradients that a step has side by side: which ones are found, and that they reach the host as others do."""

from __future__ import annotations

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
from podembed.workers.device.transfers.side_by_side import Together
from podembed.workers.job.job import JobConfig

# Large enough that threads share the work and that the kernel streams.
NUM_SAMPLES = 2048
WIDTHS = {"a": 8, "b": 16, "c": 3, "d": 512, "e": 32}
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
) -> tuple[Together, list[bytes]]:
    """What is found to lie side by side, and the bytes of all gradients and parameters."""
    found: list[Together] = []

    def looked(*arguments: Any) -> Together:
        found.append(step_programs_cut(*arguments) if looks else ())
        return found[-1]

    step_programs_cut = step_programs.cut_from_one
    with monkeypatch.context() as patched:
        patched.setattr(step_programs, "cut_from_one", looked)
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
    return together, [*taken, *(values.tobytes() for values in worker.dense_arrays().values())]


@pytest.mark.parametrize(
    ("joining", "frozen", "expected"),
    [
        (all_of, "", ((0, 1, 2, 3, 4),)),
        (all_of, "c", ((0, 1, 2, 3),)),
        (in_another_order, "", ((3, 1, 0, 4, 2),)),
        (in_two_arrays, "", ((0, 1), (3, 4))),
        (with_one_used_twice, "", ((0, 2, 3, 4),)),
        (apart, "", ()),
    ],
)
def test_gradients_are_the_same_bits_as_of_one_array_each(
    joining: Joining, frozen: str, expected: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(joining, frozen=frozen)
    together, found = gradients_of(job, monkeypatch)
    assert sorted(together) == sorted(expected)
    assert found == gradients_of(job, monkeypatch, looks=False)[1]
    assert found == gradients_of(job, monkeypatch, threads=3)[1]
    assert all(np.frombuffer(one, np.float32).any() for one in found)
