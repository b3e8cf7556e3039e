"""A Ray cluster on machines of `tests.network`, and drivers of `tests.faults.network.partition_process` on its hub."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.network import Machine, Network, network
from tests.processes import wait_for

ROOT = Path(__file__).parents[3]
PATIENCE_S = 600.0
RAY_PORT = 6379
WORKERS = ("ray::_HostActor", "ray::_DeviceActor")


def workers_on(machine: Machine) -> dict[int, str]:
    """Host and device processes there."""
    return {process: name for process, name in machine.processes().items() if name.startswith(WORKERS)}


@dataclass(frozen=True)
class PartedCluster:
    """The head of Ray on the hub, which takes no hosts, and a node with room for one host on each machine that was
    started.
    """

    network: Network
    local_disk: Path

    @property
    def machines(self) -> list[Machine]:
        return [*self.network.machines]

    @property
    def environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return kept | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.local_disk),
            "RAY_raylet_start_wait_time_s": "600",  # of which a busy machine needs more than the default
            "RAY_worker_niceness": "0",  # Ray's 15 makes a busy machine starve the run
            "PYTHONPATH": str(ROOT),
        }

    def start(self, number: int) -> None:
        """Starts Ray on a machine; it lives as long as that."""
        machine, hub = self.machines[number], self.machines[0]
        role = [f"--address={hub.address}:{RAY_PORT}"]
        if not number:
            role = ["--head", f"--port={RAY_PORT}", f"--temp-dir={self.local_disk}", "--include-dashboard=false"]
        command = [str(Path(sys.executable).parent / "ray"), "start", *role, f"--node-ip-address={machine.address}"]
        command += [f"--num-cpus={int(number > 0)}", "--object-store-memory=100000000", "--disable-usage-stats"]
        done = subprocess.run(
            machine.command(*command),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]


@contextlib.contextmanager
def parted_cluster(num_machines: int, *, started: int) -> Iterator[PartedCluster]:
    """A cluster of a hub and so many machines, of which the first ones run Ray."""
    # Short, since Ray puts sockets below it.
    with (
        tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        network(num_machines, local_disk=Path(folder)) as found,
    ):
        cluster = PartedCluster(found, Path(folder))
        for number in range(started + 1):
            cluster.start(number)
        yield cluster


class Driver:
    """A training, driven from the hub. `lines` are what it has said so far, `other` what else was printed."""

    def __init__(
        self, cluster: PartedCluster, data: str, storage: Path, *, name: str = "run", max_steps: int, hosts: str = "2"
    ) -> None:
        hub = cluster.machines[0]
        program = [
            sys.executable,
            "-m",
            "tests.faults.network.partition_process",
            data,
            str(storage),
            name,
            str(max_steps),
            hosts,
        ]
        self.url = str(storage / name)
        self.process = subprocess.Popen(
            hub.command(*program),
            env={**cluster.environment, "RAY_ADDRESS": f"{hub.address}:{RAY_PORT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith('{"at_s"'):
                self.lines.append(json.loads(line))
            else:
                self.other.append(line)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The values of its events of a kind."""
        return [line["values"] for line in [*self.lines] if line.get("event") == kind]

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.report()

    def result(self, *, seconds: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for the end. Returns what the driver said of it."""
        wait_for("end of the run", lambda: self.process.poll() is not None, seconds=seconds)
        self._reader.join(120)
        assert self.process.returncode == 0, self.report()
        return next(line["result"] for line in self.lines if "result" in line)

    def report(self) -> str:
        said = [f"{line['at_s']:6.1f} {line['text']}\n" for line in [*self.lines] if "event" in line]
        return "".join([*said, *self.other[-30:]])

    def end(self) -> None:
        """Kills what is left of it."""
        with contextlib.suppress(OSError):
            # `nsenter` passes no signals on to the program.
            for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        self.process.kill()
        self.process.wait(120)
        self._reader.join(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
