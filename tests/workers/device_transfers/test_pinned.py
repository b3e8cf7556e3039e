"""What is written into staging memory goes to the devices, each time anew. What comes back is asked for once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.transfers import pinned

NUM_WORDS = 8 * pinned.LANES


@pytest.mark.parametrize("has_pinned", [True, False])
def test_each_send_takes_what_was_written_since(monkeypatch: pytest.MonkeyPatch, has_pinned: bool) -> None:
    if not has_pinned:
        monkeypatch.setattr(pinned, "KIND", "of another machine")
    mesh = GangMesh.of(DeviceOptions())
    found = pinned.staging(mesh, NUM_WORDS)
    assert isinstance(found, pinned.PinnedStaging if has_pinned else pinned.PageableStaging)
    for seed in range(3):
        words = np.random.default_rng(seed).integers(1 << 32, size=NUM_WORDS, dtype=np.uint32)
        for row in found.rows:
            row[:] = words
        sent = found.send()
        # The memory may be written again once the devices are done with what was sent.
        computed = jax.block_until_ready(sent ^ np.uint32(0))
        np.testing.assert_array_equal(computed, [words.reshape(-1, pinned.LANES)] * mesh.num_all_parts)
        assert sent.sharding.memory_kind != "pinned_host"


@pytest.mark.parametrize("has_pinned", [True, False])
def test_what_devices_computed_is_read_from_pinned_memory(monkeypatch: pytest.MonkeyPatch, has_pinned: bool) -> None:
    if not has_pinned:
        monkeypatch.setattr(pinned, "KIND", "of another machine")
    made = jax.numpy.arange(6.0).reshape(1, 6) * 2
    copied = pinned.in_pinned(made)
    assert (copied.sharding.memory_kind == "pinned_host") == has_pinned
    np.testing.assert_array_equal(copied, [[0, 2, 4, 6, 8, 10]])


class Counted:
    """An array that counts who asks for its values, and answers when all that will ask had the time to."""

    def __init__(self) -> None:
        self.num_asked, self._others = 0, threading.Event()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.num_asked += 1
        self._others.wait(0.2)  # an answer at once would hide those who come second
        return np.arange(3)


def test_threads_that_wait_for_one_array_ask_for_it_once() -> None:
    array: Any = Counted()
    arriving = pinned.Arriving(array)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: arriving.values(), range(4)))
    assert array.num_asked == 1
    for values in found:
        np.testing.assert_array_equal(values, [0, 1, 2])
