"""`GangMesh`: the devices of all hosts as a mesh, and how arrays get onto them and back whole.

Hosts follow each other along `data`, and all other axes lie within a host. So a host has every part of each
parameter, and what it saves is whole. The number of hosts changes nothing but the length of `data`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from podembed.workers.device.gang_errors import GangError, looking_for
from podembed.workers.device.options import AXIS, DeviceOptions, mesh_text


@dataclass(frozen=True, slots=True)
class GangMesh:
    """The devices of a gang.

    Attributes:
      mesh: mesh of all of them.
      local: those of this process: for each part of its samples the devices that work on it, in the order of the mesh.
      num_cores: SparseCores of a device that look sharded tables up; 0 for none.
    """

    mesh: Mesh
    local: tuple[tuple[Any, ...], ...]
    num_cores: int = 0

    @staticmethod
    def of(options: DeviceOptions) -> GangMesh:
        """The mesh of this gang.

        Raises:
          GangError: there are none of those that JAX_PLATFORMS names, the devices are not as many as the settings say,
            or hosts have unlike numbers of them.
        """
        with looking_for(""):
            mine = jax.local_devices()
        return GangMesh.over(jax.devices(), mine, options, num_hosts=jax.process_count())

    @staticmethod
    def over(devices: Sequence[Any], mine: Sequence[Any], options: DeviceOptions, *, num_hosts: int) -> GangMesh:
        """The mesh of these devices, which need not be there: a compiler's topology will do.

        Args:
          devices: devices of all processes, those of this one among them.
          mine: devices of this process.
          num_hosts: number of processes.

        Raises:
          GangError: the devices are not as many as the settings say, hosts have unlike numbers of them, or they have no
            SparseCores although these are asked for.
        """
        # JAX promises no order of its own, while the rows of a host are those of its devices. Within a host rows come
        # back in the order of the mesh.
        devices = sorted(devices, key=lambda device: device.process_index)
        own = [device for device in devices if device in set(mine)]
        if len(devices) != len(own) * num_hosts:
            raise GangError(
                f"Found {len(own)} devices here and {len(devices)} in all {num_hosts} JAX processes. "
                "Expected as many in each, since every host has an equal share of a batch. Reserve the same for every "
                "host (--resources, resources_per_host)."
            )
        _require_number(options, own)
        num_cores = num_cores_of(own[0].device_kind, options) if options.has_sparse_cores else 0
        axes = dict(options.mesh) or {AXIS: len(own)}
        sizes = (num_hosts * axes.pop(AXIS), *axes.values())
        mesh = Mesh(np.asarray(devices).reshape(sizes), (AXIS, *axes))
        return GangMesh(mesh, tuple(map(tuple, np.asarray(own).reshape(-1, options.num_replicas))), num_cores)

    @property
    def num_parts(self) -> int:
        """Into how many parts the samples of this host are divided."""
        return len(self.local)

    @property
    def num_local(self) -> int:
        """Devices of this process."""
        return sum(map(len, self.local))

    @property
    def num_hosts(self) -> int:
        """Processes of the gang."""
        return self.mesh.size // self.num_local

    @property
    def num_all_parts(self) -> int:
        """The same of all hosts."""
        return self.mesh.shape[AXIS]

    @property
    def first_part(self) -> int:
        """The first part of this host among those of all hosts."""
        mine = self.local[0][0].process_index
        firsts = self.mesh.devices.reshape(self.num_all_parts, -1)[:, 0]
        return next(at for at, device in enumerate(firsts) if device.process_index == mine)

    @property
    def has_replicas(self) -> bool:
        """Whether several devices work on the same samples."""
        return self.mesh.size > self.num_all_parts

    @property
    def text(self) -> str:
        """The devices of a host, such as `data=2,model=2`; empty where samples are spread over all of them."""
        inner = {name: size for name, size in self.mesh.shape.items() if name != AXIS}
        return mesh_text({AXIS: self.num_parts, **inner}) if inner else ""

    @property
    def platform(self) -> str:
        """JAX's name of the kind of devices."""
        return self.local[0][0].platform

    @property
    def is_one_cpu(self) -> bool:
        """Whether this process has one CPU device, whose memory is the host's."""
        return len(self.local) == len(self.local[0]) == 1 and self.platform == "cpu"

    @property
    def by_sample(self) -> NamedSharding:
        """The sharding of arrays whose first axis are samples."""
        return NamedSharding(self.mesh, P(AXIS))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, P())

    def split(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """The parts of this host's rows as its part of a global array. Copies may still be under way."""
        shape = (len(parts[0]) * self.num_all_parts, *parts[0].shape[1:])
        on_devices = [
            jax.device_put(part, device) for part, devices in zip(parts, self.local, strict=True) for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, self.by_sample, on_devices)

    def place(self, values: Any, sharding: Sharding | None = None) -> jax.Array:
        """Places an array that every host holds: sharded, or replicated without a sharding.

        Given all devices at once, JAX would gather and compare the array over the gang first.
        """
        sharding = sharding or self.replicated
        shape, own = np.shape(values), [device for devices in self.local for device in devices]
        if sharding.is_fully_replicated:
            on_devices = [jax.device_put(values, device) for device in own]
        else:
            parts = sharding.devices_indices_map(shape)
            on_devices = [jax.device_put(values[parts[device]], device) for device in own]
        return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def whole(array: jax.Array | np.ndarray) -> np.ndarray:
    """A global array of which this process has all parts, such as a parameter; numpy's own as they are."""
    if isinstance(array, np.ndarray) or array.is_fully_replicated or array.is_fully_addressable:
        return np.asarray(array)
    made = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        made[shard.index] = shard.data
    return made


CORES_BY_KIND = {"TPU v5": 4, "TPU v5p": 4, "TPU v6 lite": 2, "TPU7x": 2}
"""SparseCores of a device, by JAX's name of its kind. Others have none that jax-tpu-embedding knows."""


def num_cores_of(kind: str, options: DeviceOptions) -> int:
    """SparseCores of a device.

    Args:
      kind: JAX's name of its kind.

    Raises:
      GangError: there are none, the package that uses them is missing, or several devices work on one sample.
    """
    if kind not in CORES_BY_KIND:
        raise GangError(
            f"Found sparse_cores on {kind}. Expected devices with SparseCores: v5p, v6e or tpu7x. Leave it out: the "
            "same tables work on any device."
        )
    if options.num_replicas > 1:
        raise GangError(
            f"Found sparse_cores beside mesh={mesh_text(dict(options.mesh))}. Expected samples on all devices, since "
            "SparseCores exchange rows between all of them. Leave one of them out."
        )
    if importlib.util.find_spec("jax_tpu_embedding") is None:
        raise GangError(
            "Found sparse_cores without the package jax-tpu-embedding. Expected it beside podembed on every host. "
            "Install it: pip install 'podembed[sparsecore]'."
        )
    return CORES_BY_KIND[kind]


def _require_number(options: DeviceOptions, own: Sequence[Any]) -> None:
    """Raises `GangError` where a process has other devices than the settings say."""
    wanted = options.num_devices
    if wanted is None or wanted == len(own):
        return
    asked = f"mesh={mesh_text(dict(options.mesh))}" if options.mesh else f"devices_per_host={wanted}"
    remedy = "Name as many as each host has, or reserve others (--resources, resources_per_host)."
    if own[0].platform == "cpu":
        # Elsewhere so many would have been made.
        remedy = (
            "JAX divides the CPU when a process first uses it, and this one used it before. Start fit() before any "
            "array of JAX is made, or set XLA_FLAGS=--xla_force_host_platform_device_count before."
        )
    raise GangError(
        f"Found {len(own)} x {own[0].device_kind} on a host and {asked}. Expected {wanted} devices. {remedy}"
    )
