"""`TensorBoardSink`: measurements as TensorBoard's event files. Imported only where a run asks for it, since their
writer is an extra.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

from podembed.tools.metrics.point import Measurement, Point, StreamLine

_Fold = Callable[[Iterable[float]], float]

SUMMARY: Mapping[str, tuple[str, _Fold]] = {
    # Learning.
    "loss": ("", max),
    "evaluation": ("metric", max),
    "reachable_auc": ("", max),
    "window_auc": ("task", max),
    "window_normalized_entropy": ("task", max),
    "window_calibration": ("task", max),
    "dense_gradient_norm": ("", max),
    "dense_update_norm": ("", max),
    # Where the run stands.
    "step": ("", max),
    "left_seconds": ("", max),
    "hosts": ("", max),
    "alarm": ("", sum),
    # Speed.
    "samples_per_second": ("", max),
    "step_seconds": ("", max),
    "goodput_ratio": ("", max),
    "waited_ratio": ("source", fmean),
    "slowest_host_ratio": ("", max),
    # Commits and faults.
    "committed_step": ("", max),
    "commit_seconds": ("", max),
    "commit_bytes": ("", max),
    "failed_saves": ("", max),
    "recoveries": ("", sum),
    "lost_steps": ("", sum),
    "recovery_seconds": ("", max),
    # Tables, data and machines.
    "table_row_growth": ("quantile", max),
    "feature_distance_ratio": ("", max),
    "malformed_rows": ("", max),
    "memory_bytes": ("", max),
}
"""Series that are written where not all are asked for: the label that stays a part of the tag, and what becomes of the
values of all other labels, such as those of all hosts. So the number of tags depends on no number of hosts and tables.
"""


class TensorBoardSink:
    """A `Sink`. Mutated: the open file, and the newest values of what is summed.

    A tag is the name of a series and the values of its labels, such as `phase_seconds/0/device`; of `SUMMARY`, only the
    value of one label, such as `waited_ratio/device`. Each generation has a file of its own. It begins with the step
    that it goes on from, so that TensorBoard drops what a fault took back.

    Args:
      folder: folder of the event files, on this machine; it is made when the first point comes.
      is_full: write every series with all its labels, not only `SUMMARY`.
    """

    flush_s = 10.0

    def __init__(self, folder: str, *, is_full: bool = False) -> None:
        # Its writer at the top gives events to a thread, in which errors are lost.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self.name = f"TensorBoard's files in {folder}"
        self._folder, self._open, self._events, self._summaries = folder, EventsWriter, event_pb2, summary_pb2
        self._is_full = is_full
        self._file: Any = None
        self._generation = -1
        # Tag → labels → value of what is summed: a point names only what changed.
        self._summed: dict[str, dict[tuple[str, ...], float]] = {}

    def write(self, line: StreamLine) -> None:
        point = line.point
        if point is None:
            return
        tags = [(tag_of(one), one.value) for one in point.measurements] if self._is_full else self._summary(point)
        if not tags:
            return
        file = self._file_for(point)
        values = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in tags]
        file.write_event(
            self._events.Event(step=point.step, wall_time=line.unix_s, summary=self._summaries.Summary(value=values))
        )

    def _summary(self, point: Point) -> list[tuple[str, float]]:
        """Tags and values of `SUMMARY` that the point has."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        folds: dict[str, _Fold] = {}
        for one in point.measurements:
            # A note says that nothing is wrong.
            if one.name not in SUMMARY or one.labels.get("severity") == "info":
                continue
            label, fold = SUMMARY[one.name]
            tag = _tag(one.name, [one.labels[label]] if label else [])
            kept = self._summed if fold is sum else found
            kept.setdefault(tag, {})[tuple(one.labels.values())] = one.value
            found[tag], folds[tag] = kept[tag], fold
        return [(tag, folds[tag](values.values())) for tag, values in found.items()]

    def _file_for(self, point: Point) -> Any:
        if self._file is not None and point.generation == self._generation:
            return self._file
        self.close()
        os.makedirs(self._folder, exist_ok=True)
        # Two generations, or two drivers, may begin within a second. Their files must not have one name.
        suffix = f".{point.generation}-{secrets.token_hex(2)}"
        file = self._open(os.path.join(self._folder, "events"), suffix)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        # The step from which the generation goes on still counts.
        file.write_event(self._events.Event(step=point.first_step + 1, wall_time=point.unix_s, session_log=start))
        self._file, self._generation = file, point.generation
        return file

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def tag_of(one: Measurement) -> str:
    """The tag of a series in TensorBoard, which groups series by the part before a slash."""
    return _tag(one.name, [one.labels[name] for name in one.metric.labels if one.labels.get(name)])


def _tag(name: str, labels: Iterable[str]) -> str:
    return "/".join([name, *(label.replace(" ", "_") for label in labels)])
