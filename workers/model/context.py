"""`StepContext`: what a model may ask about the step beside its own samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.workers.model import sample_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the samples of a batch are spread over devices. Every device has as many rows, some of them padding.

    Attributes:
      num_samples: rows of a host.
      real: per host, how many of its rows are samples; the others follow them and are padding.
    """

    num_samples: int
    real: tuple[int, ...]

    @property
    def batch_size(self) -> int:
        return sum(self.real)

    @property
    def positions(self) -> np.ndarray:
        """int32 `[hosts * num_samples]`: the position of each row in the global batch. Padding comes behind it."""
        first = np.cumsum((0, *self.real))
        rows = np.arange(self.num_samples)
        found = [
            np.where(rows < real, first[host] + rows, self.batch_size + host * self.num_samples + rows)
            for host, real in enumerate(self.real)
        ]
        return np.concatenate(found).astype(np.int32)

    @property
    def order(self) -> np.ndarray:
        """int32 `[batch_size]`: where each sample lies among the rows of all hosts."""
        return np.argsort(self.positions)[: self.batch_size].astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepContext:
    """The step as a model sees it.

    Attributes:
      training: whether parameters will be updated; False in evaluations and predictions.
      step: uint32, counted from 0; the step of the last update in an evaluation.
      key: key of this step, a function of the job's seed and the step. Arrays that are drawn with it and have the
        samples as their first axis do not depend on the number of hosts (`workers.model.sample_keys`).
      positions: int32 `[n]`, of each sample in the global batch; `batch_size` or more on padding.
      batch_size: samples of the global batch.
      params: the model's parameters, for losses that look at them.
      state: what the model keeps beside its parameters; empty if it keeps nothing.
      axis: name of the axis over all devices, for `jax.lax` and for frameworks that take an axis name; None where one
        process has the whole batch.
    """

    training: bool
    step: Any
    key: jax.Array
    positions: jax.Array
    batch_size: int
    weights: jax.Array
    params: Any = None
    state: Any = None
    axis: str | None = None
    _plain_key: Any = None
    _order: Any = field(default=None)

    @staticmethod
    def alone(num_samples: int, *, training: bool = True, seed: int = 0, state: Any = None) -> StepContext:
        """The context of a process that has the whole batch: to try a model out, and to debug it.

        Args:
          num_samples: number of samples of the batch.
        """
        positions, key = jnp.arange(num_samples, dtype=jnp.int32), jax.random.key(seed)
        return StepContext(
            training=training,
            step=np.uint32(0),
            key=sample_keys.with_positions(key, positions),
            positions=positions,
            batch_size=num_samples,
            weights=jnp.ones(num_samples),
            state=state,
            _plain_key=key,
        )

    @property
    def sample_keys(self) -> jax.Array:
        """One usual key a sample, `[n]`, for functions that are mapped over samples."""
        return sample_keys.of_each(self._plain_key, self.positions)

    def all_gather(self, values: jax.Array) -> jax.Array:
        """`[n, ...]` of this device → `[batch_size, ...]`, the values of all samples in the order of the global batch.

        Gradients flow back to the device that a value came from. At the end of an epoch some of the samples have
        weight 0; gather `batch.weights` to see which.
        """
        self._require_samples("all_gather", values)
        if self.axis is None:
            return values
        return jnp.take(jax.lax.all_gather(values, self.axis, tiled=True), self._order, axis=0)

    def sum(self, values: jax.Array) -> jax.Array:
        """`[n, ...]` → `[...]`, the sum over all samples of the global batch whose weight is above 0.

        Numbers of 16 bits are added as float32.
        """
        self._require_samples("sum or mean", values)
        if _is_narrow(values):
            return self.sum(values.astype(jnp.float32)).astype(values.dtype)
        counted = (self.weights > 0).reshape(-1, *(1,) * (values.ndim - 1))
        total = jnp.sum(jnp.where(counted, values, jnp.zeros((), values.dtype)), axis=0)
        return total if self.axis is None else jax.lax.psum(total, self.axis)

    def mean(self, values: jax.Array) -> jax.Array:
        """`[n, ...]` → `[...]`, the mean over all samples of the global batch whose weight is above 0. This is what a
        normalization over the batch needs, since some rows are padding.
        """
        if _is_narrow(values):
            return self.mean(values.astype(jnp.float32)).astype(values.dtype)
        total = self.sum(values)
        return total / jnp.maximum(self.sum(jnp.ones(len(values), values.dtype)), 1)

    def _require_samples(self, what: str, values: jax.Array) -> None:
        num_samples = self.positions.shape[0]
        if jnp.shape(values)[:1] != (num_samples,):
            raise ValueError(
                f"Found context.{what} of the shape {list(jnp.shape(values))}. Expected [{num_samples}, ...], one row "
                "a sample of this device. Pass what belongs to samples."
            )


def _is_narrow(values: jax.Array) -> bool:
    return values.dtype in (jnp.bfloat16, jnp.float16)
