"""How arguments of a call travel to an actor, and on which processors actors work."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from podembed.orchestrator.api.result import Result
from podembed.workers.actors import in_pieces, of_pieces
from tests.processes import Listeners


@pytest.mark.parametrize("num_bytes", [100_000, 300_001, 500_000])
def test_arguments_of_middling_size_travel_in_pieces_within_the_call(num_bytes):
    arrays = [np.arange(num_bytes - 5_000, dtype=np.uint8), np.arange(1_000, dtype=np.float32), np.empty(0)]
    pieces = in_pieces(("text", {"arrays": arrays}, arrays[0][::2]))
    assert max(len(piece) for piece in pieces[1:]) <= 100_000
    text, found, strided = of_pieces(*pieces)
    assert text == "text"
    for one, other in zip(found["arrays"], arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
        assert one.flags.aligned
    np.testing.assert_array_equal(strided, arrays[0][::2])
    # As those of Ray's object store.
    assert not found["arrays"][0].flags.writeable


@pytest.mark.parametrize("num_bytes", [0, 90_000, 900_000, 5_000_000])
def test_small_and_large_arguments_travel_as_they_are(num_bytes):
    assert in_pieces((np.zeros(num_bytes, np.uint8),)) is None


def test_what_cannot_travel_is_refused_where_it_is_sent():
    with pytest.raises(TypeError, match="lock"):
        in_pieces((threading.Lock(),))


def test_a_process_of_a_run_imports_nothing_large_that_the_run_does_not_use():
    """Each of them takes a quarter of a second of processor time, in every process, at each start and recovery."""
    program = (
        "import podembed.jobs.criteo, podembed.workers.actors, podembed.workers.host.host, sys; "
        "import podembed.workers.device.process; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    unused = {"pandas", "pyarrow.dataset", "tyro", "rich", "matplotlib", "torch", "tensorflow", "ray.data", "ray.train"}
    assert not unused & set(done.stdout.split())


@pytest.mark.ray
def test_as_many_hosts_as_processors_keep_to_one_each(two_hosts: Result, listeners: Listeners):
    assert two_hosts.losses
    everywhere = frozenset(os.sched_getaffinity(0))
    hosts, devices = listeners.processors["HostActor"], listeners.processors["DeviceActor"]
    assert len(hosts) == len(devices) == 2
    if len(everywhere) != 2:
        assert all(found == {everywhere} for found in (*hosts, *devices))
        return
    alone = [frozenset([one]) for one in sorted(everywhere)]
    # What reads input, and Ray's own threads, roam.
    assert sorted(hosts, key=lambda found: sorted(map(sorted, found))) == [{one, everywhere} for one in alone]
    assert sorted(devices, key=lambda found: sorted(map(sorted, found))) == [{one} for one in alone]
