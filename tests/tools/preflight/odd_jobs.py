"""Jobs that a TPU runs badly or not at all, and one whose tables lie on the chips."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podembed import FeatureConfig, IdColumn, JobConfig, ParquetData, TableConfig


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear model with something in it."""

    kind: str

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"weight": jnp.ones(sum(widths.values()))}

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        x = jnp.concatenate(list(activations.values()), axis=1)
        if "callback" in self.kind:
            jax.debug.print("{}", x.sum())
        if "float64" in self.kind:
            with jax.enable_x64(True):
                x = (x.astype(jnp.float64) * 1.000001).astype(jnp.float32)
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGABRT)
        return x @ params["weight"]


def linear(
    *,
    kind: str = "",
    place: str = "host",
    rows: int = 100_000,
    dim: int = 128,
    batch_size: int = 64,
    num_lanes: int = 16,
) -> JobConfig:
    return JobConfig(
        name="linear",
        features={name: FeatureConfig(TableConfig(rows, dim, name=name, place=place)) for name in "ab"},  # type: ignore[arg-type]
        model=Linear(kind=kind),
        data=ParquetData("none-*.parquet", label="label", features={name: IdColumn(name) for name in "ab"}),
        batch_size=batch_size,
        num_lanes=num_lanes,
    )
