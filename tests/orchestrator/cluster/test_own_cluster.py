"""`OwnCluster` where Ray does not start: in words, with nothing left. What it is when it starts is in
`tests/faults/test_own_cluster.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.jobs.outcomes import exit_code
from podembed.jobs.supervise.supervision import Again, after_exit
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import EXIT_TOO_FEW_HOSTS, ClusterNotStarted
from podembed.orchestrator.cluster import own_cluster
from podembed.orchestrator.cluster.own_cluster import (
    LONGEST_SOCKET_BYTES,
    OwnCluster,
    begun,
    begun_early,
    socket_base,
)
from podembed.orchestrator.cluster.processes import FOLDER_PREFIX
from tests.processes import wait_for


def test_a_folder_whose_path_leaves_room_for_sockets_is_taken_and_else_the_next(tmp_path: Path) -> None:
    short = "/tmp"
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert socket_base("session_1", [short, "/var/tmp"]) == short
    assert socket_base("session_1", [str(long), "/nowhere", short]) == short
    with pytest.raises(ClusterNotStarted, match=rf"x{{100}}.*socket's may have {LONGEST_SOCKET_BYTES}.*TMPDIR"):
        socket_base("session_1", [str(long)])


def test_bytes_count_and_not_characters() -> None:
    with tempfile.TemporaryDirectory(prefix="ü" * 20, dir="/tmp") as base, pytest.raises(ClusterNotStarted):
        socket_base("session_1", [base])


def left_in(base: Path) -> list[str]:
    return [path.name for path in base.iterdir() if path.name.startswith(FOLDER_PREFIX)]


@pytest.mark.parametrize(
    ("environment", "num_cpus", "words"),
    [
        # Python itself does not start.
        ({"PYTHONHOME": "/nowhere"}, 1, "encodings"),
        # Ray refuses.
        ({}, -1, "-1"),
    ],
)
def test_a_cluster_that_does_not_start_says_why_and_leaves_nothing(
    environment: dict[str, str], num_cpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        cluster = OwnCluster(num_cpus, environment=dict(os.environ) | environment)
        try:
            with pytest.raises(ClusterNotStarted, match=r"Ray did not start on this machine") as caught:
                cluster.started()
        finally:
            cluster.close()
        assert words in str(caught.value)
        wait_for("end of the folder", lambda: left_in(Path(base)) == [], seconds=60)


@pytest.fixture
def no_cluster_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a program that has not imported Ray. Yields the folder for clusters."""
    monkeypatch.setattr(os, "environ", {name: text for name, text in os.environ.items() if not name.startswith("RAY_")})
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(own_cluster, "has_chosen", threading.Event())
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield Path(base)
        wait_for("end of all folders", lambda: left_in(Path(base)) == [], seconds=60)


def test_a_cluster_that_began_early_is_taken_once(no_cluster_yet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun_early(2):
        (early,) = left_in(no_cluster_yet)
        # What importing JAX sets is no reason for another one.
        monkeypatch.setitem(os.environ, "TPU_SKIP_MDS_QUERY", "1")
        first = begun(2)
        assert left_in(no_cluster_yet) == [early]
        second = begun(2)
        assert len(left_in(no_cluster_yet)) == 2
        second.close()
    assert left_in(no_cluster_yet) == [early], "it belongs to who took it"
    first.close()
    assert left_in(no_cluster_yet) == []


@pytest.mark.parametrize("change", ["hosts", "environment"])
def test_a_cluster_that_began_early_as_another_one_is_left(
    change: str, no_cluster_yet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hosts = 2 * (os.cpu_count() or 1)
    with begun_early(num_hosts):
        (early,) = left_in(no_cluster_yet)
        if change == "environment":
            monkeypatch.setitem(os.environ, "PYTHONPATH", "/somewhere")
        cluster = begun(num_hosts + (change == "hosts"))
        assert early not in left_in(no_cluster_yet)
        cluster.close()


def test_a_cluster_that_began_early_and_is_not_taken_ends(no_cluster_yet: Path) -> None:
    with begun_early(1):
        assert len(left_in(no_cluster_yet)) == 1
    assert left_in(no_cluster_yet) == []


@pytest.mark.parametrize("why", ["address", "import"])
def test_no_cluster_begins_early_for_a_program_that_has_its_own_way(
    why: str, no_cluster_yet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "address":
        monkeypatch.setitem(os.environ, "RAY_ADDRESS", "127.0.0.1:1")
    else:
        monkeypatch.setitem(sys.modules, "ray", sys)
    with begun_early(1):
        assert left_in(no_cluster_yet) == []


def test_a_supervisor_that_cannot_begin_leaves_no_folder_and_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(FileNotFoundError):
            OwnCluster(1, environment=os.environ)
        assert left_in(Path(base)) == []
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_child_that_the_job_forks_does_not_keep_the_cluster() -> None:
    """It has the pipe whose end tells the supervisor to go. One that does not hear of it is killed."""
    program = (
        "import os, signal; from podembed.orchestrator.cluster.own_cluster import OwnCluster; "
        "cluster = OwnCluster(1, environment=os.environ); child = os.fork(); child or signal.pause(); "
        "cluster.close(); os.kill(child, 9); print(cluster._supervisor.returncode)"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=dict(os.environ) | {"TMPDIR": base}, capture_output=True, text=True)
        assert done.stdout == "0\n", done.stderr
        assert left_in(Path(base)) == []


def test_a_program_that_is_killed_before_its_supervisor_runs_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        # It ends before a supervisor can have imported anything.
        program = (
            "import os, sys; from podembed.orchestrator.cluster.own_cluster import OwnCluster; "
            "OwnCluster(1, environment=os.environ); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", program], env=dict(os.environ) | {"TMPDIR": base})
        wait_for("end of the folder", lambda: os.listdir(base) == [], seconds=60)


@pytest.mark.parametrize(
    "node",
    [
        None,
        "",
        "class Node:\n    def __init__(self): pass",
        "class Node:\n    gcs_address, all_processes = '127.0.0.1:1', {}\n    def __init__(self, *a, **b): pass",
    ],
    ids=["module", "name", "argument", "daemon"],
)
def test_a_ray_that_is_started_in_another_way_is_refused_in_words(node: str | None, tmp_path: Path) -> None:
    """Another try, as of a supervisor, would end alike."""
    package = tmp_path / "ray" / "_private"
    package.mkdir(parents=True)
    for module, text in {
        "parameter": "class RayParams:\n    def __init__(self, **settings): pass",
        "resource_isolation_config": "class ResourceIsolationConfig: pass",
        "node": node,
    }.items():
        if text is not None:
            (package / f"{module}.py").write_text(text)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    cluster = OwnCluster(1, environment=dict(os.environ) | {"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(ConfigurationError, match=r"Found Ray .*Expected a version such as .*RAY_ADDRESS"):
            cluster.started()
    finally:
        cluster.close()


def test_what_is_raised_while_it_starts_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        cluster = OwnCluster(1, environment=os.environ)
        with pytest.raises(KeyboardInterrupt):
            cluster.started(interrupt)
        cluster.close()
        cluster.close()
        assert left_in(Path(base)) == []


def test_a_supervisor_tries_again(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ClusterNotStarted("Ray did not start on this machine: no memory.")

    code = exit_code(fail)
    assert code == EXIT_TOO_FEW_HOSTS
    assert "no memory" in capsys.readouterr().err
    assert isinstance(after_exit(code, failures=0, max_failures=5, is_stopping=False), Again)
