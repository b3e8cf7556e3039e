"""`RowsWay`: the way of a lookup on which rows travel to the host of the samples, and are combined there.

A step begins with the unique ids of each table, grouped by owner (`request`). Owners find their rows and gather them
(`accept`, `gather`). The rows come back and are pooled (`finish`). Later the gradients are summed per unique row
(`sum_gradients`). Owners add what all hosts sent, in host order, and update each touched row once (`update`).

A host that is alone has all rows, and combines them where they lie.

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
from podembed.embedding.kernels.grouped import FLOATS_PER_ENTRY
from podembed.embedding.kernels.requests import rows_by_host
from podembed.embedding.kernels.threads import ONE_THREAD, Threads, column_parts, cut
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.lookup.prefetch import Part
from podembed.embedding.lookup.router import Router
from podembed.embedding.lookup.streams import (
    FeatureBinding,
    RowsRequest,
    Stream,
    by_feature,
    groups_of,
    streams_of,
    tables_of,
)
from podembed.embedding.lookup.wanted_rows import listed, split_rows, starts_by_host, starts_of
from podembed.embedding.lookup.way import LookupPhase
from podembed.embedding.ragged import Ragged
from podembed.embedding.row_index import KeyRequest
from podembed.embedding.table.table import Pooling, Table, pool_in_parallel, update_in_parallel
from podembed.embedding.table_spec import TableSpec


class RowsWay:
    """As `Way`, and this host's shard of every table. Mutated: the tables' rows and slots.

    Args:
      specs: all tables of the job.
      features: all features, in the order of the batch.
      placement: per table, int32 `[num_buckets]`, the owner of each bucket.
      host: this host's number, 0-based.
      num_hosts: hosts of the generation.
      elsewhere: positions of tables that are held here but looked up and updated by `PooledWay`; with all their
        features.
      tables: the shard, where it is here already; None allocates it.
      quantization: per table how looked-up rows are rounded before they are combined, or None; empty for none at all.
      thread_pool: pool whose threads do the work.
    """

    gather_phase, prefetch_phase = LookupPhase.GATHER, LookupPhase.PREFETCH_GATHER

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
        thread_pool: Threads = ONE_THREAD,
    ) -> None:
        self._thread_pool, self.host, self.num_hosts = thread_pool, host, num_hosts
        self.features = tuple(feature for feature in features if feature.table not in elsewhere)
        self._numbers = {feature.name: number for number, feature in enumerate(features)}
        if tables is None:
            tables = [
                Table(spec, np.flatnonzero(owners == host)) for spec, owners in zip(specs, placement, strict=True)
            ]
        self.tables = tuple(tables)
        self._routers = tuple(Router(spec, owners) for spec, owners in zip(specs, placement, strict=True))
        self._streams = streams_of(specs, self.features)
        self.groups = groups_of(self._streams, specs, elsewhere=elsewhere)
        self._order = tuple(number for group in self.groups for number in group.streams)
        self._sends_times = any(specs[self._streams[number].table].keys.counts for number in self._order)
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
        self._rows_asked = np.zeros(len(self.tables), np.int64)
        # Scratch of `unique_ids`, as much as threads have wanted at a time.
        self._hash_slots: list[np.ndarray] = []

    @property
    def is_used(self) -> bool:
        """As of `Way`."""
        return bool(self.groups)

    def request(
        self,
        bags: Mapping[str, Ragged],
        *,
        buffer: int = 0,
        layout: ActivationLayout | None = None,
        is_in_place: bool = True,
    ) -> RowsRequest:
        """As of `Way`: finds each stream's distinct ids and who owns their rows."""
        num_streams = len(self._streams)
        counts = np.zeros((self.num_hosts, num_streams), np.int64)
        num_unique = np.zeros(num_streams, np.int64)
        keys: list[np.ndarray] = [np.zeros(0, np.int64)] * num_streams
        times: list[np.ndarray] = [np.zeros(0, np.int64)] * num_streams
        place: list[np.ndarray] = [np.zeros(0, np.int32)] * num_streams

        def find(number: int) -> None:
            stream = self._streams[number]
            values = [bags[feature.name].values for feature in stream.features]
            ids = values[0] if len(values) == 1 else np.concatenate(values)
            unique, inverse = self._distinct(ids, stream)
            num_unique[number] = len(unique)
            keys[number], position = np.empty(len(unique), np.int64), np.empty(len(unique), np.int32)
            of_owner = np.empty(self.num_hosts, np.int64)
            self._routers[stream.table].route(unique, of_owner, keys[number], position)
            counts[:, number] = of_owner
            if self._sends_times:
                times[number] = np.empty(len(unique), np.int64)
                times[number][position] = np.bincount(inverse, minlength=len(unique))
            if self.num_hosts == 1:
                # One owner keeps the order of the distinct ids.
                place[number] = inverse
            else:
                place[number] = np.empty(len(ids), np.int32)
                kernels.row_of_each_id(position, inverse, place[number])

        num_ids = sum(bags[feature.name].num_ids for feature in self.features)
        self._thread_pool.run([partial(find, number) for number in self._order], size=FLOATS_PER_ENTRY * num_ids)
        return self._arrange(bags, num_unique, counts, keys, times, place)

    def lay_out(self, request: RowsRequest, bags: Mapping[str, Ragged]) -> None:
        """As of `Way`."""
        request.features = bags

    def words(self, request: RowsRequest, host: int) -> list[np.ndarray]:
        """As of `Way`: how many rows of each stream, then the keys, group by group, stream by stream. Then how often
        the batch names each of them, if a table on this way wants to know.
        """
        return [
            request.asked_counts[host],
            request.asked[host],
            *(_packed(times[host]) for times in request.asked_times),
        ]

    def take_rows_asked(self) -> np.ndarray:
        """As of `Way`."""
        taken = self._rows_asked.copy()
        self._rows_asked[:] = 0
        return taken

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
        bags: Mapping[str, Ragged],
        num_unique: np.ndarray,
        counts: np.ndarray,
        keys: Sequence[np.ndarray],
        times: Sequence[np.ndarray],
        place: Sequence[np.ndarray],
    ) -> RowsRequest:
        """Turns positions within one table, ordered by owner, into positions within a group, ordered by owner and then
        by stream.
        """
        of_order = np.ascontiguousarray(counts[:, self._order])
        ends = np.cumsum(of_order.sum(axis=1)).tolist()

        def by_owner(of_stream: Sequence[np.ndarray]) -> list[np.ndarray]:
            listing = np.concatenate([np.empty(0, np.int64), *(of_stream[at] for at in self._order)])
            sorted_ = np.empty(len(listing), np.int64)
            rows_by_host(listing, starts_of(of_order), of_order, sorted_)
            return [sorted_[first:stop] for first, stop in pairwise([0, *ends])]

        index: dict[str, np.ndarray] = {}
        for group in self.groups:
            starts = starts_of(counts[:, group.streams])
            for column, at in enumerate(group.streams):
                if self.num_hosts == 1:
                    index |= by_feature(place[at] + np.int32(starts[0, column]), self._streams[at], bags)
                    continue
                # Row k of a stream's owner-ordered list sits this much further in the group's array.
                shift = starts[:, column] - (np.cumsum(counts[:, at]) - counts[:, at])
                moved = (np.arange(num_unique[at]) + np.repeat(shift, counts[:, at])).astype(np.int32)
                positions = np.empty(len(place[at]), np.int32)
                kernels.row_of_each_id(moved, place[at], positions)
                index |= by_feature(positions, self._streams[at], bags)
        return RowsRequest(
            features=bags,
            num_unique=num_unique,
            asked=by_owner(keys),
            asked_times=[by_owner(times)] if self._sends_times else [],
            asked_counts=counts,
            asked_starts=[starts_by_host(counts[:, group.streams]) for group in self.groups],
            index=index,
        )

    def accept(self, request: RowsRequest, frames: Sequence[np.ndarray], *, training_step: int | None = None) -> None:
        """As of `Way`.

        Raises:
          ValueError: the keys are not as many as the counts say, or of buckets that are not held here.
        """
        num_streams = len(self._streams)
        counts, wanted, times = np.zeros((self.num_hosts, num_streams), np.int64), [*frames], [*frames]
        counts[self.host], wanted[self.host] = request.asked_counts[self.host], request.asked[self.host]
        for of_hosts in request.asked_times:
            times[self.host] = of_hosts[self.host]
        for host, frame in enumerate(frames):
            if host == self.host:
                continue
            if len(frame) < num_streams or (frame[:num_streams] < 0).any():
                raise ValueError(
                    f"Found a request of {len(frame)} words from host {host}. Expected {num_streams} numbers of rows, "
                    "none below 0, and as many keys. Check that all hosts are of one generation."
                )
            counts[host] = frame[:num_streams]
            end = num_streams + int(counts[host].sum()) if self._sends_times else len(frame)
            wanted[host] = frame[num_streams:end]
            times[host] = frame[end:].view(np.int32)[: end - num_streams].astype(np.int64)
        groups = [group.streams for group in self.groups]
        request.wanted = listed(wanted, counts, groups)
        request.times = listed(times, counts, groups) if self._sends_times else []
        np.add.at(self._rows_asked, [stream.table for stream in self._streams], counts.sum(axis=0))
        self._resolve(request, training_step)
        request.rows = [
            aligned_empty((int(starts[-1]), group.dim))
            for group, starts in zip(self.groups, request.asked_starts, strict=True)
        ]
        request.served = [
            aligned_empty((len(rows.rows), group.dim)) for group, rows in zip(self.groups, request.wanted, strict=True)
        ]
        request.splits = [None] * self.num_hosts

    def _resolve(self, request: RowsRequest, training_step: int | None) -> None:
        """Turns the keys that the hosts want into rows."""
        calls: list[Callable[[], None]] = []
        for number, (tables, wanted) in enumerate(zip(self._tables_of, request.wanted, strict=True)):
            for at, first, stop in tables:
                table, some = self.tables[at], wanted.of_streams(first, stop)
                times = request.times[number].rows[some] if request.times and table.spec.keys.counts else None
                keys = wanted.rows[some]
                call = partial(table.index.accept, [KeyRequest(keys, keys, times)], table.deciding_step(training_step))
                if table.index.is_dynamic:
                    call()
                else:
                    calls.append(call)
        self._thread_pool.run(calls, size=FLOATS_PER_ENTRY * sum(len(wanted.rows) for wanted in request.wanted))
        if self._in_place:
            # One host's rows lie stream by stream in either list, so the places of one are those of the other.
            rows = self._group_arrays([wanted.rows.astype(np.int32) for wanted in request.wanted])
            for feature in self.features:
                if feature.table in self._in_place:
                    found = request.own_rows[feature.name] = np.empty_like(request.index[feature.name])
                    kernels.row_of_each_id(rows[feature.table], request.index[feature.name], found)

    def group(self, request: RowsRequest, gradients: Blocks) -> None:
        """As of `Way`. Where gradients of rows lie, they lie since `accept`."""

    def split(self, request: RowsRequest, previous: RowsRequest) -> None:
        """As of `Way`.

        Raises:
          ValueError: a row is not held here.
        """
        if self._in_place.issuperset(feature.table for feature in self.features):
            return  # there is nothing to gather
        late = []
        for number, wanted in enumerate(request.wanted):
            flags = np.empty(len(wanted.rows), bool)
            before = previous.wanted[number]
            for table, first, stop in self._tables_of[number]:
                rows = wanted.of_streams(first, stop)
                touched = before.rows[before.of_streams(first, stop)]
                self._find_late(touched, wanted.rows[rows], table, flags[rows])
            by_place = np.empty(len(flags), bool)
            by_place[wanted.places] = flags
            late.append(by_place)
        request.splits = split_rows(request.wanted, late, [group.dim for group in self.groups], own=self.host)

    def _find_late(self, touched: np.ndarray, wanted: np.ndarray, at: int, found: np.ndarray) -> None:
        """Writes which of the rows that are wanted of a table are among the touched ones."""
        table = self.tables[at]
        optimizer = table.spec.optimizer
        if optimizer is None or optimizer.touches_all_rows:
            found[:] = optimizer is not None  # all of them change, or none
            return
        with table.marked([touched]) as marks:
            kernels.find_marked_rows(wanted, marks, found)

    def gather(self, request: RowsRequest, activations: Blocks | None = None, part: Part = Part.REST) -> None:
        """As of `Way`: `served` for the other hosts, straight into `rows` for this one.

        Raises:
          ValueError: a row is not held here.
        """
        calls: list[Callable[[], None]] = []
        size = 0
        for number, wanted in enumerate(request.wanted):
            if all(table in self._in_place for table, _, _ in self._tables_of[number]):
                continue
            found = wanted.targets_of(part, *self._memory(request, number))
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
        self._thread_pool.run(calls, size=size)

    def _memory(self, request: RowsRequest, number: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where the rows of a group lie: served ones, asked ones, this host, where its own begin among the asked."""
        own_start = int(request.asked_starts[number][self.host])
        return request.served[number], request.rows[number], self.host, own_start

    def gather_own(self, request: RowsRequest, activations: Blocks, part: Part = Part.REST) -> None:
        """As of `Way`. `gather` has read them."""

    def receivers(self, request: RowsRequest) -> Sequence[int]:
        """As of `Way`."""
        return request.is_asked_by()

    def senders(self, request: RowsRequest) -> Sequence[int]:
        """As of `Way`."""
        return request.asks()

    def outgoing(self, request: RowsRequest, host: int) -> list[np.ndarray]:
        """As of `Way`."""
        split, served = request.splits[host], self.prefetched(request, host)
        return served if split is None else split.packed(Part.REST, served)

    def arriving(self, request: RowsRequest, host: int, activations: Blocks, *, is_split: bool) -> list[np.ndarray]:
        """As of `Way`."""
        return self._blocks(request, host, of="rows")

    def outgoing_gradients(self, request: RowsRequest, host: int, gradients: Blocks) -> list[np.ndarray]:
        """As of `Way`."""
        return self._blocks(request, host, of="rows", only_trained=True)

    def arriving_gradients(self, request: RowsRequest, host: int) -> list[np.ndarray]:
        """As of `Way`."""
        return self._blocks(request, host, of="served", only_trained=True)

    def prefetch_partners(self) -> Sequence[int]:
        """As of `Way`. Rows go through no shared memory."""
        return [host for host in range(self.num_hosts) if host != self.host]

    def prefetched(self, request: RowsRequest, host: int) -> list[np.ndarray]:
        """As of `Way`."""
        return self._blocks(request, host, of="served")

    def _blocks(self, request: RowsRequest, host: int, *, of: str, only_trained: bool = False) -> list[np.ndarray]:
        """The pieces of one host, by group."""
        numbers = [number for number, group in enumerate(self.groups) if group.is_trained or not only_trained]
        return [self.piece(request, number, host, of=of) for number in numbers]

    def piece(self, request: RowsRequest, group: int, host: int, *, of: str) -> np.ndarray:
        """The contiguous rows of one host in a group's array: `rows` (owned by it) or `served` (asked by it)."""
        starts = request.asked_starts[group] if of == "rows" else request.wanted[group].host_starts
        array = request.rows[group] if of == "rows" else request.served[group]
        return array[starts[host] : starts[host + 1]]

    def finish(self, request: RowsRequest, activations: Blocks) -> None:
        """As of `Way`. Samples behind those of the batch get zeros."""
        blocks = self._by_name(activations)
        self.pool(request, blocks)
        for feature in self.features:
            blocks[feature.name][request.features[feature.name].num_samples :] = 0.0

    def _by_name(self, blocks: Blocks) -> dict[str, np.ndarray]:
        return {feature.name: blocks.arrays[self._numbers[feature.name]] for feature in self.features}

    def pool(self, request: RowsRequest, out: Mapping[str, np.ndarray]) -> None:
        """Combines the rows of each sample's ids into activations.

        Args:
          out: per feature float32 `[num_samples or more, dim]`; samples without ids get zeros, those beyond the batch
            are left alone.
        """
        if any(self._quantization):
            self._quantize(request)
        rows = self._group_arrays(request.rows)
        poolings = []
        for feature in self.features:
            ragged = request.features[feature.name]
            block = out[feature.name][: ragged.num_samples]
            bags = ragged.row_splits, ragged.weights, feature.combiner, block
            if feature.table in self._in_place:
                pool = self.tables[feature.table].store.pool
                poolings.append(Pooling(pool, request.own_rows[feature.name], *bags))
            else:
                pool = partial(kernels.pool, rows[feature.table])
                poolings.append(Pooling(pool, request.index[feature.name], *bags))
        pool_in_parallel(poolings, self._thread_pool)

    def _quantize(self, request: RowsRequest) -> None:
        """Rounds the rows that came for this step, where their table says so; the tables keep theirs."""
        for number, group in enumerate(self.groups):
            counts = request.asked_counts[:, group.streams]
            stream_of_row = np.repeat(np.tile(group.streams, self.num_hosts), counts.reshape(-1))
            for at in group.streams:
                quantization = self._quantization[self._streams[at].table]
                if quantization is not None:
                    here = np.flatnonzero(stream_of_row == at)
                    rows = request.rows[number][here]
                    quantization.apply(rows)
                    request.rows[number][here] = rows

    def sum_gradients(self, request: RowsRequest, gradients: Blocks) -> None:
        """As of `Way`."""
        self.sum_by_row(request, self._by_name(gradients))

    def sum_by_row(self, request: RowsRequest, gradients: Mapping[str, np.ndarray]) -> None:
        """Replaces `rows` of trained tables by the gradient of each, summed over this host's samples and features.

        Args:
          gradients: per feature float32 `[num_samples or more, dim]`, of the activations.
        """
        if self.num_hosts == 1:
            request.rows = [self._scratch(number, len(rows)) for number, rows in enumerate(request.rows)]
        sums = self._group_arrays(request.rows)

        def add(stream: Stream, columns: slice) -> None:
            """All gradients of a stream, for some columns: sums of a row stay in the order of its ids."""
            for feature in stream.features:
                ragged = request.features[feature.name]
                kernels.sum_gradients(
                    gradients[feature.name][: ragged.num_samples, columns],
                    request.index[feature.name],
                    ragged.row_splits,
                    ragged.weights,
                    feature.combiner,
                    sums[stream.table][:, columns],
                )

        num_threads = self._thread_pool.num_threads
        cleared = [
            rows for rows, group in zip(request.rows, self.groups, strict=True) if rows.size and group.is_trained
        ]
        streams = [self._streams[number] for group in self.groups if group.is_trained for number in group.streams]
        parts = cut([len(array) for array in cleared], [array.size for array in cleared], num_threads)
        size = sum(array.size for array in cleared)
        self._thread_pool.run([partial(cleared[at][first:stop].fill, 0.0) for at, first, stop in parts], size=size)
        calls = [
            partial(add, stream, columns)
            for stream in streams
            for columns in column_parts(sums[stream.table].shape[1], num_threads)
        ]
        num_ids = sum(request.features[feature.name].num_ids for stream in streams for feature in stream.features)
        self._thread_pool.run(calls, size=FLOATS_PER_ENTRY * num_ids)

    def _scratch(self, group: int, num_rows: int) -> np.ndarray:
        """Room for sums that are used up before the next step's; it is kept, since new memory costs page faults."""
        if len(self._sums[group]) < num_rows:
            self._sums[group] = aligned_empty((num_rows + num_rows // 4, self.groups[group].dim))
        return self._sums[group][:num_rows]

    def update(self, request: RowsRequest, gradients: Blocks | None, learning_rates: Sequence[float]) -> None:
        """As of `Way`.

        Args:
          gradients: gradients of activations, which `sum_gradients` has taken.
          learning_rates: one a table.
        """
        found = {}
        for number, wanted in enumerate(request.wanted):
            addresses = wanted.addresses(*self._memory(request, number))
            for table, first, stop in self._tables_of[number] if self.groups[number].is_trained else ():
                rows = wanted.of_streams(first, stop)
                found[table] = wanted.rows[rows], addresses[rows]
        update_in_parallel(self.tables, found, learning_rates, self._thread_pool)

    def _group_arrays(self, arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """By table, the array of its group."""
        return {
            self._streams[at].table: arrays[number] for number, group in enumerate(self.groups) for at in group.streams
        }


def _packed(times: np.ndarray) -> np.ndarray:
    """Numbers of 32 bits in int64 words."""
    words = np.zeros(-(-len(times) // 2), np.int64)
    words.view(np.int32)[: len(times)] = np.minimum(times, np.iinfo(np.int32).max)
    return words
