"""What evaluations show beside training: a model that is no better than a constant, one that gets worse while its
training loss falls, one that knows its samples by heart, and an AUC that nothing can reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from podembed.orchestrator.api.save_policies import Order, is_better, order_of
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import Standing, is_window, window_s
from podembed.tools.health.scores import CHUNK_POSITIVES, CHUNK_STEPS, CHUNKS, LEAST_STEPS
from podembed.tools.metrics.point import Point

CONSTANT_BEGINS, CONSTANT_ENDS = 1.0, 0.995
"""Normalized entropy, which is 1 for the share of positives as the only score."""
LEAST_SAMPLES = 100_000
"""After so many samples a model that learns has an AUC that is clearly above that of chance."""
CHANCE_BEGINS, CHANCE_ENDS = 0.54, 0.58
LIFT_BEGINS, LIFT_ENDS = 0.25, 0.35
"""Shares of the best reachable AUC's lift over 0.5, where the job knows it."""
FALLS = 3
"""Evaluations in a row that are worse than the best one. One or two may be noise."""
LEAST_FALL_OF_LOSS, LEAST_FALL_OF_SCORE = 0.005, 0.002
"""Relative to the best loss or error. For scores absolute, or relative for those above 1. Evaluations use the same
samples, so noise is small."""
_LEAST_FALL: Mapping[Order, float] = {"min": LEAST_FALL_OF_LOSS, "max": LEAST_FALL_OF_SCORE}
GAP_BEGINS, GAP_ENDS = 0.05, 0.03
"""AUC of training above that of the evaluation. Data of another day differs by a hundredth or two."""
RATIO_BEGINS, RATIO_ENDS = 1.25, 1.15
"""Evaluation loss over training loss, over the lowest such ratio of the run: the two may be unlike from the start."""
RECENT_STEPS = 100
"""Before an evaluation, whose training loss is compared with it. Earlier ones are of a model that knew less."""
LEAST_ABOVE = 0.002
"""An AUC may be better than that of the true probabilities by chance."""
FEW_POSITIVES = 0.05
"""Share of positives that is supposed where it is not measured."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Windows of one task: steps, positives, and the sum of positives × normalized entropy."""

    steps: int = 0
    positives: float = 0.0
    entropy: float = 0.0

    def plus(self, steps: int, positives: float, entropy: float) -> _Chunk:
        return _Chunk(self.steps + steps, self.positives + positives, self.entropy + positives * entropy)

    @property
    def is_full(self) -> bool:
        return self.steps >= CHUNK_STEPS and self.positives >= CHUNK_POSITIVES

    @property
    def mean(self) -> float:
        return self.entropy / self.positives


@dataclass(frozen=True, slots=True)
class _Trained:
    """Training since the evaluation before.

    Attributes:
      losses: mean loss and steps of the last windows, of `RECENT_STEPS` steps or somewhat more.
      auc, positives: by task, sums of AUC × positives, and of positives.
    """

    losses: tuple[tuple[float, int], ...] = ()
    auc: Mapping[str, float] | None = None
    positives: Mapping[str, float] | None = None

    def plus(self, point: Point, loss: float) -> _Trained:
        num_steps = point.step - point.first_step
        auc, positives = dict(self.auc or {}), dict(self.positives or {})
        came = point.by_label("window_positives", "task")
        for task, value in point.by_label("window_auc", "task").items():
            if math.isfinite(value) and came.get(task, 0.0) > 0:
                auc[task] = auc.get(task, 0.0) + value * came[task]
                positives[task] = positives.get(task, 0.0) + came[task]
        losses = (*self.losses, (loss, num_steps))
        while sum(steps for _, steps in losses[1:]) >= RECENT_STEPS:
            losses = losses[1:]
        return _Trained(losses, auc, positives)

    @property
    def mean_loss(self) -> float:
        return sum(loss * steps for loss, steps in self.losses) / sum(steps for _, steps in self.losses)

    def aucs(self) -> dict[str, float]:
        """AUCs of tasks with enough positives."""
        positives = self.positives or {}
        return {task: total / positives[task] for task, total in (self.auc or {}).items() if positives[task] >= 1000.0}


