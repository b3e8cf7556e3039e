"""`TwoHop`: exchanges over a mesh in which every frame goes by way of a relay, so that hosts send few frames.

First each host sends one frame to its relay of each column (`workers.mesh.grid`): what it has for all hosts of that
column. When a relay has all of these frames, it sends each host of its column one frame with what has come for it. So a
host sends about 2 √n frames instead of n - 1, and each byte travels twice.

Both hops are exchanges of the mesh, so deadlines, lost hosts, goodbyes and checks are those of the mesh. A host waits
for a relay only when its own first hop is done, so waits never form a circle. What a relay holds is about as much as a
host receives in an exchange.

A joined frame begins with the length of each part, int64, `NO_FRAME` for none. The parts follow in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from podembed.workers.mesh.active_exchange import ExchangeStatistics, Outgoing, checked_views
from podembed.workers.mesh.frames import Buffer, byte_view, writable_views
from podembed.workers.mesh.grid import Grid
from podembed.workers.mesh.link import Receive
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import FrameError, MeshUsageError

NO_FRAME = -1
# Added to the tag, so that a host that exchanges another way is found by the first frame.
FIRST_HOP, SECOND_HOP = 1 << 16, 2 << 16
# Who waits for a relay may be waiting for what the relay waits for. The relay knows for whom, so it gives up first.
_LONGER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Exchange:
    """The exchange in progress.

    Attributes:
      frames: frames that this host sends, by rank.
      receive, senders: arguments of `Mesh.begin`.
    """

    tag: int
    step: int
    frames: Mapping[int, bytes]
    receive: Receive
    senders: Collection[int] | None

    def deliver(self, sender: int, part: memoryview | None) -> None:
        """Copies what a host sent to where the caller wants it.

        Raises:
          FrameError: it should have sent nothing, or something.
          MeshUsageError: `receive` gave no fitting buffer.
        """
        is_expected = self.senders is None or sender in self.senders
        if (part is not None) != is_expected:
            found, expected = ("none", "one") if is_expected else ("one", "none")
            raise FrameError(sender, "relayed frame", found, f"{expected}, as this host planned")
        if part is None:
            return
        buffers, at = self.receive(sender, part.nbytes), 0
        if part.nbytes:
            for view in writable_views(buffers, part.nbytes, sender):
                view[:] = part[at : at + view.nbytes]
                at += view.nbytes


class TwoHop:
    """The exchanges by way of relays of one host. It has the calls of `Mesh` for them.

    Args:
      mesh: connected to all other hosts.
    """

    def __init__(self, mesh: Mesh) -> None:
        identity = mesh.identity
        self._mesh, self._own, self._num_ranks = mesh, identity.rank, identity.num_ranks
        place = Grid(identity.num_ranks).place(identity.rank)
        self._column = place.columns[place.own].ranks
        # Per relay, the hosts that it serves.
        self._relays = {column.relay: column.ranks for column in place.columns if column.relay != self._own}
        self._sources = place.sources
        self._row = [sender for sender in place.sources[self._own] if sender != self._own]
        self._exchange: _Exchange | None = None
        self._came: dict[int, memoryview] = {}

    def exchange(
        self,
        *,
        tag: int,
        step: int,
        send: Outgoing,
        receive: Receive,
        senders: Collection[int] | None = None,
        timeout_s: float,
    ) -> ExchangeStatistics:
        """As `Mesh.exchange`."""
        self.begin(tag=tag, step=step, send=send, receive=receive, senders=senders)
        return self.finish(timeout_s=timeout_s)

    def begin(
        self, *, tag: int, step: int, send: Outgoing, receive: Receive, senders: Collection[int] | None = None
    ) -> None:
        """As `Mesh.begin`, except that `receive` is called in `finish`, when a relayed frame is here as a whole."""
        views = checked_views(
            send,
            tag=tag,
            step=step,
            own_rank=self._own,
            num_ranks=self._num_ranks,
        )
        # Joined at once: few bytes are copied in less time than every hop would take to handle their parts.
        frames = {rank: b"".join(parts) for rank, parts in views.items()}
        joined = {relay: [_joined([frames.get(rank) for rank in ranks])] for relay, ranks in self._relays.items()}
        self._came = {}
        self._mesh.begin(tag=tag + FIRST_HOP, step=step, send=joined, receive=self._take, senders=self._row)
        self._exchange = _Exchange(tag=tag, step=step, frames=frames, receive=receive, senders=senders)

    def finish(self, *, timeout_s: float) -> ExchangeStatistics:
        """As `Mesh.finish`, with a longer wait for relays than for the hosts that send to this one."""
        exchange = self._exchange
        if exchange is None:
            raise MeshUsageError("Found no exchange in progress. Expected a call of begin before finish.")
        statistics = self._mesh.finish(timeout_s=timeout_s)
        self._exchange = None
        try:
            second = self._relayed(exchange)
        except BaseException as error:
            self._mesh.fail(error)
            raise
        self._came = {}
        relays = [relay for relay in self._sources if relay != self._own]
        statistics += self._mesh.exchange(
            tag=exchange.tag + SECOND_HOP,
            step=exchange.step,
            send=second,
            receive=self._take,
            senders=relays,
            timeout_s=timeout_s + min(_LONGER_S, 0.25 * timeout_s),
        )
        try:
            for relay in relays:
                sources = self._sources[relay]
                parts = _parts(relay, self._came[relay], len(sources))
                for sender, part in zip(sources, parts, strict=True):
                    exchange.deliver(sender, part)
        except BaseException as error:
            self._mesh.fail(error)
            raise
        self._came = {}
        return statistics

    def _relayed(self, exchange: _Exchange) -> dict[int, list[Buffer]]:
        """Frames of the second hop by rank; what came for this host is delivered."""
        column, own_at = self._column, self._column.index(self._own)
        by_sender: list[Sequence[bytes | memoryview | None]] = []
        for sender in self._sources[self._own]:
            if sender == self._own:
                by_sender.append([exchange.frames.get(rank) for rank in column])
                continue
            parts = _parts(sender, self._came[sender], len(column))
            exchange.deliver(sender, parts[own_at])
            by_sender.append(parts)
        by_rank = zip(column, zip(*by_sender, strict=True), strict=True)
        return {rank: [_joined(parts)] for rank, parts in by_rank if rank != self._own}

    def _take(self, rank: int, num_bytes: int) -> memoryview:
        # Through numpy, which does not fill it first.
        self._came[rank] = byte_view(np.empty(num_bytes, np.uint8))
        return self._came[rank]


def _joined(parts: Sequence[bytes | memoryview | None]) -> bytes:
    """The joined frame of some parts, None for none."""
    lengths = [NO_FRAME if part is None else len(part) for part in parts]
    return b"".join([_lengths(len(parts)).pack(*lengths), *(part for part in parts if part)])


def _parts(rank: int, frame: memoryview, count: int) -> list[memoryview | None]:
    """The parts of a joined frame of a host.

    Raises:
      FrameError: it holds something else.
    """
    at = 8 * count
    lengths = _lengths(count).unpack_from(frame) if len(frame) >= at else ()
    parts: list[memoryview | None] = []
    for length in lengths:
        parts.append(None if length == NO_FRAME else frame[at : at + length])
        at += max(0, length)
    if at != len(frame) or not lengths or min(lengths) < NO_FRAME:
        expected = f"{8 * count} bytes of lengths, and what they say; they are {list(lengths)}"
        raise FrameError(rank, "joined frames", f"{len(frame)} bytes", expected)
    return parts


@cache
def _lengths(count: int) -> struct.Struct:
    """Lengths of the parts of a frame. They stand at its beginning."""
    return struct.Struct(f"<{count}q")
