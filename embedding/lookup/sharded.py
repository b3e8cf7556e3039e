"""`ShardedLookup`: one host's half of every lookup and update, between its batch and the bytes that cross the network.

A step begins with the unique ids of each table, grouped by owner (`prepare`). Owners find their rows and gather them
(`accept`, `gather`). The rows come back and are pooled (`pool`). Later the gradients are summed per unique row
(`sum_gradients`). Owners add what all hosts sent, in host order, and update each touched row once (`update`).

This module owns the arrays of that path. It sends nothing: an `Exchange` moves the bytes between these calls. A host
that is alone has all rows, and combines them where they lie.

Tables of one width form a group. Within a group, rows lie in one array ordered by owner, then by stream (see
`streams`). What goes to one host, or comes from it, is one contiguous piece. So the network reads and writes the arrays
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.kernels.crew import ONE_THREAD, Crew, column_parts, cut
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY
from podembed.embedding.kernels.requests import rows_by_host
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.router import Router
from podembed.embedding.lookup.streams import (
    FeatureBinding,
    Prepared,
    Stream,
    by_feature,
    groups_of,
    streams_of,
    tables_of,
)
from podembed.embedding.lookup.wanted_rows import listed, split_rows, starts_by_host, starts_of
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Pooling, Table, pool_in_parallel, update_in_parallel
from podembed.embedding.table_spec import TableSpec


class ShardedLookup:
    """This host's shard of every table, and the lookup path over it. Mutated: the tables' rows and slots.

    Args:
      specs: all tables of the job.
      features: all features, in the order of the batch.
      placement: per table, int32 `[num_buckets]`, the owner of each bucket.
      host: this host's number, 0-based.
      num_hosts: hosts of the generation.
      elsewhere: positions of tables that are held here but looked up and updated by `PooledLookup`; with all their
        features.
      tables: the shard, where it is here already; None allocates it.
      quantization: per table how looked-up rows are rounded before they are combined, or None; empty for none at all.
      crew: its threads do the work.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        features: Sequence[FeatureBinding],
        placement: Sequence[np.ndarray],
        *,
        host: int,
        num_hosts: int,
        elsewhere: Collection[int] = (),
        tables: Sequence[Table] | None = None,
        quantization: Sequence[QuantizationConfig | None] = (),
        crew: Crew = ONE_THREAD,
    ) -> None:
        self._crew, self.host, self.num_hosts = crew, host, num_hosts
        self.features = tuple(feature for feature in features if feature.table not in elsewhere)
        if tables is None:
            tables = [
                Table(spec, np.flatnonzero(owners == host)) for spec, owners in zip(specs, placement, strict=True)
            ]
        self.tables = tuple(tables)
        self._routers = tuple(Router(spec, owners) for spec, owners in zip(specs, placement, strict=True))
        self._streams = streams_of(specs, self.features)
        self.groups = groups_of(self._streams, specs, elsewhere=elsewhere)
        self._order = tuple(number for group in self.groups for number in group.streams)
        # Per group, its tables, each with its first stream in the group and the one after its last.
        self._tables_of = tuple(tables_of(group, self._streams) for group in self.groups)
        self._quantization = tuple(quantization) or (None,) * len(self.tables)
        # Tables whose rows are all here and need no rounding. A row number must fit the 32 bits of an index.
        self._in_place = frozenset(
            at
            for at, table in enumerate(self.tables)
            if num_hosts == 1 and self._quantization[at] is None and table.num_rows < 1 << 31
        )
        self._sums = [np.empty((0, group.dim), np.float32) for group in self.groups]
        # Scratch of `unique_ids`, as much as threads have wanted at a time.
        self._hash_slots: list[np.ndarray] = []

    def prepare(self, batch: Mapping[str, Ragged]) -> Prepared:
        """Finds each stream's distinct ids and who owns their rows. Touches no table."""
        num_streams = len(self._streams)
        counts = np.zeros((self.num_hosts, num_streams), np.int64)
        num_unique = np.zeros(num_streams, np.int64)
        keys: list[np.ndarray] = [np.zeros(0, np.int64)] * num_streams
        place: list[np.ndarray] = [np.zeros(0, np.int32)] * num_streams

        def find(number: int) -> None:
            stream = self._streams[number]
            values = [batch[feature.name].values for feature in stream.features]
            ids = values[0] if len(values) == 1 else np.concatenate(values)
            unique, inverse = self._distinct(ids, stream)
            num_unique[number] = len(unique)
            keys[number], position = np.empty(len(unique), np.int64), np.empty(len(unique), np.int32)
            of_owner = np.empty(self.num_hosts, np.int64)
            self._routers[stream.table].route(unique, of_owner, keys[number], position)
            counts[:, number] = of_owner
            if self.num_hosts == 1:
                # One owner keeps the order of the distinct ids.
                place[number] = inverse
            else:
                place[number] = np.empty(len(ids), np.int32)
                kernels.row_of_each_id(position, inverse, place[number])

        num_ids = sum(batch[feature.name].num_ids for feature in self.features)
        self._crew.run([partial(find, number) for number in self._order], size=FLOATS_PER_ENTRY * num_ids)
        return self._arrange(batch, num_unique, counts, keys, place)

    def rows_by_table(self, counts: np.ndarray) -> np.ndarray:
        """Counts `[num_hosts, num_streams]` → int64 `[num_tables]`, the rows of all hosts together."""
        found = np.zeros(len(self.tables), np.int64)
        np.add.at(found, [stream.table for stream in self._streams], counts.sum(axis=0))
        return found

    def _distinct(self, ids: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids in order of appearance, and which of them each id is."""
        if not stream.is_distinct:
            return ids, np.arange(len(ids), dtype=np.int32)
        unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
        try:
            slots = self._hash_slots.pop()
        except IndexError:
            slots = np.zeros((0, 2), np.int64)
        if len(slots) < kernels.num_hash_slots(len(ids)):
            slots = np.zeros((kernels.num_hash_slots(len(ids)), 2), np.int64)
        num_unique = kernels.unique_ids(ids, slots, unique, inverse)
        self._hash_slots.append(slots)
        return unique[:num_unique], inverse

    def _arrange(
        self,
        batch: Mapping[str, Ragged],
        num_unique: np.ndarray,
        counts: np.ndarray,
        keys: Sequence[np.ndarray],
        place: Sequence[np.ndarray],
    ) -> Prepared:
        """Turns positions within one table, ordered by owner, into positions within a group, ordered by owner and then
        by stream.
        """
        of_order = np.ascontiguousarray(counts[:, self._order])
        listing = np.concatenate([np.empty(0, np.int64), *(keys[at] for at in self._order)])
        by_owner = np.empty(len(listing), np.int64)
        rows_by_host(listing, starts_of(of_order), of_order, by_owner)
        ends = np.cumsum(of_order.sum(axis=1)).tolist()
        asked = [by_owner[first:stop] for first, stop in pairwise([0, *ends])]
        index: dict[str, np.ndarray] = {}
        for group in self.groups:
            starts = starts_of(counts[:, group.streams])
            for column, at in enumerate(group.streams):
                if self.num_hosts == 1:
                    index |= by_feature(place[at] + np.int32(starts[0, column]), self._streams[at], batch)
                    continue
                # Row k of a stream's owner-ordered list sits this much further in the group's array.
                shift = starts[:, column] - (np.cumsum(counts[:, at]) - counts[:, at])
                moved = (np.arange(num_unique[at]) + np.repeat(shift, counts[:, at])).astype(np.int32)
                positions = np.empty(len(place[at]), np.int32)
                kernels.row_of_each_id(moved, place[at], positions)
                index |= by_feature(positions, self._streams[at], batch)
        return Prepared(
            features=batch,
            num_unique=num_unique,
            asked=asked,
            asked_counts=counts,
            asked_starts=[starts_by_host(counts[:, group.streams]) for group in self.groups],
            index=index,
        )

    def accept(
        self,
        prepared: Prepared,
        wanted: Sequence[np.ndarray],
        wanted_counts: np.ndarray,
        *,
        training_step: int | None = None,
    ) -> None:
        """Takes what every host asks of this one, and finds the rows. Its own entry may be anything and is filled in
        here.

        Args:
          wanted: per host, int64 keys, group by group, stream by stream.
          wanted_counts: int64 `[num_hosts, num_streams]`; not negative.
          training_step: number of the step, of training.

        Raises:
          ValueError: the keys are not as many as the counts say, or of buckets that are not held here.
        """
        taken = list(wanted)
        taken[self.host] = prepared.asked[self.host]
        counts = np.array(wanted_counts, np.int64)
        counts[self.host] = prepared.asked_counts[self.host]
        prepared.wanted = listed(taken, counts, [group.streams for group in self.groups])
        self._resolve(prepared, training_step)
        prepared.rows = [
            aligned_empty((int(starts[-1]), group.dim))
            for group, starts in zip(self.groups, prepared.asked_starts, strict=True)
        ]
        prepared.served = [
            aligned_empty((len(rows.rows), group.dim)) for group, rows in zip(self.groups, prepared.wanted, strict=True)
        ]
        prepared.splits = [None] * self.num_hosts

    def _resolve(self, prepared: Prepared, training_step: int | None) -> None:
        """Turns the keys that the hosts want into rows."""
        calls: list[Callable[[], None]] = []
        for tables, wanted in zip(self._tables_of, prepared.wanted, strict=True):
            for table, first, stop in tables:
                index, keys = self.tables[table].index, wanted.rows[wanted.of_streams(first, stop)]
                if index.is_dynamic and training_step is not None:
                    index.begin_step(training_step, [keys])
                calls.append(partial(index.resolve, keys, keys))
        self._crew.run(calls, size=FLOATS_PER_ENTRY * sum(len(wanted.rows) for wanted in prepared.wanted))
        if self._in_place:
            # One host's rows lie stream by stream in either list, so the places of one are those of the other.
            rows = self._group_arrays([wanted.rows.astype(np.int32) for wanted in prepared.wanted])
            for feature in self.features:
                if feature.table in self._in_place:
                    found = prepared.own_rows[feature.name] = np.empty_like(prepared.index[feature.name])
                    kernels.row_of_each_id(rows[feature.table], prepared.index[feature.name], found)

    def split(self, prepared: Prepared, previous: Prepared) -> None:
        """Finds which of the rows that the hosts want no gradient of `previous`, the step under way, will change.

        Raises:
          ValueError: a row is not held here.
        """
        if self._in_place.issuperset(feature.table for feature in self.features):
            return  # there is nothing to gather
        late = []
        for number, wanted in enumerate(prepared.wanted):
            flags = np.empty(len(wanted.rows), bool)
            before = previous.wanted[number]
            for table, first, stop in self._tables_of[number]:
                rows = wanted.of_streams(first, stop)
                touched = before.rows[before.of_streams(first, stop)]
                self._find_late(touched, wanted.rows[rows], table, flags[rows])
            by_place = np.empty(len(flags), bool)
            by_place[wanted.places] = flags
            late.append(by_place)
        prepared.splits = split_rows(prepared.wanted, late, [group.dim for group in self.groups], own=self.host)

    def _find_late(self, touched: np.ndarray, wanted: np.ndarray, at: int, found: np.ndarray) -> None:
        """Writes which of the rows that are wanted of a table are among the touched ones."""
        table = self.tables[at]
        optimizer = table.spec.optimizer
        if optimizer is None or optimizer.touches_all_rows:
            found[:] = optimizer is not None  # all of them change, or none
            return
        with table.marked([touched]) as marks:
            kernels.find_marked_rows(wanted, marks, found)

    def gather(self, prepared: Prepared, part: Part = Part.REST) -> None:
        """Reads the rows that the hosts want: `served` for the others, straight into `rows` for this host.

        Args:
          part: of the rows; for a host without a split, all belong to the rest.

        Raises:
          ValueError: a row is not held here.
        """
        calls: list[Callable[[], None]] = []
        size = 0
        for number, wanted in enumerate(prepared.wanted):
            if all(table in self._in_place for table, _, _ in self._tables_of[number]):
                continue
            found = wanted.targets_of(part, *self._memory(prepared, number))
            if found is None:
                continue
            addresses, entries = found
            for table, first, stop in self._tables_of[number]:
                if table in self._in_place:
                    continue
                rows = wanted.of_streams(first, stop)
                if entries is None:
                    calls.append(partial(self.tables[table].gather_to, wanted.rows[rows], addresses[rows]))
                else:
                    some = slice(*np.searchsorted(entries, (rows.start, rows.stop)).tolist())
                    calls.append(partial(self.tables[table].gather_to, wanted.rows[entries[some]], addresses[some]))
            size += 2 * len(addresses) * self.groups[number].dim
        self._crew.run(calls, size=size)

    def _memory(self, prepared: Prepared, number: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where the rows of a group lie: served ones, asked ones, this host, where its own begin among the asked."""
        own_start = int(prepared.asked_starts[number][self.host])
        return prepared.served[number], prepared.rows[number], self.host, own_start

    def blocks(self, prepared: Prepared, host: int, *, of: str, only_trained: bool = False) -> list[np.ndarray]:
        """The pieces of one host, by group."""
        numbers = [number for number, group in enumerate(self.groups) if group.is_trained or not only_trained]
        return [self.piece(prepared, number, host, of=of) for number in numbers]

    def piece(self, prepared: Prepared, group: int, host: int, *, of: str) -> np.ndarray:
        """The contiguous rows of one host in a group's array: `rows` (owned by it) or `served` (asked by it)."""
        starts = prepared.asked_starts[group] if of == "rows" else prepared.wanted[group].host_starts
        array = prepared.rows[group] if of == "rows" else prepared.served[group]
        return array[starts[host] : starts[host + 1]]

    def pool(self, prepared: Prepared, out: Mapping[str, np.ndarray]) -> None:
        """Combines the rows of each sample's ids into activations.

        Args:
          out: per feature float32 `[num_samples or more, dim]`; samples without ids get zeros, those beyond the batch
            are left alone.
        """
        if any(self._quantization):
            self._quantize(prepared)
        rows = self._group_arrays(prepared.rows)
        poolings = []
        for feature in self.features:
            ragged = prepared.features[feature.name]
            block = out[feature.name][: ragged.num_samples]
            bags = ragged.row_splits, ragged.weights, feature.combiner, block
            if feature.table in self._in_place:
                pool = self.tables[feature.table].store.pool
                poolings.append(Pooling(pool, prepared.own_rows[feature.name], *bags))
            else:
                pool = partial(kernels.pool, rows[feature.table])
                poolings.append(Pooling(pool, prepared.index[feature.name], *bags))
        pool_in_parallel(poolings, self._crew)

    def _quantize(self, prepared: Prepared) -> None:
        """Rounds the rows that came for this step, where their table says so; the tables keep theirs."""
        for number, group in enumerate(self.groups):
            counts = prepared.asked_counts[:, group.streams]
            stream_of_row = np.repeat(np.tile(group.streams, self.num_hosts), counts.reshape(-1))
            for at in group.streams:
                quantization = self._quantization[self._streams[at].table]
                if quantization is not None:
                    here = np.flatnonzero(stream_of_row == at)
                    rows = prepared.rows[number][here]
                    quantization.apply(rows)
                    prepared.rows[number][here] = rows

    def sum_gradients(self, prepared: Prepared, gradients: Mapping[str, np.ndarray]) -> None:
        """Replaces `rows` of trained tables by the gradient of each, summed over this host's samples and features.

        Args:
          gradients: per feature float32 `[num_samples or more, dim]`, of the activations.
        """
        if self.num_hosts == 1:
            prepared.rows = [self._scratch(number, len(rows)) for number, rows in enumerate(prepared.rows)]
        sums = self._group_arrays(prepared.rows)

        def add(stream: Stream, columns: slice) -> None:
            """All gradients of a stream, for some columns: sums of a row stay in the order of its ids."""
            for feature in stream.features:
                ragged = prepared.features[feature.name]
                kernels.sum_gradients(
                    gradients[feature.name][: ragged.num_samples, columns],
                    prepared.index[feature.name],
                    ragged.row_splits,
                    ragged.weights,
                    feature.combiner,
                    sums[stream.table][:, columns],
                )

        num_threads = self._crew.num_threads
        cleared = [
            rows for rows, group in zip(prepared.rows, self.groups, strict=True) if rows.size and group.is_trained
        ]
        streams = [self._streams[number] for group in self.groups if group.is_trained for number in group.streams]
        parts = cut([len(array) for array in cleared], [array.size for array in cleared], num_threads)
        size = sum(array.size for array in cleared)
        self._crew.run([partial(cleared[at][first:stop].fill, 0.0) for at, first, stop in parts], size=size)
        calls = [
            partial(add, stream, columns)
            for stream in streams
            for columns in column_parts(sums[stream.table].shape[1], num_threads)
        ]
        num_ids = sum(prepared.features[feature.name].num_ids for stream in streams for feature in stream.features)
        self._crew.run(calls, size=FLOATS_PER_ENTRY * num_ids)

    def _scratch(self, group: int, num_rows: int) -> np.ndarray:
        """Room for sums that are used up before the next step's; it is kept, since new memory costs page faults."""
        if len(self._sums[group]) < num_rows:
            self._sums[group] = aligned_empty((num_rows + num_rows // 4, self.groups[group].dim))
        return self._sums[group][:num_rows]

    def update(self, prepared: Prepared, learning_rates: Sequence[float]) -> None:
        """Adds the gradients of all hosts, in host order, and updates each touched row once.

        Args:
          learning_rates: one a table.
        """
        found = {}
        for number, wanted in enumerate(prepared.wanted):
            addresses = wanted.addresses(*self._memory(prepared, number))
            for table, first, stop in self._tables_of[number] if self.groups[number].is_trained else ():
                rows = wanted.of_streams(first, stop)
                found[table] = wanted.rows[rows], addresses[rows]
        update_in_parallel(self.tables, found, learning_rates, self._crew)

    def _group_arrays(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """By table, the array of its group."""
        return {
            self._streams[at].table: arrays[number] for number, group in enumerate(self.groups) for at in group.streams
        }