@dataclass(frozen=True, slots=True)
class _Best:
    """The best evaluation of one figure, the training loss beside it, and how many in a row were worse since."""

    value: float
    step: int
    loss: float
    falls: int = 0


class BeatsConstant:
    """Compares scores with one constant: by the normalized entropy of windows, and by the AUC of evaluations."""

    alarms = frozenset({"no_better_than_constant"})

    def __init__(self) -> None:
        # By task: the chunk that is not full, and the last full ones.
        self._open: Mapping[str, _Chunk] = {}
        self._chunks: Mapping[str, tuple[_Chunk, ...]] = {}
        self._batch = 0.0
        self._share: Mapping[str, float] = {}
        # Of the last windows, and of the last evaluation, by task.
        self._by_entropy: Mapping[str, StandingAlarm] = {}
        self._by_auc: Mapping[str, StandingAlarm] = {}

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        if is_window(point):
            self._count(point)
            self._by_entropy = {one.subject: one for one in self._entropies(point, standing)}
        elif aucs := _of_figure(point, "auc"):
            self._by_auc = {one.subject: one for one in self._aucs(point, aucs, standing)}
        else:
            return None
        # One of a task is enough.
        return [*{**self._by_entropy, **self._by_auc}.values()]

    def _count(self, point: Point) -> None:
        steps = point.step - point.first_step
        num_samples = _samples_of(point)
        if num_samples > 0:
            self._batch = num_samples / steps
        self._share = dict(self._share) | _shares_of_positives(point)
        if point.first_step < LEAST_STEPS:
            return
        positives = point.by_label("window_positives", "task")
        open_, chunks = dict(self._open), dict(self._chunks)
        for task, entropy in point.by_label("window_normalized_entropy", "task").items():
            came = positives.get(task, 0.0)
            if not math.isfinite(entropy) or came <= 0:
                continue
            # The window's own share of positives is fitted to its labels: it gains half a nat over all samples, which
            # is at most 1 / (2 positives) of their entropy.
            open_[task] = open_.get(task, _Chunk()).plus(steps, came, entropy - 0.5 / came)
            if open_[task].is_full:
                chunks[task] = (*chunks.get(task, ()), open_.pop(task))[-CHUNKS:]
        self._open, self._chunks = open_, chunks

    def _entropies(self, point: Point, standing: Standing) -> Iterator[StandingAlarm]:
        for task, chunks in self._chunks.items():
            limit = CONSTANT_ENDS if ("no_better_than_constant", task) in standing else CONSTANT_BEGINS
            if len(chunks) < CHUNKS or min(chunk.mean for chunk in chunks) < limit:
                continue
            steps = sum(chunk.steps for chunk in chunks)
            mean = sum(chunk.entropy for chunk in chunks) / sum(chunk.positives for chunk in chunks)
            yield StandingAlarm(
                alarm="no_better_than_constant",
                subject=task,
                text=f"the normalized entropy of the {steps} steps up to {point.step} is {mean:.4f}: the share of "
                "positives as the only score predicts as well or better",
            )

    def _aucs(self, point: Point, aucs: Mapping[str, float], standing: Standing) -> Iterator[StandingAlarm]:
        num_samples = point.step * self._batch
        if point.step < LEAST_STEPS or num_samples < LEAST_SAMPLES:
            return
        best = point.value("reachable_auc")
        for task, auc in aucs.items():
            subject = task or (next(iter(self._share)) if len(self._share) == 1 else "")
            stands = ("no_better_than_constant", subject) in standing
            words = f"the AUC of the evaluation after step {point.step} is {auc:.4f}, after {num_samples:,.0f} samples"
            if auc + 2 * _error_of_auc(point, self._share.get(subject), 0.5) < (
                CHANCE_ENDS if stands else CHANCE_BEGINS
            ):
                text = f"{words}; 0.5 is that of a constant"
            elif best is not None and auc - 0.5 < (LIFT_ENDS if stands else LIFT_BEGINS) * (best - 0.5):
                text = f"{words}, where {best:.4f} is reachable: {(auc - 0.5) / (best - 0.5):.0%} of the way from 0.5"
            else:
                continue
            yield StandingAlarm(alarm="no_better_than_constant", subject=subject, text=text)


