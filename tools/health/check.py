"""`check_health`: what the stream in a run's folder says of its health, as its driver would have said it; and that in
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import format_duration, plural
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.watch import HealthWatch
from podembed.tools.metrics.point import Point
from podembed.tools.metrics.reading import StreamReader
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHealth:
    """A run's health at the end of its stream.

    Attributes:
      standing: findings that stand, with the steps at which they began.
      over: alarms that began and ended, with both steps; those of a driver's own events as well.
      num_windows, step, total_steps: what was measured.
      age_s: of the last point; of a run that trains, seconds.
      num_unread: lines that are damaged or of a later version.
    """

    standing: Sequence[tuple[StandingAlarm, int]]
    over: Sequence[tuple[AlarmBegan, int]]
    num_windows: int
    step: int
    total_steps: int
    age_s: float
    num_unread: int

    @property
    def is_healthy(self) -> bool:
        """Whether nothing but notes stands."""
        return all(finding.kind.is_note for finding, _ in self.standing)


def check_health(store: Store, *, now_unix_s: float) -> RunHealth:
    """Reads the stream and shows it to the detectors.

    Raises:
      ConfigurationError: the run has no measurements.
      StorageError: the storage does not answer.
    """
    stream = StreamReader(store).read()
    if not stream.windows:
        raise ConfigurationError(
            f"Found no measurements of a window in {store.location}. Expected some in its folder metrics/. A run has "
            "them after its first steps, unless an older version trained it, or MetricsConfig(in_run=False) was "
            "set. Train further."
        )
    watch, events = replayed(stream.points)
    last = stream.windows[-1]
    return RunHealth(
        standing=[(one, watch.began_step[key]) for key, one in watch.standing.items()],
        over=_over(events),
        num_windows=len(stream.windows),
        step=last.step,
        total_steps=int(last.value("steps_planned") or 0),
        age_s=max(0.0, now_unix_s - stream.points[-1].unix_s),
        num_unread=stream.num_unread,
    )


def replayed(points: Sequence[Point]) -> tuple[HealthWatch, list[Event]]:
    """A watch that has seen these points, and what it said."""
    watch = HealthWatch()
    return watch, [event for point in points for event in watch.take(point)]


def _over(events: Sequence[Event]) -> list[tuple[AlarmBegan, int]]:
    """Alarms that ended, with the steps at which they did."""
    begun: dict[tuple[str, str], AlarmBegan] = {}
    over = []
    for event in events:
        if isinstance(event, AlarmBegan):
            begun[event.alarm, event.subject] = event
        elif isinstance(event, AlarmEnded) and (began := begun.pop((event.alarm, event.subject), None)) is not None:
            over.append((began, event.step))
    return over


def render(health: RunHealth) -> str:
    """For people: what stands, with remedies, and then what is over."""
    of_all = f" of {health.total_steps:,}" if health.total_steps else ""
    lines = [
        f"step {health.step:,}{of_all}, {plural(health.num_windows, 'window')} of steps, last measured "
        f"{format_duration(health.age_s)} ago"
    ]
    if health.num_unread:
        lines.append(f"{plural(health.num_unread, 'line')} could not be read: damaged, or of a later version")
    alarms = [one for one in health.standing if not one[0].kind.is_note]
    notes = [one for one in health.standing if one[0].kind.is_note]
    lines.append("healthy: no alarm stands" if not alarms else f"{plural(len(alarms), 'alarm')}:")
    lines += [_shown("ALARM", finding, began) for finding, began in alarms]
    lines += [_shown("note", finding, began) for finding, began in notes]
    if health.over:
        lines.append("over:")
        lines += [
            f"  {began.alarm}, steps {began.step:,} to {ended:,}: {began.finding}" for began, ended in health.over
        ]
    return "\n".join(lines)


def _shown(word: str, finding: StandingAlarm, began: int) -> str:
    text = finding.text[:1].upper() + finding.text[1:]
    return f"  {word} {finding.alarm} since step {began:,}\n    {text}.\n    {finding.kind.remedy}"
