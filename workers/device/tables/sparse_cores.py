"""Sharded tables on the SparseCores of a TPU: the same lookups and updates by processors made for them.

A SparseCore fetches rows from the memory of any chip, sums each bag on the way, and applies the update of a row where
it lies. So no vector of an id ever comes to the TensorCores, as in `exchange.py`: only sums of bags do. Its operations
are those of the package jax-tpu-embedding. What they ask for is a list of ids for each pair of cores, the one that has
the bag and the one that has the row. Here the list is made on the device, from the ids that plain lookups get as well.

A core has room for so many distinct rows of another one. As plain lookups do, a step that needs more takes several
rounds, and each row is wholly in one of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.shards import ShardedArray
from podembed.workers.device.tables.exchange import AskedArray, AskedRound, exchanged, in_rounds
from podembed.workers.device.tables.lines import LINE, as_rows
from podembed.workers.device.tables.pooling import BagIds, gains_of_ids
from podembed.workers.device.tables.updates import CHANGED, ROWS, Arrays, updated_rows
from podembed.workers.job.tables import DeviceTable

MOST_ROWS = 16_384
"""Distinct rows that all cores together ask of one in a round. With twice as many the compiler of TPUs takes 75 instead
of 25 CPU seconds for an update, and its flops are 16 times as many; with four times as many, lists do not fit into the
memory of a v6e's core.
"""

_ALIGNED = 8  # the list of each pair of cores begins at a multiple of this
_NOTHING = 2**31 - 1  # between lists


def with_cores(arrays: Sequence[ShardedArray], tables: Sequence[DeviceTable], *, num_cores: int) -> list[ShardedArray]:
    """The arrays with the number of SparseCores that look them up: all of a device, or none.

    Args:
      num_cores: SparseCores of a device.
    """
    able = {table.spec.name for table in tables if _is_able(table)}
    return [replace(array, cores=num_cores if able.issuperset(array.tables) else 0) for array in arrays]


def _is_able(table: DeviceTable) -> bool:
    """Whether the operations of the package know such a table: rows and slots of one width, a multiple of 8; rules that
    change the rows of a step alone. Where rows, or one of them, fill a line, cores have the same bytes row by row.
    """
    spec = table.spec
    if (
        spec.dim % _ALIGNED
        or LINE % spec.dim
        or table.quantization is not None
        or {*spec.widths.values()} != {spec.dim}
    ):
        return False
    return spec.optimizer is None or not spec.optimizer.touches_all_rows


class CoreIds(NamedTuple):
    """The ids that one device has of an array, in the order of the lists. Equal ids of a bag are one.

    Attributes:
      array: its tables.
      num_bags: bags of the device, a multiple of 8 for each of its cores.
      pair: int32 `[n]`, rising: core of this device * cores of all devices + core that has the row. Behind all pairs
        where there is no id.
      rows: int32 `[n]`: places at the core that has them, rising within a pair.
      bags: int32 `[n]`: among those of the core.
      gains: float32 `[n]`: what a row is multiplied by.
      is_first: bool `[n]`: which ids are the first of their kind; the gain of the others is with them.
    """

    array: ShardedArray
    num_bags: int
    pair: jax.Array
    rows: jax.Array
    bags: jax.Array
    gains: jax.Array
    is_first: jax.Array

    @staticmethod
    def of(asked: AskedArray, features: Sequence[BagIds]) -> CoreIds:
        """The ids of the features of an array, in the order in which it was asked for them."""
        array, wanted = asked.array, asked.wanted
        multiple = _ALIGNED * array.cores
        num_bags = -(-sum(one.num_bags for one in features) // multiple) * multiple
        bags, gains, begin = [], [], 0
        for one in features:
            own = jnp.arange(one.num_bags, dtype=jnp.int32) if one.bags is None else one.bags
            bags.append(jnp.minimum(begin + own, num_bags - 1))
            gains.append(gains_of_ids(one))
            begin += one.num_bags
        num_cores = array.num_owners
        slots = wanted.slots[jnp.cumsum(wanted.is_first) - 1]
        asking = jnp.concatenate(bags)[wanted.order] // (num_bags // array.cores)
        asking = jnp.where(slots == array.num_slots, array.cores, asking)
        # They are sorted by slot, and of one slot by bag. A sort by the asking core as well would take the compiler of
        # TPUs half a minute; there are but a few cores, and each one's ids stay in their order.
        is_of = asking == jnp.arange(array.cores + 1, dtype=jnp.int32)[:, None]
        places = jnp.cumsum(is_of, dtype=jnp.int32).reshape(is_of.shape)
        places = jnp.where(is_of, places, 0).sum(axis=0) - 1
        by_core = jnp.zeros_like(places).at[places].set(jnp.arange(len(places), dtype=jnp.int32), unique_indices=True)
        order = wanted.order[by_core]
        slots, asking = slots[by_core], asking[by_core]
        within = jnp.concatenate(bags)[order] % (num_bags // array.cores)
        owner, rows = jnp.divmod(slots, array.rows_per_core)
        pair = jnp.where(asking == array.cores, array.cores * num_cores, asking * num_cores + owner)
        is_other = (pair[1:] != pair[:-1]) | (rows[1:] != rows[:-1]) | (within[1:] != within[:-1])
        is_first = jnp.concatenate([jnp.ones(1, bool), is_other])
        number = jnp.cumsum(is_first) - 1
        summed = jax.ops.segment_sum(
            jnp.concatenate(gains)[order], number, num_segments=len(slots), indices_are_sorted=True
        )
        return CoreIds(array, num_bags, pair, rows, within, summed[number], is_first)

    @property
    def room(self) -> int:
        """The ids that the lists of a core have room for."""
        num, num_cores = len(self.pair), self.array.num_owners
        return -(-num // _ALIGNED) * _ALIGNED + (_ALIGNED * min(num, num_cores))

    def lists(self, turn: AskedRound) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The lists of a round, as `preprocess_sparse_dense_matmul_input` of the package makes them.

        Returns:
          int32 `[cores * max(8, all cores)]`, where each list ends among those of its core; int32 rows, int32 bags and
          float32 gains, `[cores * room]`, those of one core after those of another.
        """
        array = self.array
        num_cores = array.num_owners
        owner = self.pair % num_cores
        slots = owner * array.rows_per_core + self.rows
        is_now = self.is_first & (self.pair < array.cores * num_cores)
        is_now &= (slots >= turn.first[owner]) & (slots < turn.last[owner])
        behind = jnp.cumsum(is_now, dtype=jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), behind])
        pairs = jnp.arange(array.cores * num_cores + 1, dtype=jnp.int32)
        begin_of = before[jnp.searchsorted(self.pair, pairs)]
        sizes = jnp.diff(begin_of).reshape(array.cores, num_cores)
        aligned = -(-sizes // _ALIGNED) * _ALIGNED
        begins = jnp.cumsum(aligned, axis=1) - aligned
        core = jnp.minimum(self.pair // num_cores, array.cores - 1)
        places = core * self.room + begins[core, owner] + before[:-1] - begin_of[self.pair]
        places = jnp.where(is_now, places, array.cores * self.room)

        def listed(values: jax.Array, nothing: float) -> jax.Array:
            empty = jnp.full(array.cores * self.room, nothing, values.dtype)
            return empty.at[places].set(values, mode="drop")

        ends = jnp.pad(begins + sizes, ((0, 0), (0, max(0, _ALIGNED - num_cores))))
        behind = jnp.arange(ends.shape[1]) >= num_cores
        ends = jnp.where(behind, aligned.sum(axis=1, keepdims=True), ends)
        return (
            ends.reshape(-1),
            listed(self.rows, _NOTHING),
            listed(self.bags, _NOTHING),
            listed(self.gains, jnp.nan),
        )


class CoreAsked(NamedTuple):
    """An array in a step: what rounds go by, and the ids."""

    asked: AskedArray
    ids: CoreIds

    @staticmethod
    def of(asked: AskedArray, features: Sequence[BagIds]) -> CoreAsked:
        """Arguments as of `CoreIds.of`."""
        most = max(_ALIGNED, MOST_ROWS // asked.array.num_owners)
        return CoreAsked(asked._replace(room=min(asked.room, most)), CoreIds.of(asked, features))

    @property
    def limits(self) -> dict[str, int]:
        """Ids and distinct rows of a list, at most."""
        return {
            "max_ids_per_partition": self.ids.room,
            "max_unique_ids_per_partition": min(self.asked.room, self.ids.room),
        }


def looked_up(
    arrays: Sequence[CoreAsked], tables: Sequence[jax.Array], dims: Sequence[int]
) -> tuple[list[jax.Array], jax.Array]:
    """The sums of all bags, `[num_bags, dim]` by array, and the number of rounds that it took.

    Args:
      tables: the part of this device of each array, in lines.
      dims: columns of a row, by array.
    """
    from jax_tpu_embedding.sparsecore.lib.core.primitives.sparse_dense_matmul_csr import (
        tpu_sparse_dense_matmul_csr_primitive as product,
    )

    def turn(turns: Sequence[AskedRound], sums: list[jax.Array]) -> list[jax.Array]:
        return [
            before
            + product.bind(
                *one.ids.lists(now),
                jnp.int32(1),
                as_rows(table, dim),
                device_batch_size=one.ids.num_bags,
                **one.limits,
            )
            for one, now, table, dim, before in zip(arrays, turns, tables, dims, sums, strict=True)
        ]

    start = [jnp.zeros((one.ids.num_bags, dim)) for one, dim in zip(arrays, dims, strict=True)]
    return in_rounds([one.asked for one in arrays], turn, start)


def updated(
    arrays: Sequence[CoreAsked],
    gradients: Sequence[jax.Array],
    tables: Sequence[Arrays],
    rules: Sequence[tuple[Optimizer, jax.Array]],
) -> list[dict[str, jax.Array]]:
    """The tables after an update of the rows that the ids of all devices name.

    Args:
      gradients: of the bags of this device, `[num_bags, dim]` by array.
      tables: the part of this device of each array, in lines.
      rules: rule and learning rate of each array.
    """
    from jax_tpu_embedding.sparsecore.lib.core.primitives.sparse_dense_matmul_optimizer_grad import (
        tpu_sparse_dense_matmul_optimizer_grad_primitive as update,
    )

    def turn(turns: Sequence[AskedRound], state: list[dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        after = []
        for at, (one, now, slots) in enumerate(zip(arrays, turns, exchanged([now.sent for now in turns]), strict=True)):
            (optimizer, rate), table, dim = rules[at], state[at], gradients[at].shape[1]
            names = [ROWS, *(slot.name for slot in optimizer.slots)]
            values = update.bind(
                *one.ids.lists(now),
                jnp.int32(1),
                gradients[at],
                rate,
                *(as_rows(table[name], dim) for name in names),
                num_hyperparameters=1,
                **_rule(optimizer, names, dim),
                computation_name=f"update_{at}",
                **one.limits,
            )
            changed = table[CHANGED].at[slots.reshape(-1)].set(True, mode="drop")
            lines = {name: own.reshape(table[name].shape) for name, own in zip(names, values, strict=True)}
            after.append({**lines, CHANGED: changed})
        return after

    return in_rounds([one.asked for one in arrays], turn, [dict(table) for table in tables])[0]


def _rule(optimizer: Optimizer, names: Sequence[str], dim: int) -> dict[str, Any]:
    """The update of one row as the package takes it: a program of (gradient, row and slots, learning rate), `[1, dim]`
    each. Since its version 0.2 it is the text of one.
    """

    def rule(gradient: jax.Array, *held: jax.Array) -> tuple[jax.Array, ...]:
        found = updated_rows(dict(zip(names, held[:-1], strict=True)), gradient, optimizer, held[-1])
        return tuple(found[name] for name in names)

    try:
        lowering = importlib.import_module("jax_tpu_embedding.sparsecore.lib.nn.custom_optimizer_lowering")
    except ImportError:
        row = jax.ShapeDtypeStruct((1, dim), jnp.float32)
        return {"jaxpr": jax.make_jaxpr(rule)(*[row] * (2 + len(names)))}
    num_slots = len(names) - 1
    text = lowering.lower_to_stablehlo(
        rule, embedding_dim=dim, num_slot_variables=num_slots, num_hyperparameters=1, min_value=None, max_value=None
    )
    return {"stablehlo": text}
