"""Hosts that hold the others up by their own work, and owners that serve more rows than the others: pure functions over
windows.

A host's *own work* is the time of the phases in which it does not wait for other hosts or for its device process. All
hosts take the same steps, so in a window every host spends the same time; the slow one works while the others wait.
What a slow device costs cannot be seen here: its gang waits for it inside of one compiled program.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.events.progress import HostSlow
from podembed.workers.liveness.progress import Phase

SLOW_RATIO = 2.0
WELL_RATIO = 1.5
# Below this part of a window a difference is of no use to anybody, and mostly noise.
LEAST_EXCESS = 0.1
LEAST_ROWS = 1000
# A host gathers and updates a million rows a second and more. Fewer rows than these cost it no noticeable part of its
# time.
LEAST_EXCESS_ROWS_PER_S = 50_000


def own_work_s(phase_s: Mapping[Phase, float]) -> float:
    """Seconds in phases that wait neither for other hosts nor for the device process."""
    return sum(spent for phase, spent in phase_s.items() if not phase.waits_for_others)


def work_ratios(phase_s: Sequence[Mapping[Phase, float]]) -> list[float]:
    """Per host its own work over the median of the others'; 1 for a host alone."""
    work = [own_work_s(phases) for phases in phase_s]
    if len(work) < 2:
        return [1.0] * len(work)
    others = [statistics.median(work[:at] + work[at + 1 :]) for at in range(len(work))]
    return [own / other if other > 0 else 1.0 for own, other in zip(work, others, strict=True)]


def slow_hosts(
    phase_s: Sequence[Mapping[Phase, float]], *, window_s: float, ratio: float = SLOW_RATIO
) -> list[HostSlow]:
    """The slow hosts of a window, by number.

    Args:
      phase_s: per host, seconds of each phase.
      window_s: how long the window took.
      ratio: from which a host is slow.
    """
    found = []
    for host, found_ratio in enumerate(work_ratios(phase_s)):
        others = [phases for at, phases in enumerate(phase_s) if at != host]
        excess_s = own_work_s(phase_s[host]) * (1 - 1 / found_ratio) if found_ratio > 1 else 0.0
        if found_ratio < ratio or excess_s < LEAST_EXCESS * window_s:
            continue
        usual = {phase: statistics.median(other.get(phase, 0.0) for other in others) for phase in phase_s[host]}
        working = [phase for phase in phase_s[host] if not phase.waits_for_others]
        phase = max(working, key=lambda name: phase_s[host][name] - usual[name])
        found.append(
            HostSlow(
                host=host,
                ratio=found_ratio,
                phase=phase,
                phase_s=phase_s[host][phase],
                others_phase_s=usual[phase],
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """The unevenness of row requests among owners in a window.

    Attributes:
      ratio: rows asked of the busiest owner over the mean; 1 is even, the number of hosts the worst.
      host: the busiest owner.
      table: number of the table that adds the most to it.
      rows: asked of that owner.
    """

    ratio: float
    host: int
    table: int
    rows: int


def imbalance(rows_asked: Sequence[Sequence[int]]) -> Imbalance:
    """The imbalance of a window.

    Args:
      rows_asked: per owner and table, the rows that all hosts requested.
    """
    totals = [sum(rows) for rows in rows_asked]
    mean = statistics.fmean(totals) if totals else 0.0
    if mean < LEAST_ROWS:
        return Imbalance(ratio=1.0, host=0, table=0, rows=0)
    host = max(range(len(totals)), key=totals.__getitem__)
    excess = [
        rows_asked[host][at] - statistics.fmean(rows[at] for rows in rows_asked) for at in range(len(rows_asked[host]))
    ]
    table = max(range(len(excess)), key=excess.__getitem__)
    return Imbalance(ratio=totals[host] / mean, host=host, table=table, rows=totals[host])


def is_notable(found: Imbalance, num_hosts: int, *, window_s: float) -> bool:
    """Whether to report an imbalance: twice the mean, or three quarters of the way to the worst for two hosts. There
    must also be enough rows above the mean to cost time.

    Args:
      window_s: how long the window took.
    """
    if num_hosts < 2 or found.ratio < min(2.0, 1 + 0.75 * (num_hosts - 1)):
        return False
    return found.rows * (1 - 1 / found.ratio) >= LEAST_EXCESS_ROWS_PER_S * window_s
