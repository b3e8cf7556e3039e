"""`ShardedLookup`: one host's half of every lookup and update, between its batch and the bytes that cross the network.

A step begins with the unique ids of each table, grouped by owner (`prepare`). Owners gather the rows (`accept`,
`gather`). The rows come back and are pooled (`pool`). Later the gradients are summed per unique row (`sum_gradients`).
Owners add what all hosts sent, in host order, and update each touched row once (`update`).

This module owns the arrays of that path. It sends nothing: an `Exchange` moves the bytes between these calls. A host
that is alone has all rows, and combines them where they lie.

Tables of one width form a group. Within a group, rows lie in one array ordered by owner, then by stream (see
`streams`). What goes to one host, or comes from it, is one contiguous piece. So the network reads and writes the arrays
in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.prefetch import Part, Split
from podembed.embedding.lookup.streams import (
    FeatureBinding,
    Prepared,
    Stream,
    by_feature,
    groups_of,
    segment_of,
    starts_of,
    streams_of,
)
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.key_index import DenseIndex, KeyIndex
from podembed.embedding.table.table import Table
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
    ) -> None:
        self.host = host
        self.num_hosts = num_hosts
        self.features = tuple(feature for feature in features if feature.table not in elsewhere)
        if tables is None:
            tables = [
                Table(spec, np.flatnonzero(owners == host)) for spec, owners in zip(specs, placement, strict=True)
            ]
        self.tables = tuple(tables)
        self._indexes: tuple[KeyIndex, ...] = tuple(
            DenseIndex(spec.layout, owners) for spec, owners in zip(specs, placement, strict=True)
        )
        self._streams = streams_of(specs, self.features)
        self.groups = groups_of(self._streams, specs, elsewhere=elsewhere)
        self._order = tuple(number for group in self.groups for number in group.streams)
        self._quantization = tuple(quantization) or (None,) * len(self.tables)
        # Tables whose rows are all here and need no rounding. A row number must fit the 32 bits of an index.
        self._in_place = frozenset(
            at
            for at, table in enumerate(self.tables)
            if num_hosts == 1 and self._quantization[at] is None and table.num_rows < 1 << 31
        )
        self._sums = [np.empty((0, group.dim), np.float32) for group in self.groups]
        self._hash_slots = np.zeros((kernels.num_hash_slots(0), 2), np.int64)

    def prepare(self, batch: Mapping[str, Ragged]) -> Prepared:
        """Finds each stream's distinct ids and who owns their rows. Touches no table."""
        num_streams = len(self._streams)
        counts = np.zeros((self.num_hosts, num_streams), np.int64)
        num_unique = np.zeros(num_streams, np.int64)
        local_rows: list[np.ndarray] = [np.zeros(0, np.int64)] * num_streams
        place: list[np.ndarray] = [np.zeros(0, np.int32)] * num_streams
        own_rows: dict[str, np.ndarray] = {}
        for number in self._order:
            stream = self._streams[number]
            values = [batch[feature.name].values for feature in stream.features]
            ids = values[0] if len(values) == 1 else np.concatenate(values)
            unique, inverse = self._distinct(ids, stream)
            num_unique[number] = len(unique)
            local_rows[number], position = np.empty(len(unique), np.int64), np.empty(len(unique), np.int32)
            of_owner = np.empty(self.num_hosts, np.int64)
            self._indexes[stream.table].route(unique, of_owner, local_rows[number], position)
            counts[:, number] = of_owner
            if stream.table in self._in_place:
                rows = np.empty(len(ids), np.int32)
                kernels.row_of_each_id(local_rows[number].astype(np.int32), inverse, rows)
                own_rows |= by_feature(rows, stream, batch)
            if self.num_hosts == 1:
                # One owner keeps the order of the distinct ids.
                place[number] = inverse
                continue
            place[number] = np.empty(len(ids), np.int32)
            kernels.row_of_each_id(position, inverse, place[number])
        prepared = self._arrange(batch, num_unique, counts, local_rows, place)
        prepared.own_rows = own_rows
        return prepared

    def rows_by_table(self, counts: np.ndarray) -> np.ndarray:
        """Counts `[num_hosts, num_streams]` → int64 `[num_tables]`, the rows of all hosts together."""
        found = np.zeros(len(self.tables), np.int64)
        np.add.at(found, [stream.table for stream in self._streams], counts.sum(axis=0))
        return found

    def _distinct(self, ids: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids in order of appearance, and which of them each id is."""
        if not stream.is_distinct:
            return ids, np.arange(len(ids), dtype=np.int32)
        if len(self._hash_slots) < kernels.num_hash_slots(len(ids)):
            self._hash_slots = np.zeros((kernels.num_hash_slots(len(ids)), 2), np.int64)
        unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
        num_unique = kernels.unique_ids(ids, self._hash_slots, unique, inverse)
        return unique[:num_unique], inverse

    def _arrange(
        self,
        batch: Mapping[str, Ragged],
        num_unique: np.ndarray,
        counts: np.ndarray,
        local_rows: Sequence[np.ndarray],
        place: Sequence[np.ndarray],
    ) -> Prepared:
        """Turns positions within one table, ordered by owner, into positions within a group, ordered by owner and then
        by stream.
        """
        asked = [
            np.concatenate(
                [np.empty(0, np.int64), *(segment_of(local_rows[at], counts[:, at], owner) for at in self._order)]
            )
            for owner in range(self.num_hosts)
        ]
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
        return Prepared(features=batch, num_unique=num_unique, asked=asked, asked_counts=counts, index=index)

    def accept(self, prepared: Prepared, wanted: Sequence[np.ndarray], wanted_counts: np.ndarray) -> None:
        """Takes what every host asks of this one; its own entry may be anything and is filled in here.

        Args:
          wanted: per host, int64 local rows, group by group, stream by stream.
          wanted_counts: int64 `[num_hosts, num_streams]`.
        """
        prepared.wanted = list(wanted)
        prepared.wanted[self.host] = prepared.asked[self.host]
        prepared.wanted_counts = wanted_counts
        prepared.wanted_counts[self.host] = prepared.asked_counts[self.host]
        prepared.rows = [
            np.empty((int(prepared.asked_counts[:, g.streams].sum()), g.dim), np.float32) for g in self.groups
        ]
        prepared.served = [
            np.empty((int(prepared.wanted_counts[:, g.streams].sum()), g.dim), np.float32) for g in self.groups
        ]
        prepared.splits = [None] * self.num_hosts

    def split(self, prepared: Prepared, previous: Prepared) -> None:
        """Finds which of the rows that the hosts want no gradient of `previous`, the step under way, will change.

        Raises:
          ValueError: a row is not held here.
        """
        if self._in_place.issuperset(feature.table for feature in self.features):
            return  # there is nothing to gather
        hosts = range(self.num_hosts)
        flags: list[list[list[np.ndarray]]] = [[[] for _ in self.groups] for _ in hosts]
        wanted = [self._wanted_rows(prepared, host) for host in hosts]
        touched = [self._wanted_rows(previous, host) for host in hosts]
        for number, group in enumerate(self.groups):
            for at in group.streams:
                table = self._streams[at].table
                of_table = [n for n in group.streams if self._streams[n].table == table]
                rows = [touched[h][n] for h in hosts for n in of_table]
                found = self._find_late(rows, [wanted[h][at] for h in hosts], table)
                for host in hosts:
                    flags[host][number].append(found[host])
        widths = [group.dim for group in self.groups]
        prepared.splits = [Split.worthwhile([np.concatenate(f) for f in flags[host]], widths) for host in hosts]

    def _find_late(self, touched: Sequence[np.ndarray], wanted: Sequence[np.ndarray], at: int) -> list[np.ndarray]:
        """Per host, which of the rows that it wants of a table are among the touched ones."""
        table = self.tables[at]
        optimizer = table.spec.optimizer
        if optimizer is not None and optimizer.touches_all_rows:
            return [np.ones(len(rows), bool) for rows in wanted]
        found = [np.empty(len(rows), bool) for rows in wanted]
        with table.marked(touched) as marks:
            for rows, flags in zip(wanted, found, strict=True):
                kernels.find_marked_rows(rows, marks, flags)
        return found

    def gather(self, prepared: Prepared, part: Part = Part.REST) -> None:
        """Reads the rows that the hosts want: `served` for the others, straight into `rows` for this host.

        Args:
          part: of the rows; for a host without a split, all belong to the rest.
        """
        for number, group in enumerate(self.groups):
            for host in range(self.num_hosts):
                split = prepared.splits[host]
                if split is not None:
                    self._gather_part(prepared, number, host, split, part)
                elif part is Part.REST:
                    out = self.piece(prepared, number, host, of="rows" if host == self.host else "served")
                    rows, first = self._wanted_rows(prepared, host), 0
                    for at in group.streams:
                        count = int(prepared.wanted_counts[host, at])
                        if self._streams[at].table not in self._in_place:
                            self._table(at).gather(rows[at], out[first : first + count])
                        first += count

    def _gather_part(self, prepared: Prepared, number: int, host: int, split: Split, part: Part) -> None:
        """One part of one host's rows in a group: packed for another host, in their places for this one."""
        positions, wanted = split.positions(part)[number], self._wanted_rows(prepared, host)
        is_own = host == self.host
        if is_own:
            out = self.piece(prepared, number, host, of="rows")
        else:
            out = split.packed(part, self.blocks(prepared, host, of="served"))[number]
        first = first_position = 0
        for at in self.groups[number].streams:
            stop = first + int(prepared.wanted_counts[host, at])
            last_position = int(np.searchsorted(positions, stop))
            places = positions[first_position:last_position]
            rows = wanted[at][places - first]
            if is_own:
                self._table(at).gather(rows, out, places)
            else:
                self._table(at).gather(rows, out[first_position:last_position])
            first, first_position = stop, last_position

    def blocks(self, prepared: Prepared, host: int, *, of: str) -> list[np.ndarray]:
        """The pieces of one host, by group."""
        return [self.piece(prepared, number, host, of=of) for number in range(len(self.groups))]

    def piece(self, prepared: Prepared, group: int, host: int, *, of: str) -> np.ndarray:
        """The contiguous rows of one host in a group's array: `rows` (owned by it) or `served` (asked by it)."""
        streams = self.groups[group].streams
        counts = prepared.asked_counts if of == "rows" else prepared.wanted_counts
        array = prepared.rows[group] if of == "rows" else prepared.served[group]
        ends = np.cumsum(counts[:, streams].sum(axis=1))
        return array[(ends[host - 1] if host else 0) : ends[host]]

    def pool(self, prepared: Prepared, out: Mapping[str, np.ndarray]) -> None:
        """Combines the rows of each sample's ids into activations.

        Args:
          out: per feature float32 `[num_samples or more, dim]`; samples without ids get zeros, those beyond the batch
            are left alone.
        """
        if any(self._quantization):
            self._quantize(prepared)
        rows = self._group_arrays(prepared.rows)
        for feature in self.features:
            ragged = prepared.features[feature.name]
            block = out[feature.name][: ragged.num_samples]
            bags = ragged.row_splits, ragged.weights, feature.combiner, block
            if feature.table in self._in_place:
                self.tables[feature.table].store.pool(prepared.own_rows[feature.name], *bags)
            else:
                kernels.pool(rows[feature.table], prepared.index[feature.name], *bags)

    def _quantize(self, prepared: Prepared) -> None:
        """Rounds the rows that came for this step, where their table says so; the tables keep theirs."""
        for number, group in enumerate(self.groups):
            ends = np.cumsum(prepared.asked_counts[:, group.streams])
            for at, stop in enumerate(ends):
                stream = group.streams[at % len(group.streams)]
                quantization = self._quantization[self._streams[stream].table]
                if quantization is not None:
                    first = int(ends[at - 1]) if at else 0
                    quantization.apply(prepared.rows[number][first : int(stop)])

    def sum_gradients(self, prepared: Prepared, gradients: Mapping[str, np.ndarray]) -> None:
        """Replaces `rows` by the gradient of each row, summed over this host's samples and features.

        Args:
          gradients: per feature float32 `[num_samples or more, dim]`, of the activations.
        """
        if self.num_hosts == 1:
            prepared.rows = [self._scratch(number, len(rows)) for number, rows in enumerate(prepared.rows)]
        for array in prepared.rows:
            array.fill(0.0)
        sums = self._group_arrays(prepared.rows)
        for feature in self.features:
            ragged = prepared.features[feature.name]
            kernels.sum_gradients(
                gradients[feature.name][: ragged.num_samples],
                prepared.index[feature.name],
                ragged.row_splits,
                ragged.weights,
                feature.combiner,
                sums[feature.table],
            )

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
        for number, group in enumerate(self.groups):
            of_host = [
                self.piece(prepared, number, host, of="rows" if host == self.host else "served")
                for host in range(self.num_hosts)
            ]
            starts = starts_of(prepared.wanted_counts[:, group.streams])
            starts -= starts[:, :1]
            wanted = [self._wanted_rows(prepared, host) for host in range(self.num_hosts)]
            for at in dict.fromkeys(self._streams[n].table for n in group.streams):
                columns = [column for column, n in enumerate(group.streams) if self._streams[n].table == at]
                rows, pieces = [], []
                for column in columns:
                    stream = group.streams[column]
                    for host in range(self.num_hosts):
                        first = int(starts[host, column])
                        rows.append(wanted[host][stream])
                        pieces.append(of_host[host][first : first + len(rows[-1])])
                self.tables[at].update(rows, pieces, learning_rates[at])

    def _wanted_rows(self, prepared: Prepared, host: int) -> dict[int, np.ndarray]:
        """Per stream, the local rows that `host` wants."""
        parts, first = {}, 0
        for at in self._order:
            count = int(prepared.wanted_counts[host, at])
            parts[at] = prepared.wanted[host][first : first + count]
            first += count
        return parts

    def _group_arrays(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """By table, the array of its group."""
        return {
            self._streams[at].table: arrays[number] for number, group in enumerate(self.groups) for at in group.streams
        }

    def _table(self, stream: int) -> Table:
        return self.tables[self._streams[stream].table]
