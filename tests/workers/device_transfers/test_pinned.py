"""What is written into the staging memory goes to the devices, each time anew."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.transfers import pinned

NUM_WORDS = 1000


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
        np.testing.assert_array_equal(computed, [words] * mesh.num_all_parts)
        assert sent.sharding.memory_kind != "pinned_host"


@pytest.mark.parametrize("has_pinned", [True, False])
def test_what_devices_computed_is_read_from_pinned_memory(monkeypatch: pytest.MonkeyPatch, has_pinned: bool) -> None:
    if not has_pinned:
        monkeypatch.setattr(pinned, "KIND", "of another machine")
    made = jax.numpy.arange(6.0).reshape(1, 6) * 2
    copied = pinned.in_pinned(made)
    assert (copied.sharding.memory_kind == "pinned_host") == has_pinned
    np.testing.assert_array_equal(copied, [[0, 2, 4, 6, 8, 10]])
