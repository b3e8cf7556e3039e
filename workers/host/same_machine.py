"""Hosts of one pod that share a machine: each maps the memory that the other shares with its device process.

Between such hosts pooled vectors and their gradients need not pass through a socket. An owner pools straight into the
activations of the other one, and reads the gradients where that one's device wrote them. The exchanges of a step
take place all the same, with empty frames, since they say when memory may be written and read. A pair does so only if
both could map; between machines nothing changes.

The memory is anonymous and is reached through `/proc/<process>/fd`, which the kernel opens to processes of the same
user only. What is asked and answered here travels through the mesh, whose members have proved that they are of one
generation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podembed.embedding.lookup.pooled_way import PooledWay
from podembed.workers.liveness.progress import machine_identity
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh

_ASK_STEP, _ANSWER_STEP = -2, -1
_MAX_ASK_BYTES = 4096


class MemoryLayout(Protocol):
    """The layout of the memory of a host and its device process."""

    @property
    def kind(self) -> str:
        """The prefix of names of such memory."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def views(self, memory: mmap.mmap) -> tuple[Mapping[str, np.ndarray], ...]:
        """The arrays of each batch that may be in flight; among them "activations" and "gradients", both flat."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """Another host's shared memory. `buffers` as `MemoryLayout.views`."""

    buffers: tuple[Mapping[str, np.ndarray], ...]

    def of_every_buffer(self, name: str) -> list[np.ndarray]:
        return [arrays[name] for arrays in self.buffers]


def share_pooled(
    pooled: PooledWay, mesh: Mesh, descriptor: int, layout: MemoryLayout, *, timeout_s: float
) -> frozenset[int]:
    """Shares memory among the lookups of hosts on this machine. As `meet`; returns the hosts."""
    met = meet(mesh, descriptor, layout, timeout_s=timeout_s)
    for host, memory in met.items():
        activations, gradients = (memory.of_every_buffer(name) for name in ("activations", "gradients"))
        pooled.share(host, activations=activations, gradients=gradients)
    return frozenset(met)


def meet(mesh: Mesh, descriptor: int, layout: MemoryLayout, *, timeout_s: float) -> dict[int, SharedMemory]:
    """Finds the hosts on this machine and maps their memory; all hosts of the mesh call it together.

    Args:
      descriptor: descriptor of the memory that this host shares with its device process; may be closed afterwards.
      layout: layout of every host's memory; the same on all, since it follows from the plan.

    Returns:
      By rank, those that mapped this host's memory, too.

    Raises:
      MeshError: a host is gone or silent.
    """
    own, others = mesh.identity.rank, range(mesh.identity.num_ranks)
    ask = np.frombuffer(f"{os.getpid()} {descriptor} {machine_identity()}".encode(), np.uint8)
    asked = _exchange(mesh, _ASK_STEP, [ask] * mesh.identity.num_ranks, timeout_s)
    mapped: dict[int, SharedMemory] = {}
    for rank, frame in asked.items():
        process, number, identity = bytes(frame).decode().split(" ", 2)
        if identity == machine_identity():
            with contextlib.suppress(OSError, ValueError):
                mapped[rank] = _map(int(process), int(number), layout)
    answers = [np.array([rank in mapped], np.uint8) if rank != own else np.empty(0, np.uint8) for rank in others]
    agreed = _exchange(mesh, _ANSWER_STEP, answers, timeout_s)
    return {rank: memory for rank, memory in mapped.items() if agreed[rank][0]}


def _exchange(mesh: Mesh, step: int, send: list[np.ndarray], timeout_s: float) -> dict[int, np.ndarray]:
    frames: dict[int, np.ndarray] = {}

    def receive(rank: int, num_bytes: int) -> np.ndarray:
        if not 0 < num_bytes <= _MAX_ASK_BYTES:
            raise ValueError(f"Host {rank} sent {num_bytes} bytes of greeting. Expected 1 to {_MAX_ASK_BYTES}.")
        frames[rank] = np.empty(num_bytes, np.uint8)
        return frames[rank]

    mesh.exchange(tag=Tag.IDS, step=step, send=[[part] for part in send], receive=receive, timeout_s=timeout_s)
    return frames


def _map(process: int, number: int, layout: MemoryLayout) -> SharedMemory:
    """Maps another process's memory.

    Raises:
      OSError: the process is gone, or the kernel does not let us.
      ValueError: the memory is shorter than the layout.
    """
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Accepted only if it is what a host creates; a number that was reused in between is something else.
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{layout.kind}"):
            raise ValueError(f"Found descriptor {number} of process {process} to be something else than {layout.kind}.")
        memory = mmap.mmap(descriptor, layout.size_bytes)
    finally:
        os.close(descriptor)
    return SharedMemory(layout.views(memory))
