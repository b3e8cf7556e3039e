"""Memory of the host that devices read and write by themselves.

A GPU copies from and to pinned memory at the rate of its link. Any other memory JAX copies first, by one thread, into
pinned memory of its own. On an H200 that made a copy of 27 MB six times as long.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from podembed.workers.device.device_mesh import GangMesh

LANES = 128
"""Words side by side in a register of a TPU: arrays whose rows are as long lie there as in the host's memory."""
KIND = "pinned_host"  # as JAX calls this memory
SEEN_ON = ("cpu", "gpu")
"""Platforms whose pinned memory was seen to be written in place. Others list some, too."""


class Staging(Protocol):
    """Words on their way to the devices of this process."""

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """uint32 `[words]`, an array for each device, part after part. What is written there goes along with the next
        `send`.
        """
        ...

    def send(self) -> jax.Array:
        """The global array `[parts, words / 128, 128]`. Copies may still be under way."""
        ...


def staging(mesh: GangMesh, num_words: int) -> Staging:
    """Pinned memory where there is some, else memory as any other."""
    devices = [device for devices in mesh.local for device in devices]
    if all(_has_pinned(device) for device in devices):
        return PinnedStaging(mesh, devices, num_words)
    return PageableStaging(mesh, num_words)


class PinnedStaging:
    """Arrays of JAX in pinned memory, which are written in place. JAX never sees them change: each `send` copies them
    to the devices anew.

    Args:
      devices: devices of this process, part after part.
      num_words: number of words for each device, a multiple of `LANES`.
    """

    def __init__(self, mesh: GangMesh, devices: Sequence[Any], num_words: int) -> None:
        self._shape = (mesh.num_all_parts, num_words // LANES, LANES)
        self._by_sample = mesh.by_sample
        self._targets = [SingleDeviceSharding(device) for device in devices]
        # A CPU device may take the given memory itself, so each gets some of its own.
        self._arrays = [
            jax.device_put(np.zeros((1, *self._shape[1:]), np.uint32), SingleDeviceSharding(device, memory_kind=KIND))
            for device in devices
        ]
        self.rows = [_memory_of(array) for array in self._arrays]

    def send(self) -> jax.Array:
        on_devices = jax.device_put(self._arrays, self._targets)
        return jax.make_array_from_single_device_arrays(self._shape, self._by_sample, on_devices)


class PageableStaging:
    """Memory that JAX copies from as it can."""

    def __init__(self, mesh: GangMesh, num_words: int) -> None:
        self._mesh = mesh
        # What stands between arrays is never written, and never read.
        self._words = np.zeros((mesh.num_parts, num_words), np.uint32)
        self.rows = list(self._words)

    def send(self) -> jax.Array:
        return self._mesh.split(list(self._words.reshape(len(self._words), 1, -1, LANES)))


def in_pinned(part: jax.Array) -> jax.Array:
    """A copy of one device's array in pinned memory, which is under way; the array itself where there is none."""
    (device,) = part.devices()
    if not _has_pinned(device):
        part.copy_to_host_async()
        return part
    return jax.device_put(part, SingleDeviceSharding(device, memory_kind=KIND))


class Arriving:
    """One device's array on its way to the host, for several threads.

    JAX counts who looks at the memory of an array. With a GPU and several threads that requested one array at once,
    that count was wrong, it seems: the process was aborted when the array went. So one of them asks, once.
    """

    def __init__(self, part: jax.Array) -> None:
        self._part, self._lock = part, threading.Lock()
        self._values: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """Waits for the array."""
        with self._lock:
            if self._values is None:
                self._values = np.asarray(self._part)
            return self._values


def _has_pinned(device: Any) -> bool:
    return device.platform in SEEN_ON and any(memory.kind == KIND for memory in device.addressable_memories())


def _memory_of(array: jax.Array) -> np.ndarray:
    """The words of an array of one row, to be written."""
    array.block_until_ready()
    address = ctypes.cast(array.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint32))
    return np.ctypeslib.as_array(address, (array.size,))
