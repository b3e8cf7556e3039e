"""Memory of tables that several processes of a machine read: one writes it, its workers map it.

Memory has no name in the file system. Others reach it through the descriptors of the process that made it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from podembed.embedding.kernels.key_map import WORDS
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.server.rows import TableMemory

_DTYPES = {"float32": np.dtype(np.float32), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}


class WorkerMemory(TableMemory):
    """As `TableMemory`, for the process that writes."""

    def __init__(self) -> None:
        # Descriptor and name by address.
        self._places: dict[int, tuple[int, str]] = {}

    def rows(self, num_rows: int, dim: int) -> np.ndarray:
        return self._zeros((num_rows, dim), "float32")

    def copy(self, places: np.ndarray) -> np.ndarray:
        made = self._zeros(places.shape, "int32")
        made[:] = places
        return made

    def lines(self, num_buckets: int, per_bucket: int) -> np.ndarray:
        return self._zeros((num_buckets * per_bucket, WORDS), "int64")

    def place_of(self, array: np.ndarray) -> dict[str, Any]:
        """With which `opened` maps an array that was made here."""
        descriptor, name = self._places[array.ctypes.data]
        return {
            "process": os.getpid(),
            "descriptor": descriptor,
            "name": name,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
        }

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        name = f"podembed-rows-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _size_bytes(shape, dtype))
            array, memory = _mapped(descriptor, shape, dtype)
        except BaseException:
            os.close(descriptor)
            raise
        address = array.ctypes.data
        self._places[address] = descriptor, name
        # Once no array shows it, nobody asks for it any more.
        weakref.finalize(memory, self._close, address).atexit = False
        return array

    def _close(self, address: int) -> None:
        descriptor, _ = self._places.pop(address)
        os.close(descriptor)


def opened(place: Mapping[str, Any]) -> np.ndarray:
    """An array of the process that writes, as `WorkerMemory.place_of` describes it. It is not to be written to.

    Raises:
      ConfigurationError: this process cannot reach it.
    """
    path = f"/proc/{place['process']}/fd/{place['descriptor']}"
    try:
        # The number may stand for something else by now.
        if str(place["name"]) not in os.readlink(path):
            raise FileNotFoundError(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"Found no way to map {place['name']} of process {place['process']} ({error}). Expected its memory. Run "
            "without --workers."
        ) from error
    try:
        return _mapped(descriptor, tuple(place["shape"]), str(place["dtype"]))[0]
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, mmap.mmap]:
    memory = mmap.mmap(descriptor, _size_bytes(shape, dtype))
    return np.frombuffer(memory, _DTYPES[dtype], int(np.prod(shape))).reshape(shape), memory


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    # Memory has at least a byte.
    return max(1, _DTYPES[dtype].itemsize * int(np.prod(shape)))
