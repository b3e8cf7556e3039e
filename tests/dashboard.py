"""A cluster of this machine to which jobs can be submitted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.processes import free_port

START_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNode:
    """A node beside the head. `variables` are of its environment."""

    num_cpus: int
    resources: Mapping[str, float] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def cluster_for_jobs(python: Path, *, num_cpus: int = 2, workers: Sequence[WorkerNode] = ()) -> Iterator[str]:
    """The address of the dashboard of a cluster whose machine has the environment of an interpreter. It ends with the
    block.

    Args:
      workers: further nodes, each with its own `ray start`.
    """
    folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    port, dashboard_port = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray installs a job's wheels with pip, which would load all their dependencies from the network.
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PIP_NO_DEPS": "1"}
    # Ray's niceness of 15 makes a busy machine starve the job, and its daemons need long to start there.
    environment |= {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "600"}
    # `python` of a submitted command is found on the path of the cluster's machines.
    environment["PATH"] = os.pathsep.join([str(python.parent), environment["PATH"]])
    options = {"port": port, "dashboard-port": dashboard_port, "dashboard-host": "127.0.0.1", "num-cpus": num_cpus}
    # The agent, which starts jobs, has a fixed port unless told otherwise, and does without one that another cluster
    # has.
    options |= {"dashboard-agent-listen-port": free_port(), "dashboard-agent-grpc-port": free_port()}
    options |= {"temp-dir": folder, "object-store-memory": 200_000_000, "include-dashboard": "true"}
    head = subprocess.Popen(
        [python, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        + [f"--{name}={value}" for name, value in options.items()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        _wait_for_port(dashboard_port)
        for worker in workers:
            nodes.append(_start(worker, python, environment, f"127.0.0.1:{port}"))
            # One after the other: of two that start at once, one is sometimes lost.
            _wait_for_nodes(dashboard_port, 1 + len(nodes))
        yield f"http://127.0.0.1:{dashboard_port}"
    finally:
        # All of them by pid: the daemons do not go with the command that started them.
        started = [psutil.Process(node.pid) for node in (*nodes, head)]
        daemons = [child for process in started for child in process.children(recursive=True)]
        for process in (*started, *daemons):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for node in (*nodes, head):
            node.wait(timeout=120)
        psutil.wait_procs(daemons, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def _start(node: WorkerNode, python: Path, environment: dict[str, str], head: str) -> subprocess.Popen[bytes]:
    options = {"address": head, "num-cpus": node.num_cpus, "object-store-memory": 200_000_000}
    options |= {"resources": json.dumps(node.resources)}
    # Nodes of one machine must not give their workers the same ports.
    options |= {"min-worker-port": 0, "max-worker-port": 0, "metrics-export-port": free_port()}
    options |= {"dashboard-agent-listen-port": free_port(), "dashboard-agent-grpc-port": free_port()}
    return subprocess.Popen(
        [python, "-m", "ray.scripts.scripts", "start", "--block"]
        + [f"--{name}={value}" for name, value in options.items()],
        env={**environment, **node.variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def ray_job(python: Path, *words: str, folder: Path | None = None, hidden: tuple[str, ...] = (), end_s: float) -> str:
    """What `ray job` printed. It must end well, within so many seconds.

    Args:
      hidden: beginnings of variables that it does not get, beside those of Ray.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", *hidden))}
    done = subprocess.run(
        [python, "-m", "ray.scripts.scripts", "job", *words],
        cwd=folder,
        env=variables | {"RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=end_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"The dashboard did not listen within {START_S} s.")


def _wait_for_nodes(dashboard_port: int, count: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            with urllib.request.urlopen(f"http://127.0.0.1:{dashboard_port}/api/v0/nodes", timeout=5) as answer:
                found = json.load(answer)["data"]["result"]["result"]
            if sum(node["state"] == "ALIVE" for node in found) == count:
                return
        time.sleep(0.2)
    raise TimeoutError(f"There were not {count} nodes within {START_S} s.")