class Evaluations:
    """Compares each evaluation with the best one before, and with the training that led to it."""

    alarms = frozenset({"evaluation_falls", "overfits", "auc_above_reachable"})

    def __init__(self) -> None:
        self._trained = _Trained()
        self._share: Mapping[str, float] = {}
        self._best: Mapping[str, _Best] = {}
        self._least_ratio = math.inf

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        if is_window(point):
            loss = point.value("loss")
            if loss is not None and math.isfinite(loss):
                self._trained = self._trained.plus(point, loss)
            self._share = _shares_of_positives(point) or self._share
            return None
        figures = {
            name: value for name, value in point.by_label("evaluation", "metric").items() if math.isfinite(value)
        }
        if not figures:
            return None
        trained, self._trained = self._trained, _Trained()
        if not trained.losses:
            # Another evaluation of the same state, such as the one at the end.
            return None
        signs = point.by_label("evaluation_order", "metric")
        orders = _judged(figures, {name: "max" if sign > 0 else "min" for name, sign in signs.items()})
        improves = self._compare(point.step, figures, orders, trained.mean_loss)
        return [
            *self._falling(point.step, trained.mean_loss, figures, orders, standing),
            *self._overfitted(point, figures, trained, standing, improves=improves),
            *self._too_good(point, standing),
        ]

    def _compare(self, step: int, figures: Mapping[str, float], orders: Mapping[str, Order], loss: float) -> bool:
        """Takes the figures in. Returns whether one of them is clearly better than ever before."""
        best, improves = dict(self._best), False
        for name, order in orders.items():
            value, before = figures[name], best.get(name)
            if before is None or is_better(name, value, before.value, order=order):
                improves |= before is not None and _fall(order, before.value, value) <= -_LEAST_FALL[order]
                best[name] = _Best(value, step, loss)
            else:
                falls = before.falls + 1 if _fall(order, before.value, value) >= _LEAST_FALL[order] else 0
                best[name] = _Best(before.value, before.step, before.loss, falls)
        self._best = best
        return improves

    def _falling(
        self,
        step: int,
        loss: float,
        figures: Mapping[str, float],
        orders: Mapping[str, Order],
        standing: Standing,
    ) -> Iterator[StandingAlarm]:
        for name in orders:
            best = self._best[name]
            # One that began when the training loss fell goes on until the figure comes back.
            stands = ("evaluation_falls", name) in standing
            if best.falls < FALLS or not (stands or loss < best.loss):
                continue
            yield StandingAlarm(
                alarm="evaluation_falls",
                subject=name,
                text=f"{name} of the evaluation is {figures[name]:.4f} after step {step} and was {best.value:.4f} at "
                f"its best, after step {best.step}; the {best.falls} evaluations since are worse, while the training "
                f"loss went from {best.loss:.4g} to {loss:.4g}",
            )

    def _overfitted(
        self,
        point: Point,
        figures: Mapping[str, float],
        trained: _Trained,
        standing: Standing,
        *,
        improves: bool,
    ) -> Iterator[StandingAlarm]:
        """While the evaluation still gets better, a gap begins no alarm: many models learn on that way."""

        def limit(subject: str, begins: float, ends: float) -> float:
            return ends if ("overfits", subject) in standing else math.inf if improves else begins

        aucs, seen = _of_figure(point, "auc"), trained.aucs()
        pairs = {task: seen[task] for task in aucs if task in seen}
        if "" in aucs and len(seen) == 1:
            pairs[""] = next(iter(seen.values()))
        for task, auc in pairs.items():
            share = self._share.get(task or next(iter(seen)))
            if auc - aucs[task] - _error_of_auc(point, share, auc) >= limit(task, GAP_BEGINS, GAP_ENDS):
                yield StandingAlarm(
                    alarm="overfits",
                    subject=task,
                    text=f"the AUC is {auc:.4f} in training and {aucs[task]:.4f} in the evaluation after step "
                    f"{point.step}",
                )
        loss = figures.get("loss", figures.get("log_loss", math.nan))
        if pairs or not (loss > 0 and trained.mean_loss > 0):
            return
        ratio = loss / trained.mean_loss
        least, self._least_ratio = self._least_ratio, min(self._least_ratio, ratio)
        if math.isfinite(least) and ratio >= limit("", RATIO_BEGINS, RATIO_ENDS) * least:
            yield StandingAlarm(
                alarm="overfits",
                text=f"the loss is {trained.mean_loss:.4g} in training and {loss:.4g} in the evaluation after step "
                f"{point.step}, {ratio:.2f} times as high; it was {least:.2f} times as high at first",
            )

    def _too_good(self, point: Point, standing: Standing) -> Iterator[StandingAlarm]:
        auc, best = point.value("evaluation", metric="auc"), point.value("reachable_auc")
        if auc is None or best is None:
            return
        share = next(iter(self._share.values())) if len(self._share) == 1 else None
        margin = max(LEAST_ABOVE, _error_of_auc(point, share, best))
        if auc > best + (margin / 2 if ("auc_above_reachable", "") in standing else margin):
            yield StandingAlarm(
                alarm="auc_above_reachable",
                text=f"the AUC of the evaluation after step {point.step} is {auc:.4f}, and the best that any model can "
                f"reach is {best:.4f}",
            )


