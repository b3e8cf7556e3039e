"""The cluster that a program starts for itself: a signal to all of its processes costs no commit, and a killed program
leaves none of them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from podembed.orchestrator.api.run_errors import EXIT_STOPPED
from podembed.orchestrator.cluster.processes import FOLDER_PREFIX, processes_of, session_of
from podembed.orchestrator.commit.holder import read_heartbeat
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
NUM_EPOCHS = 100_000


@dataclass(frozen=True)
class Running:
    """A program that trains. `folder` is that of its cluster, `processes` all of the cluster's, `temporary` its
    TMPDIR.
    """

    program: subprocess.Popen[bytes]
    folder: str
    processes: list[int]
    temporary: Path
    output: Path
    store: Store

    def left(self) -> list[int]:
        """Processes of the cluster that are still there."""
        return [process for process in self.processes if psutil.pid_exists(process) and not _is_zombie(process)]


def _is_zombie(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def left_in(temporary: Path) -> list[str]:
    """What is left but what was compiled, which is kept for other runs."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("podembed-compiled-")]


@pytest.fixture
def running(request: pytest.FixtureRequest, small_data: str, tmp_path: Path) -> Iterator[Running]:
    """A program on two hosts, or as many as the test's parameter says."""
    # Too long for the sockets of Ray, which are then elsewhere.
    base = Path(tempfile.mkdtemp(prefix="po-", dir="/tmp"))
    temporary = base / ("t" * 90)
    temporary.mkdir()
    output = tmp_path / "output.txt"
    job = ["--job", "tests.small_job:small_job", "--set", f"folder={small_data}", f"epochs={NUM_EPOCHS}"]
    hosts = ["--hosts", str(getattr(request, "param", 2)), "--threads-per-host", "1", "--checkpoint-every", "1000000"]
    # What it compiles comes into the folder of all runs of a user, as for users.
    others = ("RAY_", "JAX_COMPILATION_CACHE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    with output.open("wb") as file:
        program = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "podembed.jobs.cli.main",
                "train",
                *job,
                *hosts,
                "--storage",
                str(tmp_path),
                "--name",
                "run",
            ],
            cwd=ROOT,
            env=environment | {"TMPDIR": str(temporary)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for("step", lambda: b"step  " in output.read_bytes(), seconds=TIMEOUT_S)
        (folder,) = Path("/tmp").glob(f"{FOLDER_PREFIX}{program.pid}-*")
        processes = processes_of(str(folder), session_of(str(folder)))
        yield Running(program, str(folder), processes, temporary, output, Store(str(tmp_path / "run")))
    finally:
        program.kill()
        program.wait()
        shutil.rmtree(base, ignore_errors=True)


@is_long
@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_to_all_processes_ends_the_run_with_a_commit(running: Running) -> None:
    """As a service manager or a batch system sends it: to the program, and to Ray's processes with it."""
    names = {psutil.Process(process).name() for process in running.processes}
    assert {"gcs_server", "raylet"} <= names
    # A process that stands by may be there already.
    workers = {name.partition(".")[0] for name in names if name.startswith(("ray::_Host", "ray::_Device"))}
    assert workers == {"ray::_HostActor", "ray::_DeviceActor"}
    for process in [running.program.pid, *running.processes]:
        os.kill(process, signal.SIGTERM)
    assert running.program.wait(TIMEOUT_S) == EXIT_STOPPED, running.output.read_text()[-2000:]
    (commit,) = read_commit_names(running.store)
    assert commit > "s000000000"
    assert read_heartbeat(running.store, 1) is None
    assert running.left() == []
    assert not os.path.exists(running.folder)
    assert left_in(running.temporary) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("running", [1], indirect=True)
def test_a_killed_program_leaves_no_process_and_no_file(running: Running) -> None:
    _assert_heard_on_this_machine_alone(running.processes)
    assert {psutil.Process(process).nice() for process in running.processes} == {psutil.Process().nice()}
    running.program.kill()
    wait_for("end of the cluster", lambda: running.left() == [], seconds=300)
    wait_for("end of its folders", lambda: not os.path.exists(running.folder), seconds=300)
    assert left_in(running.temporary) == []


@is_long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("running", [1], indirect=True)
@pytest.mark.parametrize("daemon", ["gcs_server", "raylet", "supervisor"])
def test_a_cluster_that_loses_a_daemon_is_started_again(daemon: str, running: Running) -> None:
    """Without its supervisor the kernel ends its daemons."""
    (process,) = (one for one in running.processes if daemon in _names(one))
    os.kill(process, signal.SIGKILL)
    wait_for("recovery", lambda: b"recovered in" in running.output.read_bytes(), seconds=TIMEOUT_S)
    ended = "gcs_server|raylet" if daemon == "supervisor" else daemon
    assert re.search(f"({ended}) of Ray ended on this machine", running.output.read_text())
    assert running.left() == [], "the other processes of the cluster that was lost are ended"
    assert not os.path.exists(running.folder)
    # A stop before the first step of the new generation has nothing to commit.
    wait_for("step", lambda: b"step  " in running.output.read_bytes().partition(b"recovered in")[2], seconds=TIMEOUT_S)
    running.program.send_signal(signal.SIGTERM)
    assert running.program.wait(TIMEOUT_S) == EXIT_STOPPED, running.output.read_text()[-2000:]
    (commit,) = read_commit_names(running.store)
    assert commit.endswith("g00000002")


def _names(process: int) -> set[str]:
    found = psutil.Process(process)
    is_supervisor = any(part.endswith("cluster/cluster_supervisor.py") for part in found.cmdline())
    return {"supervisor"} if is_supervisor else {found.name()}


def _assert_heard_on_this_machine_alone(processes: list[int]) -> None:
    """No port of any process, Ray's metrics included, is open to other machines."""
    heard = {
        connection.laddr.ip
        for process in processes
        for connection in psutil.Process(process).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert heard, "Ray listens somewhere"
    assert heard <= {"127.0.0.1", "::ffff:127.0.0.1"}
