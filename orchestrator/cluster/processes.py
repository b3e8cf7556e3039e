"""The folder and the processes of a Ray cluster that a program started for itself: who they are, and how they are
ended.

Ray's agents replace their titles and with them most of their environment. Its workers have process groups of their own.
A process therefore belongs to a cluster in two cases. Its environment names the folder, or it is of the supervisor's
session and has a file of the folder open. Only processes of the same user are looked at. A lock on a file in the folder
says that the program, or the supervisor of its cluster, lives. The kernel releases it with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from podembed.workers.processors import OWN_CLUSTER

VARIABLE = OWN_CLUSTER  # the folder, in the environment of all processes of the cluster
FOLDER_PREFIX = "podembed-ray-"
LOCK_NAME = "podembed.lock"  # holds the number of the supervisor's session
END_TIMEOUT_S = 10.0
_LOOK_S = 0.05


def claim_folder(base: str) -> tuple[str, int]:
    """Makes a folder that only this user can enter, and locks it. Returns its path and the descriptor that holds the
    lock.

    The name has the process id, for people and for programs of before the lock.
    """
    folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base)
    try:
        # Locked before it has its name: another program that sweeps just now would take a free lock for one that was
        # left.
        unnamed = os.path.join(folder, f"{LOCK_NAME}.new")
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unnamed, os.path.join(folder, LOCK_NAME))
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def processes_of(folder: str, session: int | None) -> list[int]:
    """Processes of the cluster in a folder, but for this one.

    Args:
      session: number of its supervisor's session, None if there is none.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            process = int(entry)
            with contextlib.suppress(OSError, ValueError, IndexError):
                if os.stat(f"/proc/{entry}").st_uid == os.getuid() and _belongs(process, folder, session):
                    found.append(process)
    return found


def _belongs(process: int, folder: str, session: int | None) -> bool:
    mark = f"{VARIABLE}={folder}".encode()
    if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
        return True
    fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    if session is None or int(fields[3]) != session:
        return False
    # Another session may have the number by now, and another program a file of the folder open; not both.
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process}/fd/{descriptor}").startswith(f"{folder}/"):
                return True
    return False


def end_processes(folder: str, session: int | None, *, timeout_s: float = END_TIMEOUT_S) -> list[int]:
    """Kills all processes of the cluster in a folder, until none is left. Returns those that did not end in time."""
    deadline_s = time.monotonic() + timeout_s
    while (left := processes_of(folder, session)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_S)
    return left


def session_of(folder: str) -> int | None:
    """The session that the supervisor of a folder's cluster has, or had."""
    try:
        with open(os.path.join(folder, LOCK_NAME), encoding="ascii") as file:
            text = file.read(20).strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def end_cluster(folder: str) -> None:
    """Ends what is left of the cluster in a folder, and removes the folder."""
    end_processes(folder, session_of(folder))
    # A process that waits for a disk may write once more.
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_LOOK_S)


def sweep(bases: Iterable[str]) -> None:
    """Ends clusters in these folders that killed programs of this user left: program and supervisor are both gone."""
    for base in dict.fromkeys(bases):
        for folder in Path(base).glob(f"{FOLDER_PREFIX}*-*"):
            with contextlib.suppress(OSError):
                status = os.lstat(folder)
                if status.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink() and is_left(folder):
                    end_cluster(str(folder))


def is_left(folder: Path) -> bool:
    """Whether neither the program nor the supervisor of a folder lives."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Of a program of before the lock, or one that is just making it.
        process = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        return process.isdecimal() and not os.path.exists(f"/proc/{process}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
