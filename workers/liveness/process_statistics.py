"""What the kernel says of a process of this machine: whether it runs, and how much processor time it has used.

A process that is starved of processor time answers late but uses some. One that is stopped, or waits for a disk that is
gone, uses none. Process ids are paired with the start time, so a number that the kernel gave to another process is not
taken for the old one. Read-only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import time
from collections.abc import Collection
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED_STATES = "Tt"

_FILES_EVERY_CPU_S = 5.0
"""Processor seconds between two counts of open files. With some hundred of them a count takes half a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatistics:
    """One look at a process.

    Attributes:
      process: its id.
      started: moment of its start in ticks since the machine's; with the id, it names the process for good.
      cpu_s: processor time of all its threads so far.
      state: the kernel's letter: R runs, S sleeps, D waits for a device, T is stopped.
    """

    process: int
    started: int
    cpu_s: float
    state: str

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state in _STOPPED_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The resources that a process uses.

    Attributes:
      process: its id.
      cpu_s: processor time of all its threads since its start.
      memory_bytes: memory that it has now.
      peak_memory_bytes: the most that it has had.
      num_files: open files and sockets, as of at most five processor seconds ago.
      num_sockets: number of them that are sockets.
    """

    process: int
    cpu_s: float
    memory_bytes: int
    peak_memory_bytes: int
    num_files: int
    num_sockets: int


class OpenFiles:
    """The files and sockets of this process. Mutated: the last counts, and the processor time at that moment."""

    def __init__(self) -> None:
        self._counts: tuple[int, int] = (0, 0)
        self._counted_cpu_s = -_FILES_EVERY_CPU_S

    def counts(self, cpu_s: float) -> tuple[int, int]:
        """Files and sockets, counted anew where this process has used enough processor time meanwhile."""
        # In a child process the time begins at 0 again.
        if not 0 <= cpu_s - self._counted_cpu_s < _FILES_EVERY_CPU_S:
            self._counts, self._counted_cpu_s = _count_files(), cpu_s
        return self._counts


_OPEN_FILES = OpenFiles()


def own_usage() -> ProcessUsage | None:
    """A look at this process; None where the system does not let it look, which must not end training."""
    try:
        return _own_usage()
    except (OSError, ValueError, IndexError):
        return None


def _own_usage() -> ProcessUsage:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1])
    cpu_s = used.ru_utime + used.ru_stime
    files, sockets = _OPEN_FILES.counts(cpu_s)
    return ProcessUsage(
        process=os.getpid(),
        cpu_s=cpu_s,
        memory_bytes=resident * mmap.PAGESIZE,
        peak_memory_bytes=used.ru_maxrss * 1024,
        num_files=files,
        num_sockets=sockets,
    )


def _count_files() -> tuple[int, int]:
    files = sockets = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            files += 1
            sockets += os.readlink(entry.path).startswith("socket:")
    return files, sockets


def read_statistics(process: int) -> ProcessStatistics | None:
    """A look at a process of this machine; None if there is none, or only its remains."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may hold spaces and parentheses itself.
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return ProcessStatistics(process=process, started=int(fields[19]), cpu_s=cpu_s, state=fields[0])


def process_age_s() -> float:
    """How long ago this process began, as far as the kernel says; else 0."""
    found = read_statistics(os.getpid())
    return 0.0 if found is None else time.clock_gettime(time.CLOCK_BOOTTIME) - found.started / _TICKS_PER_S


def processes_with(variable: str, values: Collection[str]) -> dict[str, int]:
    """Processes of this machine that began with an environment variable of one of these values: value → process id.

    Of a process and the children that inherited the variable, the oldest counts.
    """
    found: dict[str, tuple[int, int]] = {}
    prefix = f"{variable}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        value = next(
            (item[len(prefix) :].decode(errors="replace") for item in environment if item.startswith(prefix)), None
        )
        statistics = read_statistics(int(entry)) if value in values else None
        if value is not None and statistics is not None:
            this = (statistics.started, statistics.process)
            found[value] = min(found.get(value, this), this)
    return {value: process for value, (_, process) in found.items()}
