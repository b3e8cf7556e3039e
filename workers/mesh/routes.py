"""`Routes`: exchanges over a mesh, each direct or by way of relays.

A direct exchange costs a frame for every other host, and one by way of relays about 2 √n frames, with each byte twice.
What pays follows from the bytes of an exchange, which no host knows before a run. So a generation begins with direct
exchanges. After `SETTLED_AFTER` exchanges of ids, every host tells the others what it has sent so far. Each of them
then makes the same choice from the same numbers, one for each kind of exchange, and keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from podembed.workers.mesh.active_exchange import ExchangeStatistics, Outgoing
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.grid import Grid
from podembed.workers.mesh.link import Receive
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.route import Route
from podembed.workers.mesh.two_hop import TwoHop

# The kinds of exchanges that repeat in every step.
KINDS = (Tag.IDS, Tag.ROWS, Tag.GRADIENTS)
SETTLED_AFTER = 8
# A route that is hardly cheaper is not worth a hop more.
_CLEARLY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCosts:
    """CPU seconds of a host, sending and receiving. The defaults are estimates for loopback, of no benchmark yet.

    Attributes:
      frame_s: for a frame.
      byte_s: for a byte.
      part_s: for a part of a joined frame.
      hop_s: for an exchange of the mesh.
    """

    frame_s: float = 30e-6
    byte_s: float = 1e-9
    part_s: float = 3e-6
    hop_s: float = 60e-6

    def direct_s(self, *, num_hosts: int, num_bytes: float) -> float:
        return self.hop_s + self.frame_s * (num_hosts - 1) + self.byte_s * num_bytes

    def two_hop_s(self, *, num_hosts: int, num_bytes: float) -> float:
        frames_s = self.frame_s * Grid(num_hosts).most_frames
        return 2 * self.hop_s + frames_s + self.part_s * num_hosts + 2 * self.byte_s * num_bytes

    def cheapest(self, *, num_hosts: int, num_bytes: float) -> Route:
        """The route of an exchange in which a host sends so many bytes, in the mean."""
        direct_s = self.direct_s(num_hosts=num_hosts, num_bytes=num_bytes)
        is_cheaper = self.two_hop_s(num_hosts=num_hosts, num_bytes=num_bytes) < _CLEARLY * direct_s
        return Route.TWO_HOP if is_cheaper else Route.DIRECT


DEFAULT_COSTS = RouteCosts()


@dataclass(slots=True)
class _Sent:
    """Bytes that this host sent in exchanges of one kind. Mutable."""

    num_bytes: int = 0
    num_exchanges: int = 0


@dataclass(slots=True, eq=False)
class Routes:
    """The exchanges of one host. Mutated: the mesh, and the choice.

    Attributes:
      mesh: connected to all other hosts.
      declared: the route of all exchanges, the same on all hosts; `AUTO` chooses.
      chosen: route of each kind.
    """

    mesh: Mesh
    declared: Route = Route.AUTO
    costs: RouteCosts = field(default_factory=lambda: DEFAULT_COSTS)
    chosen: dict[int, Route] = field(default_factory=dict)
    _sent: dict[int, _Sent] = field(default_factory=lambda: {kind: _Sent() for kind in KINDS})
    _two_hop: TwoHop | None = None
    _current: int = 0

    def __post_init__(self) -> None:
        first = Route.DIRECT if self.declared == Route.AUTO else self.declared
        self.chosen = dict.fromkeys(KINDS, first)

    def begin(
        self, *, tag: int, step: int, send: Outgoing, receive: Receive, senders: Collection[int] | None = None
    ) -> None:
        """As `Mesh.begin`, for one of `KINDS`."""
        self._current = tag
        self._way(tag).begin(tag=tag, step=step, send=send, receive=receive, senders=senders)

    def finish(self, *, timeout_s: float) -> ExchangeStatistics:
        """As `Mesh.finish`."""
        statistics = self._way(self._current).finish(timeout_s=timeout_s)
        sent = self._sent[self._current]
        sent.num_bytes += statistics.bytes_sent
        sent.num_exchanges += 1
        return statistics

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
        """As `Mesh.exchange`, for one of `KINDS`."""
        self.begin(tag=tag, step=step, send=send, receive=receive, senders=senders)
        return self.finish(timeout_s=timeout_s)

    def _way(self, tag: int) -> Mesh | TwoHop:
        if self.chosen[tag] is not Route.TWO_HOP:
            return self.mesh
        if self._two_hop is None:
            self._two_hop = TwoHop(self.mesh)
        return self._two_hop

    @property
    def relayed(self) -> tuple[str, ...]:
        """The kinds whose frames go by way of relays now, as text."""
        return tuple(kind.name.lower() for kind in KINDS if self.chosen[kind] is Route.TWO_HOP)

    @property
    def is_settling(self) -> bool:
        """Whether the exchange of ids that comes next, or is under way, is the one after which hosts choose. It is the
        same one on all hosts.
        """
        return self.declared is Route.AUTO and self._sent[Tag.IDS].num_exchanges == SETTLED_AFTER

    def mean_bytes(self) -> np.ndarray:
        """Bytes that this host sent in an exchange of each of `KINDS`, in the mean, int64."""
        return np.array([sent.num_bytes // max(1, sent.num_exchanges) for sent in self._sent.values()], np.int64)

    def settle(self, mean_bytes: np.ndarray) -> None:
        """Chooses, from the `mean_bytes` of all hosts, `[num_hosts, kinds]`."""
        num_hosts = len(mean_bytes)
        for kind, num_bytes in zip(KINDS, mean_bytes.mean(axis=0).tolist(), strict=True):
            self.chosen[kind] = self.costs.cheapest(num_hosts=num_hosts, num_bytes=num_bytes)
