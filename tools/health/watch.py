"""`HealthWatch`: shows points to all detectors, and says what begins and what ends.

When a later generation begins before the last step, what the steps in between showed is undone. A run's folder leaves
those points out, so both ways come to the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.health import AlarmBegan, AlarmEnded
from podembed.tools.health.alarms import ALARMS, StandingAlarm
from podembed.tools.health.data import DataChanges
from podembed.tools.health.detector import Detector, is_window
from podembed.tools.health.evaluations import BeatsConstant, Evaluations
from podembed.tools.health.learning import LossFalls
from podembed.tools.health.machines import Commits, MemoryGrows
from podembed.tools.health.scores import CalibrationCheck, DenseUpdates
from podembed.tools.health.speed import SlowHost, device_bound, input_bound
from podembed.tools.health.tables import TableHealth
from podembed.tools.metrics.point import Point

DETECTORS: Sequence[Callable[[], Detector]] = (
    input_bound,
    device_bound,
    SlowHost,
    Commits,
    MemoryGrows,
    LossFalls,
    CalibrationCheck,
    BeatsConstant,
    Evaluations,
    DenseUpdates,
    TableHealth,
    DataChanges,
)
MOST_SNAPSHOTS = 512
"""A run that commits more seldom begins anew after a fault."""

Findings = Mapping[tuple[str, str], StandingAlarm]


class HealthWatch:
    """See the module. Mutated by `take`.

    Attributes:
      standing: the findings that stand, by their keys, in the order in which they began.
      began_step: by the same keys, where they began.
    """

    def __init__(self) -> None:
        self._detectors: Sequence[Detector] = [make() for make in DETECTORS]
        self.standing: Findings = {}
        self.began_step: Mapping[tuple[str, str], int] = {}
        self._generation, self._step = -1, 0
        # What was known after windows since the last commit.
        self._snapshots: list[tuple[int, Sequence[Detector], Findings, Mapping[tuple[str, str], int]]] = []

    @property
    def severities(self) -> Mapping[str, str]:
        """Severities of all alarms."""
        return {alarm.name: alarm.severity for alarm in ALARMS.values()}

    def take(self, point: Point) -> list[Event]:
        """Takes the next point in. Returns what begins and what ends with it."""
        before = self.standing
        if point.generation > self._generation and point.first_step < self._step:
            self._go_back(point.first_step)
        if point.generation > self._generation:
            self._generation, self._step = point.generation, point.first_step
        # A late commit's point has a step of long ago.
        self._step = max(self._step, point.step)
        self.standing = self._judged(point)
        self.began_step = {key: self.began_step.get(key, point.step) for key in self.standing}
        self._remember(point)
        begun = [_began(one, point.step) for key, one in self.standing.items() if key not in before]
        ended = [
            AlarmEnded(alarm=name, subject=subject, step=point.step)
            for name, subject in before
            if (name, subject) not in self.standing
        ]
        return [one for one in (*ended, *begun) if not ALARMS[one.alarm].is_said]

    def _judged(self, point: Point) -> Findings:
        standing = dict(self.standing)
        for detector in self._detectors:
            found = detector.take(point, standing.keys())
            if found is None:
                continue
            fresh = {one.key: one for one in found}
            # One that goes on keeps its place, with its newest numbers.
            kept = {
                key: fresh.get(key, one)
                for key, one in standing.items()
                if key in fresh or key[0] not in detector.alarms
            }
            standing = kept | fresh
        return standing

    def _remember(self, point: Point) -> None:
        committed = point.value("committed_step")
        if committed is not None:
            # No fault leads to before it.
            first = max((at for at, one in enumerate(self._snapshots) if one[0] <= committed), default=0)
            self._snapshots = self._snapshots[first:]
        # A commit may follow the evaluation of its step: who goes back to it knows of the evaluation.
        is_of_last = bool(self._snapshots) and point.step == self._snapshots[-1][0]
        if is_window(point) or is_of_last:
            if is_of_last:
                self._snapshots = self._snapshots[:-1]
            knew = [copy.copy(detector) for detector in self._detectors]
            self._snapshots = [
                *self._snapshots[-MOST_SNAPSHOTS + 1 :],
                (point.step, knew, self.standing, self.began_step),
            ]

    def _go_back(self, step: int) -> None:
        self._snapshots = [one for one in self._snapshots if one[0] <= step]
        if self._snapshots:
            _, knew, self.standing, self.began_step = self._snapshots[-1]
            self._detectors = [copy.copy(detector) for detector in knew]
        else:
            self._detectors = [make() for make in DETECTORS]
            self.standing, self.began_step = {}, {}


def _began(finding: StandingAlarm, step: int) -> AlarmBegan:
    return AlarmBegan(
        alarm=finding.alarm,
        subject=finding.subject,
        step=step,
        is_note=finding.kind.is_note,
        finding=finding.text,
        remedy=finding.kind.remedy,
    )
