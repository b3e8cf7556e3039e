"""The connection of this process to a Ray cluster: one that is there, or one of the program's own
(`orchestrator.cluster.own_cluster`).

With an address (`RAY_ADDRESS`, as inside a Ray job) the program joins that cluster. Otherwise it starts one on this
machine, with token authentication and on the loopback interface. The folder of that cluster goes when the program ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import ClusterNotStarted
from podembed.orchestrator.api.signals import StoppedAtStart
from podembed.orchestrator.cluster.head_watch import HeadWatch
from podembed.orchestrator.cluster.own_cluster import UNWANTED_LINES, OwnCluster, begun, end_early, has_chosen, settle
from podembed.orchestrator.cluster.places import taking_connections
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import RayLeftBehind
from podembed.workers.processors import XLA_THREADS

LOOPBACK = "127.0.0.1"
FIRST_WITH_TOKENS = (2, 52)
TURN_LOOK_S = 0.1
LEAVE_S = 3.0  # for which a cluster without its head is left
_is_left_behind = threading.Event()  # whether a thread of this process still waits for a head that is gone


class Connection:
    """The cluster that this process is connected to. Mutated: which one it is, where one of the program's own is
    started again.
    """

    @property
    def is_own(self) -> bool:
        """Whether the program started it: then it is one machine for ever, and hosts have to share it."""
        return False

    def lost(self) -> str | None:
        """Why the cluster is of no use any more, as the first half of a sentence; None while it is. Costs microseconds,
        but for a connection once a second.
        """
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether a call of Ray that asks the cluster's head would come back. To be asked right before."""
        return self.lost() is None

    def require(self) -> None:
        """Returns when the cluster can be used.

        Raises:
          TooFewHosts: it is lost, and others have to mend it.
        """

    def renew(self, on_wait: Callable[[], None] | None = None) -> None:
        """Starts the program's own cluster again. All its processes, and all that Ray knew, are gone then.

        Args:
          on_wait: as of `connected`; None takes what was given there.
        """
        raise RuntimeError("Found a cluster that others started. Expected one of the program's own.")


class _ForeignConnection(Connection):
    """A connection to a cluster that others started, which they have to mend."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._head = HeadWatch(cluster_address(), emit=emit)

    def lost(self) -> str | None:
        return self._head.lost()

    def answers(self) -> bool:
        return self._head.answers()

    def require(self) -> None:
        self._head.require()

    def close(self) -> None:
        """Leaves the cluster. Without its head that takes Ray a quarter of a minute, or four of them: then it is left
        behind.
        """
        import ray

        if self.answers():
            ray.shutdown()
            return
        self._emit(RayLeftBehind(timeout_s=LEAVE_S))
        leaving = threading.Thread(target=ray.shutdown, name="leaving Ray", daemon=True)
        has_left = False
        # At the interpreter's end, as of a program that did not close its strategy, Python 3.12 starts no thread.
        with contextlib.suppress(RuntimeError):
            leaving.start()
            leaving.join(LEAVE_S)
            has_left = not leaving.is_alive()
        if not has_left:
            # At the interpreter's end Ray would begin it once more.
            atexit.unregister(ray.shutdown)
            _is_left_behind.set()


class _OwnConnection(Connection):
    def __init__(self, num_hosts: int, on_wait: Callable[[], None]) -> None:
        self._num_hosts = num_hosts
        self._on_wait = on_wait
        self._cluster = self._joined(on_wait)

    def _joined(self, on_wait: Callable[[], None]) -> OwnCluster:
        with _needing_files():
            cluster = begun(self._num_hosts)
        try:
            # Takes a second, in which the cluster starts.
            import ray  # noqa: F401

            address = cluster.started(on_wait)
            with _loopback():
                _join(address)
        except BaseException:
            cluster.close()
            raise
        return cluster

    @property
    def is_own(self) -> bool:
        return True

    def lost(self) -> str | None:
        daemon = self._cluster.lost()
        return None if daemon is None else f"{daemon} of Ray ended on this machine, and the cluster with it"

    def renew(self, on_wait: Callable[[], None] | None = None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.close()
            self._cluster = self._joined(on_wait or self._on_wait)
        except SystemExit as left:
            # While it connects, Ray installs a handler of its own for SIGTERM, which leaves so.
            raise StoppedAtStart(signal.SIGTERM.name) from left
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Leaves the cluster and ends it."""
        import ray

        try:
            ray.shutdown()
        finally:
            self._cluster.close()


