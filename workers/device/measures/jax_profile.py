"""`JaxProfile`: what JAX's own profiler saw, as spans of a trace.

The profiler belongs to the whole process, and JAX has one at a time. A job that profiles itself keeps its own, and the
trace goes without. It says when it began by the clock of the day, and times in it count from there. Both clocks are
read at one moment, so the spans lie on the recorder's clock.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podembed.workers.tracing.recorder import JAX_TRACK, MOST_SPANS, Recorder, Span

_LONGEST_TEXT = 200
# Where the profiler keeps the moment at which it began.
_ENVIRONMENT = "Task Environment"
_BEGAN_NS = "profile_start_time"
# The CPU's own mark behind each operation.
_MARKS = "end: "


class JaxProfile:
    """See the module. One trace at a time; mutated: the folder of the one under way.

    Args:
      recorder: recorder whose clock the spans get.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._folder: Path | None = None
        self._ahead_s = 0.0
        self._reason = ""

    def begin(self) -> None:
        """Profiles from now on, unless the process is profiled already. Ends an earlier one."""
        from jax import profiler

        self.end()
        options = profiler.ProfileOptions()
        # Calls of Python functions would fill the trace, and slow the steps.
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        # JAX makes it when the profile ends.
        folder = Path(tempfile.gettempdir()) / f"podembed-profile-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            profiler.start_trace(folder, profiler_options=options)
        except Exception as error:
            self._reason = _in_words(error)
            return
        self._reason = ""
        self._folder = folder
        self._ahead_s = time.time() - self._recorder.now_s()

    def end(self) -> tuple[list[Span], int, str]:
        """What the profiler saw, how many spans found no room, and why there is no profile: empty if there is one."""
        if self._folder is None:
            reason, self._reason = self._reason, ""
            return [], 0, reason
        folder, self._folder = self._folder, None
        try:
            return *self._read(folder), ""
        except Exception as error:
            return [], 0, _in_words(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, folder: Path) -> tuple[list[Span], int]:
        from jax import profiler

        profiler.stop_trace()
        spans: list[Span] = []
        num_dropped = 0
        for file in sorted(folder.rglob("*.xplane.pb")):
            for span in _spans(profiler.ProfileData.from_file(str(file)), self._ahead_s):
                if len(spans) < MOST_SPANS:
                    spans.append(span)
                else:
                    num_dropped += 1
        return spans, num_dropped


def _spans(profile: Any, ahead_s: float) -> Iterator[Span]:
    """Events that last, of all devices and of the threads that run their work.

    Args:
      ahead_s: what the clock of the day shows more than that of the spans.
    """
    planes = [*profile.planes]
    began_ns = next(int(dict(plane.stats)[_BEGAN_NS]) for plane in planes if plane.name == _ENVIRONMENT)
    seen: Counter[str] = Counter()
    for plane in planes:
        # What is above the devices, such as the machine's metadata, has no lines.
        for line in plane.lines:
            name = _track(plane.name, line.name)
            track = f"{JAX_TRACK}{name}" + (f" {seen[name]}" if seen[name] else "")
            seen[name] += 1
            for event in line.events:
                if event.duration_ns > 0 and not event.name.startswith(_MARKS):
                    began_s = (began_ns + event.start_ns) / 1e9 - ahead_s
                    yield Span(track, event.name, began_s, began_s + event.duration_ns / 1e9, _values(event))


def _track(plane: str, line: str) -> str:
    """`XLA Ops of /device:TPU:0`, or a kind of thread: each has a number behind it that says nothing."""
    return line.split("/", 1)[0] if plane.startswith("/host:") else f"{line} of {plane}"


def _values(event: Any) -> dict[str, int | float | str]:
    return {
        key: value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for key, value in event.stats
        # The others join the profile's own threads.
        if not key.startswith("_") and isinstance(value, int | float | str)
    }


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
