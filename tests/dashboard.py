"""A cluster of this machine to which jobs can be submitted."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.processes import free_port

START_S = 120


@contextlib.contextmanager
def cluster_for_jobs(python: Path, *, num_cpus: int = 2) -> Iterator[str]:
    """The address of the dashboard of a cluster whose machine has the environment of an interpreter. It ends with the
    block.
    """
    folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    port, dashboard_port = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray installs a job's wheels with pip, which would load all their dependencies from the network.
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PIP_NO_DEPS": "1"}
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
    try:
        _wait_for_port(dashboard_port)
        yield f"http://127.0.0.1:{dashboard_port}"
    finally:
        # All of them by pid: the daemons do not go with the command that started them.
        processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(timeout=30)
        psutil.wait_procs(processes[1:], timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"The dashboard did not listen within {START_S} s.")
