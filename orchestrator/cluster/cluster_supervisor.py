"""The cluster supervisor: the process that starts and ends the Ray cluster of a program on this machine.

It leads a session of its own. A signal to the program's process group, as from a terminal, `timeout` or a batch system,
thus reaches none of Ray's processes. They inherit that SIGTERM and SIGHUP are blocked. A signal to the whole control
group, as from systemd, therefore does not end them either. Only the program decides when its cluster goes. It says so
by closing the pipe, which the kernel does for one that is killed. Should the supervisor itself be killed, the kernel
ends Ray's daemons with it.

Threads: the main one starts Ray, whose daemons would end with that thread. Another one waits for the end of the pipe
and ends everything, wherever the main one is stuck. The answer is a line of JSON on the standard output:
`{"address": ..., "gcs_server": process id, "raylet": process id}`, or `{"failed": ..., "is_unknown": ...}`.

Usage: python -P cluster_supervisor.py SETTINGS FOLDER. FOLDER holds the package `podembed`. The lock of the cluster's
folder is an open descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# Last: a program that is started in somebody's folder must not import what lies there.
sys.path.append(sys.argv[2])

from podembed.orchestrator.cluster.agent_ports import free_agent_ports, tell_daemons
from podembed.orchestrator.cluster.processes import end_cluster

LOOK_S = 0.25
NODE_TIMEOUT_S = 120.0
LOOPBACK = "127.0.0.1"
DAEMONS = ("gcs_server", "raylet")


def main() -> None:
    """Keeps a cluster until standard input ends. Does not return."""
    # Ray blocks SIGINT itself.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
    settings = json.loads(sys.argv[1])
    os.ftruncate(settings["lock"], 0)
    os.pwrite(settings["lock"], str(os.getsid(0)).encode(), 0)
    threading.Thread(target=_end_with, args=(settings,), name="end", daemon=True).start()
    try:
        node = start(settings)
        answer = {"address": node.gcs_address} | {name: node.all_processes[name][0].process.pid for name in DAEMONS}
    except BaseException as error:
        answer = {"failed": f"{type(error).__name__}: {error}"[:4000], "is_unknown": _is_unknown(error)}
    _say(answer)
    threading.Event().wait()


def _is_unknown(error: BaseException) -> bool:
    """Whether this Ray has not what is called here, which are private names. Another try would end alike."""
    # The same type stands for a library that could not be loaded, as where memory is short.
    is_missing_name = isinstance(error, ImportError) and "cannot import name" in str(error)
    return is_missing_name or isinstance(error, ModuleNotFoundError | AttributeError | TypeError | KeyError)


def _patient(get_node: Callable[..., Any], *arguments: Any) -> Any:
    """What Ray knows of the new node. Ray gives it 30 s to appear, which on a busy machine is too little."""
    for _ in range(int(NODE_TIMEOUT_S / LOOK_S)):
        with contextlib.suppress(RuntimeError):
            return get_node(*arguments)
        threading.Event().wait(LOOK_S)
    return get_node(*arguments)


def start(settings: dict[str, Any]) -> Any:
    """Ray's head on this machine, as `ray.init` starts one, but listening on the loopback interface alone."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams
    from ray._private.resource_isolation_config import ResourceIsolationConfig

    tell_daemons()
    services.get_node = functools.partial(_patient, services.get_node)
    # Without the dashboard Ray starts its process nevertheless, for statistics of usage that are switched off.
    services.start_api_server = lambda *arguments, **named: (None, None)
    parameters = RayParams(
        # `ray.init` would replace it by the address of the machine, and Ray then listens on every interface.
        node_ip_address=LOOPBACK,
        num_cpus=settings["num_cpus"],
        object_store_memory=settings["object_store_bytes"],
        temp_dir=settings["temp_dir"],
        session_name=settings["session_name"],
        include_dashboard=False,
        # One machine for ever: nothing to scale, and no program reads the workers' output through Ray.
        no_monitor=True,
        include_log_monitor=False,  # pyright: ignore[reportArgumentType]  # declared as text in Ray, and used as a truth value
        resource_isolation_config=ResourceIsolationConfig(),
        **free_agent_ports(LOOPBACK),
    )
    return Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)


def _end_with(settings: dict[str, Any]) -> None:
    """Waits for the end of the program, ends the cluster and the supervisor."""
    # The program passes its number: if it is killed at once, the supervisor has another parent before it can look.
    program = settings["program"]
    # The pipe also ends where a fork of the program that still has it open does, so its parent is looked at, too.
    while os.getppid() == program:
        if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 1):
            break
    end_cluster(settings["folder"])
    os._exit(0)


def _say(answer: dict[str, Any]) -> None:
    # A program that is gone reads nothing.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