class _Shared:
    """The connection that all runs and strategies of this program use at the same time. Mutated under `lock`.

    Attributes:
      num_users: how many use it; the last one closes it.
      num_renewals: how often it was renewed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.num_renewals = 0
        self._stack = contextlib.ExitStack()
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def turn(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Waits until no other thread joins, starts, renews or leaves a cluster. What `on_wait` raises ends that."""
        while not self.lock.acquire(timeout=TURN_LOOK_S):
            on_wait()
        try:
            yield
        finally:
            self.lock.release()

    def joined(self, connecting: Callable[[], contextlib.AbstractContextManager[Connection]]) -> Connection:
        """One more user's connection; to be called in a turn."""
        if self._connection is None:
            self._connection = self._stack.enter_context(connecting())
        self.num_users += 1
        return self._connection

    def left(self) -> None:
        """Notes that a user needs the connection no more. To be called in a turn."""
        self.num_users -= 1
        if self.num_users == 0:
            self._connection = None
            self._stack.close()


_shared = _Shared()


class _Use(Connection):
    """One user's view of the shared connection: when another one has renewed it, what this one had there is gone."""

    def __init__(self, shared: _Shared, connection: Connection, on_wait: Callable[[], None]) -> None:
        self._shared = shared
        self._on_wait = on_wait
        self._connection = connection
        self._num_renewals = shared.num_renewals

    @property
    def is_own(self) -> bool:
        return self._connection.is_own

    def lost(self) -> str | None:
        if self._num_renewals != self._shared.num_renewals:
            return "another run of this program started the cluster again"
        return self._connection.lost()

    def answers(self) -> bool:
        return self.lost() is None and self._connection.answers()

    def require(self) -> None:
        self._connection.require()

    def renew(self, on_wait: Callable[[], None] | None = None) -> None:
        # The user who started it may have ended since.
        on_wait = on_wait or self._on_wait
        with self._shared.turn(on_wait):
            if self._num_renewals == self._shared.num_renewals:
                self._connection.renew(on_wait)
                self._shared.num_renewals += 1
            self._num_renewals = self._shared.num_renewals


@contextlib.contextmanager
def shared_connection(
    num_hosts: int,
    before_joining: Callable[[str], None] = lambda address: None,
    *,
    on_wait: Callable[[], None] = lambda: None,
    emit: Emit = lambda event: None,
) -> Iterator[Connection]:
    """As `connected`, but runs and strategies in other threads of this program use the same cluster, and it is left
    when the last of them has ended. Ray has one connection a process.

    Raises:
      As `connected`.
    """
    with _shared.turn(on_wait):
        connection = _shared.joined(lambda: connected(num_hosts, before_joining, on_wait=on_wait, emit=emit))
        if _shared.num_users > 1 and not connection.is_own:
            # Each user is told itself of a head that falls silent.
            connection = _ForeignConnection(emit)
    try:
        yield _Use(_shared, connection, on_wait)
    finally:
        with _shared.turn(lambda: None):
            _shared.left()


@contextlib.contextmanager
def connected(
    num_hosts: int,
    before_joining: Callable[[str], None] = lambda address: None,
    *,
    on_wait: Callable[[], None] = lambda: None,
    emit: Emit = lambda event: None,
) -> Iterator[Connection]:
    """Joins or starts a cluster for the length of the block, unless the process is connected already. Then it is one of
    others, for whoever is in the block.

    Args:
      before_joining: called with the address of a cluster that is about to be joined.
      on_wait: called often while a cluster of the program's own starts; what it raises ends the start.
      emit: callback that is told when the head of a cluster of others falls silent.

    Raises:
      ClusterNotStarted: Ray did not start, or the cluster at the address could not be joined.
      ConfigurationError: the processes of this machine may not open as much as Ray needs.
    """
    address = os.environ.get("RAY_ADDRESS")
    settle()
    if address is not None or is_connected():
        end_early()
    if is_connected():
        _skip_unwanted_lines()
        yield _ForeignConnection(emit)
    elif address is not None:
        before_joining(address)
        with _loopback() if _is_on_loopback_alone(address) else contextlib.nullcontext():
            _join(address)
        connection = _ForeignConnection(emit)
        try:
            yield connection
        finally:
            connection.close()
    else:
        with _own(num_hosts, on_wait) as connection:
            yield connection


def joins_others() -> bool:
    """Whether `connected` would use a cluster that others started, rather than start one."""
    return is_connected() or "RAY_ADDRESS" in os.environ


