"""The small job with one thing wrong in it, by name, so that worker processes can import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.workers.job.job import JobConfig
from tests.small_job import SmallModel, small_job


class FailingInit(SmallModel):
    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        raise RuntimeError("the user's init is wrong")


class FailingTrace(SmallModel):
    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        raise KeyError("the user's model is wrong")


class FailingLater(SmallModel):
    """Raises in the eleventh step of each process."""

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        logits = super().apply(params, dense, activations)
        calls = iter(range(10))

        def count(value: np.ndarray) -> np.ndarray:
            if next(calls, None) is None:
                raise ValueError("the user's callback is wrong")
            return value

        nothing = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        return logits + jax.lax.stop_gradient(nothing)


MODELS = {"init": FailingInit, "trace": FailingTrace, "later": FailingLater, "none": SmallModel}


def broken_job(*, folder: str, model: str = "none", epochs: int = 3) -> JobConfig:
    """The small job with one of `MODELS`."""
    return replace(small_job(folder=folder, audit=False, epochs=epochs), model=MODELS[model]())
