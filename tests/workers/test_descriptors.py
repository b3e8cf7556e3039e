"""A process that may open few files: what it needs is counted before it meets the others, and a lack in the midst of
that is its own fault.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys

import pytest

from podembed.workers import descriptors
from podembed.workers.descriptors import DescriptorsExhausted, in_use, require_descriptors

# Each runs in a process of its own, since a hard limit cannot be raised again.
PRELUDE = """
import os, resource, socket, sys, threading, time
from tests.workers.mesh.mesh_testing import LOCAL, identity, in_threads, succeed, trade
from podembed.workers.descriptors import DescriptorsExhausted, in_use, require_descriptors
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import MeshConnectTimeout

def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def trade_both(low, high):
    both = [lambda: trade(low, [b"", b"to high"]), lambda: trade(high, [b"to low", b""])]
    return succeed(in_threads(both))

def fill(left):
    '''Opens files until so many more can be.'''
    return [os.open('/dev/null', os.O_RDONLY) for _ in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - in_use() - left)]
"""


def in_a_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    soft, hard = (
        int(number)
        for number in in_a_process(
            "limit(64, 700)\nrequire_descriptors(500, "
            "purpose='tests')\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
        ).split()
    )
    assert (soft, hard) == (700, 700)


def test_too_low_a_limit_is_refused_before_any_host_is_met_with_what_to_do() -> None:
    said = in_a_process(
        """
limit(100, 100)
try:
    Mesh.listen(identity(0, 200), bind_address=LOCAL)
except DescriptorsExhausted as error:
    print(error)
"""
    )
    assert "(limit 100, " in said
    assert "room for 414: 398 for connections and shared memory with 199 other hosts" in said
    assert "ulimit -n 65536" in said
    assert "LimitNOFILE" in said


def test_few_hosts_meet_under_a_low_limit() -> None:
    assert "met" in in_a_process(
        """
limit(80, 80)
low, high = (Mesh.listen(identity(rank, 2), bind_address=LOCAL) for rank in range(2))
addresses = [low.address, high.address]
succeed(in_threads([lambda mesh=mesh: mesh.connect(addresses, timeout_s=20) for mesh in (low, high)]))
print("met")
"""
    )


def test_without_room_for_a_connection_a_host_rests_and_then_blames_itself() -> None:
    """The accepting side: a client waits to be let in all the time."""
    cpu_s, said = in_a_process(
        """
mesh = Mesh.listen(identity(0, 2), bind_address=LOCAL)
client = socket.create_connection(mesh.address)
limit(128, 128)
held = fill(1)  # for the selector
began = time.process_time()
try:
    mesh.connect([mesh.address, (LOCAL, 1)], timeout_s=3.0)
except DescriptorsExhausted as error:
    print(time.process_time() - began)
    print(error)
"""
    ).splitlines()
    # A loop that spins takes all of the three seconds.
    assert float(cpu_s) < 1.5
    assert said.startswith("Found no room for connections with ranks [1] (Too many open files;")
    assert "this process may have 128 files and connections)" in said


def test_without_room_for_a_dial_a_host_tries_again_and_blames_itself() -> None:
    said = in_a_process(
        """
low = Mesh.listen(identity(0, 2), bind_address=LOCAL)
high = Mesh.listen(identity(1, 2), bind_address=LOCAL)
limit(128, 128)
held = fill(1)
try:
    high.connect([low.address, high.address], timeout_s=0.5)
except DescriptorsExhausted as error:
    print(error)
"""
    )
    assert said.startswith("Found no room for connections with ranks [0] (Too many open files;")


def test_hosts_meet_as_soon_as_there_is_room() -> None:
    said = in_a_process(
        """
from podembed.workers.mesh import setup
low, high = (Mesh.listen(identity(rank, 2), bind_address=LOCAL) for rank in range(2))
limit(128, 128)
# The selectors of both, and no connection.
held = fill(2)
is_exhaustion, refused = setup.is_exhaustion, threading.Event()
setup.is_exhaustion = lambda error: (is_exhaustion(error), refused.set())[0]

# A connection takes the place of neither.
both, selector = threading.Barrier(2), setup.selectors.DefaultSelector
def made():
    one = selector()
    both.wait(60)
    return one
setup.selectors.DefaultSelector = made

def give_room():
    refused.wait()
    for descriptor in held:
        os.close(descriptor)

addresses = [low.address, high.address]
connect = [lambda mesh=mesh: mesh.connect(addresses, timeout_s=60.0) for mesh in (low, high)]
succeed(in_threads([*connect, give_room]))
print(trade_both(low, high))
"""
    )
    assert said == "[{1: b'to low'}, {0: b'to high'}]\n"


def test_the_count_is_that_of_open_files() -> None:
    before = in_use()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    try:
        assert in_use() == before + 1
    finally:
        os.close(descriptor)


def test_nothing_is_changed_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda *_: pytest.fail("the limit was changed"))
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (1_000_000, 1_000_000))
    require_descriptors(10, purpose="tests")


def test_a_limit_that_the_machine_does_not_grant_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (in_use() + 20, resource.RLIM_INFINITY))
    monkeypatch.setattr(descriptors.resource, "setrlimit", refuse)
    with pytest.raises(DescriptorsExhausted, match="room for 20 more .* Expected room for 116: 100 for tests"):
        require_descriptors(100, purpose="tests")


def test_the_error_reaches_the_driver_whole() -> None:
    error = DescriptorsExhausted("no room", "some")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
