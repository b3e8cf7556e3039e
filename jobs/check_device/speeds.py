"""How fast devices are: copies between host and devices by size, and the device's half of a step by samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from podembed.embedding.kernels.arrays import aligned_zeros
from podembed.jobs.check_device.jobs import timed_job
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.model_step import DeviceWorker
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.programs import Inputs
from podembed.workers.device.transfers.pinned import in_pinned, staging
from podembed.workers.device.transfers.ways import HostArrays


def copies(request: Mapping[str, Any], check: Mapping[str, Any]) -> dict[str, Any]:
    """GB/s to a device and back, in the ways that steps use, by size."""
    mesh, found = GangMesh.of(DeviceOptions()), {}
    plus_one = jax.jit(lambda words: words + 1)
    for size in (1 << power for power in range(12, 27, 2)):
        memory = staging(mesh, size // 4)

        def fetch(array: jax.Array) -> None:
            np.asarray(in_pinned(array.addressable_shards[0].data))

        made = iter([plus_one(memory.send()) for _ in range(9)])
        parts = [len(memory.rows) * size, size]
        calls = [lambda memory=memory: memory.send().block_until_ready(), lambda made=made: fetch(next(made))]
        rates = [nbytes / _median_s(call, 8) / 1e9 for nbytes, call in zip(parts, calls, strict=True)]
        found[str(size)] = {"to_devices_gb_s": _rounded(rates[0]), "from_a_device_gb_s": _rounded(rates[1])}
    return found


def steps(request: Mapping[str, Any], check: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of the device's half of a step, copies and all, by samples."""
    found = {}
    for batch_size in check["arguments"]["batch_sizes"]:
        mesh = GangMesh.of(DeviceOptions())
        num_samples = batch_size // mesh.num_parts * mesh.num_parts
        job, random = timed_job(batch_size=num_samples), np.random.default_rng(0)
        worker = DeviceWorker(job=job, num_samples=num_samples)
        worker.build()
        activations = tuple(random.standard_normal((num_samples, width), np.float32) for width in job.widths.values())
        inputs = Inputs(
            dense=random.random((num_samples, job.data.num_dense), np.float32),  # type: ignore[arg-type]
            activations=activations,  # type: ignore[arg-type]
            labels=np.zeros(num_samples, np.float32),  # type: ignore[arg-type]
            weights=np.ones(num_samples, np.float32),  # type: ignore[arg-type]
        )
        gradients = tuple(aligned_zeros(one.shape) for one in activations)
        arrays = HostArrays(inputs, gradients, np.zeros(num_samples, np.float32))
        step = partial(worker.begin_training, arrays, weight_sum=float(num_samples))
        seconds = _median_s(lambda step=step: step().finish(), 10)
        found[str(num_samples)] = {"ms": _rounded(1e3 * seconds), "samples_s": round(num_samples / seconds)}
    return found


def _median_s(call: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
