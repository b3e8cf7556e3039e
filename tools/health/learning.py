"""A loss that does not fall, or rises."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import Standing, is_window
from podembed.tools.metrics.point import Point

CHUNK_STEPS = 20
"""Means over fewer steps are mostly noise."""
RISE_CHUNKS = 3
LATE_CHUNKS = 8
LEAST_STEPS = 200
"""A model begins to learn in tens of steps."""
LEAST_FALL = 0.01
RISE_BEGINS, RISE_ENDS = 1.20, 1.10
"""Losses of windows differ by a few per cent; seasons in the data bring ten."""
RISE_JUMPS = 6.0
"""So many usual differences from chunk to chunk. A model may know its samples by heart, so that a few others make its
loss. Then the best of many means is far below what is usual."""
MOST_JUMPS = 32
FIRST_RISE = 2.0
"""Above the loss of the first window, which is a single step as a rule, and may be a lucky one."""
LEARNS_AUC = 0.55
"""So much says that the model learns, whatever the loss does."""
LEARNS_POSITIVES = 1000.0
"""The AUC of a window with fewer may be luck."""


class LossFalls:
    """Follows the loss in chunks of steps."""

    alarms = frozenset({"loss_not_falling", "loss_rises"})

    def __init__(self) -> None:
        self._is_new: bool | None = None
        self._first = math.nan
        self._open = (0.0, 0)  # sum of the losses, and steps, of the chunk that is not full
        self._chunks: tuple[float, ...] = ()
        # Of one chunk to the next: the logarithm of how many times the loss grew or fell.
        self._jumps: tuple[float, ...] = ()
        self._first_chunk = (math.nan, 0)
        self._best = (math.inf, 0)
        self._learns = False

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        aucs = [point.value("evaluation", metric="auc") or 0.0]
        positives = point.by_label("window_positives", "task")
        by_task = point.by_label("window_auc", "task")
        aucs += [auc for task, auc in by_task.items() if positives.get(task, 0.0) >= LEARNS_POSITIVES]
        if max(aucs) >= LEARNS_AUC:
            self._learns = True
        loss = point.value("loss")
        if loss is None or not is_window(point) or not math.isfinite(loss):
            return None
        if self._is_new is None:
            # A run that goes on, or was thinned, may have learned long ago.
            self._is_new, self._first = point.first_step == 0, loss
        num_steps = point.step - point.first_step
        total, steps = self._open[0] + loss * num_steps, self._open[1] + num_steps
        if steps < CHUNK_STEPS:
            self._open = (total, steps)
            return None
        self._open = (0.0, 0)
        self._close(total / steps, point.step)
        return [*self._rises(point, standing), *self._not_falling(point)]

    def _close(self, mean: float, step: int) -> None:
        if math.isnan(self._first_chunk[0]):
            self._first_chunk = (mean, step)
        if self._chunks and min(self._chunks[-1], mean) > 0:
            self._jumps = (*self._jumps, abs(math.log(mean / self._chunks[-1])))[-MOST_JUMPS:]
        self._chunks = (*self._chunks, mean)[-LATE_CHUNKS:]
        if len(self._chunks) >= RISE_CHUNKS:
            # The best of means of several, since the best of many single ones is luck.
            self._best = min(self._best, (statistics.fmean(self._chunks[-RISE_CHUNKS:]), step))

    def _rises(self, point: Point, standing: Standing) -> list[StandingAlarm]:
        if len(self._chunks) < RISE_CHUNKS:
            return []
        now = statistics.fmean(self._chunks[-RISE_CHUNKS:])
        # A first step that is far better than all that follow was spoilt by the first updates.
        stands = ("loss_rises", "") in standing
        usual = statistics.median(self._jumps) if self._jumps else 0.0
        factor = max(RISE_ENDS if stands else RISE_BEGINS, math.exp(RISE_JUMPS * usual / (2 if stands else 1)))
        reference, step = self._best
        if self._is_new and now >= FIRST_RISE * self._first > 0:
            reference, step = min(self._best, (self._first, 1))
        # Losses below zero have no ratio.
        if reference <= 0 or now < factor * reference:
            return []
        return [
            StandingAlarm(
                alarm="loss_rises",
                text=f"the loss is {now:.4g} at step {point.step}, {now / reference - 1:.0%} above the {reference:.4g} "
                f"of step {step}",
            )
        ]

    def _not_falling(self, point: Point) -> list[StandingAlarm]:
        first, first_step = self._first_chunk
        if not self._is_new or self._learns or point.step < LEAST_STEPS or len(self._chunks) < LATE_CHUNKS:
            return []
        # What fell once and rose again is the other alarm's.
        now, margin = min(statistics.fmean(self._chunks), self._best[0]), LEAST_FALL * abs(first)
        # The first step alone is noisy, and the first chunk may have learned most already. Either may show a fall.
        if now < self._first - margin or now < first - margin / 2:
            return []
        return [
            StandingAlarm(
                alarm="loss_not_falling",
                text=f"the loss is {now:.4g} at step {point.step}, and was {first:.4g} in the first "
                f"{first_step} steps and {self._first:.4g} in the first window",
            )
        ]
