"""The TPU slices that programs can be compiled for: their names, their sizes, and the published rates of their chips.

Rates bound what a program can reach. They are nobody's measurement.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.topology import TOPOLOGIES, Topology

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRates:
    """What the maker publishes of one chip.

    Sources: memory, its rate, bfloat16 flops and links are those of https://cloud.google.com/tpu/docs (pages v4, v5e,
    v5p, v6e, tpu7x). The links of v4 and the way to the host are those of https://jax-ml.github.io/scaling-book/tpus.
    Links are published for both directions together, so one direction is half of that.

    Attributes:
      memory_bytes: bytes of memory.
      memory_bytes_s: bytes a second of that memory.
      flops: bfloat16 operations a second. At JAX's default precision, products of float32 are products of bfloat16.
      link_bytes_s: bytes a second that leave by all links to other chips.
      host_bytes_s: bytes a second to or from the host; None where nothing is published.
      devices: devices that JAX sees in a chip. They share it evenly.
    """

    memory_bytes: int
    memory_bytes_s: float
    flops: float
    link_bytes_s: float
    host_bytes_s: float | None
    devices: int = 1


# By generation, as Ray names it.
CHIPS = {
    "v4": ChipRates(memory_bytes=32 * _GIB, memory_bytes_s=1.2e12, flops=275e12, link_bytes_s=270e9, host_bytes_s=16e9),
    "v5litepod": ChipRates(
        memory_bytes=16 * _GIB, memory_bytes_s=819e9, flops=197e12, link_bytes_s=200e9, host_bytes_s=16e9
    ),
    "v5p": ChipRates(
        memory_bytes=95 * _GIB, memory_bytes_s=2.765e12, flops=459e12, link_bytes_s=600e9, host_bytes_s=16e9
    ),
    "v6e": ChipRates(
        memory_bytes=32 * _GIB, memory_bytes_s=1.6e12, flops=918e12, link_bytes_s=400e9, host_bytes_s=32e9
    ),
    "v7x": ChipRates(
        memory_bytes=192 * _GIB,
        memory_bytes_s=7.38e12,
        flops=2307e12,
        link_bytes_s=600e9,
        host_bytes_s=None,
        devices=2,
    ),
}
# What libtpu calls a generation, where that is another name; and names that users know.
_OF_COMPILER = {"v5litepod": "v5e", "v7x": "tpu7x"}
_ALIASES = {"v5e": "v5litepod", "tpu7x": "v7x", "7x": "v7x"}
_EXAMPLES = "v6e:4x4, v6e-16, v5litepod-16, v5p-128 or tpu7x-32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """A slice that programs are compiled for.

    Attributes:
      name: as the user wrote it.
      topology: its chips and machines.
      num_hosts: machines of a slice; each has an equal part of its chips.
    """

    name: str
    topology: Topology
    num_hosts: int

    @property
    def rates(self) -> ChipRates:
        return CHIPS[self.topology.generation]

    @property
    def compiler_name(self) -> str:
        """The name that libtpu knows, such as `v6e:4x4`."""
        generation = self.topology.generation
        return f"{_OF_COMPILER.get(generation, generation)}:{self.topology.shape}"

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """The chips of a machine in each direction."""
        wanted, sides = self.topology.chips // self.num_hosts, self._sides
        # The widest block that is not wider than the slice: machines are as square as their slice lets them.
        fitting = [
            (x, y, z)
            for x in range(1, sides[0] + 1)
            for y in range(1, sides[1] + 1)
            for z in range(1, sides[2] + 1)
            if x * y * z == wanted and not (sides[0] % x or sides[1] % y or sides[2] % z)
        ]
        return min(fitting, key=lambda bounds: (max(bounds), bounds[2], bounds[1]))

    @property
    def _sides(self) -> tuple[int, int, int]:
        x, y, *z = (int(side) for side in self.topology.shape.split("x"))
        return x, y, *(z or [1])  # type: ignore[return-value]


def parse_slice(name: str, *, num_hosts: int | None = None) -> SliceShape:
    """The slice that a name means: `v6e:4x4`, or what is booked, such as `v6e-16`.

    The number of `v5p-128`, `v4-32` and `tpu7x-32` counts TensorCores, of which a chip has two. Of several shapes with
    as many chips the most compact one is meant.

    Args:
      num_hosts: number of machines; None for those that Google's machines of such a slice are.

    Raises:
      ConfigurationError: there is no such slice, or its chips do not divide evenly over so many machines.
    """
    generation, separator, rest = name.strip().lower().partition(":" if ":" in name else "-")
    generation = _ALIASES.get(generation, generation)
    if generation not in CHIPS or not separator:
        raise ConfigurationError(
            f"Found --topology {name!r}. Expected a kind of TPU with a shape or a number, such as {_EXAMPLES}. Kinds "
            "are v4, v5e, v5p, v6e and tpu7x."
        )
    shape = rest if "x" in rest else _shape_of_size(name, generation, rest)
    topology = Topology.of(shape, generation)
    hosts = topology.hosts if num_hosts is None else num_hosts
    if hosts < 1 or topology.chips % hosts:
        raise ConfigurationError(
            f"Found --hosts {hosts} for the {topology.chips} chips of {name}. Expected a number that divides them. "
            f"Leave it out for {topology.hosts}."
        )
    return SliceShape(name=name, topology=topology, num_hosts=hosts)


def _shape_of_size(name: str, generation: str, size: str) -> str:
    """The most compact shape of a slice by the number in its name."""
    cores = 1 if generation in ("v5litepod", "v6e") else 2
    shapes = {shape: [int(side) for side in shape.split("x")] for shape in TOPOLOGIES[generation]}
    if re.fullmatch(r"[0-9]+", size):
        found = [shape for shape, sides in shapes.items() if math.prod(sides) * cores == int(size)]
        if found:
            return min(found, key=lambda shape: (sum(shapes[shape]), shapes[shape]))
    sizes = sorted({math.prod(sides) * cores for sides in shapes.values()})
    raise ConfigurationError(
        f"Found --topology {name!r}. Expected one of {', '.join(map(str, sizes[:12]))}"
        f"{' and larger ones' if len(sizes) > 12 else ''} behind the dash, or a shape such as "
        f"{next(iter(shapes))} behind a colon."
    )
