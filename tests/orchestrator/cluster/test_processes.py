"""Which folders and processes are those of a cluster, and that nothing else is touched. The processes are real, and
none of them is Ray.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.orchestrator.cluster.processes import (
    FOLDER_PREFIX,
    LOCK_NAME,
    VARIABLE,
    claim_folder,
    end_cluster,
    is_left,
    processes_of,
    session_of,
    sweep,
)

# Says that it runs, with a file open if it is given one, and then sleeps for longer than any test.
SLEEPER = (
    "import sys, time; file = open(sys.argv[1], 'a') if sys.argv[1:] else None; print(flush=True); time.sleep(600)"
)


class Sleepers:
    """Processes that are ended with the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *, mark: str = "", opened: Path | None = None, new_session: bool = False) -> int:
        """Returns the process id once the process runs."""
        environment = dict(os.environ) | ({VARIABLE: mark} if mark else {})
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, *([str(opened)] if opened else [])],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=new_session,
        )
        self.started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def runs(self, process: int) -> bool:
        return next(one for one in self.started if one.pid == process).poll() is None

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    sleepers = Sleepers()
    yield sleepers
    sleepers.close()


def let_go(lock: int, *, session: int) -> None:
    """What a killed program leaves: the number of the supervisor's session, and no lock."""
    os.pwrite(lock, str(session).encode(), 0)
    os.close(lock)


def test_a_folder_is_the_users_alone_and_is_left_when_its_lock_is_gone(tmp_path: Path) -> None:
    folder, lock = claim_folder(str(tmp_path))
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert not is_left(Path(folder))
    let_go(lock, session=17)
    assert is_left(Path(folder))
    assert session_of(folder) == 17


def test_a_folder_is_not_swept_while_it_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_file, num_sweeps = fcntl.flock, 0

    def swept_first(descriptor: int, operation: int) -> None:
        nonlocal num_sweeps
        num_sweeps += 1
        if num_sweeps == 1:
            # Another program looks in the moment before the lock is held.
            sweep([str(tmp_path)])
        lock_file(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    folder, lock = claim_folder(str(tmp_path))
    assert os.listdir(folder) == [LOCK_NAME]
    os.close(lock)


def test_a_folder_that_cannot_be_locked_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(OSError, match="locks"):
        claim_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "x", "-1", "1" * 30])
def test_a_lock_file_with_something_else_names_no_session(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(text)
    assert session_of(str(tmp_path)) in (None, int("1" * 20))


def test_marked_processes_and_those_of_the_session_with_a_file_of_the_folder_belong(
    sleepers: Sleepers, tmp_path: Path
) -> None:
    folder = str(tmp_path / "cluster")
    os.mkdir(folder)
    log, elsewhere = Path(folder, "log"), tmp_path / "cluster-2"
    marked = sleepers.start(mark=folder)
    # Agents of Ray lose their environment with their title.
    agent = sleepers.start(opened=log, new_session=True)
    bystanders = [
        sleepers.start(),
        sleepers.start(mark=f"{folder}-2"),
        sleepers.start(opened=log),
        sleepers.start(opened=elsewhere, new_session=True),
    ]
    assert set(processes_of(folder, agent)) == {marked, agent}
    assert processes_of(folder, None) == [marked]
    assert processes_of(folder, bystanders[-1]) == [marked], "a file of the folder is asked for, too"
    (Path(folder) / LOCK_NAME).write_text(str(agent))
    end_cluster(folder)
    assert not os.path.exists(folder)
    assert [sleepers.runs(process) for process in (marked, agent)] == [False, False]
    assert all(sleepers.runs(process) for process in bystanders)


def test_a_sweep_ends_what_nobody_holds_and_leaves_the_rest(sleepers: Sleepers, tmp_path: Path) -> None:
    gone, lock = claim_folder(str(tmp_path))
    orphan = sleepers.start(mark=gone)
    let_go(lock, session=orphan)
    held, held_lock = claim_folder(str(tmp_path))
    worker = sleepers.start(mark=held)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / f"{FOLDER_PREFIX}1-link").symlink_to(outside)
    # Of a program of before the lock: that of a process that is there, and that of one that cannot be.
    of_before = tmp_path / f"{FOLDER_PREFIX}{os.getpid()}-before"
    of_the_dead = tmp_path / f"{FOLDER_PREFIX}99999999-before"
    of_before.mkdir()
    of_the_dead.mkdir()
    sweep([str(tmp_path)])
    assert not os.path.exists(gone)
    assert not sleepers.runs(orphan)
    assert os.path.isdir(held)
    assert sleepers.runs(worker)
    assert outside.is_dir()
    assert of_before.is_dir()
    assert not of_the_dead.exists()
    os.close(held_lock)


def test_a_folder_of_another_user_is_left_alone() -> None:
    if os.getuid() != 0:
        pytest.skip("needs another user's folder")
    with tempfile.TemporaryDirectory() as base:
        folder, lock = claim_folder(base)
        os.close(lock)
        os.chown(folder, 65534, 65534)
        sweep([base])
        assert os.path.isdir(folder)
