"""`VectorExchange`: rows, pooled vectors and their gradients on their way between this host and the others, over the
mesh.

`ShardedLookup` and `PooledLookup` own the arrays; this module says which part of them goes where, and in which form.
Without a split between a pair of hosts everything is sent from and received into these arrays in place. With a split,
the prefetched vectors go ahead with a mask and the rest follows; both arrive packed and are copied to their places.
With a narrow wire, float32 is rounded as it leaves and widened as it arrives. What a host keeps for itself or shares
through memory is never rounded.

Every exchange takes place on all hosts, in one order, even where a frame is empty: frames also say when shared memory
may be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.exchange import Splits
from podembed.embedding.lookup.owner_pooled import PooledLookup, PooledRequest
from podembed.embedding.lookup.prefetch import Part, Split, mask_bytes
from podembed.embedding.lookup.sharded import ShardedLookup
from podembed.embedding.lookup.streams import Prepared
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """Where vectors belong: a whole piece of memory, or some rows of a block."""

    memory: np.ndarray
    positions: np.ndarray | None = None

    @property
    def num_floats(self) -> int:
        return self.memory.size if self.positions is None else len(self.positions) * self.memory.shape[1]

    def take(self, values: np.ndarray) -> None:
        """Writes `num_floats` values of any float dtype."""
        if self.positions is None:
            self.memory.reshape(-1)[...] = values
        else:
            self.memory[self.positions] = values.reshape(-1, self.memory.shape[1])


class VectorExchange:
    """The exchanges of vectors of one host. Mutated: the arrays of the lookups, and the frames of the exchange in
    progress.

    Args:
      mesh: connected to all other hosts.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others.
    """

    def __init__(
        self,
        mesh: Mesh,
        lookup: ShardedLookup,
        pooled: PooledLookup,
        *,
        wire_dtype: str,
        timeout_s: float,
    ) -> None:
        self._mesh, self._lookup, self._pooled = mesh, lookup, pooled
        self._dtype = np.dtype(ml_dtypes.bfloat16 if wire_dtype == "bfloat16" else np.float32)
        self._timeout_s = timeout_s
        own, hosts = mesh.identity.rank, range(mesh.identity.num_ranks)
        self._others = [host for host in hosts if host != own]
        self._arrivals: dict[int, list[_Arrival]] = {}
        self._frames: dict[int, np.ndarray] = {}

    # ------------------------------------------------------------------ rows

    def prefetch_rows(self, prepared: Prepared, number: int) -> Splits:
        """Exchanges the rows that the step under way does not touch. Returns what the other hosts sent."""
        served = {host: self._lookup.blocks(prepared, host, of="served") for host in self._others}
        rows = {host: self._lookup.blocks(prepared, host, of="rows") for host in self._others}
        self._begin_prefetch(number, prepared.splits, served, rows)
        return self._finish_prefetch(rows)

    def rows(self, prepared: Prepared, number: int, arriving: Splits) -> None:
        """Exchanges the rows that are left: `served` into the other hosts' `rows`."""
        for group in range(len(self._lookup.groups)):
            send: dict[int, list[np.ndarray]] = {}
            arrivals: dict[int, list[_Arrival]] = {}
            for host in self._others:
                piece, split = self._lookup.piece(prepared, group, host, of="served"), prepared.splits[host]
                send[host] = [piece if split is None else piece[len(split.prefetched[group]) :]]
                room, sent = self._lookup.piece(prepared, group, host, of="rows"), arriving.get(host)
                arrivals[host] = [_Arrival(room, None if sent is None else sent.rest[group])]
            self._begin(Tag.ROWS, number, send, arrivals)
            self.finish()

    def row_gradients(self, prepared: Prepared, number: int) -> None:
        """Exchanges the gradients of rows: `rows` into their owners' `served`."""
        for group in range(len(self._lookup.groups)):
            send = {host: [self._lookup.piece(prepared, group, host, of="rows")] for host in self._others}
            served = {host: self._lookup.piece(prepared, group, host, of="served") for host in self._others}
            self._begin(Tag.GRADIENTS, number, send, {host: [_Arrival(room)] for host, room in served.items()})
            self.finish()

    # ------------------------------------------------------------------ pooled vectors

    def begin_prefetch_pooled(self, request: PooledRequest, number: int, activations: Blocks) -> None:
        """Starts to exchange the bags that the step under way does not touch; `finish_prefetch_pooled` ends it."""
        answers = {host: self._pooled.answer_blocks(request, host) for host in self._apart}
        self._begin_prefetch(number, request.splits, answers, self._blocks_from_other_machines(activations))

    def finish_prefetch_pooled(self, activations: Blocks) -> Splits:
        """Waits for the bags. Returns what the other hosts sent."""
        return self._finish_prefetch(self._blocks_from_other_machines(activations))

    def begin_pooled(self, request: PooledRequest, number: int, activations: Blocks, arriving: Splits) -> None:
        """Starts to exchange the bags that are left; `finish` ends it.

        The empty frame of a host on this machine says that its vectors are complete in the memory that it shares.
        """
        if not self._pooled.is_used:
            return
        send: dict[int, list[np.ndarray]] = {}
        arrivals: dict[int, list[_Arrival]] = {}
        for host in self._others:
            split = request.splits[host]
            if self._pooled.is_shared_with(request, host):
                continue
            if split is None:
                send[host] = [self._pooled.answer(request, host)]
            else:
                send[host] = split.packed(Part.REST, self._pooled.answer_blocks(request, host))
        for host in self._others:
            sent = arriving.get(host)
            if self._pooled.is_shared_by(request, host):
                continue
            if sent is None:
                arrivals[host] = [_Arrival(part) for part in activations.room(host)]
            else:
                blocks = activations.of_owner(host)
                arrivals[host] = [_Arrival(block, rest) for block, rest in zip(blocks, sent.rest, strict=True)]
        self._begin(Tag.ROWS, number, send, arrivals)

    def begin_pooled_gradients(self, request: PooledRequest, number: int, gradients: Blocks) -> None:
        """Starts to send the gradients of pooled vectors back to their owners; `finish` ends it.

        The empty frame of a host on this machine says that its gradients are complete in the memory that it shares. Its
        frame in the next exchange says that it does not read this host's any more.
        """
        if self._pooled.is_used:
            pooled, others = self._pooled, self._others
            send = {host: gradients.frame(host) for host in others if not pooled.is_shared_by(request, host)}
            arrivals = {
                host: [_Arrival(pooled.gradient_memory(request, host))]
                for host in others
                if not pooled.is_shared_with(request, host)
            }
            self._begin(Tag.GRADIENTS, number, send, arrivals)

    def finish_pooled(self) -> None:
        """Waits for pooled vectors or their gradients, if any feature has them."""
        if self._pooled.is_used:
            self.finish()

    def _blocks_from_other_machines(self, activations: Blocks) -> dict[int, list[np.ndarray]]:
        return {host: activations.of_owner(host) for host in self._apart}

    @property
    def _apart(self) -> list[int]:
        """Hosts with which no memory is shared."""
        return [host for host in self._others if host not in self._pooled.on_same_machine]

    # ------------------------------------------------------------------ frames

    def _begin(
        self,
        tag: Tag,
        number: int,
        send: Mapping[int, Sequence[np.ndarray]],
        arrivals: Mapping[int, list[_Arrival]],
    ) -> None:
        """Starts one exchange; hosts that are not named get and send empty frames."""
        self._arrivals, self._frames = {}, {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            expected = arrivals.get(host, [])
            size = self._dtype.itemsize * sum(arrival.num_floats for arrival in expected)
            if num_bytes != size:
                raise ValueError(f"Host {host} sent {num_bytes} bytes. Expected {size}, as both planned.")
            if self._dtype == np.float32 and len(expected) == 1 and expected[0].positions is None:
                return expected[0].memory
            self._arrivals[host], self._frames[host] = expected, np.empty(num_bytes, np.uint8)
            return self._frames[host]

        frames = [self._outgoing(send.get(host, [])) for host in range(self._mesh.identity.num_ranks)]
        self._mesh.begin(tag=tag, step=number, send=frames, receive=receive)

    def finish(self) -> None:
        """Waits for the exchange in progress and puts what came packed to its places."""
        self._mesh.finish(timeout_s=self._timeout_s)
        for host, frame in self._frames.items():
            self._put(frame.view(self._dtype), self._arrivals[host])

    def _begin_prefetch(
        self,
        number: int,
        splits: Sequence[Split | None],
        send: Mapping[int, list[np.ndarray]],
        arrivals: Mapping[int, list[np.ndarray]],
    ) -> None:
        """Starts the exchange of prefetched vectors, out of blocks and into blocks. Only their sender knows how many
        there are.
        """
        self._frames = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            blocks = arrivals.get(host, [])
            mask = mask_bytes([len(block) for block in blocks])
            limit = mask + self._dtype.itemsize * sum(block.size for block in blocks)
            if num_bytes and not mask <= num_bytes <= limit:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of prefetched vectors. Expected {mask} to {limit}."
                )
            self._frames[host] = np.empty(num_bytes, np.uint8)
            return self._frames[host]

        frames: list[list[np.ndarray]] = []
        for host in range(self._mesh.identity.num_ranks):
            split = splits[host] if host in send else None
            vectors = [] if split is None else self._outgoing(split.packed(Part.PREFETCHED, send[host]))
            frames.append(vectors if split is None else [split.mask(), *vectors])
        self._mesh.begin(tag=Tag.ROWS, step=number, send=frames, receive=receive)

    def _finish_prefetch(self, blocks: Mapping[int, list[np.ndarray]]) -> Splits:
        self._mesh.finish(timeout_s=self._timeout_s)
        found: dict[int, Split | None] = {}
        for host, frame in self._frames.items():
            if not len(frame):
                continue
            lengths = [len(block) for block in blocks[host]]
            split = found[host] = Split.of_mask(frame, lengths)
            arrivals = [_Arrival(block, first) for block, first in zip(blocks[host], split.prefetched, strict=True)]
            values = frame[mask_bytes(lengths) :].view(self._dtype)
            expected = sum(arrival.num_floats for arrival in arrivals)
            if len(values) != expected:
                raise ValueError(
                    f"Host {host} sent {len(values)} prefetched numbers. Expected {expected}, as its mask says."
                )
            self._put(values, arrivals)
        return found

    def _outgoing(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays) if self._dtype == np.float32 else [array.astype(self._dtype) for array in arrays]

    @staticmethod
    def _put(values: np.ndarray, arrivals: Sequence[_Arrival]) -> None:
        first = 0
        for arrival in arrivals:
            stop = first + arrival.num_floats
            arrival.take(values[first:stop])
            first = stop
