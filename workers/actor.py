"""The Ray actors: `HostWorker` and `DeviceProcess` with a control side that answers while they work. Nothing else of a host knows Ray.

The `control` group has a thread of its own, and so has `background`, which writes checkpoints while training goes on. Actors are never
restarted by Ray and calls never retried: a restarted actor would answer with empty tables and no error.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

import ray

from workers.host import HostReady, HostSpec, HostWorker
from workers.progress import Progress, machine_identity


def _leave_signals_to_the_driver() -> None:
    """Ctrl-C reaches every process of a terminal; only the driver decides what it means."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _HostActor:
    """One host: shard, slots, input, storage. Never runs `jax.distributed`."""

    def __init__(self) -> None:
        _leave_signals_to_the_driver()
        self._worker = HostWorker()

    def start(self, spec: HostSpec) -> HostReady:
        """As `HostWorker.start`, on the address by which the cluster knows this machine."""
        return self._worker.start(replace(spec, bind_address=spec.bind_address or ray.util.get_node_ip_address()))

    def run(self, method: str, *arguments: Any) -> Any:
        """Any working method of `HostWorker`."""
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="background")
    def run_in_background(self, method: str, *arguments: Any) -> Any:
        """A method of `HostWorker` that may run beside a working one."""
        return getattr(self._worker, method)(*arguments)

    @ray.method(concurrency_group="control")
    def identity(self) -> tuple[str, int]:
        """Which process this is: machine and process id."""
        return machine_identity(), os.getpid()

    @ray.method(concurrency_group="control")
    def status(self) -> Progress:
        return self._worker.status()

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        self._worker.abort(reason)


class _DeviceActor:
    """One host's member of the JAX gang."""

    def __init__(self) -> None:
        _leave_signals_to_the_driver()
        # Imported here, so that the environment of the actor is complete before JAX reads it.
        from workers.device_process import DeviceProcess

        self._process = DeviceProcess()

    def run(self, method: str, *arguments: Any) -> Any:
        """Any working method of `DeviceProcess`."""
        return getattr(self._process, method)(*arguments)

    @ray.method(concurrency_group="background")
    def run_in_background(self, method: str, *arguments: Any) -> Any:
        """A method of `DeviceProcess` that may run beside a working one."""
        return getattr(self._process, method)(*arguments)

    @ray.method(concurrency_group="control")
    def identity(self) -> tuple[str, int]:
        """Which process this is: machine and process id."""
        return machine_identity(), os.getpid()

    @ray.method(concurrency_group="control")
    def status(self) -> Progress:
        return self._process.status()

    @ray.method(concurrency_group="control")
    def abort(self, reason: str) -> None:
        self._process.abort(reason)


# Ray's annotations do not know the options of `remote` in this form.
_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 1, "background": 1},
}
HostActor: Any = ray.remote(**_OPTIONS)(_HostActor)
DeviceActor: Any = ray.remote(**_OPTIONS)(_DeviceActor)
