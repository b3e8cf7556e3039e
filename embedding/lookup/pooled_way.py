"""`PooledWay`: the lookup that combines rows where they lie.

It serves tables that lie whole on one host, and cut tables whose owners each pool their part of a bag.

A step begins with frames: all ids go to the owners of their rows (`request`). An owner checks what it got, finds the
rows (`accept`) and groups them (`group`). It combines the rows of each bag, straight from the table into what goes back
(`pool_for_others`, `pool_own`). Where a bag has several owners, the host that asked adds up their partial sums
(`add_partial_sums`). Later the gradients of the bags come back to the owners (`gradient_memory`). Each touched row sums
the gradients of all its bags, in host order, and is updated once (`update`).

No id is looked for twice, and no row is copied. `RowsWay` is for all other tables. This module sends nothing
either: an `Exchange` moves the frames. A host that is alone asks only itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from podembed.embedding.kernels.arrays import BlockLines, aligned_empty
from podembed.embedding.kernels.bag_frames import NUM_BAGS
from podembed.embedding.kernels.threads import ONE_THREAD, Threads
from podembed.embedding.lookup import compiled as kernels
from podembed.embedding.lookup.activation_layout import EVERY_HOST, ROWS_TRAVEL, ActivationLayout, Blocks
from podembed.embedding.lookup.pooled_frames import (
    AskedBags,
    BagKeys,
    PooledRequest,
    add_up,
    frame_of,
    parts_of,
    read_frame,
)
from podembed.embedding.lookup.prefetch import Part, Split
from podembed.embedding.lookup.router import Router
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.lookup.way import LookupPhase
from podembed.embedding.ragged import Ragged
from podembed.embedding.row_index import DenseIndexes, KeyRequest
from podembed.embedding.table.stores.store import PooledFeature
from podembed.embedding.table.table import Pooling, Table, kind_of, pool_in_parallel


class PooledWay:
    """As `Way`, for the pooled features of one host. Mutated: rows and slots of the tables that it owns, and the
    buffers below.

    Args:
      tables: all tables of the job, as this host holds them.
      features: all features of the job.
      layout: of activations and gradients; `layout.owners` says which features are pooled where. A batch may have
        other numbers of vectors.
      host, num_hosts: this host's number, 0-based, and how many there are.
      placement: per table, the owner of each bucket; left out where no feature is pooled by every host.
      num_buffers: memories that every host has for the activations and gradients of its batches, to be used in turn.
      thread_pool: pool whose threads do the work.

    Attributes:
      on_same_machine: hosts that share memory with this one.
    """

    gather_phase, prefetch_phase = LookupPhase.POOL_FOR_OTHERS, LookupPhase.PREFETCH_POOL

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[FeatureBinding],
        layout: ActivationLayout,
        *,
        host: int,
        num_hosts: int,
        placement: Sequence[np.ndarray] = (),
        num_buffers: int = 1,
        thread_pool: Threads = ONE_THREAD,
    ) -> None:
        self._thread_pool = thread_pool
        self.host = host
        self.num_hosts = num_hosts
        self.layout = layout
        self._tables = tuple(tables)
        self._features = tuple(features)
        self._partial = tuple(at for at in layout.order if layout.owners[at] == EVERY_HOST)
        cut = {features[at].table for at in self._partial}
        # A table that is not cut lies on one host, so no owners are needed.
        self._routers = tuple(
            Router(table.spec, placement[at] if at in cut else None) for at, table in enumerate(tables)
        )
        # An owner that has a part of a bag only sums.
        self._combiners = tuple(
            "sum" if owner == EVERY_HOST else feature.combiner
            for owner, feature in zip(layout.owners, features, strict=True)
        )
        self._of_owner = tuple(
            tuple(at for at in layout.order if layout.owners[at] in (owner, EVERY_HOST)) for owner in range(num_hosts)
        )
        length = layout.floats_of(host)
        owned = self._of_owner[host]
        self._numbers = {at: number for number, at in enumerate(owned)}
        self._own_tables: dict[int, list[int]] = {}
        for at in owned:
            self._own_tables.setdefault(features[at].table, []).append(at)
        self._vectors = np.array([layout.vectors[at] for at in owned], np.int64)
        pooled = [(features[at].table, self._combiners[at], features[at].combiner) for at in owned]
        self._own = kind_of(tables).group(
            self._tables,
            [PooledFeature(table=table, pooling=part, combiner=whole) for table, part, whole in pooled],
            num_hosts=num_hosts,
        )
        self._lines = BlockLines()
        self._dense_indexes = DenseIndexes([tables[features[at].table].index for at in owned])
        self._dynamic = [table for table in self._own_tables if tables[table].index.is_dynamic]
        others = [other for other in range(num_hosts) if other != host]
        # What other hosts get from here, and the gradients that come back; one region each, laid out as in their own
        # memory. One is enough for all buffers, since it is sent before the next one is pooled, and used up before the
        # next gradients come.
        self._answers = {other: aligned_empty((length,)) for other in others}
        self._gradients = {other: aligned_empty((length,)) for other in others}
        answers = {other: layout.blocks_of(host, memory) for other, memory in self._answers.items()}
        gradients = {other: layout.blocks_of(host, memory) for other, memory in self._gradients.items()}
        self._answer_blocks = [dict(answers) for _ in range(num_buffers)]
        self._gradient_blocks = [dict(gradients) for _ in range(num_buffers)]
        # The same for batches that have other numbers of vectors than the layout says.
        self._odd_answers: dict[int, np.ndarray] = {}
        self._odd_gradients: dict[int, np.ndarray] = {}
        self._layouts: dict[int, ActivationLayout] = {}
        self.on_same_machine: set[int] = set()
        self.num_buffers = num_buffers

    def share(self, host: int, *, activations: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
        """Works in another host's own memory from now on: `pool_for_others` writes there, `update` reads there.

        Args:
          activations, gradients: that host's flat memories, one a buffer.
        """
        layout, own = self.layout, self.host
        region, slot = layout.region(own), layout.slot(own)
        for buffer, (ours, theirs) in enumerate(zip(activations, gradients, strict=True)):
            self._answer_blocks[buffer][host] = layout.blocks_in(own, ours[region], ours[slot])
            self._gradient_blocks[buffer][host] = layout.blocks_in(own, theirs[region], theirs[layout.partial])
        self.on_same_machine.add(host)

    def is_shared_with(self, request: PooledRequest, host: int) -> bool:
        """Whether vectors for a host, and their gradients, lie in that host's own memory."""
        return host in self.on_same_machine and request.layouts[host] is self.layout

    def is_shared_by(self, request: PooledRequest, owner: int) -> bool:
        """Whether an owner works in this host's memory."""
        return owner in self.on_same_machine and request.is_usual

    @property
    def is_used(self) -> bool:
        """Whether any feature is pooled at its owners; the same on all hosts."""
        return any(owner != ROWS_TRAVEL for owner in self.layout.owners)

    def request(
        self,
        bags: Mapping[str, Ragged],
        *,
        buffer: int = 0,
        layout: ActivationLayout | None = None,
        is_in_place: bool = True,
    ) -> PooledRequest:
        """Finds the owners of all ids, for a batch whose activations will lie in that buffer. Touches no table.

        Args:
          layout: of these activations, where their numbers differ from those of `self.layout`.

        Raises:
          ValueError: an id lies outside its table.
        """
        is_usual = layout is None or layout.vectors == self.layout.vectors
        layout = layout or self.layout
        asked = {at: self._asked(bags, at, layout) for at in layout.order if layout.owners[at] != ROWS_TRAVEL}
        parts = {
            at: parts_of(*asked[at], self._features[at].combiner, num_hosts=self.num_hosts) for at in self._partial
        }
        of_owners = [
            [parts[at][owner] if at in parts else asked[at] for at in self._of_owner[owner]]
            for owner in range(self.num_hosts)
        ]
        frames = [frame_of(own, stays=owner == self.host) for owner, own in enumerate(of_owners)]
        splits: list[Split | None] = [None] * self.num_hosts
        return PooledRequest(
            frames=frames,
            own_keys=[part.keys if isinstance(part, BagKeys) else part[1].values for part in of_owners[self.host]],
            layout=layout,
            buffer=buffer,
            is_usual=is_usual and is_in_place,
            splits=splits,
            divisors={at: cut[0].divisors for at, cut in parts.items()},
        )

    def _asked(self, bags: Mapping[str, Ragged], at: int, layout: ActivationLayout) -> tuple[Router, Ragged]:
        """The router of a feature's table, and its bags."""
        feature = self._features[at]
        return self._routers[feature.table], bags[feature.name].padded(layout.vectors[at])

    def lay_out(self, request: PooledRequest, bags: Mapping[str, Ragged]) -> None:
        """As of `Way`. A bag that is pooled has no places."""

    def words(self, request: PooledRequest, host: int) -> list[np.ndarray]:
        """As of `Way`: whether the batch is a usual one, and the frame."""
        return [np.array([request.is_usual], np.int64), request.frames[host]]

    def take_rows_asked(self) -> np.ndarray:
        """As of `Way`. Rows are not counted where no row travels."""
        return np.zeros(len(self._tables), np.int64)

    def accept(self, request: PooledRequest, frames: Sequence[np.ndarray], *, training_step: int | None = None) -> None:
        """As of `Way`.

        Raises:
          ValueError: a frame is not one, or has keys of buckets that are not held here. Or it has other numbers of
            vectors than a usual one and does not say so.
        """
        request.bags = [
            self._bags(request.frames[host], host, request.own_keys)
            if host == self.host
            else self._bags(frame[1:], host, None)
            for host, frame in enumerate(frames)
        ]
        for bags in request.bags if self._numbers else ():
            self._dense_indexes.resolve(bags.key_lines(), bags.lines)
        found = [bags.keys_and_rows() for bags in request.bags] if self._dynamic else []
        for table in self._dynamic:
            named = [of_host[self._numbers[at]] for of_host in found for at in self._own_tables[table]]
            held = self._tables[table]
            held.index.accept([KeyRequest(*one) for one in named], held.deciding_step(training_step))
        request.layouts = [
            request.layout if host == self.host else self._layout_of(host, bags, bool(frames[host][:1].any()))
            for host, bags in enumerate(request.bags)
        ]

    def _layout_of(self, host: int, bags: AskedBags, is_usual: bool) -> ActivationLayout:
        """The layout of the vectors that a host gets from here: `self.layout` itself if its batch is a usual one."""
        if is_usual and not self._numbers:
            return self.layout
        if is_usual:
            found = bags.lines[:, NUM_BAGS]
            odd = np.flatnonzero(found != self._vectors)
            if len(odd):
                raise ValueError(
                    f"Found {found[odd[0]]} bags from host {host} in a batch of the usual size. Expected "
                    f"{self._vectors[odd[0]]}. Check that both hosts are of one generation."
                )
            return self.layout
        counts = tuple(bags[at].num_bags if at in bags else 0 for at in range(len(self.layout.widths)))
        last = self._layouts.get(host)
        if last is None or last.vectors != counts:
            last = self._layouts[host] = replace(self.layout, vectors=counts)
        return last

    def group(self, request: PooledRequest, gradients: Blocks) -> None:
        """As of `Way`: sorts what all hosts ask by row, for `split` and `update`.

        Raises:
          ValueError: a row is not held here.
        """
        if not self._numbers:
            return
        asked = [bags.lines for bags in request.bags]
        request.grouped, request.scaled = self._own.group(
            asked, self._all_gradients(request, gradients.arrays), self._thread_pool
        )

    def _all_gradients(self, request: PooledRequest, own_gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Per host, where the gradients of the vectors that it has from here lie."""
        of_host = [
            self._own_blocks(own_gradients) if host == self.host else self._gradients_of(request, host)
            for host in range(self.num_hosts)
        ]
        return [self._lines.of([*blocks.values()]) for blocks in of_host]

    def _own_blocks(self, blocks: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """Of this host's batch those that it pools itself."""
        return {at: blocks[at] for at in self._numbers}

    def _bags(self, frame: np.ndarray, host: int, keys: Sequence[np.ndarray] | None) -> AskedBags:
        return read_frame(frame, num_features=len(self._numbers), host=host, numbers=self._numbers, keys=keys)

    def _answers_of(self, request: PooledRequest, host: int) -> Mapping[int, np.ndarray]:
        """By feature, where the vectors that another host requested go."""
        layout = request.layouts[host]
        if layout is self.layout:
            return self._answer_blocks[request.buffer][host]
        return layout.blocks_of(self.host, self._answer(request, host))

    def _gradients_of(self, request: PooledRequest, host: int) -> Mapping[int, np.ndarray]:
        """By feature, where the gradients of another host are once they came."""
        layout = request.layouts[host]
        if layout is self.layout:
            return self._gradient_blocks[request.buffer][host]
        return layout.blocks_of(self.host, self._gradient_memory(request, host))

    def split(self, request: PooledRequest, previous: PooledRequest) -> None:
        """Finds which of the bags that the hosts ask for have no row that `previous`, the step under way, will
        update. Without knowing the rows of that step, none has.
        """
        if previous.grouped is None:
            return
        conflicts: list[dict[int, np.ndarray]] = [{} for _ in range(self.num_hosts)]
        for table, features in self._own_tables.items():
            with self._tables[table].marked([previous.grouped[table].rows]) as marks:
                for host, found in enumerate(conflicts):
                    for at in features:
                        bags = request.bags[host][at]
                        found[at] = np.empty(bags.num_bags, bool)
                        kernels.find_marked_bags(bags.rows, bags.row_splits, marks, found[at])
        order = self._of_owner[self.host]
        widths = [self.layout.widths[at] for at in order]
        request.splits = [Split.worthwhile([found[at] for at in order], widths) for found in conflicts]

    def gather(self, request: PooledRequest, activations: Blocks, part: Part = Part.REST) -> None:
        """As of `Way`: combines what the other hosts asked, for sending or into the memory that they share. Where all
        of them share theirs, nothing is sent, and this host's own bags go along.
        """
        hosts = [*self._answers] if self._numbers else []
        if self._pools_own_along:
            hosts.append(self.host)
        self._pool(request, hosts, activations.arrays, part)

    def gather_own(self, request: PooledRequest, activations: Blocks, part: Part = Part.REST) -> None:
        """As of `Way`; nothing if `gather` has done so."""
        if not self._pools_own_along:
            self._pool(request, [self.host], activations.arrays, part)

    @property
    def _pools_own_along(self) -> bool:
        return bool(self._answers) and len(self.on_same_machine) == len(self._answers)

    def _pool(
        self, request: PooledRequest, hosts: Sequence[int], activations: Sequence[np.ndarray], part: Part
    ) -> None:
        """Combines what some hosts asked; a host without a split has none of the part that is prefetched."""
        blocks = {
            host: self._own_blocks(activations) if host == self.host else self._answers_of(request, host)
            for host in hosts
            if part is Part.REST or request.splits[host] is not None
        }
        if not blocks:
            return
        if all(request.splits[host] is None for host in blocks):
            asked = [request.bags[host].lines for host in blocks]
            self._own.pool(asked, [self._lines.of([*own.values()]) for own in blocks.values()], self._thread_pool)
            return
        found = [self._poolings(request, host, own, part) for host, own in blocks.items()]
        # Table by table, since rows that one host's bags brought into the caches serve those of the others.
        pool_in_parallel([pooling for of_table in zip(*found, strict=True) for pooling in of_table], self._thread_pool)

    def _poolings(
        self, request: PooledRequest, host: int, blocks: Mapping[int, np.ndarray], part: Part
    ) -> list[Pooling]:
        split, found = request.splits[host], []
        in_place = host == self.host or host in self.on_same_machine
        for number, (at, block) in enumerate(blocks.items()):
            bags, feature = request.bags[host][at], self._features[at]
            if split is not None and not in_place:
                block = split.packed(part, list(blocks.values()))[number]
            some = {} if split is None else {"bags": split.positions(part)[number], "is_packed": not in_place}
            pool, combiner = self._tables[feature.table].store.pool, self._combiners[at]
            found.append(Pooling(pool, bags.rows, bags.row_splits, bags.weights, combiner, block, **some))
        return found

    def finish(self, request: PooledRequest, activations: Blocks) -> None:
        """As of `Way`: adds up what the owners of cut tables pooled, in the order of the hosts, and divides by the
        denominators of the bags.
        """
        found = [activations.partial_sums(owner) for owner in range(self.num_hosts)]
        for at in self._partial:
            parts = [of_owner[at] for of_owner in found]
            parts[self.host] = activations.arrays[at]
            add_up(parts, self.host, request.divisors[at])

    def sum_gradients(self, request: PooledRequest, gradients: Blocks) -> None:
        """As of `Way`. Owners get the gradients of vectors as they are."""

    def receivers(self, request: PooledRequest) -> Sequence[int]:
        """As of `Way`."""
        return [*self._answers] if self.host in self.layout.pooling_hosts else ()

    def senders(self, request: PooledRequest) -> Sequence[int]:
        """As of `Way`."""
        return self.layout.pooling_hosts

    def outgoing(self, request: PooledRequest, host: int) -> list[np.ndarray]:
        """As of `Way`. An empty frame says that vectors are complete in the memory that the host shares."""
        split = request.splits[host]
        if self.is_shared_with(request, host):
            return []
        if split is None:
            return [self._answer(request, host)]
        return split.packed(Part.REST, self.prefetched(request, host))

    def arriving(self, request: PooledRequest, host: int, activations: Blocks, *, is_split: bool) -> list[np.ndarray]:
        """As of `Way`."""
        if self.is_shared_by(request, host):
            return []
        return activations.of_owner(host) if is_split else activations.room(host)

    def outgoing_gradients(self, request: PooledRequest, host: int, gradients: Blocks) -> list[np.ndarray]:
        """As of `Way`. An empty frame says that gradients are complete in the memory that the host shares. Its frame in
        the next exchange of ids says that it does not read this host's any more.
        """
        return [] if self.is_shared_by(request, host) else gradients.frame(host)

    def arriving_gradients(self, request: PooledRequest, host: int) -> list[np.ndarray]:
        """As of `Way`."""
        return [] if self.is_shared_with(request, host) else [self._gradient_memory(request, host)]

    def prefetch_partners(self) -> Sequence[int]:
        """As of `Way`."""
        return [host for host in self._answers if host not in self.on_same_machine]

    def prefetched(self, request: PooledRequest, host: int) -> list[np.ndarray]:
        """As of `Way`; with a split, the prefetched vectors first in each block."""
        return list(request.layouts[host].blocks_of(self.host, self._answer(request, host)).values())

    def _answer(self, request: PooledRequest, host: int) -> np.ndarray:
        """What goes to another host: the region of this owner in that host's activations, and its partial sums."""
        return self._memory(request, host, self._answers, self._odd_answers)

    def _gradient_memory(self, request: PooledRequest, host: int) -> np.ndarray:
        """Where the gradients of another host's activations belong, laid out as `answer`."""
        return self._memory(request, host, self._gradients, self._odd_gradients)

    def _memory(
        self, request: PooledRequest, host: int, usual: Mapping[int, np.ndarray], odd: dict[int, np.ndarray]
    ) -> np.ndarray:
        layout = request.layouts[host]
        if layout is self.layout:
            return usual[host]
        length = layout.floats_of(self.host)
        if host not in odd or len(odd[host]) < length:
            odd[host] = aligned_empty((length,))
        return odd[host][:length]

    def update(self, request: PooledRequest, gradients: Blocks, learning_rates: Sequence[float]) -> None:
        """As of `Way`. Gradients lie where `group` was told."""
        scaled = request.scaled
        if scaled is not None and len(scaled.where):
            every = self._all_gradients(request, gradients.arrays)
            self._own.scale(scaled, [bags.lines for bags in request.bags], every, self._thread_pool)
        if request.grouped is not None:
            self._own.update(request.grouped, learning_rates, self._thread_pool)
