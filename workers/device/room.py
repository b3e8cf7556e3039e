"""`room_here`: the memory of this process's devices, for tables whose place is to be chosen."""

from __future__ import annotations

import jax

from podembed.embedding.device_places import ON_CPUS, DeviceRoom
from podembed.workers.device.gang import make_cpu_devices
from podembed.workers.device.options import DeviceOptions


def room_here(options: DeviceOptions = DeviceOptions()) -> DeviceRoom | str:  # noqa: B008  # frozen
    """The devices that JAX has in this process; or why there are none for tables. JAX is used from here on.

    Args:
      options: devices of a host.
    """
    make_cpu_devices(options)
    try:
        devices = jax.local_devices()
    except RuntimeError:
        # Whoever trains on them says why.
        return "JAX finds no devices"
    first = devices[0]
    memory_bytes = (first.memory_stats() or {}).get("bytes_limit", 0)
    if first.platform == "cpu":
        return ON_CPUS
    if not memory_bytes:
        return f"{first.device_kind} does not say how much memory it has"
    return DeviceRoom(
        kind=first.device_kind,
        memory_bytes=memory_bytes,
        num_parts=max(1, len(devices) // options.num_replicas),
        is_tpu=first.platform == "tpu",
    )
