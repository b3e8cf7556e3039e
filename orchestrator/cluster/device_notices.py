"""What the driver says about the devices that a generation trains on: nothing where hosts wanted processors and got
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.orchestrator.api.errors import listed
from podembed.orchestrator.cluster.worker_environment import ACCELERATORS, accelerators_of
from podembed.workers.device.process import DeviceReady
from podembed.workers.liveness.worker import Worker


def device_notices(devices: Sequence[DeviceReady], resources: Mapping[str, float] | None) -> list[str]:
    """One line with the devices that are accelerators, and one where accelerators are reserved and JAX did not find
    them.

    Args:
      devices: what each device process said, in the order of the hosts.
      resources: Ray resources of a host.
    """
    by_kind: dict[str, list[Worker]] = {}
    for host, device in enumerate(devices):
        by_kind.setdefault(f"{device.num_devices} x {device.kind or device.platform}", []).append(Worker("host", host))
    notices = []
    if any(device.platform != "cpu" for device in devices):
        notices.append("devices: " + "; ".join(f"{kind} for {listed(hosts)}" for kind, hosts in by_kind.items()))
    reserved = [
        f"{amount:g} {name}" for name, amount in (resources or {}).items() if name in ACCELERATORS and amount > 0
    ]
    without = [Worker("host", host) for host, device in enumerate(devices) if device.platform == "cpu"]
    if reserved and without:
        notices.append(
            f"{listed(without)}: found processors only, with {' and '.join(reserved)} reserved for each host. Training "
            "goes on there. "
            "Install JAX's plugin for the accelerator on every machine (jax[cuda13], jax[tpu]), and see what "
            "JAX_PLATFORMS is set to."
        )
    return notices


def idle_accelerators(bundle: Mapping[str, float], there: Mapping[str, float], *, platforms: str | None) -> str | None:
    """What to say where devices will be CPUs although the cluster has something faster: it looks like training that is
    merely slow. None where there is nothing to say.

    Args:
      bundle: resources that a host reserves.
      there: resources of the cluster.
      platforms: what the user told JAX to run on.
    """
    idle = [f"{there[name]:g} {name}" for name in ACCELERATORS if there.get(name, 0) > 0]
    if not idle or accelerators_of(bundle) or platforms:
        return None
    return (
        f"the cluster has {' and '.join(idle)}, and hosts reserve none: models run on CPUs. Reserve whole ones for "
        "each host with --resources, or resources_per_host, such as --resources CPU=8 GPU=1"
    )
