"""Input data that changed: inputs that became empty or constant, one id that takes over, columns that were swapped or
shifted, and slow drift.

Each input is judged by what was usual while the reference grew, since data sorted by user, say, is never alike. Two
or three readings must agree before an alarm begins. How much is chance, `tools.metrics.data` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from podembed.orchestrator.api.text import plural
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.health.detector import Standing, shortened
from podembed.tools.metrics.data import CERTAINLY, LEAST_USUAL, USUAL_AT_MOST, became_certain
from podembed.tools.metrics.point import Point

KEPT = 6
SURE_TIMES, VAGUE_TIMES = 2, 3
"""Readings that must agree. The first one may be of samples from before and after; what it looks like is vague."""
CERTAIN_ENDS = 0.99
TAKES_BEGINS, TAKES_ENDS = 0.25, 0.15
"""More of the samples than usual. The share of an id in 4,096 samples is off by 0.01 at most in 68 of 100 cases."""
SHIFT_BEGINS, SHIFT_ENDS = 0.5, 0.3
"""Beyond what is usual. Then half of the samples are others."""
SWAP_BEGINS = 0.3
DRIFT_BEGINS, DRIFT_ENDS = 0.2, 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a point says of one input. None where it does not say it; `empty` is None for columns of numbers."""

    empty: float | None
    top: float | None
    distance: float
    spread: float
    other: str = ""
    other_distance: float = 0.0

    def most(self, later: Reading) -> Reading:
        """The larger one of each number."""
        return replace(
            self,
            empty=_most(self.empty, later.empty),
            top=_most(self.top, later.top),
            distance=max(self.distance, later.distance),
            spread=max(self.spread, later.spread),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The history of one input: usual value, number of readings, newest readings, and the least of all."""

    usual: Reading
    num_usual: int
    least_empty: float
    least_top: float
    newest: tuple[Reading, ...] = ()

    @property
    def above(self) -> tuple[float, ...]:
        """Per new reading, its distance beyond what is usual between places in the data."""
        return tuple(one.distance - max(self.usual.distance, self.usual.spread, one.spread) for one in self.newest)


class DataChanges:
    """Compares each input with itself."""

    alarms = frozenset(
        {
            "feature_empty",
            "feature_constant",
            "id_takes_over",
            "columns_swapped",
            "column_shifted",
            "data_drifts",
            "feature_idle",
        }
    )

    def __init__(self) -> None:
        self._reference = 0.0
        self._known: Mapping[str, Known] = {}

    def take(self, point: Point, standing: Standing) -> Sequence[StandingAlarm] | None:
        """As `Detector.take`."""
        size = point.value("data_reference_samples")
        if size is None:
            return None
        if size < self._reference:
            # Another driver compares with its own first part.
            self._known = {}
        grows, self._reference = size != self._reference, size
        readings = _readings(point)
        self._known = {
            **self._known,
            **{name: _with(self._known.get(name), one, grows=grows) for name, one in readings.items()},
        }
        found: list[StandingAlarm] = []
        drifting: list[tuple[float, str]] = []
        for name in readings:
            known = self._known[name]
            if known.num_usual < LEAST_USUAL:
                continue
            one = next(_found(name, known, standing), None)
            if one is not None:
                found.append(one)
            elif (more := _drift(known, is_standing=("data_drifts", "") in standing)) > 0:
                drifting.append((more, name))
        return [*shortened(found, standing, what="input"), *_drifts(sorted(drifting, reverse=True), len(self._known))]


def _readings(point: Point) -> dict[str, Reading]:
    empty, top = point.by_label("feature_empty_ratio", "feature"), point.by_label("feature_top_ratio", "feature")
    distance = point.by_label("feature_distance_ratio", "feature")
    others = {one.labels["feature"]: one for one in point.each("feature_other_distance_ratio", "feature", "other")}
    return {
        name: Reading(
            empty=empty.get(name),
            top=top.get(name),
            distance=distance.get(name, 0.0),
            spread=spread,
            other=others[name].labels["other"] if name in others else "",
            other_distance=others[name].value if name in others else 0.0,
        )
        for name, spread in point.by_label("feature_spread_ratio", "feature").items()
    }


def _with(known: Known | None, reading: Reading, *, grows: bool) -> Known:
    """With one more reading, which is usual as long as the reference grows, and until there are enough.

    What became certainly empty or alike is never usual, so a fault is found while the reference still grows.
    """
    empty, top = _or(reading.empty, 0.0), _or(reading.top, 0.0)
    if known is None:
        return Known(usual=reading, num_usual=1, least_empty=empty, least_top=top)
    known = replace(known, least_empty=min(known.least_empty, empty), least_top=min(known.least_top, top))
    has_enough = known.num_usual >= LEAST_USUAL
    is_usual = not has_enough or (grows and not _became_certain(known.usual, reading))
    if is_usual:
        known = replace(known, usual=known.usual.most(reading), num_usual=known.num_usual + 1)
    # Behind one that was not usual they show that it is over.
    return known if is_usual and not known.newest else replace(known, newest=(*known.newest, reading)[-KEPT:])


def _became_certain(usual: Reading, reading: Reading) -> bool:
    """Whether all samples of a reading are empty, or alike, as they were not before."""
    became_empty = became_certain(_or(usual.empty, 1.0), _or(reading.empty, 0.0))
    return became_empty or became_certain(_or(usual.top, 1.0), _or(reading.top, 0.0))


def _found(name: str, known: Known, standing: Standing) -> Iterator[StandingAlarm]:
    """What is wrong with one input, the plainest first."""
    usual = known.usual
    if (idle := _idle(known)) is not None:
        yield StandingAlarm(
            alarm="feature_idle", subject=name, text=f"{name} has {idle} in all samples since the beginning"
        )
        return
    if len(known.newest) < SURE_TIMES:
        return
    last, tops = known.newest[-1], [_or(one.top, 0.0) for one in known.newest]
    empties = [_or(one.empty, 0.0) for one in known.newest]

    def holds(alarm: str, values: Sequence[float], begins: float, ends: float, *, times: int) -> bool:
        if (alarm, name) in standing:
            return values[-1] >= ends
        return len(values) >= times and min(values[-times:]) >= begins

    usual_empty, usual_top = _or(usual.empty, 1.0), _or(usual.top, 1.0)
    if usual_empty <= USUAL_AT_MOST and holds("feature_empty", empties, CERTAINLY, CERTAIN_ENDS, times=SURE_TIMES):
        text = f"{name} has no id in {empties[-1]:.1%} of the samples; before, {usual_empty:.1%} had none"
        yield StandingAlarm(alarm="feature_empty", subject=name, text=text)
    thing = "number" if last.empty is None else "id"
    if usual_top <= USUAL_AT_MOST and holds("feature_constant", tops, CERTAINLY, CERTAIN_ENDS, times=SURE_TIMES):
        text = (
            f"{name} has the same {thing} in {tops[-1]:.1%} of the samples; before, no {thing} had more than "
            f"{usual_top:.1%}"
        )
        yield StandingAlarm(alarm="feature_constant", subject=name, text=text)
    above = known.above
    if usual_top < CERTAINLY and holds("columns_swapped", _swaps(known), SWAP_BEGINS, SWAP_BEGINS, times=SURE_TIMES):
        text = (
            f"{name} looks as {last.other} did before: {last.other_distance:.0%} of its samples differ from that, and "
            f"{last.distance:.0%} from what it was itself"
        )
        yield StandingAlarm(alarm="columns_swapped", subject=name, text=text)
    begins, ends = (usual_top + usual.spread + more for more in (TAKES_BEGINS, TAKES_ENDS))
    if usual.top is not None and holds("id_takes_over", tops, begins, ends, times=VAGUE_TIMES):
        text = (
            f"one {thing} of {name} has {tops[-1]:.0%} of the samples; before, the most frequent one had "
            f"{usual_top:.0%}"
        )
        yield StandingAlarm(alarm="id_takes_over", subject=name, text=text)
    is_sudden = ("column_shifted", name) in standing or len(above) < KEPT or min(above) < DRIFT_BEGINS
    is_far = holds("column_shifted", above, SHIFT_BEGINS, SHIFT_ENDS, times=VAGUE_TIMES)
    if usual_top < CERTAINLY and is_sudden and is_far:
        text = f"{name} changed at once: {last.distance:.0%} of its samples differ from those before, {_usually(known)}"
        yield StandingAlarm(alarm="column_shifted", subject=name, text=text)


def _idle(known: Known) -> str | None:
    """What an input of ids has always had; None where it has changed."""
    if known.least_empty == 1.0:
        return "no id"
    # Bins of numbers are wide, so that years, say, are always in one of them.
    is_alike = known.least_top == 1.0 and known.usual.empty is not None
    # Each part of sorted data may have one id, and each another one.
    stays = max(one.distance for one in (known.usual, *known.newest)) < DRIFT_ENDS
    return "the same id" if is_alike and stays else None


def _swaps(known: Known) -> list[float]:
    """Per new reading, by how much it is unusual, if it looks like the same other input as the newest one."""
    other = known.newest[-1].other
    return [
        above if other and one.other == other else 0.0 for above, one in zip(known.above, known.newest, strict=True)
    ]


def _drift(known: Known, *, is_standing: bool) -> float:
    """The distance that an input has drifted; 0 where that is nothing unusual."""
    above = known.above
    if len(above) < VAGUE_TIMES or _or(known.usual.top, 1.0) >= CERTAINLY:
        return 0.0
    is_far = above[-1] >= DRIFT_ENDS if is_standing else min(above[-VAGUE_TIMES:]) >= DRIFT_BEGINS
    return known.newest[-1].distance if is_far else 0.0


def _drifts(drifting: Sequence[tuple[float, str]], num_inputs: int) -> list[StandingAlarm]:
    if not drifting:
        return []
    named = ", ".join(f"{name} by {distance:.0%} of its samples" for distance, name in drifting[:3])
    text = (
        f"{len(drifting)} of {plural(num_inputs, 'input')} differ from the first part of the run, most of all {named}"
    )
    if len(drifting) == 1:
        text = f"{drifting[0][1]} differs from the first part of the run in {drifting[0][0]:.0%} of its samples"
    return [StandingAlarm(alarm="data_drifts", text=text)]


def _usually(known: Known) -> str:
    return f"usual are {max(known.usual.distance, known.usual.spread, known.newest[-1].spread):.0%}"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _most(first: float | None, second: float | None) -> float | None:
    return max((one for one in (first, second) if one is not None), default=None)
