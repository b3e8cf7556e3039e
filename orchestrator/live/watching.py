"""`watch`: shows a run until it ends, on a terminal as one view that changes, elsewhere as a line for each window."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.text import format_duration
from podembed.orchestrator.live.snapshot import Snapshot, Watcher
from podembed.orchestrator.live.view import fault_line, one_line, screen
from podembed.workers.storage.errors import StorageError

LOCAL_S, REMOTE_S = 1.0, 2.0
"""Between two looks."""
_MOST_FAILURES = 30
"""Looks in a row that the storage may fail."""


def watch(run: str, *, console: Console, clock: Clock) -> int:
    """Shows a run until it ends. Returns the exit code.

    Raises:
      ConfigurationError: there is no run, or it has no measurements and no driver.
      StorageError: the storage has not answered for half a minute.
      KeyboardInterrupt: the user has had enough.
    """
    watcher = Watcher(run)
    seen = watcher.look(now_unix_s=clock.wall_s())
    watcher.refuse_without_measurements(seen)
    interval_s = LOCAL_S if watcher.store.is_local else REMOTE_S
    if not console.is_terminal:
        lines = _Lines(console)
        _follow(watcher, seen, lines.show, clock=clock, interval_s=interval_s)
        return 0
    is_unicode = "utf" in (console.encoding or "").lower()

    def view(seen: Snapshot, ended: str = ""):
        return screen(seen, width=console.width, height=console.height, is_unicode=is_unicode, ended=ended)

    # On a screen of its own, so that what was there before comes back. The last view stays.
    with Live(view(seen), console=console, screen=True, auto_refresh=False) as live:

        def show(seen: Snapshot, ended: str) -> None:
            live.update(view(seen, ended), refresh=True)

        seen, ended = _follow(watcher, seen, show, clock=clock, interval_s=interval_s)
    console.print(view(seen, ended))
    return 0


def _follow(
    watcher: Watcher, seen: Snapshot, show: Callable[[Snapshot, str], None], *, clock: Clock, interval_s: float
) -> tuple[Snapshot, str]:
    """Looks again and again. Returns the last look, and why it is that."""
    failures = 0
    was_over = False
    while True:
        ended = _ended(seen)
        # The driver ends its heartbeat before the last measurements are written.
        is_over = bool(ended) and was_over
        show(seen, ended if is_over else "")
        if is_over:
            return seen, ended
        was_over = bool(ended)
        clock.sleep(interval_s)
        try:
            seen = watcher.look(now_unix_s=clock.wall_s())
            failures = 0
        except StorageError:
            failures += 1
            if failures >= _MOST_FAILURES:
                raise


def _ended(seen: Snapshot) -> str:
    """Why nothing more will come; empty while a driver is at work."""
    if seen.is_driven:
        return ""
    if seen.silent_s is not None:
        return f"the driver has been silent for {format_duration(seen.silent_s)}"
    step = seen.window.step if seen.window else 0
    return "ended: all steps are done" if seen.total and step >= seen.total else "ended before its last step"


class _Lines:
    """Prints each window and each fault once. Mutated: what was printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._window: tuple[int, int] = (-1, -1)
        self._faults_until_s: float | None = None

    def show(self, seen: Snapshot, ended: str) -> None:
        if self._faults_until_s is not None:
            for line in seen.faults:
                if line.unix_s > self._faults_until_s:
                    self._print(fault_line(line))
        self._faults_until_s = max((line.unix_s for line in seen.faults), default=self._faults_until_s or 0.0)
        window = (seen.window.generation, seen.window.step) if seen.window else (0, 0)
        if window != self._window:
            self._window = window
            self._print(one_line(seen))
        if ended:
            self._print(ended)

    def _print(self, text: str) -> None:
        # As it is: a pipe has no width.
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
