"""`MeshExchange`: the exchange of a host's lookups over its mesh. Vectors have a module of their own.

`IdExchange` says which rows every host requests of every other for one step, in one exchange, and what all must know of
the step beforehand.

A frame is int64. It begins with the weight of the sender's samples and what it would prefetch. Then
it says whether its batch has the usual numbers of vectors, and what room its sequences need. The number of rows that
it requests of each table follows, and once in a generation what the sender's exchanges took (`workers.mesh.routes`).
Then come those rows, and the frame of its `PooledRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.lookup.exchange import Asked, Prefetched
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.pooled_frames import PooledRequest
from podembed.embedding.lookup.streams import Prepared
from podembed.workers.host.vectors import VectorExchange
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.route import Route
from podembed.workers.mesh.routes import KINDS, Routes

# Where no host wants a prefetch, all try it again in every 64th step. These are no multiples of 64: windows often begin
# at round numbers, and the first step of a window is not looked up ahead.
PREFETCH_RETRY_STEPS = 64
PREFETCH_RETRY_AT = 37

# Before the number of rows of each table.
_HEAD_WORDS = 3


class IdExchange:
    """The exchange of ids of one host."""

    def __init__(self, routes: Routes, *, timeout_s: float) -> None:
        self._routes = routes
        self._timeout_s = timeout_s

    def exchange(
        self,
        number: int,
        prepared: Prepared,
        request: PooledRequest,
        *,
        weight: float,
        prefetched: Prefetched,
        levels: Sequence[int] = (),
    ) -> Asked:
        """Sends each owner what is asked of it.

        Args:
          number: of the step.
          weight: of this host's samples.
          prefetched: what this host would prefetch.
          levels: as `Exchange.ids`.

        Raises:
          MeshError: a host is gone or silent.
          ValueError: a host sent something else.
        """
        num_hosts, num_tables = prepared.asked_counts.shape
        levels_end = _HEAD_WORDS + len(levels)
        counts_end = levels_end + num_tables
        is_settling = self._routes.is_settling
        num_head = counts_end + (len(KINDS) if is_settling else 0)
        head = np.empty((num_hosts, num_head), np.int64)
        head[:, 0] = np.float64(weight).view(np.int64)
        is_retry = number % PREFETCH_RETRY_STEPS == PREFETCH_RETRY_AT
        head[:, 1] = Prefetched.ROWS | Prefetched.POOLED if is_retry else prefetched
        head[:, 2] = request.is_usual
        head[:, _HEAD_WORDS:levels_end] = levels
        head[:, levels_end:counts_end] = prepared.asked_counts
        if is_settling:
            head[:, counts_end:] = self._routes.mean_bytes()
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * num_head:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of ids. Expected whole int64 with {num_head} in front."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        send = {host: [head[host], prepared.asked[host], request.frames[host]] for host in range(num_hosts)}
        self._routes.exchange(tag=Tag.IDS, step=number, send=send, receive=receive, timeout_s=self._timeout_s)
        heads = head.copy()
        wanted = [np.empty(0, np.int64)] * num_hosts
        pooled = [np.empty(0, np.int64)] * num_hosts
        for host, frame in frames.items():
            heads[host] = frame[:num_head]
            counts = heads[host, levels_end:counts_end]
            num_rows = int(counts.sum())
            if (heads[host, _HEAD_WORDS:counts_end] < 0).any() or num_rows > len(frame) - num_head:
                raise ValueError(
                    f"Host {host} announced {counts.tolist()} rows and sent {len(frame) - num_head} words. "
                    "Expected at least as many."
                )
            wanted[host], pooled[host] = np.split(frame[num_head:], [num_rows])
        if is_settling:
            self._routes.settle(heads[:, counts_end:])
        return Asked(
            wanted=wanted,
            wanted_counts=np.ascontiguousarray(heads[:, levels_end:counts_end]),
            frames=pooled,
            are_usual=(heads[:, 2] != 0).tolist(),
            # In host order, so that every host finds the same sum.
            weight_sum=float(heads[:, 0].view(np.float64).sum()),
            prefetched=Prefetched(int(np.bitwise_or.reduce(heads[:, 1]))),
            levels=tuple(heads[:, _HEAD_WORDS:levels_end].min(axis=0).tolist()),
        )


class MeshExchange(VectorExchange):
    """`embedding.lookup.exchange.Exchange` between the hosts of a mesh. Mutated: the arrays of the lookups.

    Args:
      mesh: connected to all other hosts.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others.
      route: of all exchanges; the same on all hosts.
    """

    def __init__(
        self,
        mesh: Mesh,
        lookups: Lookups,
        *,
        wire_dtype: str = "float32",
        timeout_s: float,
        route: Route = Route.AUTO,
    ) -> None:
        self.routes = Routes(mesh, route)
        super().__init__(
            self.routes,
            lookups.sharded,
            lookups.pooled,
            wire_dtype=wire_dtype,
            timeout_s=timeout_s,
        )
        self._ids = IdExchange(self.routes, timeout_s=timeout_s)

    def ids(
        self,
        number: int,
        prepared: Prepared,
        request: PooledRequest,
        *,
        weight: float,
        prefetched: Prefetched,
        levels: Sequence[int] = (),
    ) -> Asked:
        """See `IdExchange.exchange`."""
        return self._ids.exchange(number, prepared, request, weight=weight, prefetched=prefetched, levels=levels)
