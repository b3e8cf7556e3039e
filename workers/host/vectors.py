"""`VectorExchange`: vectors and their gradients on their way between this host and the others, over the mesh.

The ways of a lookup own the arrays and say what goes where; this module moves it. Without a split between a pair of
hosts everything is sent from and received into these arrays in place. With a split, the prefetched vectors go ahead
with a mask and the rest follows; both arrive packed and are copied to their places. With a narrow wire, float32 is
rounded as it leaves and widened as it arrives. What a host keeps for itself or shares through memory is never rounded.

What all ways have for a host goes in one frame. A host sends no frame to one that expects nothing of it, and both know
that from their requests. A frame may be empty all the same, since it also says when shared memory may be used.

All hosts begin the same exchanges in the same order. That of ids has a frame for every host, so no host is more than a
step ahead of another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.exchange import Splits
from podembed.embedding.lookup.prefetch import Part, Split, mask_bytes
from podembed.embedding.lookup.way import Way
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


class _Frames(dict[int, list[np.ndarray]]):
    """By host, what is sent to it, one array after another. Hosts that are not named get no frame."""

    def to(self, host: int, arrays: Sequence[np.ndarray]) -> None:
        """Adds arrays to the frame of a host."""
        self.setdefault(host, []).extend(arrays)


class _Arrivals(dict[int, list[_Arrival]]):
    """By host, where what it sends belongs, in its order. Hosts that are not named send no frame."""

    def of(self, host: int, memories: Sequence[np.ndarray], split: Split | None = None) -> None:
        """Adds what a host sends: whole memories, or the rest of each where others were prefetched."""
        positions = [None] * len(memories) if split is None else split.rest
        found = [_Arrival(memory, at) for memory, at in zip(memories, positions, strict=True)]
        self.setdefault(host, []).extend(found)


class VectorExchange:
    """The exchanges of vectors of one host. Mutated: the arrays of the lookups, and the frames of the exchange in
    progress.

    Args:
      mesh: connected to all other hosts.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others.
    """

    def __init__(self, mesh: Mesh, ways: Sequence[Way], *, wire_dtype: str, timeout_s: float) -> None:
        self._mesh, self._ways = mesh, ways
        self._dtype = np.dtype(ml_dtypes.bfloat16 if wire_dtype == "bfloat16" else np.float32)
        self._timeout_s = timeout_s
        identity = mesh.identity
        self._own = identity.rank
        self._others = [host for host in range(identity.num_ranks) if host != self._own]
        self._arrivals: dict[int, Sequence[_Arrival]] = {}
        self._frames: dict[int, np.ndarray] = {}

    # ------------------------------------------------------------------ prefetched vectors

    def begin_prefetch(self, way: Way, request: Any, number: int, activations: Blocks) -> None:
        """As of `Exchange`."""
        vectors = {host: way.prefetched(request, host) for host in way.prefetch_partners()}
        self._begin_prefetch(number, request.splits, vectors, self._prefetch_blocks(way, request, activations))

    def finish_prefetch(self, way: Way, request: Any, activations: Blocks) -> Splits:
        """As of `Exchange`."""
        return self._finish_prefetch(self._prefetch_blocks(way, request, activations))

    @staticmethod
    def _prefetch_blocks(way: Way, request: Any, activations: Blocks) -> dict[int, list[np.ndarray]]:
        return {host: way.arriving(request, host, activations, is_split=True) for host in way.prefetch_partners()}

    # ------------------------------------------------------------------ everything that is left

    def begin_vectors(
        self, requests: Sequence[Any], number: int, activations: Blocks, *, arrived: Sequence[Splits]
    ) -> None:
        """As of `Exchange`."""
        send, arrivals = _Frames(), _Arrivals()
        for way, request, before in zip(self._ways, requests, arrived, strict=True):
            for host in self._without_own(way.receivers(request)):
                send.to(host, way.outgoing(request, host))
            for host in self._without_own(way.senders(request)):
                split = before.get(host)
                arrivals.of(host, way.arriving(request, host, activations, is_split=split is not None), split)
        self._begin(Tag.ROWS, number, send, arrivals)

    def begin_gradients(self, requests: Sequence[Any], number: int, gradients: Blocks) -> None:
        """As of `Exchange`."""
        send, arrivals = _Frames(), _Arrivals()
        for way, request in zip(self._ways, requests, strict=True):
            for host in self._without_own(way.senders(request)):
                send.to(host, way.outgoing_gradients(request, host, gradients))
            for host in self._without_own(way.receivers(request)):
                arrivals.of(host, way.arriving_gradients(request, host))
        self._begin(Tag.GRADIENTS, number, send, arrivals)

    def _without_own(self, hosts: Sequence[int]) -> list[int]:
        return [host for host in hosts if host != self._own]

    # ------------------------------------------------------------------ frames

    def _begin(
        self,
        tag: Tag,
        number: int,
        send: Mapping[int, Sequence[np.ndarray]],
        arrivals: Mapping[int, Sequence[_Arrival]],
    ) -> None:
        """Starts one exchange. A host that is not named gets no frame, or sends none."""
        self._arrivals, self._frames = {}, {}

        def receive(host: int, num_bytes: int) -> list[np.ndarray]:
            expected = arrivals[host]
            size = self._dtype.itemsize * sum(arrival.num_floats for arrival in expected)
            if num_bytes != size:
                raise ValueError(f"Host {host} sent {num_bytes} bytes. Expected {size}, as both planned.")
            if self._dtype == np.float32 and all(arrival.positions is None for arrival in expected):
                return [arrival.memory for arrival in expected]
            self._arrivals[host], self._frames[host] = expected, np.empty(num_bytes, np.uint8)
            return [self._frames[host]]

        frames = {host: self._outgoing(arrays) for host, arrays in send.items()}
        self._mesh.begin(tag=tag, step=number, send=frames, receive=receive, senders=arrivals)

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

        frames: dict[int, list[np.ndarray]] = {}
        for host in self._others:
            split = splits[host] if host in send else None
            vectors = [] if split is None else self._outgoing(split.packed(Part.PREFETCHED, send[host]))
            frames[host] = vectors if split is None else [split.mask(), *vectors]
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
