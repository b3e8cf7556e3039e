"""Hosts of one machine reach each other's shared memory; others, and anything that is not such memory, are left to the
mesh.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.workers.device.shared_memory import ChannelLayout
from podembed.workers.host.same_machine import meet
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, meshes, succeed

LAYOUT = ChannelLayout(num_dense=2, activations=ActivationLayout(num_samples=4, widths=(8, 8, 4), owners=(0, 1, -1)))


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """The shared memory of three hosts."""
    found = [os.memfd_create("podembed-channel", os.MFD_CLOEXEC) for _ in range(3)]
    for descriptor in found:
        os.ftruncate(descriptor, LAYOUT.size_bytes)
    yield found
    for descriptor in found:
        os.close(descriptor)


def met(descriptors: list[int]) -> list[dict]:
    with meshes(len(descriptors)) as ranks:
        calls = [
            lambda mesh=mesh, number=number: meet(mesh, number, LAYOUT, timeout_s=PATIENCE_S)
            for mesh, number in zip(ranks, descriptors, strict=True)
        ]
        return succeed(in_threads(calls))


def test_what_another_host_of_the_machine_writes_is_there(descriptors: list[int]) -> None:
    met_hosts = met(descriptors)
    assert [sorted(of_host) for of_host in met_hosts] == [[1, 2], [0, 2], [0, 1]]
    own = LAYOUT.views(mmap.mmap(descriptors[0], LAYOUT.size_bytes))[0]
    met_hosts[1][0].buffers[0]["activations"][LAYOUT.activations.region(1)] = 7.0
    assert (own["activations"][LAYOUT.activations.region(1)] == 7.0).all()
    assert (own["activations"][LAYOUT.activations.region(0)] == 0.0).all()
    own["gradients"][:] = 3.0
    assert (met_hosts[2][0].buffers[0]["gradients"] == 3.0).all()


def test_a_pair_shares_only_if_both_can(descriptors: list[int], tmp_path: Path) -> None:
    """Host 1 names a file that is no shared-memory channel: neither it nor the others use that pair's memory."""
    file = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, LAYOUT.size_bytes)
    try:
        met_hosts = met([descriptors[0], file, descriptors[2]])
    finally:
        os.close(file)
    assert [sorted(of_host) for of_host in met_hosts] == [[2], [], [0]]
    assert not np.fromfile(tmp_path / "other", np.uint8).any()


def test_a_memory_that_is_too_short_is_not_used(descriptors: list[int]) -> None:
    os.ftruncate(descriptors[1], 8)
    assert [sorted(of_host) for of_host in met(descriptors[:2])] == [[], []]


def test_hosts_of_different_machines_do_not_share(descriptors: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(range(100))
    monkeypatch.setattr("podembed.workers.host.same_machine.machine_identity", lambda: f"machine {next(asked)}")
    assert met(descriptors[:2]) == [{}, {}]


def test_one_host_meets_no_other(descriptors: list[int]) -> None:
    assert met(descriptors[:1]) == [{}]
