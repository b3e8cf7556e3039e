"""What a run is bound by: its input, its devices, one slow host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from podembed.orchestrator.decisions.stragglers import SLOW_RATIO, WELL_RATIO, slow_hosts
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import MeasuredSpan, Standing, is_window, recent, total_s, weighted, window_s
from podembed.tools.metrics.point import Point
from podembed.workers.liveness.progress import Phase

LOOKBACK_S = 60.0
"""A machine is busy with something else for seconds now and then; that is nothing to act on."""
EVIDENCE_S = 30.0
LEAST_WINDOWS = 4
INPUT_BEGINS, INPUT_ENDS = 0.30, 0.15
"""Reading runs beside the steps, so a host that reads fast enough waits for next to nothing."""
DEVICE_BEGINS, DEVICE_ENDS = 0.85, 0.75
"""At this share nothing but the device could make the run a fifth faster."""


class Recent:
    """Windows of the last minute, of one generation. Its first one is left out: there, caches are cold."""

    def __init__(self) -> None:
        self.spans: tuple[MeasuredSpan, ...] = ()
        self._generation: int | None = None

    def with_window(self, point: Point, values: dict[str, float]) -> Recent:
        """Another one with a window more."""
        found = Recent()
        found._generation = point.generation
        if point.generation == self._generation:
            found.spans = recent(self.spans, MeasuredSpan(window_s(point), values), least_s=LOOKBACK_S)
        return found

    @property
    def is_telling(self) -> bool:
        return len(self.spans) >= LEAST_WINDOWS and total_s(self.spans) >= EVIDENCE_S


class WaitDetector:
    """One thing that hosts wait for."""

    def __init__(self, alarm: str, source: str, *, begins: float, ends: float, what: str) -> None:
        self.alarms = frozenset({alarm})
        self._alarm, self._source, self._begins, self._ends, self._what = alarm, source, begins, ends, what
        self._recent = Recent()

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        if not is_window(point):
            return None
        shares = [
            one.value
            for one in point.each("waited_ratio")
            if one.labels.get("source") == self._source and one.value >= 0
        ]
        mean = sum(shares) / len(shares) if shares else 0.0
        self._recent = self._recent.with_window(point, {"waited": mean, "rate": point.value("samples_per_second") or 0})
        if not self._recent.is_telling:
            return []
        spans = self._recent.spans
        share = weighted(spans, "waited")
        if share < (self._ends if (self._alarm, "") in standing else self._begins):
            return []
        rate = weighted(spans, "rate")
        text = (
            f"hosts waited for {self._what} for {share:.0%} of the last {total_s(spans):.0f} s; without that, "
            f"{rate:,.0f} samples a second could be {rate / max(1 - share, 0.01):,.0f}"
        )
        if self._source == "device":
            text = f"hosts waited for {self._what} for {share:.0%} of the last {total_s(spans):.0f} s"
        return [StandingAlarm(alarm=self._alarm, text=text)]


def input_bound() -> WaitDetector:
    return WaitDetector("input_bound", "input", begins=INPUT_BEGINS, ends=INPUT_ENDS, what="their input")


def device_bound() -> WaitDetector:
    return WaitDetector("device_bound", "device", begins=DEVICE_BEGINS, ends=DEVICE_ENDS, what="their devices")


class SlowHost:
    """A host whose own work takes much longer than that of the others."""

    alarms = frozenset({"slow_host"})

    def __init__(self) -> None:
        self._recent = Recent()

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        if not is_window(point):
            return None
        phases = {
            f"{one.labels['host']} {one.labels['phase']}": one.value
            for one in point.each("phase_seconds", "host", "phase")
        }
        num_steps = point.step - point.first_step
        seconds = window_s(point)
        # As shares of the window, so that means over windows are weighted as all others.
        shares = {key: value * num_steps / max(seconds, 1e-9) for key, value in phases.items()}
        self._recent = self._recent.with_window(point, shares)
        if not self._recent.is_telling:
            return []
        spent = self._spent()
        if len(spent) < 2:
            return []
        numbers, of_all_s = list(spent), total_s(self._recent.spans)
        slow = {numbers[one.host]: one for one in slow_hosts([*spent.values()], window_s=of_all_s, ratio=WELL_RATIO)}
        return [
            StandingAlarm(
                alarm="slow_host",
                subject=f"host {host}",
                text=f"host {host} worked {one.ratio:.1f} times as long as the others in the last {of_all_s:.0f} s, "
                f"most of it in {one.phase.value} ({one.phase_s:.1f} s, the others {one.others_phase_s:.1f} s)",
            )
            for host, one in slow.items()
            if one.ratio >= SLOW_RATIO or ("slow_host", f"host {host}") in standing
        ]

    def _spent(self) -> dict[str, dict[Phase, float]]:
        """Seconds by host and phase, of hosts that are in the last window."""
        spans = self._recent.spans
        hosts = {key.partition(" ")[0] for key in spans[-1].values}
        spent: dict[str, dict[Phase, float]] = {host: defaultdict(float) for host in sorted(hosts, key=int)}
        known = {phase.value: phase for phase in Phase}
        for span in spans:
            for key, share in span.values.items():
                host, _, name = key.partition(" ")
                if host in spent and name in known:
                    spent[host][known[name]] += share * span.seconds
        return spent
