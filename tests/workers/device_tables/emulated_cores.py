"""Devices of the processor as if they had SparseCores: what the operations of jax-tpu-embedding mean, in plain JAX.

They read the lists alone, as the cores do, and know nothing of how these are made. A list that is longer than it says
gives no number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import mlir
from jax_tpu_embedding.sparsecore.lib.core.primitives.sparse_dense_matmul_csr import (
    tpu_sparse_dense_matmul_csr_primitive,
)
from jax_tpu_embedding.sparsecore.lib.core.primitives.sparse_dense_matmul_optimizer_grad import (
    tpu_sparse_dense_matmul_optimizer_grad_primitive,
)

from podembed.workers.device import device_mesh
from podembed.workers.device.options import AXIS

NUM_CORES = 2


def emulate() -> None:
    """From now on CPU devices of this process have SparseCores."""
    device_mesh.CORES_BY_KIND["cpu"] = NUM_CORES
    product = mlir.lower_fun(_product, multiple_results=False)
    mlir.register_lowering(tpu_sparse_dense_matmul_csr_primitive, product, platform="cpu")
    update = mlir.lower_fun(_update, multiple_results=True)
    mlir.register_lowering(tpu_sparse_dense_matmul_optimizer_grad_primitive, update, platform="cpu")


def _entries(ends: jax.Array, rows: jax.Array, *, max_ids: int, max_rows: int) -> tuple[jax.Array, jax.Array]:
    """By place of the lists, core after core: the core that has the row, and whether an id is there; and where a list
    is too long, no number.
    """
    num_cores = NUM_CORES * jax.lax.axis_size(AXIS)
    ends = ends.reshape(NUM_CORES, -1)[:, :num_cores]
    begins = jnp.concatenate([jnp.zeros((NUM_CORES, 1), jnp.int32), -(-ends[:, :-1] // 8) * 8], axis=1)
    places = jnp.arange(len(rows) // NUM_CORES)
    owners = jax.vmap(lambda one: jnp.searchsorted(one, places, side="right") - 1)(begins)
    is_there = places < jnp.take_along_axis(ends, owners, axis=1)
    own = rows.reshape(NUM_CORES, -1)
    is_new = jnp.concatenate(
        [jnp.ones((NUM_CORES, 1), bool), (own[:, 1:] != own[:, :-1]) | (owners[:, 1:] != owners[:, :-1])], axis=1
    )
    count = jnp.zeros((NUM_CORES, num_cores), jnp.int32)
    core = jnp.arange(NUM_CORES)[:, None]
    distinct = count.at[core, owners].add(is_there & is_new)
    is_short = ((ends - begins) <= max_ids).all() & (distinct <= max_rows).all()
    return jnp.where(is_there, owners, -1).reshape(-1), jnp.where(is_short, 1.0, jnp.nan)


def _bags(bags: jax.Array, num_bags: int) -> jax.Array:
    """The number of each bag among those of the device."""
    core = jnp.arange(len(bags)) // (len(bags) // NUM_CORES)
    return core * (num_bags // NUM_CORES) + bags


def _product(
    ends: jax.Array,
    rows: jax.Array,
    bags: jax.Array,
    gains: jax.Array,
    one: jax.Array,
    table: jax.Array,
    *,
    device_batch_size: int,
    max_ids_per_partition: int,
    max_unique_ids_per_partition: int,
    **others: Any,
) -> jax.Array:
    owners, number = _entries(ends, rows, max_ids=max_ids_per_partition, max_rows=max_unique_ids_per_partition)
    by_core = jax.lax.all_gather(table, AXIS).reshape(-1, len(table) // NUM_CORES, table.shape[1])
    is_there = owners >= 0
    vectors = by_core[owners, jnp.where(is_there, rows, 0)] * jnp.where(is_there, gains, 0)[:, None]
    bags = jnp.where(is_there, _bags(bags, device_batch_size), device_batch_size)
    return number * jnp.zeros((device_batch_size, table.shape[1])).at[bags].add(vectors, mode="drop")


def _update(
    ends: jax.Array,
    rows: jax.Array,
    bags: jax.Array,
    gains: jax.Array,
    one: jax.Array,
    gradients: jax.Array,
    rate: jax.Array,
    *tables: jax.Array,
    jaxpr: Any,
    max_ids_per_partition: int,
    max_unique_ids_per_partition: int,
    **others: Any,
) -> list[jax.Array]:
    owners, number = _entries(ends, rows, max_ids=max_ids_per_partition, max_rows=max_unique_ids_per_partition)
    is_there = owners >= 0
    own = gradients[jnp.where(is_there, _bags(bags, len(gradients)), 0)] * jnp.where(is_there, gains, 0)[:, None]
    num_rows, dim = tables[0].shape
    owners, rows, own = (jax.lax.all_gather(each, AXIS, tiled=True) for each in (owners, rows, own))
    places = owners % NUM_CORES * (num_rows // NUM_CORES) + rows
    places = jnp.where((owners >= 0) & (owners // NUM_CORES == jax.lax.axis_index(AXIS)), places, num_rows)
    sums = jnp.zeros((num_rows, dim)).at[places].add(own, mode="drop")
    is_named = jnp.zeros(num_rows, bool).at[places].set(True, mode="drop")
    rule = jex.core.jaxpr_as_fun(jaxpr)

    def updated(gradient: jax.Array, *held: jax.Array) -> list[jax.Array]:
        row = [value[None] for value in (gradient, *held)]
        return [value[0] for value in rule(*row, jnp.full((1, dim), rate))]

    after = jax.vmap(updated)(sums, *tables)
    return [number * jnp.where(is_named[:, None], new, old) for new, old in zip(after, tables, strict=True)]
