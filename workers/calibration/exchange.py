"""Measures an exchange between two hosts of this machine: the mesh of a run, over loopback."""

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
    rank: int, token: bytes, *, swap: Callable[[tuple[str, int]], Sequence[tuple[str, int]]]
) -> list[float]:
    """One of the two hosts: median seconds of an exchange of each of `SIZES_BYTES`.

    Args:
      swap: gives the own address and returns those of both, in rank order.
    """
    identity = MeshIdentity(run_id="calibration", generation=0, token=token, rank=rank, num_ranks=2)
    with Mesh.listen(identity, bind_address="127.0.0.1") as mesh:
        mesh.connect(swap(mesh.address), timeout_s=_TIMEOUT_S)
        found, step = [], 0
        for size, repeats in zip(SIZES_BYTES, _REPEATS, strict=True):
            source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
            frames: list[list[np.ndarray]] = [[source], [source]]
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                mesh.exchange(
                    tag=Tag.ROWS, step=step, send=frames, receive=lambda *_, to=target: to, timeout_s=_TIMEOUT_S
                )
                times.append(time.perf_counter() - began)
                step += 1
            # The first exchanges touch memory and let the kernel grow its windows.
            found.append(statistics.median(times[repeats // 4 :]))
        return found


def wire_of(seconds: Sequence[float]) -> Wire:
    """From what `measure_exchange` found."""
    message_s = seconds[0]
    per_byte = [(spent - message_s) / size for size, spent in zip(SIZES_BYTES[2:], seconds[2:], strict=True)]
    return Wire(message_s=message_s, byte_s=max(0.0, statistics.fmean(per_byte)))
