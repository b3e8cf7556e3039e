"""Measures training steps of small dense models, as a device process compiles them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from podembed.workers.calibration.record import Dense

# Samples and widths of layers: overhead, operations and bytes take turns in being what counts.
_MODELS = ((64, (16, 16, 1)), (512, (128, 128, 64, 1)), (1024, (512, 512, 256, 1)), (4096, (1024, 16, 1)))
_STEPS = 10


def measure_dense() -> Dense:
    """Seconds for a step, an operation and a byte, by a fit that allows none below 0."""
    from scipy.optimize import nnls  # late: it is needed here alone

    steps = [_measured(samples, widths) for samples, widths in _MODELS]
    seconds = np.array([spent for spent, _, _ in steps])
    counts = np.array([(1.0, flops, num_bytes) for _, flops, num_bytes in steps]) / seconds[:, None]
    scale = counts.max(axis=0)
    found, _ = nnls(counts / scale, np.ones(len(steps)))
    step_s, flop_s, byte_s = found / scale
    return Dense(step_s=float(step_s), flop_s=float(flop_s), byte_s=float(byte_s))


def _measured(samples: int, widths: tuple[int, ...]) -> tuple[float, float, float]:
    """Seconds of a step, and what the compiler says of it: operations and bytes."""
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    sizes = list(pairwise(widths))
    params = [jnp.asarray(random.standard_normal(size, np.float32) / size[0] ** 0.5) for size in sizes]
    inputs = jnp.asarray(random.standard_normal((samples, widths[0]), np.float32))

    def loss(params: Any, inputs: Any) -> Any:
        for weight in params[:-1]:
            inputs = jax.nn.relu(inputs @ weight)
        return jnp.mean(jnp.square(inputs @ params[-1]))

    def step(params: Any, inputs: Any) -> Any:
        value, (of_params, of_inputs) = jax.value_and_grad(loss, argnums=(0, 1))(params, inputs)
        return [weight - 1e-4 * change for weight, change in zip(params, of_params, strict=True)], of_inputs, value

    compiled = jax.jit(step).lower(params, inputs).compile()
    flops, num_bytes = costs_of(compiled)
    return quickest(lambda: jax.block_until_ready(compiled(params, inputs)), _STEPS), flops, num_bytes


def costs_of(compiled: Any) -> tuple[float, float]:
    """Floating point operations and bytes of a compiled program, as its compiler counts them; 0 where it does not."""
    found = compiled.cost_analysis() or {}
    found = found[0] if isinstance(found, list) else found
    return max(0.0, float(found.get("flops", 0.0))), max(0.0, float(found.get("bytes accessed", 0.0)))


def quickest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest quarter of several runs, after two more."""
    times = []
    for number in range(2 + repeats):
        began = time.perf_counter()
        run()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return float(np.quantile(times, 0.25))
