"""`Calibration`: the constants of one machine, and the file in which they lie.

The file is sealed JSON. One that is damaged, of another format or of another machine is refused with a sentence.
Otherwise predictions would follow from numbers of somewhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podembed.embedding.costs.constants import KINDS, Kernels
from podembed.workers.storage.finished_folder import write_durably
from podembed.workers.storage.records import encode, from_document
from podembed.workers.storage.strict_json import MAX_DOCUMENT_BYTES, DocumentRefused, unseal

FORMAT = 7


class CalibrationError(ValueError):
    """There are no constants of this machine that can be used."""


class CalibrationRefused(CalibrationError):
    """A file of constants that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where constants were measured."""

    processor: str
    cpus: int

    def describe(self) -> str:
        return f"{self.cpus} x {self.processor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """An exchange between hosts: seconds for itself, for each other host, and for each byte that a host sends."""

    exchange_s: float
    peer_s: float
    byte_s: float

    def seconds(self, *, peers: int, num_bytes: float) -> float:
        return self.exchange_s + self.peer_s * peers + self.byte_s * num_bytes if peers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A training step of a device process: seconds for a step, for a floating point operation, and for a byte that it
    reads or writes.
    """

    step_s: float
    flop_s: float
    byte_s: float

    def seconds(self, *, flops: float, num_bytes: float) -> float:
        return self.step_s + self.flop_s * flops + self.byte_s * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTime:
    """A device process at work.

    Attributes:
      num_samples: of a step.
      step_s: seconds of a step with its transfers, without other devices.
      cpu_s: processor seconds of it, of all threads.
      gradient_bytes: of the parameters' gradients, which devices add up.
    """

    num_samples: int
    step_s: float
    cpu_s: float
    gradient_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Processor seconds of a phase in a run, from what its kernels or messages take alone.

    Attributes:
      factor: of what they take alone. Caches are cold in a run, and others use the memory.
      constant_s: beside it, once a step.
      cold_s: once a step, where all of its code and books have left the caches since the step before.
      call_s: for each call of a kernel, of what Python does around it.
      float_s: for each float that another process wrote or will read.
      error: how far the fit was off in the middle of the measured runs; 0.1 is a tenth.
    """

    factor: float = 1.0
    constant_s: float = 0.0
    cold_s: float = 0.0
    call_s: float = 0.0
    float_s: float = 0.0
    error: float = 0.0

    def once_s(self, cold: float) -> float:
        """Once a step.

        Args:
          cold: as `Caches.cold_share`.
        """
        return self.constant_s + self.cold_s * cold

    def seconds(self, alone_s: float, *, cold: float, calls: float = 0.0, floats: float = 0.0) -> float:
        return self.factor * alone_s + self.call_s * calls + self.float_s * floats + self.once_s(cold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Seconds that pass in runs without a processor, and who gets one first.

    Attributes:
      meeting_s: of an exchange, until a host that waited works again.
      spread: of an exchange, the share of the work before it by which hosts that have equal work differ.
      input_s: until a host has a batch that lies in memory.
      device_s: of a step of a device: waking up, and the sum over all devices.
      turn: of a device's processor seconds, what it does before its host gets a processor back, where they are short.
        A host that wakes its device, or that has waited for another host, is set aside for so long.
      device_weight: a device's share of a processor that others want, where a host has 1.
      error: of the phases of the measured runs, in the middle.
    """

    meeting_s: float = 0.0
    spread: float = 0.0
    input_s: float = 0.0
    device_s: float = 0.0
    turn: float = 0.0
    device_weight: float = 1.0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCorrections:
    """What was found in runs of made-up jobs with the processes of real ones.

    Attributes:
      hosts: on one machine.
      phases: by the name of a phase; those that were not measured are taken as they are.
      device: of a device's step with its transfers and the sum over all devices.
      waiting: of hosts and devices for each other.
      reading: processor seconds of a thread that decodes input in a run, for each that it takes alone.
    """

    hosts: int
    phases: Mapping[str, Correction]
    device: Correction
    waiting: Waiting
    reading: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """See the module.

    Attributes:
      format: of the file.
      code: version of the program that measured.
      threads: of a host's kernels and of its CPU device.
      kernels: alone, and with as many processes as the machine has for hosts; rising by `num_processes`.
      wire: over loopback.
      dense: by number of processes that worked alike, as text.
      sample_s, id_s: seconds for a sample of Parquet input without ids, and for an id.
      pods: rising by `hosts`; empty where no runs were measured.
    """

    format: int
    code: str
    machine: Machine
    measured_unix_s: float
    threads: int
    kernels: tuple[Kernels, ...]
    wire: Wire
    dense: Mapping[str, Dense]
    sample_s: float
    id_s: float
    pods: tuple[PodCorrections, ...] = ()

    def corrections_for(self, hosts: int) -> PodCorrections | None:
        """Those measured with at most so many hosts on a machine."""
        fitting = [found for found in self.pods if found.hosts <= hosts]
        return (fitting or self.pods)[-1] if self.pods else None

    def kernels_for(self, num_processes: int) -> Kernels:
        """Those measured with at most so many processes side by side."""
        fitting = [found for found in self.kernels if found.num_processes <= num_processes]
        return (fitting or self.kernels)[-1]

    def dense_for(self, num_processes: int) -> Dense:
        """The same of the device."""
        counts = sorted(int(count) for count in self.dense)
        fitting = [count for count in counts if count <= num_processes]
        return self.dense[str((fitting or counts)[-1])]


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Replaces the file whole.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, encode(calibration).decode())


def read_calibration(path: Path, machine: Machine) -> Calibration | None:
    """What the file says; None where there is none.

    Args:
      machine: that it must be of.

    Raises:
      CalibrationRefused: it is damaged, or of another format or machine.
      OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        return None
    remedy = "Measure again with podembed calibrate."
    try:
        document = unseal(str(path), data)
        if has_another_format(document):
            raise CalibrationRefused(
                f"Found format {document['format']} of {path}, of another version. Expected {FORMAT}. {remedy}"
            )
        found = from_document(Calibration, str(path), document)
    except DocumentRefused as error:
        raise CalibrationRefused(
            f"Found {error.found} in the constants of {path}. Expected {error.expected}. {remedy}"
        ) from error
    odd = [kernels for kernels in found.kernels if any(len(of) != len(KINDS) for of in kernels.factors_ns.values())]
    if odd or not found.kernels or not found.dense:
        raise CalibrationRefused(f"Found constants in {path} that are not complete. Expected all of them. {remedy}")
    if found.machine != machine:
        raise CalibrationRefused(
            f"Found constants of another machine in {path}: {found.machine.describe()}. Expected "
            f"{machine.describe()}. {remedy}"
        )
    return found


def has_another_format(document: Any) -> bool:
    """Whether plain values are those of a calibration that another version wrote."""
    found = document.get("format") if isinstance(document, dict) else None
    return type(found) is int and found != FORMAT


def this_machine() -> Machine:
    """The processors that this process may use."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return Machine(processor=names[0] if names else "unknown processor", cpus=len(os.sched_getaffinity(0)))


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
