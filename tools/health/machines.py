"""What commits cost, and memory that grows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from podembed.orchestrator.api.text import format_bytes, format_duration, plural
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import MeasuredSpan, Standing, is_window, recent, total_s, weighted, window_s
from podembed.tools.metrics.point import Point

COMMITS_LOOKBACK_S = 120.0
"""Commits come in tens of seconds and more."""
COMMITS_EVIDENCE_S = 30.0
LEAST_COMMITS = 3
STALL_BEGINS, STALL_ENDS = 0.10, 0.05
"""A commit is written beside training, so it should cost next to nothing. A tenth is worth a flag."""
SLOW_COMMIT_S = 5.0
"""A shorter one may be small; then it is the storage's answer that takes its time, not its bytes."""
SLOW_BYTES_PER_S = 20e6
"""A hard disk does five times that."""

MEMORY_SPAN_S = 600.0
"""Tables and caches fill in the first minutes."""
MOST_SAMPLES = 64
LEAST_GROWTH, LEAST_GROWTH_BYTES = 0.10, 100 << 20
"""Allocators give back what they hold in steps of this size."""


class Commits:
    """Training that stands still for commits: for too many, or for a slow storage."""

    alarms = frozenset({"frequent_commits", "slow_storage"})

    def __init__(self) -> None:
        self._spans: tuple[MeasuredSpan, ...] = ()
        self._delayed_s = 0.0
        self._last: tuple[float, float] = (0.0, 0.0)

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        delayed_s = point.value("commit_delay_seconds")
        if delayed_s is not None:
            # The counter of a driver begins at 0.
            more_s = delayed_s - self._delayed_s if delayed_s >= self._delayed_s else delayed_s
            self._delayed_s = delayed_s
            self._add(MeasuredSpan(more_s, {"stalled": 1.0}))
            return None
        size_bytes, seconds = point.value("commit_bytes"), point.value("commit_seconds")
        if size_bytes is not None and seconds is not None:
            self._last = (size_bytes, seconds)
            self._add(MeasuredSpan(0.0, {"commit": 1.0}))
            return None
        if not is_window(point):
            return None
        waited = [one.value for one in point.each("waited_ratio") if one.labels.get("source") == "storage"]
        self._add(MeasuredSpan(window_s(point), {"stalled": max(waited, default=0.0)}))
        return self._found(standing)

    def _add(self, span: MeasuredSpan) -> None:
        self._spans = recent(self._spans, span, least_s=COMMITS_LOOKBACK_S)

    def _found(self, standing: Standing) -> list[StandingAlarm]:
        spent_s, share = total_s(self._spans), weighted(self._spans, "stalled")
        num_commits = sum("commit" in span.values for span in self._spans)
        stands = any(name in self.alarms for name, _ in standing)
        if spent_s < COMMITS_EVIDENCE_S or num_commits < LEAST_COMMITS:
            return []
        if share < (STALL_ENDS if stands else STALL_BEGINS):
            return []
        size_bytes, seconds = self._last
        is_slow = seconds >= SLOW_COMMIT_S and size_bytes / seconds < SLOW_BYTES_PER_S
        rate = f"{format_bytes(size_bytes / max(seconds, 1e-9))} a second"
        return [
            StandingAlarm(
                alarm="slow_storage" if is_slow else "frequent_commits",
                text=f"training stood still for commits for {share:.0%} of the last {spent_s:.0f} s, with "
                f"{plural(num_commits, 'commit')} in them; the last one had {format_bytes(size_bytes)} and took "
                f"{seconds:.1f} s, {rate}",
            )
        ]


class MemoryGrows:
    """Memory of a host's processes that grows and does not stop."""

    alarms = frozenset({"memory_grows"})

    def __init__(self) -> None:
        self._generation: int | None = None
        # By host: time and bytes, at times that are at least so far apart.
        self._samples: dict[str, tuple[tuple[float, float], ...]] = {}
        self._apart_s = 0.0

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        if not is_window(point):
            return None
        found = point.by_label("memory_bytes", "host")
        if point.generation != self._generation:
            # Its processes are new, or their tables are.
            self._generation, self._samples, self._apart_s = point.generation, {}, 0.0
        taken = {}
        for host, size_bytes in found.items():
            before = self._samples.get(host, ())
            is_due = not before or point.unix_s - before[-1][0] >= self._apart_s
            taken[host] = (*before, (point.unix_s, size_bytes)) if is_due and size_bytes > 0 else before
        if max(map(len, taken.values()), default=0) > MOST_SAMPLES:
            # Half as many, and from now on half as often. The early ones fade, since a start is no leak.
            taken = {host: samples[len(samples) // 4 :: 2] for host, samples in taken.items()}
            self._apart_s = max((s[-1][0] - s[0][0]) / len(s) for s in taken.values() if s)
        self._samples = taken
        return [
            StandingAlarm(alarm="memory_grows", subject=f"host {host}", text=text)
            for host, samples in taken.items()
            if (text := _growth(host, samples))
        ]


def _growth(host: str, samples: Sequence[tuple[float, float]]) -> str | None:
    """In words, if each quarter of the time lies above the one before, and the last ones grow as the first ones did."""
    if len(samples) < 16 or samples[-1][0] - samples[0][0] < MEMORY_SPAN_S:
        return None
    size = len(samples) // 4
    quarters = [[value for _, value in samples[at * size : (at + 1) * size]] for at in range(3)]
    quarters.append([value for _, value in samples[3 * size :]])
    grows = all(min(later) > max(earlier) for earlier, later in itertools.pairwise(quarters))
    means = [sum(values) / len(values) for values in quarters]
    first, last, spent_s = samples[0][1], samples[-1][1], samples[-1][0] - samples[0][0]
    # What fills a table or a cache slows down by itself.
    if not grows or means[3] - means[2] < 0.5 * (means[1] - means[0]):
        return None
    if last - first < max(LEAST_GROWTH * first, LEAST_GROWTH_BYTES):
        return None
    return (
        f"the memory of host {host} grew from {format_bytes(first)} to {format_bytes(last)} in "
        f"{format_duration(spent_s)}, {format_bytes((last - first) / spent_s * 3600)} an hour"
    )
