"""Ids to the devices that have their rows, vectors back, and gradients there: what a step does for sharded tables.

Pure functions of the arrays of one device, within a map over all devices. A device makes the slots of its ids distinct
and sorts them, so those of each owner lie in a row. An owner is a device, or each of its SparseCores. A message has a
fixed *room* of ids for each owner. One that is asked for more is asked in several *rounds*. All devices agree where a
round ends at each owner: at the first slot for which some device has no more room. So a row is wholly in one round, and
sums that are made in order do not hang on the room. All arrays share a round's messages. Nearly all steps have one
round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podembed.embedding.shards import ShardedArray
from podembed.workers.device.options import AXIS
from podembed.workers.device.tables.lines import rows_at
from podembed.workers.device.tables.updates import Entries, sums_of_runs
from podembed.workers.job.padding import room_level, rows_of_room


class Wanted(NamedTuple):
    """The rows that one device wants of an array.

    Attributes:
      slots: int32 `[n]`: distinct ones, rising; behind them `num_slots` of the array.
      places: int32 `[n]`: by id, where its slot is among these; -1 for none.
      order, is_first: int32 and bool `[n]`: the ids by their slots, and which of them begins another slot.
      ends: int32 `[num_owners + 1]`: where the slots of each owner begin among `slots`, and where the last one's end.
    """

    slots: jax.Array
    places: jax.Array
    order: jax.Array
    is_first: jax.Array
    ends: jax.Array

    @staticmethod
    def of(asked: jax.Array, array: ShardedArray) -> Wanted:
        """The slots of ids: int32 `[n]`, `num_slots` for none."""
        size = asked.shape[0]
        # Equal ids stay in their order, since their numbers are a key as well. A stable sort takes the compiler of TPUs
        # half as long again: 30 instead of 20 CPU seconds for 53,248 ids.
        slots, order = jax.lax.sort((asked, jnp.arange(size, dtype=jnp.int32)), num_keys=2, is_stable=False)
        is_first = jnp.concatenate([jnp.ones(1, bool), slots[1:] != slots[:-1]])
        number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        distinct = jnp.full(size, array.num_slots, jnp.int32).at[number].set(slots)
        places = jnp.zeros(size, jnp.int32).at[order].set(number, unique_indices=True)
        return Wanted(
            slots=distinct,
            places=jnp.where(asked == array.num_slots, -1, places),
            order=order,
            is_first=is_first,
            ends=jnp.searchsorted(distinct, _bounds(array)).astype(jnp.int32),
        )

    def sums(self, gradients: jax.Array, *, in_a_tree: bool) -> jax.Array:
        """The sum of each slot, `[n, dim]`, of the gradients of ids, `[n, dim]`: in the order of the ids.

        Args:
          in_a_tree: as of `sums_of_runs`.
        """
        if in_a_tree:
            number = jnp.cumsum(self.is_first) - 1
            return sums_of_runs(gradients[self.order], self.is_first, number, in_a_tree=True)
        places = jnp.where(self.places < 0, len(self.places), self.places)
        return jnp.zeros_like(gradients).at[places].add(gradients, mode="drop")


class AskedArray(NamedTuple):
    """An array of tables in the messages of a step.

    Attributes:
      array: its tables.
      wanted: slots that this device wants.
      room: ids of a message from a device to an owner.
    """

    array: ShardedArray
    wanted: Wanted
    room: int

    @staticmethod
    def of(rows: Mapping[str, jax.Array], array: ShardedArray, *, level: int | None = None) -> AskedArray:
        """What the ids of a device ask for: by table int32 `[n]`, -1 for none.

        Args:
          level: level of the room; None for one in which as many rows as ids fit.
        """
        slots = jnp.concatenate(
            [
                jnp.where(rows[name] < 0, array.num_slots, array.slots_of(name, jnp.maximum(rows[name], 0)))
                for name in array.tables
            ]
        )
        if level is None:
            level = room_level(sum(rows[name].size * layout.largest_share for name, layout in array.tables.items()))
        return AskedArray(array, Wanted.of(slots, array), min(len(slots), rows_of_room(level)))


class AskedRound(NamedTuple):
    """An array in one round.

    Attributes:
      begin: int32 `[num_owners]`: the first place of each owner's slots.
      is_there: bool `[num_owners, room]`: whether a place of the message has an id.
      sent: int32 `[num_owners, room]`: places in the owner's part; `rows_per_part` where there is none.
      is_now: bool `[n]`: which of the wanted slots it has.
      first, last: int32 `[num_owners]`: the first slot of each owner that it has, and the one behind the last.
    """

    begin: jax.Array
    is_there: jax.Array
    sent: jax.Array
    is_now: jax.Array
    first: jax.Array
    last: jax.Array

    @property
    def index(self) -> jax.Array:
        """int32 `[num_owners, room]`: the places of what is sent among the wanted slots."""
        return self.begin[:, None] + jnp.arange(self.is_there.shape[1], dtype=jnp.int32)


def fetched(
    shards: Sequence[AskedArray], tables: Sequence[jax.Array], dims: Sequence[int]
) -> tuple[list[jax.Array], jax.Array]:
    """The rows of all wanted slots, `[n, dim]` by array, and the number of rounds that it took.

    Args:
      tables: the part of this device of each array: `rows_per_part` rows of `dim` columns, or lines of them.
      dims: columns of a row, by array.
    """

    def turn(turns: Sequence[AskedRound], found: list[jax.Array]) -> list[jax.Array]:
        asked = exchanged([turn.sent for turn in turns])
        own = [rows_at(*one, fill=0) for one in zip(tables, asked, dims, strict=True)]
        return [
            _taken(shard, turn, vectors, before)
            for shard, turn, vectors, before in zip(shards, turns, exchanged(own), found, strict=True)
        ]

    start = [jnp.zeros((shard.wanted.slots.shape[0], dim)) for shard, dim in zip(shards, dims, strict=True)]
    return in_rounds(shards, turn, start)


def given(
    shards: Sequence[AskedArray],
    sums: Sequence[jax.Array],
    take: Callable[[Sequence[Entries], Any], Any],
    start: Any,
) -> Any:
    """Gives gradients to the owners of their rows, and lets `take` update these, round by round.

    Args:
      sums: gradients of the wanted slots, `[n, dim]` by array.
      take: (entries of each array, by local slots and one device after another; state) → state.
      start: first state.

    Returns:
      The last state.
    """

    def turn(turns: Sequence[AskedRound], state: Any) -> Any:
        own = []
        for turn, values in zip(turns, sums, strict=True):
            picked = values[jnp.minimum(turn.index, values.shape[0] - 1)]
            own.append(jnp.where(turn.is_there[:, :, None], picked, 0))
        found = exchanged([*(turn.sent for turn in turns), *own])
        rows, gradients = found[: len(shards)], found[len(shards) :]
        entries = [
            Entries(
                jnp.where(slots == shard.array.rows_per_part, -1, slots).reshape(-1),
                values.reshape(-1, values.shape[2]),
            )
            for shard, slots, values in zip(shards, rows, gradients, strict=True)
        ]
        return take(entries, state)

    return in_rounds(shards, turn, start)[0]


def in_rounds(
    shards: Sequence[AskedArray], turn: Callable[[Sequence[AskedRound], Any], Any], start: Any
) -> tuple[Any, jax.Array]:
    """The last state, and the number of rounds.

    Args:
      turn: (rounds of all arrays; state) → state.
      start: first state.
    """
    bounds = [_bounds(shard.array) for shard in shards]
    first, last = (jnp.stack([part[at] for part in bounds]) for at in (slice(None, -1), slice(1, None)))

    def turned(covered: jax.Array, until: jax.Array, state: Any) -> Any:
        return turn([_turn(*one) for one in zip(shards, covered, until, strict=True)], state)

    if all(shard.room >= shard.wanted.slots.shape[0] for shard in shards):
        return turned(first, last, start), jnp.int32(1)

    def one_round(before: Any) -> Any:
        covered, count, state = before
        reach = jnp.stack([_reach(*one) for one in zip(shards, covered, last, strict=True)])
        until = jax.lax.pmin(reach, AXIS)
        return until, count + 1, turned(covered, until, state)

    def is_more(state: Any) -> jax.Array:
        return (state[0] < last).any()

    _, count, state = jax.lax.while_loop(is_more, one_round, (first, jnp.int32(0), start))
    return state, count


def _bounds(array: ShardedArray) -> jax.Array:
    """int32 `[num_owners + 1]`: the first slot of each owner, and the end of all."""
    return jnp.arange(array.num_owners + 1, dtype=jnp.int32) * array.rows_per_core


def _begin(shard: AskedArray, covered: jax.Array) -> jax.Array:
    return jnp.searchsorted(shard.wanted.slots, covered).astype(jnp.int32)


def _reach(shard: AskedArray, covered: jax.Array, last: jax.Array) -> jax.Array:
    """The slot of each owner that this device has no room for."""
    slots, ends = shard.wanted.slots, shard.wanted.ends
    behind = _begin(shard, covered) + shard.room
    return jnp.where(behind < ends[1:], slots[jnp.minimum(behind, slots.shape[0] - 1)], last)


def _turn(shard: AskedArray, covered: jax.Array, until: jax.Array) -> AskedRound:
    slots, ends, array = shard.wanted.slots, shard.wanted.ends, shard.array
    begin = _begin(shard, covered)
    index = begin[:, None] + jnp.arange(shard.room, dtype=jnp.int32)
    wanted = slots[jnp.minimum(index, slots.shape[0] - 1)]
    is_there = (index < ends[1:, None]) & (wanted < until[:, None])
    parts = _bounds(array)[:-1, None] // array.rows_per_part * array.rows_per_part
    sent = jnp.where(is_there, wanted - parts, array.rows_per_part)
    owner = _owners(shard)
    is_now = (slots >= covered[owner]) & (slots < until[owner])
    return AskedRound(begin, is_there, sent, is_now, covered, until)


def _owners(shard: AskedArray) -> jax.Array:
    """int32 `[n]`: the owner of each wanted slot; the last one where there is none."""
    return jnp.minimum(shard.wanted.slots // shard.array.rows_per_core, shard.array.num_owners - 1)


def _taken(shard: AskedArray, turn: AskedRound, vectors: jax.Array, before: jax.Array) -> jax.Array:
    """The rows that came in a round, `[num_parts, room, dim]`, each at its place; others stay."""
    owner = _owners(shard)
    within = jnp.arange(shard.wanted.slots.shape[0], dtype=jnp.int32) - turn.begin[owner]
    found = vectors[owner, jnp.clip(within, 0, shard.room - 1)]
    return jnp.where(turn.is_now[:, None], found, before)


def exchanged(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """What all devices sent this one, `[num_owners, ...]` each, by the device; in one message a pair."""
    words = [jax.lax.bitcast_convert_type(part, jnp.uint32).reshape(part.shape[0], -1) for part in parts]
    came = jax.lax.all_to_all(jnp.concatenate(words, axis=1), AXIS, split_axis=0, concat_axis=0, tiled=True)
    found, at = [], 0
    for part, own in zip(parts, words, strict=True):
        values = came[:, at : at + own.shape[1]]
        found.append(jax.lax.bitcast_convert_type(values, part.dtype).reshape(part.shape))
        at += own.shape[1]
    return found
