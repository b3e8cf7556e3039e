"""The gang: the JAX processes of all hosts of a run, joined so that they can sum their gradients."""

from __future__ import annotations

import contextlib
import socket
import time

import jax

from podembed.workers.descriptors import require_for_device
from podembed.workers.device.gang_errors import GangError, looking_for
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.waiting_threads import calm_waiting, threads

_COORDINATOR_LOOK_S = 0.01


def join_gang(*, coordinator: str, num_processes: int, process: int, timeout_s: int, platform: str = "") -> None:
    """Makes this process a member of the gang of JAX processes. A gang of one needs no coordinator.

    Args:
      platform: that its devices must be of, as JAX calls it; empty for any.

    Raises:
      DescriptorsExhausted: this process may not open enough of them for the other members.
      RuntimeError: the gang did not form within `timeout_s`.
      GangError: it formed, and the devices of its members are not joined; or this process has used JAX before.
      DeviceMissing: this machine has no devices of the platform.
    """
    require_for_device(num_processes)
    with looking_for(platform):
        _join_gang(coordinator=coordinator, num_processes=num_processes, process=process, timeout_s=timeout_s)


def _join_gang(*, coordinator: str, num_processes: int, process: int, timeout_s: int) -> None:
    # The preemption service makes a process ignore SIGTERM; preemption is the driver's business.
    jax.config.update("jax_enable_preemption_service", False)
    if num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if process > 0:
        _await_listener(coordinator, timeout_s=timeout_s)
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            # Without this, the coordinator listens on every interface.
            coordinator_bind_address=coordinator if process == 0 else None,
            num_processes=num_processes,
            process_id=process,
            # The driver said all that there is to say; a batch system around it counts processes in its own way.
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s,
        )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        shown = ", ".join(f"{array.dtype}{list(array.shape)}" for array in jax.live_arrays()[:3])
        raise GangError(
            f"Found that JAX was used while the job was read (arrays that are still there: {shown or 'none'}). "
            "Expected that it is not: a process that has used it can join no others. Use numpy where the job and its "
            "modules are declared, or the model's init, or give Trainer the job by name: "
            "JobReference(function='my_module:my_job')."
        ) from error
    before = threads()
    # Accelerators know their peers from their own topology, not from the coordinator. Left alone, each member would sum
    # its gradients alone, and train a model of its own.
    num_found = jax.process_count()
    if jax.default_backend() == "cpu":
        # With accelerators there is no such thread, and to look for it in vain takes a while.
        calm_waiting(before)
    if num_found != num_processes:
        mine = jax.local_devices()
        raise GangError(
            f"Found {num_found} JAX processes that share devices, as process {process} with {len(mine)} x "
            f"{mine[0].device_kind} sees it. Expected {num_processes}, one a host. Give each host whole GPUs or whole "
            "machines of one TPU slice, the same for all (--resources, resources_per_host). See whether a device "
            "process fell back to the CPU."
        )


def make_cpu_devices(options: DeviceOptions) -> None:
    """Has JAX divide the CPU into so many devices, if the settings name a number. Before JAX is used first."""
    if options.num_devices is not None:
        # In a process that has used JAX already, the mesh says what is wrong.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", options.num_devices)


def _await_listener(address: str, *, timeout_s: float) -> None:
    """Waits until somebody listens at `host:port`. A gang member that knocks too early pauses for a second before it
    tries again.
    """
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as link:
                # Dialing a free local port over and over can hit the port that the dial itself was given.
                if link.getsockname() != link.getpeername():
                    return
        except OSError:
            pass
        time.sleep(_COORDINATOR_LOOK_S)


def leave_gang() -> None:
    """Dissolves the gang in order; without this, the members that leave later take it for a crash and abort."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
