"""Ports of the agents of a Ray node that this process starts.

Ray's daemon waits until its agents have chosen theirs, and ends itself when that takes more than 15 s, as on a busy
machine. So it is told them. Ray passes on all but one, which is added to the daemon's command here.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

_NAMES = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")


def free_agent_ports(address: str = "") -> dict[str, Any]:
    """A free port for each agent of a node, by the names of Ray's parameters.

    Args:
      address: address that the ports are free at; empty for all of this machine.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in _NAMES]
        for one in sockets:
            one.bind((address, 0))
        return {name: one.getsockname()[1] for name, one in zip(_NAMES, sockets, strict=True)}


def tell_daemons() -> None:
    """Tells daemons that this process starts from now on the port of their dashboard agent."""
    from ray._private import services

    if not isinstance(services.start_ray_process, functools.partial):
        services.start_ray_process = functools.partial(_start, services.start_ray_process)


def _start(start: Callable[..., Any], command: Sequence[str], process_type: str, **others: Any) -> Any:
    if process_type == "raylet" and (found := re.search(r"--listen-port=(\d+)", " ".join(command))):
        command = [*command, f"--dashboard_agent_listen_port={found[1]}"]
    return start(command, process_type, **others)
