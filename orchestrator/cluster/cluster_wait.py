"""Waiting for a Ray cluster before joining it. Ray itself tries an address where no process listens for a quarter of an
hour, silently. Meanwhile it hears no request to stop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.errors import TooFewHosts
from podembed.orchestrator.api.signals import StoppedAtStart, StopSignals
from podembed.orchestrator.cluster.places import taking_connections

LOOK_S = 0.5
LAST_PORT = 65535


def await_cluster(
    address: str,
    *,
    timeout_s: float,
    stop: StopSignals,
    notice: Callable[[str], None],
    clock: Clock = SYSTEM_CLOCK,
    answers: Callable[[str], bool] | None = None,
) -> None:
    """Returns when something listens at the address of the cluster's head.

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
                "it, or unset RAY_ADDRESS "
                "to train on this machine alone."
            )
        if waited_s >= timeout_s:
            raise TooFewHosts(
                f"Found no Ray cluster at {address} for {waited_s:.0f} s. Expected it back by now. What is committed "
                "stands: start the cluster, "
                "then `podembed resume` goes on."
            )
        if stop.reason is not None:
            raise StoppedAtStart
        if not has_told:
            has_told = True
            notice(
                f"waiting for the Ray cluster at {address}, where nobody listens; the run goes on as soon as it is "
                "back, and ends in "
                f"{timeout_s:.0f} s if it is not"
            )
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
