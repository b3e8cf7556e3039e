"""`TensorBoardSink`: measurements as TensorBoard's event files. Imported only where a run asks for it, since their
writer is an extra.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from podembed.orchestrator.metrics.point import Line, Measurement, Point


class TensorBoardSink:
    """A `Sink`. Mutated: the open file.

    A tag is the name of a series and the values of its labels, such as `phase_seconds/0/device`. Each generation has a
    file of its own. It begins with the step that it goes on from, so that TensorBoard drops what a fault took back.

    Args:
      folder: of the event files, on this machine; it is made when the first point comes.
    """

    flush_s = 10.0

    def __init__(self, folder: str) -> None:
        # Its writer at the top gives events to a thread, in which errors are lost.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self.name = f"TensorBoard's files in {folder}"
        self._folder, self._open, self._events, self._summaries = folder, EventsWriter, event_pb2, summary_pb2
        self._file: Any = None
        self._generation = -1

    def write(self, line: Line) -> None:
        point = line.point
        if point is None:
            return
        file = self._file_for(point)
        values = [self._summaries.Summary.Value(tag=tag_of(one), simple_value=one.value) for one in point.measurements]
        file.write_event(
            self._events.Event(step=point.step, wall_time=line.unix_s, summary=self._summaries.Summary(value=values))
        )

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
    """Where TensorBoard shows a series. It makes groups of what stands before a slash."""
    labels = (one.labels[name] for name in one.metric.labels if name in one.labels)
    return "/".join([one.name, *(label.replace(" ", "_") for label in labels)])
