"""Predictions that do not fit what comes, and updates of the dense half that are too large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import Standing, is_window
from podembed.tools.metrics.point import Point

CHUNK_STEPS = 50
CHUNK_POSITIVES = 1000.0
"""The count of so many positives is known to 3 %."""
CHUNKS = 3
LEAST_STEPS = 200
"""A model begins anywhere and finds the share of positives in tens of steps."""
OFF_BEGINS, OFF_ENDS = 0.10, 0.07
"""Calibrated models stay within a few per cent."""
STILL_FALLS = 0.8
"""A deviation that shrinks by a fifth from chunk to chunk is on its way."""
UPDATE_BEGINS, UPDATE_ENDS = 0.1, 0.07
"""Adam changes a healthy model by hundredths of its norm in the first steps, and by thousandths later."""


@dataclass(frozen=True, slots=True)
class _Count:
    steps: int = 0
    predicted: float = 0.0
    positives: float = 0.0

    def plus(self, steps: int, predicted: float, positives: float) -> _Count:
        return _Count(self.steps + steps, self.predicted + predicted, self.positives + positives)

    @property
    def is_full(self) -> bool:
        return self.steps >= CHUNK_STEPS and self.positives >= CHUNK_POSITIVES

    @property
    def log_ratio(self) -> float:
        return math.log(max(self.predicted, 1e-9) / self.positives)


class CalibrationCheck:
    """Compares the positives that scores predict with those that came, in chunks of steps."""

    alarms = frozenset({"calibration_off"})

    def __init__(self) -> None:
        # By task: the chunk that is not full, and the last full ones.
        self._open: Mapping[str, _Count] = {}
        self._chunks: Mapping[str, tuple[_Count, ...]] = {}

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        calibration = point.by_label("window_calibration", "task")
        if not is_window(point) or not calibration or point.first_step < LEAST_STEPS:
            return None
        positives = point.by_label("window_positives", "task")
        open_, chunks = dict(self._open), dict(self._chunks)
        for task, ratio in calibration.items():
            count = positives.get(task, 0.0)
            if not math.isfinite(ratio) or count <= 0:
                continue
            open_[task] = open_.get(task, _Count()).plus(point.step - point.first_step, ratio * count, count)
            if open_[task].is_full:
                chunks[task] = (*chunks.get(task, ()), open_.pop(task))[-CHUNKS:]
        self._open, self._chunks = open_, chunks
        found = (_off(task, found, point, standing) for task, found in chunks.items())
        return [one for one in found if one is not None]


def _off(task: str, chunks: tuple[_Count, ...], point: Point, standing: Standing) -> StandingAlarm | None:
    limit = math.log1p(OFF_ENDS if ("calibration_off", task) in standing else OFF_BEGINS)
    ratios = [chunk.log_ratio for chunk in chunks]
    is_off = min(ratios) > limit or max(ratios) < -limit
    if len(ratios) < CHUNKS or not is_off or abs(ratios[-1]) < STILL_FALLS ** (CHUNKS - 1) * abs(ratios[0]):
        return None
    predicted, positives = sum(chunk.predicted for chunk in chunks), sum(chunk.positives for chunk in chunks)
    steps = sum(chunk.steps for chunk in chunks)
    return StandingAlarm(
        alarm="calibration_off",
        subject=task,
        text=f"in the {steps} steps up to {point.step} the scores predicted {predicted:,.0f} positives and "
        f"{positives:,.0f} came, {predicted / positives:.2f} times as many",
    )


class DenseUpdates:
    """Compares the updates of the dense half with its size."""

    alarms = frozenset({"learning_rate_too_high"})

    def __init__(self) -> None:
        self._open = (0.0, 0)  # sum of the ratios of steps, and steps, of the chunk that is not full
        self._chunks: tuple[float, ...] = ()

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        update, norm = point.value("dense_update_norm"), point.value("dense_parameter_norm")
        if update is None or not norm or not is_window(point) or point.first_step < LEAST_STEPS:
            return None
        steps = point.step - point.first_step
        total, count = self._open[0] + steps * update / norm, self._open[1] + steps
        if count < CHUNK_STEPS:
            self._open = (total, count)
            return None
        self._open, self._chunks = (0.0, 0), (*self._chunks, total / count)[-CHUNKS:]
        limit = UPDATE_ENDS if ("learning_rate_too_high", "") in standing else UPDATE_BEGINS
        if len(self._chunks) < CHUNKS or min(self._chunks) < limit:
            return []
        return [
            StandingAlarm(
                alarm="learning_rate_too_high",
                text=f"each step changes the dense parameters by {self._chunks[-1]:.0%} of their norm, "
                f"up to step {point.step}",
            )
        ]
