"""`joined`: where the hosts of a run are to live, and the signals that end it, for the length of a block.

In the driver's own process, on a Ray cluster that is there, or on one that the program starts for itself.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.run_errors import TooFewHosts
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.cluster.connection import Connection, shared_connection
from podembed.orchestrator.cluster.in_process import InProcessBackend
from podembed.orchestrator.cluster.job_modules import require_modules
from podembed.orchestrator.cluster.places import taking_connections
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_nodes import RayNodes
from podembed.orchestrator.cluster.slices.backend import SliceBackend
from podembed.orchestrator.decisions.cluster import check_alone
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import ClusterAwaited
from podembed.workers.job.reference import AnyJob

LOOK_S = 0.5
LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joined:
    """The cluster in which hosts are started.

    Attributes:
      cluster: the machines; None for hosts in the driver's own process.
      stop: asked whether somebody wants the run to end.
    """

    backend: InProcessBackend | RayBackend
    cluster: RayNodes | None
    stop: StopSignals


@contextlib.contextmanager
def joined(
    scaling: ScalingConfig,
    *,
    patience_s: Callable[[], float],
    activity: Callable[[str], None],
    emit: Emit,
    run: str,
    job: AnyJob,
) -> Iterator[Joined]:
    """Joins or starts a cluster, unless hosts are in this process.

    Args:
      patience_s: says how long a cluster that does not answer is waited for.
      activity: told what is being done.
      run: name of the run, by which Ray shows its processes.
      job: job as hosts get it.

    Raises:
      StoppedAtStart: a signal came before there was a cluster.
      ConfigurationError: the hosts do not fit on this machine, and no cluster is named; or a machine of the cluster has
        not the job's modules.
      As `shared_connection` and `await_cluster`.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        if scaling.in_process:
            yield Joined(backend=InProcessBackend(), cluster=None, stop=stop)
            return
        wait = partial(await_cluster, timeout_s=patience_s(), stop=stop, emit=emit)
        activity("starting Ray, or joining its cluster")
        try:
            connection = stack.enter_context(
                shared_connection(scaling.least_hosts, wait, on_wait=partial(_go_on, stop), emit=emit)
            )
        except SystemExit as left:
            # While it connects, Ray installs a handler of its own for SIGTERM, which leaves so.
            raise StoppedAtStart(signal.SIGTERM.name) from left
        stop.claim()
        backend = _backend(scaling, connection, emit, run=run)
        cluster = RayNodes(backend, scaling, connection=connection, emit=emit)
        if not connection.is_own:
            _require_modules(job, connection)
        elif (nodes := cluster.look()) is not None:
            check_alone(nodes, cluster.rules())
        if scaling.ask_cluster:
            cluster.ask_for_most()
            stack.callback(cluster.withdraw)
        yield Joined(backend=backend, cluster=cluster, stop=stop)


def _require_modules(job: AnyJob, connection: Connection) -> None:
    if connection.answers():
        from podembed.orchestrator.cluster.worker_path import driver_path

        require_modules(job, driver_path())


def _backend(scaling: ScalingConfig, connection: Connection, emit: Emit, *, run: str) -> RayBackend:
    if (topology := scaling.slices) is None:
        return RayBackend(scaling, emit, lost=connection.lost, answers=connection.answers, run=run)
    return SliceBackend(scaling, emit, topology=topology, lost=connection.lost, answers=connection.answers, run=run)


def _go_on(stop: StopSignals) -> None:
    if stop.reason is not None:
        raise StoppedAtStart(stop.reason)


def await_cluster(
    address: str,
    *,
    timeout_s: float,
    stop: StopSignals,
    emit: Emit,
    clock: Clock = SYSTEM_CLOCK,
    answers: Callable[[str], bool] | None = None,
) -> None:
    """Returns when something listens at the address of the cluster's head.

    Ray itself tries an address where no process listens for a quarter of an hour, silently, and hears no request to
    stop meanwhile.

    Args:
      timeout_s: how long it is waited for; 0 for a run that has not begun, which refuses at once.
      answers: whether something listens there; by default a connection is tried.

    Raises:
      ConfigurationError: no process listens, and the run has not begun.
      TooFewHosts: no process has listened for so long.
      StoppedAtStart: the run was asked to end meanwhile.
    """
    answers = answers or _answers
    began_s, has_told = clock.monotonic_s(), False
    while not answers(address):
        waited_s = clock.monotonic_s() - began_s
        if timeout_s <= 0:
            raise ConfigurationError(
                f"Found no Ray cluster at {address}. Expected the head of one there, since RAY_ADDRESS names it. Start "
                "it, or unset RAY_ADDRESS to train on this machine alone."
            )
        if waited_s >= timeout_s:
            raise TooFewHosts(
                f"Found no Ray cluster at {address} for {waited_s:.0f} s. Expected it back by now. What is committed "
                "stands: start the cluster, then `podembed resume` goes on."
            )
        if stop.reason is not None:
            raise StoppedAtStart(stop.reason)
        if not has_told:
            has_told = True
            emit(ClusterAwaited(address=address, timeout_s=timeout_s))
        clock.sleep(LOOK_S)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        # `auto` and what else Ray finds out by itself.
        return True
    if int(port) > LAST_PORT:
        return False
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        # A name that is unknown now may be known when the cluster is back.
        return False
    # A name may stand for several addresses, of both versions of IP.
    return bool(taking_connections({str(entry[4][0]): (str(entry[4][0]), int(port)) for entry in found}))
