"""`Topology`: how many chips and machines a TPU slice has, from its topology and the generation of its chips.

The numbers are those of Ray, which reserves slices. They stand here as well, so that a declaration can be checked and
planned without Ray. A test compares all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from podembed.orchestrator.api.configuration_error import ConfigurationError
from podembed.workers.declared_types import shown

CHIPS_A_MACHINE = 4
# These generations have machines of up to 8 chips, for slices that are one machine.
_UP_TO_8_CHIPS = ("v5litepod", "v6e")
_ONE_CORE_A_CHIP = ("v5litepod", "v6e")
_FLAT = ("1x1", "2x2", "2x4", "2x8", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_IRONWOOD = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


def _cubes(most_x: int, most_y: int, most_z: int) -> tuple[str, ...]:
    """Topologies made of cubes of 4 x 4 x 4 chips."""
    ranges = [range(4, most + 1, 4) for most in (most_x, most_y, most_z)]
    return tuple(f"{x}x{y}x{z}" for x in ranges[0] for y in ranges[1] for z in ranges[2])


# By generation, as Ray names it.
TOPOLOGIES = {
    "v2": ("4x4", "4x8", "8x8", "8x16", "16x16"),
    "v3": ("4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
    "v4": (*_SMALL_CUBES, *_cubes(12, 12, 16)),
    "v5p": (*_SMALL_CUBES, *_cubes(16, 16, 24)),
    "v5litepod": _FLAT,
    "v6e": _FLAT,
    "v7x": (*_SMALL_CUBES, *_IRONWOOD),
}
_ALIASES = {"v5e": "v5litepod", "7x": "v7x"}
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One kind of TPU slice.

    Attributes:
      shape: chips in each direction, such as `4x4`.
      generation: generation of the chips, as Ray names it, such as `v6e` or `v5litepod`.
      chips: chips of a slice.
      chips_per_host: chips per host of one of its machines; a machine has one host.
      pod_type: what its machines are labelled with, such as `v6e-16`. The number counts cores.
    """

    shape: str
    generation: str
    chips: int
    chips_per_host: int
    pod_type: str

    @property
    def hosts(self) -> int:
        """Machines of a slice."""
        return max(1, self.chips // self.chips_per_host)

    @property
    def accelerator_type(self) -> str:
        """As Ray Train has it, such as `TPU-V6E`."""
        return f"TPU-{self.generation.upper()}"

    def __str__(self) -> str:
        return f"{self.shape} {self.accelerator_type}"

    @staticmethod
    def of(topology: str, accelerator_type: str) -> Topology:
        """The topology that two words name.

        Args:
          topology: such as `4x4`.
          accelerator_type: such as `TPU-V6E`; the generation alone (`v6e`) will do.

        Raises:
          ConfigurationError: there is no such generation, or it has no such topology.
        """
        generation = _generation(accelerator_type)
        shape = topology.strip().lower()
        if shape not in TOPOLOGIES[generation]:
            raise ConfigurationError(
                f"Found topology={shown(topology)} for accelerator_type={shown(accelerator_type)}. Expected one of "
                f"{_some(generation)}. Choose the topology that the machines were made with (--topology)."
            )
        chips = math.prod(int(part) for part in shape.split("x"))
        is_one_machine = generation in _UP_TO_8_CHIPS and shape in ("1x1", "2x2", "2x4")
        cores = 1 if generation in _ONE_CORE_A_CHIP else 2
        return Topology(
            shape=shape,
            generation=generation,
            chips=chips,
            chips_per_host=chips if is_one_machine else CHIPS_A_MACHINE,
            pod_type=f"{generation}-{chips * cores}",
        )


def _generation(accelerator_type: str) -> str:
    name = accelerator_type.strip().lower().removeprefix("tpu").removeprefix("-")
    name = _ALIASES.get(name, name)
    if name not in TOPOLOGIES:
        known = ", ".join(f"TPU-{generation.upper()}" for generation in TOPOLOGIES)
        raise ConfigurationError(
            f"Found accelerator_type={shown(accelerator_type)}. Expected one of {known}. Name the generation of the "
            "slice's chips (--accelerator-type)."
        )
    return name


def _some(generation: str) -> str:
    """The topologies of a generation, the smallest first, as many as can be read."""
    known = sorted(TOPOLOGIES[generation], key=lambda shape: math.prod(map(int, shape.split("x"))))
    more = f" and {len(known) - _MAX_SHOWN} larger ones" if len(known) > _MAX_SHOWN else ""
    return f"{', '.join(known[:_MAX_SHOWN])}{more}"
