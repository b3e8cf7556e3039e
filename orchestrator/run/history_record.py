"""`history/g<generation>-<number>.json`: loss and evaluations of a whole run, for people and plots; nothing that trains
reads it.

Each record holds the whole history of the steps before it, so one file is enough. Steps that a fault took back are not
in the next one. A driver begins with the newest record, cut to the commit that it starts from. It writes a record with
every commit and another one after the last evaluation, and then deletes those before it. Long histories are thinned, so
a record stays below a megabyte however long the run is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from podembed.orchestrator.api.result import Evaluation
from podembed.orchestrator.api.save_policies import Order, is_better
from podembed.orchestrator.events.commits import HistoryUnread, HistoryUnwritten
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.run.history import History, Window
from podembed.workers.storage.records import decode, encode, read_document
from podembed.workers.storage.storage_errors import NameNotFound, StorageError
from podembed.workers.storage.store import Store

FOLDER = "history"
MAX_WINDOWS = 2048
MAX_EVALUATIONS = 2048
_MAX_BYTES = 4 << 20
_FILE = re.compile(r"g(\d{8,12})-(\d{5,9})\.json")
_READS = 3  # of a record that its driver deletes meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvaluation:
    """One evaluation.

    Attributes:
      generation: generation of the driver that made it.
      metrics: name to value, without those that are not finite.
    """

    generation: int
    step: int
    num_samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRecord:
    """The history of a run up to some step. Windows and evaluations in the order of their steps.

    Attributes:
      generation: generation of the driver that wrote it.
    """

    generation: int = 0
    windows: tuple[Window, ...] = ()
    evaluations: tuple[RecordedEvaluation, ...] = ()

    def cut(self, step: int) -> HistoryRecord:
        """The record without what was done after `step` steps."""
        return replace(
            self,
            windows=tuple(window for window in self.windows if window.step <= step),
            evaluations=tuple(made for made in self.evaluations if made.step <= step),
        )

    def best(self, metric: str, order: Order | None = None) -> RecordedEvaluation | None:
        """The best evaluation, the first of equals; None where none has the metric. `order` as for `is_better`."""
        best: RecordedEvaluation | None = None
        for made in self.evaluations:
            if metric in made.metrics and (
                best is None or is_better(metric, made.metrics[metric], best.metrics[metric], order=order)
            ):
                best = made
        return best


def read_history(store: Store) -> HistoryRecord:
    """The newest record of a run, an empty one if it has none. It may reach beyond the newest commit: `cut` it to that.

    Raises:
      DocumentRefused: it is damaged.
    """
    for attempt in range(_READS):
        names = _names(store)
        if not names:
            return HistoryRecord()
        name = f"{FOLDER}/{names[-1]}"
        try:
            return decode(HistoryRecord, name, read_document(store, name, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES)
        except NameNotFound:
            # Its driver has written the next one, and deleted this one, in between.
            if attempt == _READS - 1:
                raise
    return HistoryRecord()


class HistoryKeeper:
    """Keeps the history of a run on storage.

    Writing may happen in another thread, one at a time. Mutated: `_before`, by the driver's thread; `trouble`, by the
    one that writes.

    Attributes:
      trouble: why the last record was not written or old ones not deleted; a history is no reason to stop training.
    """

    def __init__(self, store: Store, *, emit: Emit) -> None:
        self._store = store
        self._emit = emit
        self._before: HistoryRecord | None = None
        self.trouble: Exception | None = None

    def begin(self, step: int) -> None:
        """A generation starts from `step`. The first one of a driver reads what earlier drivers have left."""
        if self._before is None:
            try:
                self._before = read_history(self._store)
            except (StorageError, OSError) as error:
                self._emit(HistoryUnread(reason=str(error)))
                self._before = HistoryRecord()
        self._before = self._before.cut(step)

    def record(self, history: History, *, generation: int, step: int) -> HistoryRecord:
        """The history up to `step` steps: that of earlier drivers, and `history` of this one."""
        before = self._before or HistoryRecord()
        own = HistoryRecord(windows=tuple(history.windows), evaluations=tuple(_recorded(history, generation)))
        own = own.cut(step)
        return HistoryRecord(
            generation=generation,
            windows=_thinned_windows((*before.windows, *own.windows)),
            evaluations=_thinned_evaluations((*before.evaluations, *own.evaluations)),
        )

    def write(self, record: HistoryRecord) -> None:
        """Writes a record and deletes those before it."""
        self.trouble = None
        try:
            names = _names(self._store)
            newest = max((_key(name)[1] for name in names if _key(name)[0] == record.generation), default=0)
            name = f"g{record.generation:08d}-{newest + 1:05d}.json"
            if not self._store.create_exclusive(f"{FOLDER}/{name}", encode(record)):
                raise StorageError(f"{FOLDER}/{name} is there already")
            for older in names:
                if _key(older) < _key(name):
                    with contextlib.suppress(NameNotFound):
                        self._store.delete(f"{FOLDER}/{older}")
        except (StorageError, OSError) as error:
            self.trouble = error

    def tell(self) -> None:
        """Reports what went wrong with the last record, once."""
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            self._emit(HistoryUnwritten(reason=str(trouble)))


def _recorded(history: History, generation: int) -> list[RecordedEvaluation]:
    """The evaluations of this driver, each under the generation that trained its last step."""
    generations = {window.step: window.generation for window in history.windows}
    return [_evaluation(made, generations.get(made.step, generation)) for made in history.evaluations]


def _evaluation(made: Evaluation, generation: int) -> RecordedEvaluation:
    return RecordedEvaluation(
        generation=generation, step=made.step, num_samples=made.num_samples, metrics=dict(made.comparable)
    )


def _thinned_windows(windows: Sequence[Window]) -> tuple[Window, ...]:
    """At most `MAX_WINDOWS`: adjacent windows of one generation become one, all over the run, so that its beginning and
    its end stay equally fine.
    """
    while len(windows) > MAX_WINDOWS:
        thinned: list[Window] = []
        for at in range(0, len(windows), 2):
            thinned += _joined(windows[at : at + 2])
        if len(thinned) == len(windows):
            return tuple(windows[-MAX_WINDOWS:])
        windows = thinned
    return tuple(windows)


def _joined(pair: Sequence[Window]) -> list[Window]:
    if len(pair) < 2 or pair[0].generation != pair[1].generation or pair[0].step != pair[1].first_step:
        return [*pair]
    first, last = pair
    steps = (first.step - first.first_step, last.step - last.first_step)
    joined: dict[str, Any] = {
        "step": last.step,
        "loss": (first.loss * steps[0] + last.loss * steps[1]) / sum(steps),
        "num_samples": first.num_samples + last.num_samples,
        "seconds": first.seconds + last.seconds,
    }
    return [replace(first, **joined)]


def _thinned_evaluations(made: Sequence[RecordedEvaluation]) -> tuple[RecordedEvaluation, ...]:
    """At most `MAX_EVALUATIONS`, each step once: every second one goes, but for the newest and the best of each
    metric.
    """
    made = list({evaluation.step: evaluation for evaluation in made}.values())
    while len(made) > MAX_EVALUATIONS:
        record = HistoryRecord(evaluations=tuple(made))
        names = {name for evaluation in made for name in evaluation.metrics}
        # Which end is the best one, the job knows.
        ends = [record.best(name, order) for name in names for order in get_args(Order)]
        kept = {end.step for end in ends if end is not None} | {made[-1].step}
        made = [evaluation for at, evaluation in enumerate(made) if at % 2 == 0 or evaluation.step in kept]
    return tuple(made)


def _names(store: Store) -> list[str]:
    """Files of records, the newest last."""
    return sorted((name for name in store.children(FOLDER) if _FILE.fullmatch(name)), key=_key)


def _key(name: str) -> tuple[int, int]:
    match = _FILE.fullmatch(name)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
