"""`OwnCluster`: the Ray cluster that a program starts for itself on this machine, seen from the program. Knows
processes and folders, not Ray.

All is done by the supervisor (`orchestrator.cluster.cluster_supervisor`), a child process that outlives the program
for as long as it takes to end the cluster.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import podembed
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import ClusterNotStarted
from podembed.orchestrator.cluster.processes import FOLDER_PREFIX, VARIABLE, claim_folder, end_cluster, sweep
from podembed.workers.liveness.process_statistics import ProcessStatistics, read_statistics

DAEMONS = ("gcs_server", "raylet")
# The supervisor finds the same program there that this one is, also where none is installed.
PROGRAM_FOLDER = str(Path(podembed.__file__).absolute().parents[1])
SUPERVISOR = Path(__file__).with_name("cluster_supervisor.py")
OBJECT_STORE_BYTES = 200 << 20  # control messages only; no step's data passes through Ray
# On a starved machine each of Ray's daemons takes its time. Each has a deadline of its own, of which Ray says more.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 15.0
KNOWN_RAY = "2.50 or 2.60"  # with which it was tried
LONGEST_SOCKET_BYTES = 107  # of a Unix socket's path
_LOOK_S = 0.1
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class OwnCluster:
    """One cluster, from its start to its end.

    Args:
      num_cpus: number of CPUs that Ray counts with.
      environment: environment of the cluster's processes.
      left: folders that go with the program, if it is killed.

    Raises:
      ClusterNotStarted: there is no room for its sockets.
    """

    def __init__(self, num_cpus: int, *, environment: Mapping[str, str], left: Sequence[str] = ()) -> None:
        session_name = f"session_{secrets.token_hex(4)}"
        base = socket_base(session_name, [tempfile.gettempdir(), *_SHORT_FOLDERS])
        self._folder, self._lock = claim_folder(base)
        self._daemons: dict[str, ProcessStatistics | None] = {}
        self._unread = b""
        settings = {
            "folder": self._folder,
            "lock": self._lock,
            "program": os.getpid(),
            "left": list(left),
            # Ray opens its own folder to all users; the folder above lets none of them through.
            "temp_dir": f"{self._folder}/r",
            "session_name": session_name,
            "num_cpus": num_cpus,
            "object_store_bytes": OBJECT_STORE_BYTES,
        }
        try:
            self._supervisor = self._supervisor_with(settings, environment)
        except BaseException:
            # Without room for one more process or file.
            end_cluster(self._folder)
            os.close(self._lock)
            raise

    def _supervisor_with(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(f"{self._folder}/supervisor.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", str(SUPERVISOR), json.dumps(settings), PROGRAM_FOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, VARIABLE: self._folder},
                pass_fds=(self._lock,),
                start_new_session=True,
            )

    def started(self, on_wait: Callable[[], None] = lambda: None) -> str:
        """Waits until the cluster is up. Returns where to join it.

        Args:
          on_wait: called often; what it raises is passed on.

        Raises:
          ClusterNotStarted: Ray did not start.
          ConfigurationError: a version of Ray that is started in another way.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            on_wait()
            answer = self._heard(_LOOK_S)
            if answer is None:
                continue
            if "address" in answer:
                self._daemons = {name: read_statistics(answer[name]) for name in DAEMONS}
                return answer["address"]
            if answer.get("is_unknown"):
                raise ConfigurationError(_other_ray(answer["failed"]))
            raise ClusterNotStarted(_not_started(answer.get("failed") or self._last_words()))
        raise ClusterNotStarted(_not_started(f"nothing for {START_TIMEOUT_S:.0f} s"))

    def _heard(self, timeout_s: float) -> dict[str, Any] | None:
        """The answer of the supervisor, if there is one in time; an empty one if it is gone."""
        output = self._supervisor.stdout
        if output is None:
            raise RuntimeError("The supervisor has no standard output. Expected a pipe.")
        while b"\n" not in self._unread:
            if not select.select([output], [], [], timeout_s)[0]:
                return None
            data = os.read(output.fileno(), 65536)
            if not data:
                return {}
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = Path(self._folder, "supervisor.log").read_text(errors="replace").strip().splitlines()
            if lines:
                return " | ".join(lines[-5:])[:2000]
        return f"its supervisor ended with {self._supervisor.poll()}"

    def lost(self) -> str | None:
        """Which daemon of the cluster has ended, so that it is of no use any more; None while all is well. Costs some
        50 microseconds.
        """
        for name, first in self._daemons.items():
            # Looked at here and not by the supervisor: with the head gone, the next call of Ray would not come back.
            now = None if first is None else read_statistics(first.process)
            if first is None or now is None or now.started != first.started:
                return name
        return None

    def close(self) -> None:
        """Ends all processes of the cluster and removes its folder. Safe to call twice."""
        if self._supervisor.stdin is None or self._supervisor.stdin.closed:
            return
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
        finally:
            # After a supervisor that was killed, or is frozen.
            if os.path.exists(self._folder):
                end_cluster(self._folder)
            self._supervisor.wait()
            if self._supervisor.stdout is not None:
                self._supervisor.stdout.close()
            os.close(self._lock)


def sweep_left() -> None:
    """Ends clusters whose programs and supervisors were killed together."""
    sweep([tempfile.gettempdir(), *_SHORT_FOLDERS])


def socket_base(session_name: str, candidates: Sequence[str]) -> str:
    """The first folder below which Ray's sockets have room in their names and this user may make one.

    Raises:
      ClusterNotStarted: there is none.
    """
    # The longest that Ray makes, below a folder of ours with a process id of seven digits.
    below = f"/{FOLDER_PREFIX}1234567-12345678/r/{session_name}/sockets/plasma_store.12"
    longest = LONGEST_SOCKET_BYTES - len(below)
    for base in candidates:
        if len(os.fsencode(base)) <= longest and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            return base
    raise ClusterNotStarted(
        f"Found none of {', '.join(candidates)} fit for Ray's sockets. Expected a folder that this user may write to, "
        f"with a path of at most {longest} bytes, since a socket's may have {LONGEST_SOCKET_BYTES}. Set TMPDIR to one."
    )


def _not_started(why: str) -> str:
    return (
        f"Ray did not start on this machine: {why}. Expected a cluster of the program's own. What is committed stands. "
        "See to what is named, such as a machine without memory or room for files, then try again. `podembed "
        "supervise` tries again by itself. Or set RAY_ADDRESS to a cluster that is up."
    )


def _other_ray(why: str) -> str:
    return (
        f"Found Ray {_version_of_ray()}, which is not started as it is known here: {why}. Expected a version such as "
        f"{KNOWN_RAY}. Install that one, or set RAY_ADDRESS to a cluster that is up."
    )


def _version_of_ray() -> str:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"
