"""`DriverPulse`: whether the driver that a supervisor started is frozen, seen from outside of it.

A driver that is stopped, or waits for a disk that is gone, ends neither itself nor its attempt. What can be seen of it
is the heartbeat that it replaces every few seconds in the run's folder. On this machine, the processor time that it
uses can be seen, too. Both must stand still: a driver that reads a large commit before it starts writes no heartbeat,
but works. Another driver's heartbeat says nothing about ours. Only durations between looks of this process count, so no
clock is compared with another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from podembed.orchestrator.commit.holder import Heartbeat, Holder, read_heartbeat
from podembed.orchestrator.commit.lease_files import read_claims
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

FROZEN_S = 30.0
# Of a driver on another machine only the heartbeat can be seen.
FROZEN_ELSEWHERE_S = 300.0
LOOK_EVERY_S = 5.0
_LONGEST_GAP_S = 3 * LOOK_EVERY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSigns:
    """What is seen of a driver at one moment. Its newest heartbeat is None before it has a lease, and the kernel's
    statistics are None unless the driver runs on this machine.
    """

    heartbeat: Heartbeat | None
    statistics: ProcessStatistics | None


class DriverPulse:
    """Mutable: how long both signs have stood still."""

    def __init__(self) -> None:
        self._last: DriverSigns | None = None
        self._looked_s: float | None = None
        self._still_s = 0.0

    def see(self, look: DriverSigns, now_s: float) -> str | None:
        """Takes a look in. Returns why the driver is to be killed, or None."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _LONGEST_GAP_S)
        before, self._last, self._looked_s = self._last, look, now_s
        is_stopped = look.statistics is not None and look.statistics.is_stopped
        is_new = before is None or look.heartbeat != before.heartbeat or _has_run(before.statistics, look.statistics)
        # Before it has a lease, only a process that is stopped is known to be stuck.
        if is_new or (look.heartbeat is None and not is_stopped):
            self._still_s = 0.0
            return None
        self._still_s += passed_s
        still_s = self._still_s
        if still_s < (FROZEN_ELSEWHERE_S if look.statistics is None else FROZEN_S):
            return None
        self._still_s = 0.0
        idle = "" if look.statistics is None else f" and used no processor time (state {look.statistics.state})"
        return f"the driver has written no heartbeat for {still_s:.0f} s{idle}"


def _has_run(before: ProcessStatistics | None, now: ProcessStatistics | None) -> bool:
    if before is None or now is None:
        return before is not now
    return (before.process, before.started, before.cpu_s) != (now.process, now.started, now.cpu_s)


def heartbeat_of(url: str, is_ours: Callable[[Holder], bool]) -> Heartbeat | None:
    """The newest heartbeat of a run if our driver wrote it. None as well where storage cannot be read: that is no sign
    of anything.
    """
    try:
        store = Store(url)
        claims = read_claims(store)
        beat = read_heartbeat(store, claims[-1]) if claims else None
    except (StorageError, OSError, ValueError):
        return None
    return beat if beat is not None and is_ours(beat.holder) else None
