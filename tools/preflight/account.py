"""`ProgramAccount`: what one compiled program takes of a device, and the time that this bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podembed.tools.preflight.program_text import Collective
from podembed.tools.preflight.slices import ChipRates


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAccount:
    """A program as the compiler left it. All numbers are those of one device and one step.

    Attributes:
      name: such as `train`, or `train, 512 x 50` of a room of sequences.
      compile_s: seconds to lower and compile it.
      argument_bytes, result_bytes, temporary_bytes, code_bytes: what it keeps in the device's memory.
      shared_bytes: bytes of results that take the place of arguments.
      flops: operations. Those of a loop are counted once, where the compiler does not know how often it runs.
      memory_traffic_bytes: bytes that move to and from the chip's memory.
      accessed_bytes: bytes that its operations read and write there and in the fast memory within the chip, as the
        compiler counts them.
      collectives: by kind.
      to_device_bytes, to_host_bytes: bytes that travel between host and device.
      flaws: sentences on what does not belong there.
      num_samples: samples of the whole batch.
    """

    name: str
    compile_s: float
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
    code_bytes: int
    shared_bytes: int
    flops: float
    memory_traffic_bytes: int
    accessed_bytes: float
    collectives: tuple[Collective, ...]
    to_device_bytes: int
    to_host_bytes: int
    num_samples: int
    flaws: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device's memory while it runs."""
        held = self.argument_bytes + self.result_bytes + self.temporary_bytes + self.code_bytes
        return held - self.shared_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends to others."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def seconds(self, rates: ChipRates) -> dict[str, float]:
        """The least seconds that each part of a device needs, by its name; they may work side by side.

        Both directions between host and device count one after the other: what comes back follows from what went.
        """
        share = rates.devices
        found = {
            "arithmetic": self.flops / (rates.flops / share),
            "memory": self.memory_traffic_bytes / (rates.memory_bytes_s / share),
            "links": self.sent_bytes / (rates.link_bytes_s / share),
        }
        if rates.host_bytes_s is not None:
            found["host"] = (self.to_device_bytes + self.to_host_bytes) / (rates.host_bytes_s / share)
        return found

    def bound(self, rates: ChipRates) -> tuple[str, float]:
        """The part that takes longest, and its seconds: no step is shorter."""
        seconds = self.seconds(rates)
        slowest = max(seconds, key=lambda part: seconds[part])
        return slowest, seconds[slowest]

    def as_json(self, rates: ChipRates) -> dict[str, Any]:
        """For `--json`."""
        part, seconds = self.bound(rates)
        return {
            "program": self.name,
            "compile_s": round(self.compile_s, 3),
            "memory_bytes": self.memory_bytes,
            "argument_bytes": self.argument_bytes,
            "result_bytes": self.result_bytes,
            "temporary_bytes": self.temporary_bytes,
            "code_bytes": self.code_bytes,
            "shared_bytes": self.shared_bytes,
            "flops": self.flops,
            "memory_traffic_bytes": self.memory_traffic_bytes,
            "accessed_bytes": self.accessed_bytes,
            "collectives": [
                {
                    "kind": one.kind,
                    "group": one.group,
                    "count": one.count,
                    "bytes": one.size_bytes,
                    "sent_bytes": round(one.sent_bytes),
                }
                for one in self.collectives
            ],
            "to_device_bytes": self.to_device_bytes,
            "to_host_bytes": self.to_host_bytes,
            "num_samples": self.num_samples,
            "least_seconds": self.seconds(rates),
            "bound_s": seconds,
            "bound_by": part,
            "flaws": list(self.flaws),
        }


def account_of(values: Mapping[str, Any]) -> ProgramAccount:
    """The account that the compiling process wrote as JSON."""
    kinds = tuple(Collective(**one) for one in values["collectives"])
    return ProgramAccount(**{**values, "collectives": kinds, "flaws": tuple(values["flaws"])})
