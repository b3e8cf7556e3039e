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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import podembed
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import ClusterNotStarted
from podembed.orchestrator.cluster.processes import FOLDER_PREFIX, VARIABLE, claim_folder, end_cluster, sweep
from podembed.workers.descriptors import DescriptorsExhausted, require_descriptors
from podembed.workers.liveness.process_statistics import ProcessStatistics, read_statistics

DAEMONS = ("gcs_server", "raylet")
NICENESS = "RAY_worker_niceness"
PRESTART = "RAY_prestart_worker_first_driver"
# The supervisor finds the same program there that this one is, also where none is installed.
PROGRAM_FOLDER = str(Path(podembed.__file__).absolute().parents[1])
SUPERVISOR = Path(__file__).with_name("cluster_supervisor.py")
OBJECT_STORE_BYTES = 200 << 20  # control messages only; no step's data passes through Ray
# On a starved machine each of Ray's daemons takes its time. Each has a deadline of its own, of which Ray says more.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 15.0
KNOWN_RAY = "2.50 or 2.60"  # with which it was tried
LONGEST_SOCKET_BYTES = 107  # of a Unix socket's path
# Of the daemon with 2 hosts, 70 were seen; it aborts with a limit of 64.
DAEMON_DESCRIPTORS = 64
HOST_DESCRIPTORS = 16
# Of what Ray prints of the workers: a page of general advice when one dies, whose end the driver tells itself, and a
# line of the collectives of CPU devices for each of them.
UNWANTED_LINES = r"A worker died or was killed|^\[Gloo\] Rank \d+ is connected to \d+ peer ranks"
has_chosen = threading.Event()
"""Whether this process imports Ray with the settings of here."""
# In each process that imports it.
SET_BY_JAX = {
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "GRPC_VERBOSITY",
    "LIBTPU_INIT_ARGS",
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
    "TPU_SKIP_MDS_QUERY",
}
_LOOK_S = 0.1
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class OwnCluster:
    """One cluster, from its start to its end.

    Args:
      num_cpus: number of CPUs that Ray counts with.
      environment: environment of the cluster's processes.

    Raises:
      ClusterNotStarted: there is no room for its sockets.
    """

    def __init__(self, num_cpus: int, *, environment: Mapping[str, str]) -> None:
        session_name = f"session_{secrets.token_hex(4)}"
        base = socket_base(session_name, [tempfile.gettempdir(), *_SHORT_FOLDERS])
        self._folder, self._lock = claim_folder(base)
        self._daemons: dict[str, ProcessStatistics | None] = {}
        self._unread = b""
        settings = {
            "folder": self._folder,
            "lock": self._lock,
            "program": os.getpid(),
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
            supervisor = subprocess.Popen(
                [sys.executable, "-P", str(SUPERVISOR), json.dumps(settings), PROGRAM_FOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, VARIABLE: self._folder},
                pass_fds=(self._lock,),
                start_new_session=True,
            )
        # A child that the job forks would hold the pipe open, whose end is the end of the cluster.
        if supervisor.stdin is not None:
            os.register_at_fork(after_in_child=supervisor.stdin.close)
        return supervisor

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


def settle() -> None:
    """What Ray reads when it is imported; a program that imported it before chose its own settings."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", UNWANTED_LINES)
    # Calls that a generation leaves behind fail with it; no code reads their answers any more.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if os.environ["RAY_AUTH_MODE"] == "token":
            # Set, so that Ray does not write a token of its own into the home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        has_chosen.set()


@dataclass(frozen=True, slots=True)
class _Early:
    """A cluster that `begun_early` began, and what it began with."""

    cluster: OwnCluster
    num_cpus: int
    environment: Mapping[str, str]


# None, or the one that nobody has taken yet.
_early: list[_Early] = []


@contextlib.contextmanager
def begun_early(num_hosts: int) -> Iterator[None]:
    """Begins a cluster that a `begun` in the block takes. Ray then starts while the program imports what it needs. One
    that nobody takes is ended. Where none can be begun, `begun` says so.
    """
    if "RAY_ADDRESS" in os.environ or "ray" in sys.modules:
        yield
        return
    settle()
    with contextlib.suppress(OSError, ClusterNotStarted, ConfigurationError):
        _early.append(_Early(begun(num_hosts), _num_cpus(num_hosts), dict(os.environ)))
    try:
        yield
    finally:
        end_early()


def end_early() -> None:
    """Ends a cluster that `begun_early` began and nobody took."""
    while _early:
        _early.pop().cluster.close()


def begun(num_hosts: int) -> OwnCluster:
    """A cluster that starts now, or started before in `begun_early` with enough CPUs and the same environment: its
    processes have it from there.

    Raises:
      As `OwnCluster`.
      ConfigurationError: the processes of this machine may not open as much as Ray needs.
    """
    num_cpus = _num_cpus(num_hosts)
    if _early:
        early = _early.pop()
        changed = {name for name, _ in early.environment.items() ^ os.environ.items()}
        if early.num_cpus >= num_cpus and changed <= SET_BY_JAX:
            return early.cluster
        early.cluster.close()
    _require_descriptors(num_hosts)
    # What was left by programs and supervisors that were killed together.
    sweep([tempfile.gettempdir(), *_SHORT_FOLDERS])
    # Ray starts workers with a niceness of 15, so one other busy program on the machine is enough to starve a run. It
    # also starts an idle worker for each processor, which takes a second of it. Ours have environments of their own, so
    # none of the idle ones would serve.
    return OwnCluster(num_cpus, environment={NICENESS: "0", PRESTART: "0"} | dict(os.environ))


def _num_cpus(num_hosts: int) -> int:
    """CPUs that Ray counts with: those of this machine, or one for each of a host's two processes."""
    return max(os.cpu_count() or 1, 2 * num_hosts)


def _require_descriptors(num_hosts: int) -> None:
    """Raises the soft limit, which the cluster inherits. With too few Ray's daemon does not refuse: it aborts, again
    and again.
    """
    try:
        require_descriptors(
            DAEMON_DESCRIPTORS + HOST_DESCRIPTORS * num_hosts,
            purpose=f"Ray's daemon on this machine and the processes of {num_hosts} "
            f"{'host' if num_hosts == 1 else 'hosts'}",
        )
    except DescriptorsExhausted as error:
        raise ConfigurationError(str(error)) from error


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
