"""`TableStep`: what the compiled programs of a job do with tables on devices. Pure functions of arrays.

A step looks up with the rows that the step before left, and differentiates the model by these vectors as by those of
hosts. Then it updates the rows. Its tables are whole on every device, and stay the same on all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.embedding.row_optimizers.base import Optimizer
from podembed.workers.device.options import AXIS
from podembed.workers.device.tables.pooling import BagIds, gradients_of_bags, gradients_of_ids, pooled
from podembed.workers.device.tables.updates import ROWS, Arrays, Entries, sums_by_row, update_all, update_named
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import DeviceTable, device_tables, weighted_features

Tables = Mapping[str, Arrays]
"""By name of the table."""


class TableStep:
    """The tables on devices within the programs of a job.

    Args:
      platform: platform of the devices, as JAX calls it.

    Attributes:
      tables: in the job's order.
      weighted: features whose ids have weights.
    """

    def __init__(self, job: JobConfig, *, platform: str) -> None:
        self._job = job
        self.tables: tuple[DeviceTable, ...] = device_tables(job)
        self.weighted = weighted_features(job)
        # Additions to one place have no order on GPUs, and each device would get other sums.
        self._in_a_tree = platform not in ("cpu", "tpu")

    def looked_up(self, tables: Tables, ids: Mapping[str, BagIds], activations: Sequence[jax.Array]) -> tuple[Any, ...]:
        """The activations of all features in the job's order.

        Args:
          activations: activations of the features that hosts look up.
        """
        found = dict(zip(self._job.host_features, activations, strict=True))
        for table in self.tables:
            rows = tables[table.spec.name][ROWS]
            for name in table.features:
                vectors = pooled(rows, ids[name], table.config.quantization_config)
                inner = () if name in self._job.sequences else self._job.activation_shapes[name][:-1]
                found[name] = vectors.reshape(vectors.shape[0] // math.prod(inner), *inner, vectors.shape[1])
        return tuple(found[name] for name in self._job.features)

    def updated(
        self,
        tables: Tables,
        ids: Mapping[str, BagIds],
        gradients: Sequence[jax.Array],
        *,
        scale: jax.Array,
        rates: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """The gradients that hosts get, and the tables after the step.

        Args:
          gradients: gradients of all features whose tables are trained, in the job's order, not scaled.
          scale: what they are multiplied with.
          rates: float32, the learning rate of each table on devices.
        """
        job = self._job
        named = [name for name, is_trained in zip(job.features, job.trained_features, strict=True) if is_trained]
        found = dict(zip(named, gradients, strict=True))
        trained = [
            _Trained(
                number,
                table,
                table.spec.optimizer,
                [_Part.of(ids[name], found[name] * scale) for name in table.features],
            )
            for number, table in enumerate(self.tables)
            if table.spec.optimizer is not None
        ]
        after: dict[str, Any] = dict(tables)
        summed = [one for one in trained if one.is_summed]
        for one, sums in zip(summed, _over_devices([one.sums() for one in summed]), strict=True):
            after[one.name] = update_all(tables[one.name], sums, one.optimizer, rates[one.number])
        others = [one for one in trained if not one.is_summed]
        for one, parts in zip(others, _of_all_devices([one.parts for one in others]), strict=True):
            after[one.name] = update_named(
                tables[one.name], _entries(parts), one.optimizer, rates[one.number], in_a_tree=self._in_a_tree
            )
        return tuple(found[name] for name in named if name in job.host_features), after


class _Part(NamedTuple):
    """A step's arrays for the rows of one feature.

    Attributes:
      rows, weights: rows and weights of `BagIds`.
      each: float32 `[num_bags, dim]`, of `gradients_of_bags`.
    """

    rows: jax.Array
    each: jax.Array
    weights: jax.Array | None

    @staticmethod
    def of(ids: BagIds, gradients: jax.Array) -> _Part:
        return _Part(ids.rows, gradients_of_bags(gradients.reshape(-1, gradients.shape[-1]), ids), ids.weights)


class _Trained(NamedTuple):
    """A table that a step updates, and what one device has for it; `number` is its place among tables on devices."""

    number: int
    table: DeviceTable
    optimizer: Optimizer
    parts: list[_Part]

    @property
    def name(self) -> str:
        return self.table.spec.name

    @property
    def is_summed(self) -> bool:
        """Whether each device has a sum for every row. It must not hang on the room of bags, which a restart may find
        smaller: then numbers would be others.
        """
        num_bags = sum(part.rows.shape[0] for part in self.parts) * jax.lax.axis_size(AXIS)
        return self.optimizer.touches_all_rows or self.table.spec.num_rows <= num_bags

    def sums(self) -> jax.Array:
        return sums_by_row(_entries(self.parts), self.table.spec.num_rows)


def _entries(parts: Sequence[_Part]) -> Entries:
    """The ids of several features with their gradients."""
    return Entries(
        jnp.concatenate([part.rows.reshape(-1) for part in parts]),
        jnp.concatenate([gradients_of_ids(part.each, part.rows, part.weights) for part in parts]),
    )


def _over_devices(sums: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums over all devices, in one message."""
    if not sums:
        return []
    flat = jax.lax.psum(jnp.concatenate([one.reshape(-1) for one in sums]), AXIS)
    ends = [0, *itertools.accumulate(one.size for one in sums)]
    return [flat[a:b].reshape(one.shape) for one, (a, b) in zip(sums, itertools.pairwise(ends), strict=True)]


def _of_all_devices(tables: list[list[_Part]]) -> list[list[_Part]]:
    """The parts of all devices, one device after another, in one message."""
    leaves, structure = jax.tree.flatten(tables)
    if not leaves:
        return []
    words = [jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1) for leaf in leaves]
    gathered = jax.lax.all_gather(jnp.concatenate(words), AXIS)
    ends = [0, *itertools.accumulate(one.size for one in words)]
    found = [
        jax.lax.bitcast_convert_type(gathered[:, a:b], leaf.dtype).reshape(-1, *leaf.shape[1:])
        for leaf, (a, b) in zip(leaves, itertools.pairwise(ends), strict=True)
    ]
    return jax.tree.unflatten(structure, found)
