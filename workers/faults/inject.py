"""`FaultPoints`: the points of one process at which a `FaultPlan` strikes. Without a plan there is none, and a point
costs one comparison.

A place in the code that has a point reads `if faults is not None: faults.hit("step.update", step=step)`. Before a fault
acts, its record is created exclusively in the plan's folder; who does not create it does not act. A fault thus strikes
once although its step is replayed after the recovery. What was injected, when and where can be read afterwards, also if
it killed the process that wrote it.

No thread and no lock: counters are advanced by one atomic operation, and the file system decides who strikes.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podembed.workers.faults.plan import ERRORS, PROCESS_ACTIONS, Fault, FaultPlan
from podembed.workers.storage.strict_json import canonical_bytes


class HttpError(Exception):
    """What a client of an object store raises for an answer with this status."""

    def __init__(self, code: int) -> None:
        super().__init__(f"injected answer {code} of the storage")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """A fault that struck.

    Attributes:
      fault: its number in the plan.
      strike: how often it had struck before.
      rank, process: who was struck.
      unix_s: when, a moment before it acted.
    """

    fault: int
    strike: int
    point: str
    action: str
    rank: str
    step: int | None
    detail: str
    process: int
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessActs:
    """What a fault does to its process, as functions, so that a simulation can put its own in their place."""

    send_signal: Callable[[int], None] = field(default=lambda number: os.kill(os.getpid(), number))
    sleep: Callable[[float], None] = field(default=time.sleep)
    unix_s: Callable[[], float] = field(default=time.time)


@dataclass(slots=True)
class _Armed:
    """One fault in one process. Mutated: `hits`."""

    number: int
    fault: Fault
    pattern: re.Pattern[str] | None
    hits: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def is_due(self, step: int | None, detail: str) -> bool:
        if self.fault.step is not None and step != self.fault.step:
            return False
        return self.pattern is None or self.pattern.search(detail) is not None


class FaultPoints:
    """The faults of a plan that may strike one process. Made by `of`.

    Args:
      rank: rank of the process, such as `host 0`, `device 1` or `driver`.
    """

    def __init__(self, plan: FaultPlan, rank: str, acts: ProcessActs | None = None) -> None:
        self.rank = rank
        self._folder = plan.folder
        self._acts = acts or ProcessActs()
        self._by_point: dict[str, list[_Armed]] = {}
        for number, fault in enumerate(plan.faults):
            if _is_meant(fault.rank, rank):
                pattern = None if fault.match is None else re.compile(fault.match)
                self._by_point.setdefault(fault.point, []).append(_Armed(number, fault, pattern))

    @staticmethod
    def of(plan: FaultPlan | None, rank: str, acts: ProcessActs | None = None) -> FaultPoints | None:
        """The points of a process; None if nothing can strike it."""
        if plan is None or not any(_is_meant(fault.rank, rank) for fault in plan.faults):
            return None
        return FaultPoints(plan, rank, acts)

    def knows(self, prefix: str) -> bool:
        """Whether a fault may strike at a point whose name begins so."""
        return any(point.startswith(prefix) for point in self._by_point)

    def hit(self, point: str, *, step: int | None = None, detail: str = "", acts: bool = True) -> Fault | None:
        """Marks a point of the process. A fault of the process itself happens before this returns, or instead.

        Args:
          acts: False leaves also what strikes the process to the caller, who must call `act`.

        Returns:
          A fault that strikes what the caller is doing, to be carried out by the caller; None in most cases.

        Raises:
          Exception: whatever the plan raises here.
        """
        due: Fault | None = None
        for armed in self._by_point.get(point, ()):
            if armed.is_due(step, detail) and self._is_released(armed.fault) and self._strikes(armed, step, detail):
                if acts and armed.fault.action in PROCESS_ACTIONS:
                    self.act(armed.fault)
                else:
                    due = armed.fault
        return due

    def _strikes(self, armed: _Armed, step: int | None, detail: str) -> bool:
        """Whether the fault strikes at this hit; if so, it is on record."""
        if next(armed.hits) < armed.fault.nth:
            return False
        for strike in range(armed.fault.times):
            if self._record(armed, strike, step, detail):
                return True
        return armed.fault.for_s > 0 and self._is_going_on(armed)

    def _is_released(self, fault: Fault) -> bool:
        return fault.after is None or _record_path(self._folder, fault.after, 0).exists()

    def _record(self, armed: _Armed, strike: int, step: int | None, detail: str) -> bool:
        record = {
            "fault": armed.number,
            "strike": strike,
            "point": armed.fault.point,
            "action": armed.fault.action,
            "rank": self.rank,
            "step": step,
            "detail": detail,
            "process": os.getpid(),
            "unix_s": self._acts.unix_s(),
        }
        try:
            handle = os.open(
                _record_path(self._folder, armed.number, strike), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
            )
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(canonical_bytes(record) + b"\n")
        return True

    def _is_going_on(self, armed: _Armed) -> bool:
        try:
            data = _record_path(self._folder, armed.number, armed.fault.times - 1).read_bytes()
            since_s = float(json.loads(data)["unix_s"])
        except (OSError, ValueError, KeyError):
            # Another process is just writing it.
            return True
        return self._acts.unix_s() - since_s < armed.fault.for_s

    def act(self, fault: Fault) -> None:
        """Strikes this process."""
        arguments = fault.arguments
        match fault.action:
            case "kill":
                self.kill()
            case "stop":
                self._acts.send_signal(signal.SIGSTOP)
            case "signal":
                self._acts.send_signal(signal.Signals[str(arguments["name"])])
            case "delay":
                self._acts.sleep(float(arguments.get("seconds", 1.0)))
            case "no_space":
                raise OSError(errno.ENOSPC, "injected: no space left on device")
            case _:
                kind = ERRORS[str(arguments.get("type", "RuntimeError"))]
                raise kind(str(arguments.get("message", f"injected at {fault.point}")))

    def kill(self) -> None:
        """Ends this process at once, as a loss of power would."""
        self._acts.send_signal(signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        self._acts.sleep(seconds)


def spoil(faults: FaultPoints, point: str, *, step: int, arrays: Iterable[Any]) -> None:
    """Passes a point at which arrays can be spoilt: those of a fault `nan` become NaN as a whole."""
    fault = faults.hit(point, step=step)
    if fault is not None and fault.action == "nan":
        for array in arrays:
            array[...] = float("nan")


def flipped(data: bytes, arguments: Mapping[str, Any]) -> bytes:
    """The bytes with one bit turned: of byte `byte` from the start, the middle one by default."""
    if not data:
        return data
    at = int(arguments.get("byte", len(data) // 2)) % len(data)
    changed = bytearray(data)
    changed[at] ^= 1 << (int(arguments.get("bit", 0)) % 8)
    return bytes(changed)


def _record_path(folder: str, number: int, strike: int) -> Path:
    return Path(folder) / f"fired-{number:03d}-{strike:03d}.json"


def _is_meant(wanted: str | None, rank: str) -> bool:
    return wanted is None or wanted == rank or rank.startswith(f"{wanted} ")
