"""Measures an exchange between hosts of this machine: the mesh of a run, over loopback."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from podembed.workers.calibration.record import Wire
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh, MeshIdentity

SIZES_BYTES = (0, 1 << 16, 1 << 20, 1 << 23)
_REPEATS = (200, 60, 24, 8)
_TIMEOUT_S = 60.0


def measure_exchange(
    rank: int, token: bytes, *, num_hosts: int, swap: Callable[[tuple[str, int]], Sequence[tuple[str, int]]]
) -> list[float]:
    """One of the hosts: median seconds of an exchange of each of `SIZES_BYTES`.

    Args:
      swap: gives the own address and returns those of all, in rank order.
    """
    identity = MeshIdentity(run_id="calibration", generation=0, token=token, rank=rank, num_ranks=num_hosts)
    with Mesh.listen(identity, bind_address="127.0.0.1") as mesh:
        mesh.connect(swap(mesh.address), timeout_s=_TIMEOUT_S)
        found, step = [], 0
        for size, repeats in zip(SIZES_BYTES, _REPEATS, strict=True):
            source, targets = np.ones(size, np.uint8), [np.zeros(size, np.uint8) for _ in range(num_hosts)]
            frames: list[list[np.ndarray]] = [[source]] * num_hosts
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                mesh.exchange(
                    tag=Tag.ROWS,
                    step=step,
                    send=frames,
                    receive=lambda host, _, to=targets: to[host],
                    timeout_s=_TIMEOUT_S,
                )
                times.append(time.perf_counter() - began)
                step += 1
            # The first exchanges touch memory and let the kernel grow its windows.
            found.append(statistics.median(times[repeats // 4 :]))
        return found


def wire_of(pair: Sequence[float], many: Sequence[float], *, num_hosts: int, cpus: int) -> Wire:
    """From what `measure_exchange` found between two hosts, and between so many.

    Hosts beyond the machine's processors wait for their turn, which those of a pod would not.
    """
    empty_s = pair[0]
    per_byte = [(spent - empty_s) / size for size, spent in zip(SIZES_BYTES[2:], pair[2:], strict=True)]
    own_s = many[0] * min(1.0, cpus / num_hosts)
    peer_s = min(empty_s, max(0.0, (own_s - empty_s) / (num_hosts - 2)))
    return Wire(exchange_s=empty_s - peer_s, peer_s=peer_s, byte_s=max(0.0, statistics.fmean(per_byte)))
