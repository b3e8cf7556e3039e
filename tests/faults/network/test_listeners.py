"""Where the processes of a run listen: what is ours on the machine's loopback alone where all hosts share a machine."""

from __future__ import annotations

import os

import pytest

from podembed.orchestrator.api.result import Result
from tests.processes import Listeners

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


@pytest.mark.ray
def test_workers_of_one_machine_listen_on_its_loopback(two_hosts: Result, listeners: Listeners) -> None:
    assert os.environ.get("RAY_AUTH_MODE") == "token"
    assert [len(processes) for processes in listeners.seen.values()] == [2, 2]
    for addresses in listeners.seen["HostActor"] + listeners.seen["DeviceActor"]:
        assert set(addresses) <= LOOPBACK, listeners.seen
    # The coordinator of the gang, and gloo.
    assert all(LOOPBACK & set(addresses) for addresses in listeners.seen["DeviceActor"])