def is_connected() -> bool:
    """Whether this process is a driver of a Ray cluster now."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _skip_unwanted_lines() -> None:
    """As `settle`, where the program imported Ray before: it has read its settings by then. A choice of the program
    stays.
    """
    try:
        from ray._private.ray_logging import stderr_deduplicator, stdout_deduplicator

        for one in (stdout_deduplicator, stderr_deduplicator):
            if one.skip_re is None:
                one.skip_re = re.compile(UNWANTED_LINES)
    except (ImportError, AttributeError):
        # Another version of Ray, which prints them.
        return


def _switch_tokens_on() -> None:
    """As `ray.init` does for a cluster that it starts, where the program imported Ray before it came here.

    Raises:
      ConfigurationError: this version of Ray does it in another way.
    """
    import ray

    try:
        from ray._private.authentication import authentication_token_setup as setup

        enable, ensure = setup.enable_token_auth_by_default, setup.ensure_token_if_auth_enabled
    except (ImportError, AttributeError) as error:
        if "RAY_AUTH_MODE" in os.environ or tuple(map(int, ray.__version__.split(".")[:2])) < FIRST_WITH_TOKENS:
            # The program chose itself, or a version without tokens.
            return
        raise ConfigurationError(
            f"Found Ray {ray.__version__}, imported by the program, in which token authentication is not switched on "
            f"as it is known here ({error}). Expected Ray to be imported by podembed first, or a choice. Set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled, before the program imports Ray."
        ) from error
    enable()
    ensure({}, create_token_if_missing=True)


@contextlib.contextmanager
def _own(num_hosts: int, on_wait: Callable[[], None]) -> Iterator[Connection]:
    if not has_chosen.is_set():
        _switch_tokens_on()
    with contextlib.closing(_OwnConnection(num_hosts, on_wait)) as connection:
        yield connection


@contextlib.contextmanager
def _needing_files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClusterNotStarted(
            f"Ray did not start on this machine: {error}. Expected room for a cluster of the program's own, in its "
            "folder for temporary files "
            "(TMPDIR) and among its processes. What is committed stands: see to that, then `podembed resume` goes on."
        ) from error


def _join(address: str) -> None:
    import ray
    from ray.exceptions import AuthenticationError

    from podembed.orchestrator.cluster.worker_path import DriverPath

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, job_config=DriverPath())
    except (AuthenticationError, ConnectionError, TimeoutError) as error:
        if _is_about_tokens(error):
            raise ClusterNotStarted(
                f"The Ray cluster at {address} refused this program, which has not its token. Expected the cluster's "
                "token. Set RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as the cluster has it. "
                "Without these two, Ray reads ~/.ray/auth_token, where `ray start` leaves it on the head's machine."
            ) from error
        raise ClusterNotStarted(
            f"Ray did not let the program join the cluster at {address}: {error}. Expected its head, and a node on "
            "this machine. What is committed stands: see to the cluster, then `podembed resume` goes on."
        ) from error


def _is_about_tokens(error: BaseException | None) -> bool:
    """Whether Ray says so, perhaps in the text of an error below another one."""
    from ray.exceptions import AuthenticationError

    while error is not None:
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """While it lasts, Ray takes a loopback address as it is. Otherwise Ray puts the machine's own in its place, where a
    cluster that only listens on the loopback interface is not found.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _is_on_loopback_alone(address: str) -> bool:
    """Whether the cluster at an address is one that a program on this machine started for itself, as `podembed chaos`
    does.
    """
    host, _, port = address.rpartition(":")
    if host not in (LOOPBACK, "localhost") or not port.isdecimal():
        return False
    import ray.util

    asked = {"loopback": (LOOPBACK, int(port)), "machine": (ray.util.get_node_ip_address(), int(port))}
    return taking_connections(asked) == {"loopback"}


def is_left_behind() -> bool:
    """Whether this process left a cluster without its head, and a thread still waits for that. The interpreter's end
    would wait, too.
    """
    return _is_left_behind.is_set()


def cluster_address() -> str:
    """The address at which other programs join this one's cluster, as `RAY_ADDRESS` has it."""
    import ray

    return ray.get_runtime_context().gcs_address


def compile_cache(threads: int | None) -> str:
    """A folder for compiled programs on each machine, for all runs of this user whose CPU devices have so many threads;
    None for as many as there are processors.
    """
    # XLA cuts work into parts for its threads and the processors, and JAX knows programs by other things.
    processors = len(os.sched_getaffinity(0))
    parts = os.environ.get(XLA_THREADS) or threads or processors
    return f"{tempfile.gettempdir()}/podembed-compiled-{os.getuid()}-{processors}-{parts}"
