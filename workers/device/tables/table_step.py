"""`TableStep`: what compiled programs do with tables on devices. Pure functions of arrays.

A step looks up with the rows that the step before left, and differentiates the model by these vectors as by those of
hosts. Then it updates the rows. Replicated tables are whole on every device, and stay the same on all of them. Of
sharded ones each device has a part, and `exchange.py` brings ids, vectors and gradients to where they belong.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.embedding.row_optimizers.base import Optimizer
from podembed.embedding.shards import sharded_arrays
from podembed.workers.device.options import AXIS
from podembed.workers.device.tables import sparse_cores
from podembed.workers.device.tables.exchange import AskedArray, fetched, given
from podembed.workers.device.tables.pooling import BagIds, gradients_of_bags, gradients_of_ids, pooled
from podembed.workers.device.tables.sparse_cores import CoreAsked, with_cores
from podembed.workers.device.tables.updates import (
    ROWS,
    Arrays,
    Entries,
    sums_by_row,
    update_all,
    update_named,
)
from podembed.workers.job.padding import PaddingLevels
from podembed.workers.job.tables import DeviceTable

Tables = Mapping[str, Arrays]
"""By name of the replicated table, and of the array that sharded ones are in."""


class TableStep:
    """The tables on devices within compiled programs.

    Args:
      tables: tables in the job's order.
      num_parts: parts of the samples, over all hosts.
      platform: platform of the devices, as JAX calls it.
      num_cores: SparseCores of a device that look up; 0 for none.
    """

    def __init__(self, tables: Sequence[DeviceTable], *, num_parts: int, platform: str, num_cores: int = 0) -> None:
        self.tables = tuple(tables)
        arrays = sharded_arrays([table.spec for table in tables], num_parts)
        self._arrays = with_cores(arrays, tables, num_cores=num_cores)
        self._by_name = {table.spec.name: table for table in tables}
        # Additions to one place have no order on GPUs, and each device would get other sums.
        self._in_a_tree = platform not in ("cpu", "tpu")

    def asked(self, ids: Mapping[str, BagIds], levels: PaddingLevels) -> Asked:
        """What a step asks of the tables.

        Args:
          levels: room of messages for each array of sharded tables; none for as many rows as there are ids.
        """
        named, shards, of_cores = dict(ids), {}, {}
        for at, array in enumerate(self._arrays):
            features = {name: self._by_name[name].features for name in array.tables}
            rows = {table: jnp.concatenate([ids[name].rows for name in names]) for table, names in features.items()}
            shard, begin = AskedArray.of(rows, array, level=levels[at] if levels else None), 0
            if array.cores:
                own = [ids[name] for name in itertools.chain.from_iterable(features.values())]
                of_cores[array.name] = CoreAsked.of(shard, own)
                continue
            for name in itertools.chain.from_iterable(features.values()):
                one = ids[name].rows
                places = shard.wanted.places[begin : begin + one.size]
                named[name], begin = replace(ids[name], rows=places), begin + one.size
            shards[array.name] = shard
        return Asked(named, shards, of_cores)

    def looked_up(self, tables: Tables, asked: Asked) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """The vectors of each feature, `[num_bags, dim]`, and the rounds of sharded tables; None without any."""
        found, rounds = {}, []
        by_table = {name: arrays[ROWS] for name, arrays in tables.items()}
        if asked.of_cores:
            names = [*asked.of_cores]
            sums, count = sparse_cores.looked_up(
                [*asked.of_cores.values()],
                [by_table[name] for name in names],
                [self._by_name[name].spec.dim for name in names],
            )
            rounds.append(count)
            for one, own in zip(asked.of_cores.values(), sums, strict=True):
                found |= {feature: own[place] for feature, place in self._places(one, asked).items()}
        if asked.shards:
            shards = [*asked.shards.values()]
            dims = [self._by_name[name].spec.dim for name in asked.shards]
            fetching, count = fetched(shards, [by_table[name] for name in asked.shards], dims)
            rounds.append(count)
            for shard, values in zip(asked.shards.values(), fetching, strict=True):
                by_table |= dict.fromkeys(shard.array.tables, values)
        by_cores = {name for one in asked.of_cores.values() for name in one.ids.array.tables}
        for table in self.tables:
            if table.spec.name in by_cores:
                continue
            rows = by_table[table.spec.name]
            for name in table.features:
                ids, dim = asked.ids[name], table.spec.dim
                found[name] = pooled(rows, ids, table.quantization, dim=dim, in_a_tree=self._in_a_tree)
        return found, functools.reduce(jnp.maximum, rounds) if rounds else None

    def _places(self, one: CoreAsked, asked: Asked) -> dict[str, slice]:
        """Where the bags of each feature of an array are among those of all of them."""
        names = [name for table in one.ids.array.tables for name in self._by_name[table].features]
        ends = itertools.accumulate((asked.ids[name].num_bags for name in names), initial=0)
        return {name: slice(a, b) for name, (a, b) in zip(names, itertools.pairwise(ends), strict=True)}

    def updated(
        self, tables: Tables, asked: Asked, gradients: Mapping[str, jax.Array], *, rates: jax.Array
    ) -> dict[str, Any]:
        """The tables after the step.

        Args:
          gradients: by feature whose table is trained, `[..., dim]`, one for each bag.
          rates: float32, the learning rate of each table on devices.
        """
        trained = [
            _Trained(
                number,
                table,
                table.spec.optimizer,
                [_Part.of(asked.ids[name], gradients[name], in_a_tree=self._in_a_tree) for name in table.features],
            )
            for number, table in enumerate(self.tables)
            if table.spec.optimizer is not None
        ]
        after: dict[str, Any] = dict(tables)
        after |= self._shards_updated(tables, asked, {one.name: one for one in trained}, rates)
        after |= self._updated_by_cores(tables, asked, gradients, rates)
        trained = [one for one in trained if not one.table.spec.is_sharded]
        summed = [one for one in trained if one.is_summed]
        for one, sums in zip(summed, _over_devices([one.sums() for one in summed]), strict=True):
            after[one.name] = update_all(
                tables[one.name], sums, one.optimizer, rates[one.number], widths=one.table.spec.widths
            )
        others = [one for one in trained if not one.is_summed]
        for one, parts in zip(
            others, _of_all_devices([[part.numbered() for part in one.parts] for one in others]), strict=True
        ):
            after[one.name] = update_named(
                tables[one.name],
                _entries(parts),
                one.optimizer,
                rates[one.number],
                widths=one.table.spec.widths,
                in_a_tree=self._in_a_tree,
            )
        return after

    def _shards_updated(
        self, tables: Tables, asked: Asked, trained: Mapping[str, _Trained], rates: jax.Array
    ) -> dict[str, Any]:
        """The arrays of sharded tables after the step. Each owner updates its rows."""
        # Tables of one array have one rule, so all of them are trained or none, at one rate.
        shards = {name: shard for name, shard in asked.shards.items() if name in trained}
        if not shards:
            return {}
        sums = []
        for shard in shards.values():
            parts = itertools.chain.from_iterable(trained[table].parts for table in shard.array.tables)
            sums.append(shard.wanted.sums(_entries([*parts]).gradients, in_a_tree=self._in_a_tree))
        rules = {name: (trained[name].optimizer, rates[trained[name].number]) for name in shards}
        widths = {name: trained[name].table.spec.widths for name in shards}

        def take(entries: Sequence[Entries], state: Sequence[Any]) -> list[Any]:
            return [
                before + sums_by_row(own, before.shape[0])
                if optimizer.touches_all_rows
                else update_named(before, own, optimizer, rate, widths=widths[name], in_a_tree=self._in_a_tree)
                for (name, (optimizer, rate)), own, before in zip(rules.items(), entries, state, strict=True)
            ]

        # A rule that changes all rows waits for the sums of all rounds.
        start = [
            jnp.zeros((tables[name][ROWS].shape[0], tables[name][ROWS].shape[1] + 1))
            if optimizer.touches_all_rows
            else dict(tables[name])
            for name, (optimizer, _) in rules.items()
        ]
        found = given([*shards.values()], sums, take, start)
        return {
            name: update_all(tables[name], one, optimizer, rate, widths=widths[name])
            if optimizer.touches_all_rows
            else one
            for (name, (optimizer, rate)), one in zip(rules.items(), found, strict=True)
        }

    def _updated_by_cores(
        self, tables: Tables, asked: Asked, gradients: Mapping[str, jax.Array], rates: jax.Array
    ) -> dict[str, Any]:
        """The arrays that SparseCores update, after the step."""
        numbers = {table.spec.name: number for number, table in enumerate(self.tables)}
        arrays = {name: one for name, one in asked.of_cores.items() if self._by_name[name].spec.optimizer is not None}
        if not arrays:
            return {}
        of_bags, rules = [], []
        for name, one in arrays.items():
            spec = self._by_name[name].spec
            own = jnp.concatenate([gradients[feature].reshape(-1, spec.dim) for feature in self._places(one, asked)])
            of_bags.append(jnp.pad(own, ((0, one.ids.num_bags - own.shape[0]), (0, 0))))
            rules.append((spec.optimizer, rates[numbers[name]]))
        after = sparse_cores.updated([*arrays.values()], of_bags, [tables[name] for name in arrays], rules)
        return dict(zip(arrays, after, strict=True))


class Asked(NamedTuple):
    """The ids of a step on one device.

    Attributes:
      ids: ids by feature. Those of a sharded table are places among the rows that the device fetches.
      shards: arrays of sharded tables by name.
      of_cores: those that SparseCores look up. Their ids are rows.
    """

    ids: Mapping[str, BagIds]
    shards: Mapping[str, AskedArray]
    of_cores: Mapping[str, CoreAsked]


class _Part(NamedTuple):
    """A step's arrays for the rows of one feature.

    Attributes:
      rows, bags, weights: those of `BagIds`.
      each: float32 `[num_bags, dim]`, of `gradients_of_bags`.
    """

    rows: jax.Array
    bags: jax.Array | None
    each: jax.Array
    weights: jax.Array | None

    @staticmethod
    def of(ids: BagIds, gradients: jax.Array, *, in_a_tree: bool) -> _Part:
        each = gradients_of_bags(gradients.reshape(-1, gradients.shape[-1]), ids, in_a_tree=in_a_tree)
        return _Part(ids.rows, ids.bags, each, ids.weights)

    def numbered(self) -> _Part:
        """The same with the numbers of bags among those of all devices."""
        if self.bags is None:
            return self
        return self._replace(bags=self.bags + jax.lax.axis_index(AXIS) * self.each.shape[0])


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
        num_bags = sum(part.each.shape[0] for part in self.parts) * jax.lax.axis_size(AXIS)
        return self.optimizer.touches_all_rows or self.table.spec.num_rows <= num_bags

    def sums(self) -> jax.Array:
        return sums_by_row(_entries(self.parts), self.table.spec.num_rows)


def _entries(parts: Sequence[_Part]) -> Entries:
    """The ids of several features with their gradients."""
    return Entries(
        jnp.concatenate([part.rows for part in parts]),
        jnp.concatenate([gradients_of_ids(part.each, part.bags, part.weights) for part in parts]),
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
