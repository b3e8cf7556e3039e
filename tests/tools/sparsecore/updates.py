"""The update of an optimizer of `jax-tpu-embedding`, as the package writes it for the TPU's compiler, run on a CPU.

The package lowers an update to a function of one row, which it hands to a custom call of the TPU. That function is
plain StableHLO. It is taken out of the lowered program and compiled for the CPU. All of its operations are elementwise,
so one row may stand for many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib._jax import CompileOptions, DeviceList

_IDS, _SAMPLES = 64, 8


def lowered_step(optimizer: Any, *, width: int, name: str = "update", **settings: Any) -> str:
    """The text of a training step of one table, for TPUs."""
    slots = [jnp.zeros((_SAMPLES, width))] * optimizer.slot_variables_count()
    numbers = optimizer.get_hyperparameters(0)
    ids = jnp.zeros(_IDS, jnp.int32)

    def step(table: Any, slots: Any, gradients: Any, numbers: Any) -> Any:
        return optimizer.get_optimizer_primitive().bind(
            *(jnp.zeros(8, jnp.int32), ids, ids, jnp.zeros(_IDS), jnp.int32(1)),
            *(table, *slots, gradients, *numbers),
            max_ids_per_partition=256,
            max_unique_ids_per_partition=256,
            computation_name=name,
            sharding_strategy=1,
            **settings,
        )

    table = jnp.zeros((_SAMPLES, width))
    return jax.jit(step).trace(table, slots, table, numbers).lower(lowering_platforms=("tpu",)).as_text()


def update_on_cpu(optimizer: Any, *, num_values: int, **settings: Any) -> Callable[..., list[np.ndarray]]:
    """A function of gradient, weights and slots, float32 `[num_values]`, and of the step. Returns weights and slots."""
    text = lowered_step(optimizer, width=num_values, **settings)
    found = re.search(r"func\.func private @update\((.*?)\) -> tuple<(.*?)> \{\n(.*?)\n  \}", text, re.DOTALL)
    assert found is not None, text
    arguments, results, body = found.groups()
    packed = re.search(r"%(\w+) = stablehlo\.tuple (.*?) : .*?\n\s*return %\1 : .*", body)
    assert packed is not None, body
    body = body.replace(packed[0], f"return {packed[2]} : {results}")
    module = f"module @update {{\n  func.func public @main({arguments}) -> ({results}) {{\n{body}\n  }}\n}}\n"
    run = _compiled(module)

    def update(gradient: np.ndarray, values: Sequence[np.ndarray], step: int) -> list[np.ndarray]:
        numbers = [np.asarray(number) for number in optimizer.get_hyperparameters(step)]
        rows = [value.reshape(1, num_values) for value in (gradient, *values)]
        return [out.reshape(-1) for out in run([*rows, *(np.full((1, num_values), one) for one in numbers)])]

    return update


def _compiled(module: str) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    device = jax.devices("cpu")[0]
    loaded = device.client.compile_and_load(module, DeviceList((device,)), CompileOptions())
    return lambda values: [np.asarray(out) for out in loaded.execute([jax.device_put(v, device) for v in values])]
