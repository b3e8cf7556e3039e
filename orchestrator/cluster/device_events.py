"""What the driver says about the devices that a generation trains on: nothing where hosts wanted processors and got
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.orchestrator.cluster.worker_environment import ACCELERATORS
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.machines import AcceleratorsMissing, DevicesFound
from podembed.workers.device.process import DeviceReady


def device_events(devices: Sequence[DeviceReady], resources: Mapping[str, float] | None) -> list[Event]:
    """Which devices there are, where some are accelerators or a host has several; and where accelerators are reserved
    and JAX did not find them.

    Args:
      devices: what each device process said, in the order of the hosts.
      resources: Ray resources of a host.
    """
    by_kind: dict[str, tuple[int, ...]] = {}
    for host, device in enumerate(devices):
        kind = f"{device.num_devices} x {device.kind or device.platform}"
        kind += f" as {device.mesh}" if device.mesh else ""
        by_kind[kind] = (*by_kind.get(kind, ()), host)
    events: list[Event] = []
    if any(device.platform != "cpu" or device.num_devices > 1 for device in devices):
        events.append(DevicesFound(hosts=by_kind))
    reserved = tuple(
        f"{amount:g} {name}" for name, amount in (resources or {}).items() if name in ACCELERATORS and amount > 0
    )
    without = tuple(host for host, device in enumerate(devices) if device.platform == "cpu")
    if reserved and without:
        events.append(AcceleratorsMissing(hosts=without, reserved=reserved))
    return events