def _of_figure(point: Point, figure: str) -> dict[str, float]:
    """A figure of the evaluation by task; of a job without tasks the task is empty."""
    found = {}
    for name, value in point.by_label("evaluation", "metric").items():
        task, _, last = name.rpartition("/")
        if last == figure and math.isfinite(value):
            found[task] = value
    return found


def _judged(figures: Mapping[str, float], declared: Mapping[str, Order]) -> dict[str, Order]:
    """Figures of which it is known what is better, and that. The job's own loss counts where there is no other figure:
    it may be a sum that nobody aims at.
    """
    known: dict[str, Order] = {name: order for name in figures if (order := order_of(name, declared)) is not None}
    aimed_at: dict[str, Order] = {name: order for name, order in known.items() if name.rpartition("/")[2] != "loss"}
    return aimed_at or known


def _fall(order: Order, best: float, value: float) -> float:
    """How much worse a value is than the best one; see `LEAST_FALL_OF_LOSS`."""
    if order == "min":
        return value / best - 1 if best > 0 else value - best
    return (best - value) / max(1.0, abs(best))


def _samples_of(window: Point) -> float:
    return (window.value("samples_per_second") or 0.0) * window_s(window)


def _shares_of_positives(window: Point) -> dict[str, float]:
    """By task, of the samples of a window; empty where these are not known."""
    num_samples = _samples_of(window)
    came = window.by_label("window_positives", "task")
    return {task: positives / num_samples for task, positives in came.items()} if num_samples > 0 else {}


def _error_of_auc(point: Point, share: float | None, auc: float) -> float:
    """A bound of the standard error of an AUC: sqrt(auc (1 - auc) / m) for the smaller number m of the two labels
    (Birnbaum and Klose, "Bounds for the variance of the Mann-Whitney statistic", 1957).

    Args:
      share: share of positives; None where it is not known.
    """
    num_samples = point.value("evaluation_samples") or 0.0
    share = FEW_POSITIVES if share is None else share
    return math.sqrt(auc * (1 - auc) / max(1.0, num_samples * min(share, 1 - share)))
