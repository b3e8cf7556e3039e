"""Where the processes of a run listen: what is ours on the machine's loopback alone where all hosts share a machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from tests.orchestrator.driver.test_equality import train_small
from tests.processes import actor_processes

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}


class Looking(SilentReporter):
    """Looks once, while steps are done. `seen` has the addresses of the listening sockets of each process."""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[str]]] = {}

    def window(self, report: WindowReport) -> None:
        if not self.seen:
            for kind in ("HostActor", "DeviceActor"):
                self.seen[kind] = [listening(process) for process in actor_processes(kind)]


def listening(process: int) -> list[str]:
    return [c.laddr.ip for c in psutil.Process(process).net_connections("inet") if c.status == psutil.CONN_LISTEN]


@pytest.mark.ray
def test_workers_of_one_machine_listen_on_its_loopback(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    assert os.environ.get("RAY_AUTH_MODE") == "token"
    looking = Looking()
    train_small(small_data, tmp_path, "listeners", num_hosts=2, max_steps=4, reporter=looking)
    assert [len(processes) for processes in looking.seen.values()] == [2, 2]
    for addresses in looking.seen["HostActor"] + looking.seen["DeviceActor"]:
        assert set(addresses) <= LOOPBACK, looking.seen
    # The coordinator of the gang, and gloo.
    assert all(LOOPBACK & set(addresses) for addresses in looking.seen["DeviceActor"])
