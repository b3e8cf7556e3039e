"""`DeviceOptions`: which devices a host trains on, how they are laid out, and how batches get there.

Values that the driver reads too, so nothing of JAX is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from podembed.workers.declared_types import shown

AXIS = "data"
"""The axis of a mesh over which samples are spread."""


class Transfers(StrEnum):
    """Ways of a step's arrays between a host's memory and its devices. Users write the text."""

    AUTO = "auto"
    PACKED = "packed"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """The devices of a host.

    Attributes:
      per_host: how many there are. So many are made where they are CPUs. None takes what is there.
      mesh: sizes of the axes of a host's devices, `data` first; empty for `data` alone.
      reserved: accelerators that Ray reserves for the host.
      transfers: how arrays travel.
      has_sparse_cores: whether SparseCores look sharded tables up.
    """

    per_host: int | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    reserved: int = 0
    transfers: Transfers = Transfers.AUTO
    has_sparse_cores: bool = False

    @property
    def num_replicas(self) -> int:
        """Devices that work on the same samples together."""
        return math.prod(size for name, size in self.mesh if name != AXIS)

    @property
    def num_devices(self) -> int | None:
        """Devices of a host, if the settings name a number."""
        return math.prod(size for _, size in self.mesh) if self.mesh else self.per_host

    @property
    def sample_multiple(self) -> int:
        """The rows of a host's share are a multiple of this, so that each device has as many."""
        return max(1, (self.num_devices or self.reserved or 1) // self.num_replicas)


def device_options(
    per_host: int | None,
    mesh: Mapping[str, int] | None,
    transfers: str,
    *,
    sparse_cores: bool = False,
    resources: Mapping[str, float] | None,
) -> DeviceOptions:
    """The options of settings without a problem.

    Args:
      sparse_cores: whether SparseCores look sharded tables up.
      resources: resources of Ray, that a host reserves.
    """
    axes = dict(mesh or {})
    reserved = max((resources or {}).get(name, 0.0) for name in ("GPU", "TPU"))
    return DeviceOptions(
        per_host=per_host,
        mesh=((AXIS, axes.pop(AXIS)), *axes.items()) if axes else (),
        reserved=int(reserved),
        transfers=Transfers(transfers),
        has_sparse_cores=sparse_cores,
    )


def options_problem(per_host: Any, mesh: Any, transfers: Any) -> str | None:
    """The mistake in the settings of a host's devices, in three parts; None if there is none."""
    if per_host is not None and per_host < 1:
        return f"Found devices_per_host={per_host}. Expected at least 1, or None."
    if transfers not in tuple(Transfers):
        return f"Found transfers={shown(transfers)}. Expected one of {', '.join(Transfers)}."
    if mesh is None:
        return None
    axes = dict(mesh) if isinstance(mesh, Mapping) else {}
    if not axes or not all(_is_axis(name, size) for name, size in axes.items()):
        return (
            f"Found mesh={shown(mesh)}. Expected the sizes of its axes by their names, each at least 1. Write "
            "{'data': 2, 'model': 2}."
        )
    text, product = mesh_text(axes), math.prod(axes.values())
    if AXIS not in axes:
        return f"Found mesh={text}. Expected the axis {AXIS!r}, over which samples are spread. Add data=1 or more."
    if per_host is not None and product != per_host:
        return (
            f"Found mesh={text}, which are {product} devices, beside devices_per_host={per_host}. Expected as many, "
            "since a mesh has all devices of a host. Leave devices_per_host out, or change an axis."
        )
    return None


def mesh_text(axes: Mapping[str, int]) -> str:
    """A mesh as users write it, such as `data=2,model=2`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def _is_axis(name: Any, size: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and type(size) is int and size >= 1
