"""Rates on a machine that others use, too: windows, which of them were quiet, and CPU seconds of a whole tree of
processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

QUIET_CPUS = 0.2
MIN_QUIET = 6
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tune_allocator() -> None:
    """Runs this program again with the allocator settings that worker processes have, unless others are set. Call it
    first.
    """
    from podembed.orchestrator.cluster.worker_environment import ALLOCATOR

    if "GLIBC_TUNABLES" not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**ALLOCATOR, **os.environ})


def machine_cpu_s() -> float:
    """CPU seconds that all processes of the machine have used; waiting for disks and idling do not count."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, soft_irq = (int(field) for field in file.readline().split()[1:8])
    return (user + nice + system + irq + soft_irq) / _TICKS_PER_S


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process, [])
    return found


def _stat(process: int) -> list[str] | None:
    """Fields of `/proc/<process>/stat` after the name; None if the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return None


def cpu_s(processes: list[int]) -> dict[str, float]:
    """CPU seconds that these processes have used, by role."""
    used: dict[str, float] = {}
    for process in processes:
        if fields := _stat(process):
            role = _role(process)
            used[role] = used.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return used


def _role(process: int) -> str:
    """`hosts`, `devices`, `ray` for Ray's own processes, or `driver`."""
    try:
        title = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return "ray"
    if process == os.getpid():
        return "driver"
    names = {b"HostActor": "hosts", b"DeviceActor": "devices"}
    return next((role for name, role in names.items() if name in title), "ray")


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes(root: int) -> int:
    """Sum of the peak resident memory of a tree of processes; memory that two of them share counts twice."""
    total = 0
    for process in process_tree(root):
        try:
            lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return total


def pss_gb(root: int) -> dict[str, float]:
    """Memory that a tree of processes has now, by role. What several processes share counts once."""
    found: dict[str, int] = {}
    for process in process_tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        size = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        found[_role(process)] = found.get(_role(process), 0) + size
    return {role: round(size / 1e9, 2) for role, size in found.items()}


class Meter:
    """Rates and CPU seconds of windows. Mutated by `window`."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._rates: list[float] = []
        self._others: list[float] = []
        self._samples = 0
        self._cpu_s: dict[str, float] = {}
        self.seconds_of_last = 0.0

    @contextmanager
    def window(self, num_samples: int) -> Iterator[None]:
        """Counts what happens inside as the work on so many samples."""
        processes = process_tree(self._root)
        machine, own, started = machine_cpu_s(), cpu_s(processes), time.perf_counter()
        yield
        window_s = time.perf_counter() - started
        machine = machine_cpu_s() - machine
        used = {role: seconds - own.get(role, 0.0) for role, seconds in cpu_s(processes).items()}
        self.seconds_of_last = window_s
        self._rates.append(num_samples / window_s)
        self._others.append(max(0.0, machine - sum(used.values())) / window_s)
        self._samples += num_samples
        for role, seconds in used.items():
            self._cpu_s[role] = self._cpu_s.get(role, 0.0) + seconds

    def has_enough_quiet(self) -> bool:
        return sum(other < QUIET_CPUS for other in self._others) >= MIN_QUIET

    def cpu_ms(self, batch_size: int) -> dict[str, float]:
        """CPU milliseconds a batch, by role."""
        return {role: round(1e3 * seconds * batch_size / self._samples, 2) for role, seconds in self._cpu_s.items()}

    def summary(self) -> dict[str, Any]:
        """Median, spread and best of the quiet windows, or of all if fewer than three were quiet."""
        rates, others = np.asarray(self._rates), np.asarray(self._others)
        quiet = others < QUIET_CPUS
        chosen = rates[quiet] if quiet.sum() >= 3 else rates
        low, middle, high = np.quantile(chosen, [0.1, 0.5, 0.9])
        return {
            "samples_per_s": round(float(middle), 1),
            "p10": round(float(low), 1),
            "p90": round(float(high), 1),
            "best": round(float(rates.max()), 1),
            "samples_per_cpu_s": round(self._samples / sum(self._cpu_s.values()), 1),
            "windows": len(rates),
            "quiet_windows": int(quiet.sum()),
            "other_cpus_busy": round(float(np.median(others)), 2),
        }
