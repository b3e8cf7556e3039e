"""A job small enough for tests that still has everything: that of `podembed chaos`, with a larger table to cut, an
evaluation, and an audit of another kind: a gradient that the model sets to exactly 1 and a plain rule, so that the
audit tells the same with every loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import Always, LeastFrequent, LeastRecent, MinCount, Never
from podembed.jobs.chaos.jobs import (
    BATCH_SIZE,
    DIM,
    NUM_LANES,
    NUM_ROWS,
    TinyModel,
    tiny_data,
    tiny_features,
    write_tiny_files,
)
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ReadOrder
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import choose_buckets, table_specs

__all__ = ["BATCH_SIZE", "B_ROWS", "DIM", "NUM_LANES", "NUM_ROWS", "SmallModel", "small_job", "write_small_data"]

# Too many for one host's fair share: table b is cut into buckets and its rows travel, while the others lie whole and
# are pooled there.
B_ROWS = 30_000
_INNER = TinyModel()


class SmallModel:
    """The audit feature bypasses the inner model with a gradient of exactly 1. On a mesh, the hidden layer is cut."""

    shardings = {"hidden": P(None, "model"), "out": P("model")}  # noqa: RUF012

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        return _INNER.init(key, num_dense, {name: width for name, width in widths.items() if name != "audit"})

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        seen = {name: value for name, value in activations.items() if name != "audit"}
        logits = _INNER.apply(params, dense, seen)
        return _tap(logits, activations["audit"]) if "audit" in activations else logits


@jax.custom_vjp
def _tap(logits: jax.Array, audit: jax.Array) -> jax.Array:
    """The logits alone; the gradient of every sample's audit value is 1, whatever the loss says."""
    return logits


_tap.defvjp(lambda logits, audit: (logits, audit), lambda audit, upstream: (upstream, jnp.ones_like(audit)))


def write_small_data(folder: Path | str, *, num_rows: int = NUM_ROWS, seed: int = 5) -> None:
    """Two files of uneven row groups; columns `label`, `x`, `y`, `a`, `b`, `bag`, `other_bag`, `sample_id`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_tiny_files(Path(folder), num_rows=num_rows, cut_rows=B_ROWS, seed=seed)


def small_job(
    *,
    folder: str,
    num_rows: int = NUM_ROWS,
    epochs: int = 3,
    audit: bool = True,
    evaluate: bool = False,
    seed: int = 3,
    staleness: int = 0,
    overlap: bool = True,
    order: ReadOrder = "shuffled",
    cut_bags: bool = False,
    dynamic: bool = False,
    room: float = 0.25,
    places: Mapping[str, str] = {},
) -> JobConfig:
    """The job on what `write_small_data` wrote.

    Args:
      cut_bags: with a larger table still, which is cut in the place of b. Its owners pool their part of each bag.
      dynamic: whether keys of all tables but the audit's come and go.
      room: for which share of their values.
      places: places of tables by their names.
    """
    features = tiny_features(cut_rows=B_ROWS)
    data = replace(tiny_data(folder, features), order=order)
    if cut_bags:
        table = TableConfig(4 * B_ROWS, 2 * DIM, name="cut_bags", combiner="mean", optimizer=Adagrad(0.1))
        features["cut_bags"] = FeatureConfig(table)
        data = replace(data, features={**data.features, "cut_bags": IdColumn("bag", mode="hash")})
    if dynamic:
        policies = itertools.cycle([(Always(), LeastRecent()), (MinCount(2), LeastFrequent(4)), (Always(), Never())])
        for table, (admit, evict) in zip({feature.table: 0 for feature in features.values()}, policies, strict=False):
            capacity = 1 + int(table.vocabulary_size * room)
            table.dynamic_keys = DynamicKeys(capacity=capacity, admit=admit, evict=evict, forget_after=8)
            table.vocabulary_size = capacity
    if audit:
        # Gradients are divided by the batch's weight, so at this rate a visit in a full batch takes 1 off a sample's
        # row.
        table = TableConfig(
            num_rows, 1, name="audit", combiner="sum", initializer=Constant(0.0), optimizer=SGD(float(BATCH_SIZE))
        )
        features["audit"] = FeatureConfig(table)
        data = replace(data, features={**data.features, "audit": IdColumn("sample_id")})
    for table in {feature.table for feature in features.values()}:
        table.place = places.get(str(table.name), table.place)
    return JobConfig(
        name="small",
        features=features,
        model=SmallModel(),
        data=replace(data, eval_paths=data.paths) if evaluate else data,
        batch_size=BATCH_SIZE,
        num_lanes=NUM_LANES,
        num_epochs=epochs,
        dense_optimizer=optax.adam(1e-2),
        seed=seed,
        staleness=staleness,
        overlap=overlap,
    )


def compile_small_job() -> None:
    """Leaves in numba's cache what hosts of the job need, as most tests do."""
    job = small_job(folder="")
    compile_kernels(table_specs(job, choose_buckets(job)))
