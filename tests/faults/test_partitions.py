"""Two machines, a driver on a third, and links that fail one way or both: the fault is named, nobody hangs, and no steps are lost or doubled.

The machines are namespaces with Ray nodes in them (`tests.network`). Where there can be none, the tests are skipped with the reason. They start
three Ray nodes and run only when asked for: `PODEMBED_TEST_PARTITIONS=1 make test TESTS=tests/faults/test_partitions.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.lease import read_head, read_lineage
from orchestrator.manifest import parse_commit_name
from tests.jobs.test_cli import run
from tests.network import Network, network, why_not
from tests.orchestrator.test_equality import expected_audit
from tests.run_state import committed_state
from tests.small_job import small_job
from workers.storage import Store

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
STEP_TIMEOUT_S = 8
RAY_PORT = 6379


def wait_for(what: str, is_so: Callable[[], bool], *, seconds: float = PATIENCE_S) -> float:
    """Seconds until it is so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() < began + seconds, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def cluster() -> Iterator[Network]:
    """A Ray cluster: its head on the hub, which takes no hosts, and a node with room for one on each of two machines."""
    asked = os.environ.get("PODEMBED_TEST_PARTITIONS")
    reason = why_not() if asked else "PODEMBED_TEST_PARTITIONS is not set"
    if reason is not None:
        pytest.skip(reason)
    # Short, since Ray puts sockets below it.
    folder = tempfile.mkdtemp(prefix="pp-", dir="/tmp")
    ray = str(Path(sys.executable).parent / "ray")
    nodes: list[subprocess.Popen[bytes]] = []
    with network(2) as found:
        try:
            for number, machine in enumerate(found.machines):
                role = ["--head", f"--port={RAY_PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
                if number:
                    role = [f"--address={found.machines[0].address}:{RAY_PORT}"]
                command = [
                    ray,
                    "start",
                    *role,
                    f"--node-ip-address={machine.address}",
                    "--block",
                    "--disable-usage-stats",
                ]
                command += [f"--num-cpus={int(number > 0)}", "--object-store-memory=100000000"]
                nodes.append(
                    subprocess.Popen(
                        machine.command(*command),
                        cwd=ROOT,
                        env=environment(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
                if not number:
                    wait_for("Ray head", lambda: _listens(found), seconds=180)
            yield found
        finally:
            for node in nodes:
                node.kill()
                node.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}


def _listens(found: Network) -> bool:
    sockets = found.machines[0].run("cat", "/proc/net/tcp", "/proc/net/tcp6")
    return f":{RAY_PORT:04X} " in sockets


class Driver:
    """A training on two hosts, driven from the hub. `lines` are what it has printed so far."""

    def __init__(self, found: Network, data: str, storage: Path, max_steps: int) -> None:
        program = [
            sys.executable,
            "-m",
            "tests.faults.partition_process",
            data,
            str(storage),
            str(max_steps),
            str(STEP_TIMEOUT_S),
        ]
        address = f"{found.machines[0].address}:{RAY_PORT}"
        self.process = subprocess.Popen(
            found.machines[0].command(*program),
            cwd=ROOT,
            env=environment() | {"RAY_ADDRESS": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def said(self, text: str) -> list[str]:
        return [line for line in list(self.lines) if text in line]

    def check_alive(self) -> None:
        assert self.process.poll() is None, "".join(self.lines[-30:])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def head(store: Store) -> tuple[int, int]:
    return parse_commit_name(read_head(store) or "") or (0, 0)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "named"),
    [
        ([(1, 2), (2, 1)], "host"),
        ([(0, 2)], "host|device"),
        ([(0, 2), (2, 0)], "host|device"),
    ],
    ids=["hosts-both-ways", "driver-to-host", "driver-and-host"],
)
def test_a_cut_link_costs_steps_and_nothing_else(
    cuts: list[tuple[int, int]], named: str, cluster: Network, small_data: str, tmp_path: Path
) -> None:
    store, steps = Store(str(tmp_path / "run")), 4000
    driver = Driver(cluster, small_data, tmp_path, steps)
    try:

        def has_commits() -> bool:
            driver.check_alive()
            return head(store)[0] >= 20

        wait_for("second commit", has_commits)
        for sender, receiver in cuts:
            cluster.cut(sender, receiver)
        found_s = wait_for("notice of the fault", lambda: bool(driver.said("fault: ")))
        cluster.heal()
        fault = driver.said("fault: ")[0]
        print(f"cut {cuts}: found after {found_s:.1f} s: {fault.strip()}")
        assert found_s < STEP_TIMEOUT_S + 12

        def goes_on() -> bool:
            driver.check_alive()
            return head(store)[1] >= 2 and head(store)[0] >= 40

        wait_for("commit of the next generation", goes_on)
        driver.process.terminate()
        wait_for("end of the driver", lambda: driver.process.poll() is not None)
    finally:
        cluster.heal()
        driver.end()
    code, out, _ = run("fsck", str(tmp_path / "run"))
    assert code == 0, out
    step, _ = head(store)
    assert len({parse_commit_name(name) for name in read_lineage(store)}) == len(read_lineage(store))
    audit = committed_state(str(tmp_path / "run"))["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(small_job(folder=small_data, epochs=5000), step), atol=1e-2)
