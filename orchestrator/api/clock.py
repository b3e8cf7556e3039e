"""`Clock`: the passing of time as an argument, so that the driver's waiting, deadlines and heartbeats run in a test
without any waiting.

`monotonic_s` measures: deadlines, intervals, durations. `wall_s` dates: heartbeats, records, ages of files; it may
jump, and nothing that must be right depends on it. What talks to real processes (`cluster`, `ray_jobs`, `pod`) waits
for them in real time and has no clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Reads time and waits."""

    def monotonic_s(self) -> float:
        """Seconds since some moment; never falls."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970 by the machine's clock, which may be wrong or jump."""
        ...

    def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()


def at_most_every(
    interval_s: float, action: Callable[[], None], monotonic_s: Callable[[], float]
) -> Callable[[], None]:
    """The same action, skipped when it ran less than `interval_s` ago."""
    last_s = -math.inf

    def throttled() -> None:
        nonlocal last_s
        if monotonic_s() - last_s >= interval_s:
            last_s = monotonic_s()
            action()

    return throttled
