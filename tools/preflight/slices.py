"""The TPU slices that programs can be compiled for: their names and their sizes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from podembed.orchestrator.api.chips import CHIPS, ChipRates
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.topology import TOPOLOGIES, Topology

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
