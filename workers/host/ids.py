"""`IdExchange`: which rows every host asks of every other for one step, in one exchange, and what all must know of the
step beforehand.

A frame is int64: the weight of the sender's samples, what it found early in the step before, the number of rows that it
asks for of each table, those rows, and the frame of its `PooledRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from podembed.embedding.lookup.owner_pooled import PooledRequest
from podembed.embedding.lookup.sharded import Prepared
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh

# Where no host found early vectors worth sending, all look again in every step whose number is a multiple of this.
EARLY_RETRY_STEPS = 64


class Early(IntFlag):
    """Kinds of vectors of which some can be sent before an update."""

    NONE = 0
    ROWS = 1
    POOLED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What all hosts said for one step.

    Attributes:
      wanted, wanted_counts: for `ShardedLookup.accept`.
      frames: per host, for `PooledLookup.accept`.
      weight_sum: weight of the global batch.
      found_early: what any host found early in the step before; the same on all hosts.
    """

    wanted: list[np.ndarray]
    wanted_counts: np.ndarray
    frames: list[np.ndarray]
    weight_sum: float
    found_early: Early


class IdExchange:
    """The exchange of ids of one host."""

    def __init__(self, mesh: Mesh, *, timeout_s: float) -> None:
        self._mesh = mesh
        self._timeout_s = timeout_s

    def exchange(
        self, number: int, prepared: Prepared, request: PooledRequest, *, weight: float, found_early: Early
    ) -> Asked:
        """Sends each owner what is asked of it.

        Args:
          number: of the step.
          weight: of this host's samples.
          found_early: by this host, in the step before.

        Raises:
          MeshError: a host is gone or silent.
          ValueError: a host sent something else.
        """
        num_hosts, num_tables = prepared.asked_counts.shape
        num_head = 2 + num_tables
        head = np.empty((num_hosts, num_head), np.int64)
        head[:, 0] = np.float64(weight).view(np.int64)
        head[:, 1] = Early.ROWS | Early.POOLED if number % EARLY_RETRY_STEPS == 0 else found_early
        head[:, 2:] = prepared.asked_counts
        frames: dict[int, np.ndarray] = {}

        def receive(host: int, num_bytes: int) -> np.ndarray:
            if num_bytes % 8 or num_bytes < 8 * num_head:
                raise ValueError(
                    f"Host {host} sent {num_bytes} bytes of ids. Expected whole int64 with {num_head} in front."
                )
            frames[host] = np.empty(num_bytes // 8, np.int64)
            return frames[host]

        send = [[head[host], prepared.asked[host], request.frames[host]] for host in range(num_hosts)]
        self._mesh.exchange(tag=Tag.IDS, step=number, send=send, receive=receive, timeout_s=self._timeout_s)
        heads = head.copy()
        wanted = [np.empty(0, np.int64)] * num_hosts
        pooled = [np.empty(0, np.int64)] * num_hosts
        for host, frame in frames.items():
            heads[host] = frame[:num_head]
            num_rows = int(heads[host, 2:].sum())
            wanted[host], pooled[host] = np.split(frame[num_head:], [num_rows])
        return Asked(
            wanted=wanted,
            wanted_counts=np.ascontiguousarray(heads[:, 2:]),
            frames=pooled,
            # In host order, so that every host finds the same sum.
            weight_sum=float(heads[:, 0].view(np.float64).sum()),
            found_early=Early(int(np.bitwise_or.reduce(heads[:, 1]))),
        )
