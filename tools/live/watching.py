"""`watch`: shows a run until it ends, on a terminal as one view that changes, elsewhere as a line for each window."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from podembed.orchestrator.api.clock import Clock
from podembed.orchestrator.api.text import format_duration, printable
from podembed.tools.health.alarms import StandingAlarm
from podembed.tools.live.snapshot import LiveSnapshot, Watcher
from podembed.tools.live.view import alarm_line, fault_line, one_line, screen
from podembed.workers.storage.storage_errors import StorageError

LOCAL_S, REMOTE_S = 1.0, 2.0
"""Between two looks."""
_MOST_FAILURES = 30
"""Looks in a row that the storage may fail."""
LONGEST_START_S = 120.0
"""In which a run that was just begun has its first heartbeat or measurement."""


def watch(run: str, *, console: Console, clock: Clock) -> int:
    """Shows a run until it ends. Returns the exit code.

    Raises:
      ConfigurationError: there is no run, or it has no measurements and no driver. One without commits is waited for.
      StorageError: the storage has not answered for half a minute.
      KeyboardInterrupt: the user has had enough.
    """
    watcher = Watcher(run)
    interval_s = LOCAL_S if watcher.store.is_local else REMOTE_S
    seen = _first_look(watcher, console, clock=clock, interval_s=interval_s)
    if not console.is_terminal:
        lines = _Lines(console)
        _follow(watcher, seen, lines.show, clock=clock, interval_s=interval_s)
        return 0
    is_unicode = "utf" in (console.encoding or "").lower()

    def view(seen: LiveSnapshot, ended: str = ""):
        return screen(seen, width=console.width, height=console.height, is_unicode=is_unicode, ended=ended)

    # On a screen of its own, so that what was there before comes back. The last view stays.
    with Live(view(seen), console=console, screen=True, auto_refresh=False) as live:

        def show(seen: LiveSnapshot, ended: str) -> None:
            live.update(view(seen, ended), refresh=True)

        seen, ended = _follow(watcher, seen, show, clock=clock, interval_s=interval_s)
    console.print(view(seen, ended))
    return 0


def _first_look(watcher: Watcher, console: Console, *, clock: Clock, interval_s: float) -> LiveSnapshot:
    until_s = clock.monotonic_s() + LONGEST_START_S
    seen = watcher.look(now_unix_s=clock.wall_s())
    if not seen.is_known and watcher.may_begin():
        text = f"{printable(watcher.name)}  waiting up to {format_duration(LONGEST_START_S)} for its driver to begin"
        console.print(text, soft_wrap=True, markup=False, highlight=False)
        while not seen.is_known and clock.monotonic_s() < until_s:
            clock.sleep(interval_s)
            seen = watcher.look(now_unix_s=clock.wall_s())
    watcher.refuse_without_measurements(seen)
    return seen


def _follow(
    watcher: Watcher, seen: LiveSnapshot, show: Callable[[LiveSnapshot, str], None], *, clock: Clock, interval_s: float
) -> tuple[LiveSnapshot, str]:
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


def _ended(seen: LiveSnapshot) -> str:
    """Why nothing more will come; empty while a driver is at work."""
    if seen.is_driven:
        return ""
    if seen.silent_s is not None:
        return f"the driver has been silent for {format_duration(seen.silent_s)}"
    step = seen.window.step if seen.window else 0
    return "ended: all steps are done" if seen.total and step >= seen.total else "ended before its last step"


class _Lines:
    """Prints each window and each fault once; of those before the first look, the newest window. Alarms are printed
    when they begin and when they are over. Mutated: what was printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._window: tuple[int, int] | None = None
        self._faults_until_s: float | None = None
        self._alarms: dict[tuple[str, str], tuple[StandingAlarm, int]] = {}

    def show(self, seen: LiveSnapshot, ended: str) -> None:
        if self._faults_until_s is not None:
            for line in seen.faults:
                if line.unix_s > self._faults_until_s:
                    self._print(fault_line(line))
        self._faults_until_s = max((line.unix_s for line in seen.faults), default=self._faults_until_s or 0.0)
        windows = seen.stream.windows
        if self._window is None:
            windows = windows[-1:]
            if not windows:
                self._print(one_line(seen, None))
        for window in windows:
            # A generation that went back does steps again.
            if self._window is None or (window.generation, window.step) > self._window:
                self._print(one_line(seen, window))
        self._window = max(self._window or (-1, -1), *((one.generation, one.step) for one in windows), (-1, -1))
        self._show_alarms({finding.key: (finding, began) for finding, began in seen.alarms})
        if ended:
            self._print(ended)

    def _show_alarms(self, alarms: dict[tuple[str, str], tuple[StandingAlarm, int]]) -> None:
        for key, (finding, began) in self._alarms.items():
            if key not in alarms:
                self._print(alarm_line(finding, began, is_over=True))
        for key, (finding, began) in alarms.items():
            # Its figures change while it stands.
            if key not in self._alarms:
                self._print(alarm_line(finding, began))
        self._alarms = alarms

    def _print(self, text: str) -> None:
        # As it is: a pipe has no width.
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
