"""`MeshExchange`: the exchange of a host's lookups over its mesh. Vectors have a module of their own.

Its `ids` says what every host requests of every other for one step, in one exchange, and what all must know of the
step beforehand.

A frame is int64. It begins with the weight of the sender's samples, the ways on which it would prefetch, and the
padding levels that its sequences need. The number of words of each way follows, and then come those words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from podembed.embedding.lookup.exchange import Agreement
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.steps import every_way
from podembed.workers.host.vectors import VectorExchange
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh

# Where no host wants a prefetch, all try it again in every 64th step. These are no multiples of 64: windows often begin
# at round numbers, and the first step of a window is not looked up ahead.
PREFETCH_RETRY_STEPS = 64
PREFETCH_RETRY_AT = 37

# Before the padding levels.
_HEAD_WORDS = 2


class MeshExchange(VectorExchange):
    """`embedding.lookup.exchange.Exchange` between the hosts of a mesh. Mutated: the arrays of the lookups.

    Args:
      mesh: connected to all other hosts.
      wire_dtype: one of `workers.job.job.WIRE_DTYPES`.
      timeout_s: longest wait for the others.
    """

    def __init__(self, mesh: Mesh, lookups: Lookups, *, wire_dtype: str = "float32", timeout_s: float) -> None:
        super().__init__(mesh, lookups.ways, wire_dtype=wire_dtype, timeout_s=timeout_s)

    def ids(
        self, number: int, requests: Sequence[Any], *, weight: float, prefetches: int, levels: Sequence[int] = ()
    ) -> Agreement:
        """As of `Exchange.ids`.

        Raises:
          MeshError: a host is gone or silent.
          ValueError: a host sent something else.
        """
        num_hosts, own, num_ways = self._mesh.identity.num_ranks, self._own, len(requests)
        levels_end = _HEAD_WORDS + len(levels)
        num_head = levels_end + num_ways
        head = np.empty((num_hosts, num_head), np.int64)
        head[:, 0] = np.float64(weight).view(np.int64)
        is_retry = number % PREFETCH_RETRY_STEPS == PREFETCH_RETRY_AT
        head[:, 1] = every_way(num_ways) if is_retry else prefetches
        head[:, _HEAD_WORDS:levels_end] = levels
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * num_head:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of ids. Expected whole int64 with {num_head} in front."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        send = {}
        for host in range(num_hosts):
            if host != own:
                words = [way.words(request, host) for way, request in zip(self._ways, requests, strict=True)]
                head[host, levels_end:] = [sum(map(len, of_way)) for of_way in words]
                send[host] = [head[host], *(array for of_way in words for array in of_way)]
        self._mesh.exchange(tag=Tag.IDS, step=number, send=send, receive=receive, timeout_s=self._timeout_s)
        heads, nothing = head.copy(), np.empty(0, np.int64)
        found = [[nothing] * num_hosts for _ in requests]
        for host, frame in frames.items():
            heads[host] = frame[:num_head]
            lengths = heads[host, levels_end:]
            if (heads[host, _HEAD_WORDS:] < 0).any() or int(lengths.sum()) != len(frame) - num_head:
                raise ValueError(
                    f"Host {host} announced {lengths.tolist()} words and sent {len(frame) - num_head}. Expected as "
                    "many. Check that all hosts are of one generation."
                )
            for way, part in enumerate(np.split(frame[num_head:], np.cumsum(lengths)[:-1])):
                found[way][host] = part
        return Agreement(
            frames=found,
            # In host order, so that every host finds the same sum.
            weight_sum=float(heads[:, 0].view(np.float64).sum()),
            prefetches=int(np.bitwise_or.reduce(heads[:, 1])),
            levels=tuple(heads[:, _HEAD_WORDS:levels_end].min(axis=0).tolist()),
        )
