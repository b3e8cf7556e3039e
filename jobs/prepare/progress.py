"""The progress of a preparation: a bar for each stage on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from podembed.jobs.prepare import preparation

LINE_INTERVAL_S = 5.0
_STAGES = {"count": "counting values", "write": "writing parts"}


class Bars:
    """A context; while it is entered, calling it shows a progress. Mutated: the bars and the time of the last line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = 0.0

    def __enter__(self) -> Bars:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, TextColumn("{task.fields[found]}"), console=self._console)
            self._bars.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: preparation.PreparationProgress) -> None:
        name = _STAGES[progress.stage]
        found = f"{progress.lines:,} lines" + (f", {progress.malformed:,} malformed" if progress.malformed else "")
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=progress.total_bytes, found=found)
            self._bars.update(self._tasks[name], completed=progress.done_bytes, found=found)
            return
        is_last = progress.done_bytes == progress.total_bytes
        if is_last or time.monotonic() - self._last_line_s >= LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            share = progress.done_bytes / max(1, progress.total_bytes)
            self._console.print(f"{name}: {share:.0%}, {found}", soft_wrap=True, markup=False)
