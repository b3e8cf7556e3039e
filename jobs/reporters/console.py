"""What a run tells its user while it goes on: a live panel on a terminal, plain lines elsewhere.

The driver emits events; an event's `sentence` puts them into words, and how these look is decided here.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podembed.orchestrator.api.result import Evaluation, Recovery
from podembed.orchestrator.api.text import format_duration, format_rate
from podembed.orchestrator.events.commits import commit_line
from podembed.orchestrator.events.progress import Evaluated, WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.run import Recovered
from podembed.workers.job.ranking import Baseline

LINE_INTERVAL_S = 5.0
PHASES_INTERVAL_S = 30.0
LINE_WIDTH = 80


class LastingConsole(Console):
    """A console whose program goes on when no process reads its output any more, as behind `| head` or a `tee` that was
    killed.
    """

    def on_broken_pipe(self) -> None:
        # Rich ends the program here. Hours of training are worth more than their lines.
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        with contextlib.suppress(OSError):
            print("podembed: nobody reads the output any more; the run goes on without it", file=sys.stderr)


class ConsoleReporter(SilentReporter):
    """Prints to a terminal or a log. Mutated: the live panel and the time of the last line.

    Args:
      began_s: moment from which times count, by `monotonic_s`; now by default.
    """

    def __init__(
        self,
        console: Console | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        began_s: float | None = None,
    ) -> None:
        self._console = console or LastingConsole(highlight=False)
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s() if began_s is None else began_s
        self._live: Live | None = None
        self._is_panel = False
        self._last_line_s = self._last_phases_s = -math.inf

    def activity(self, what: str) -> None:
        now_s = self._monotonic_s()
        if self._has_panel:
            self.close()
            self._start_live(_Running(what, now_s, self._monotonic_s))
        else:
            self.notice(f"{now_s - self._began_s:6.1f} s  {what}")

    def notice(self, text: str) -> None:
        # A terminal would cut words at its edge. A log keeps a sentence in one line, for grep.
        self._console.print(text, soft_wrap=not self._console.is_terminal, markup=False)

    def window(self, report: WindowReport) -> None:
        now_s = self._monotonic_s()
        if self._has_panel:
            if self._live is None or not self._is_panel:
                self.close()
                self._start_live(_panel(report))
                self._is_panel = True
            elif self._live is not None:
                self._live.update(_panel(report))
        elif now_s - self._last_line_s >= LINE_INTERVAL_S or report.step == report.total_steps:
            self._last_line_s = now_s
            lines = _lines(report)
            if now_s - self._last_phases_s >= PHASES_INTERVAL_S:
                self._last_phases_s = now_s
                lines.append(_phases(report))
            self._console.print("\n".join(lines), soft_wrap=True, markup=False)

    @property
    def _has_panel(self) -> bool:
        # A dumb terminal shows nothing that moves.
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def _start_live(self, shown: RenderableType) -> None:
        self._live = Live(shown, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None:
        self.notice(Evaluated(evaluation=evaluation, best_auc=best_auc, baseline=baseline).sentence())

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.notice(commit_line(name, size_bytes=size_bytes, seconds=seconds))

    def recovery(self, recovery: Recovery) -> None:
        self.notice(Recovered(recovery=recovery).sentence())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._is_panel = False


def _age(report: WindowReport) -> str:
    alarm = f", {report.failed_saves} SAVES FAILED since" if report.failed_saves else ""
    if report.committed_unix_s is None:
        return f"no commit yet{alarm}"
    return f"committed step {report.committed_step}, {max(0.0, time.time() - report.committed_unix_s):.0f} s ago{alarm}"


def _phases(report: WindowReport) -> str:
    """The longest phases, as many as fit a line."""
    line = "  ms a step:"
    for name, seconds in sorted(report.phase_s.items(), key=lambda item: -item[1]):
        part = f"  {name} {seconds * 1e3:.1f}"
        if seconds < 5e-5 or len(line) + len(part) > LINE_WIDTH:
            break
        line += part
    return line


def _lines(report: WindowReport) -> list[str]:
    """Where the run stands, in lines of 80 columns: first what changes, then what seldom does."""
    share = report.step / max(1, report.total_steps)
    left = (
        "" if report.left_s is None or report.step >= report.total_steps else f"  {format_duration(report.left_s)} left"
    )
    staleness = [f"staleness {report.staleness}"] if report.staleness else []
    parts = [f"hosts {report.num_hosts}", f"generation {report.generation}", *staleness, _age(report)]
    lines = [
        f"step {report.step:>6}/{report.total_steps}  {share:5.1%}{left}  {format_rate(report.samples_per_s)} "
        f"samples/s  loss {report.loss:.4f}"
    ]
    for part in parts:
        if len(lines) > 1 and len(lines[-1]) + 2 + len(part) <= LINE_WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return lines


@dataclass(frozen=True, slots=True)
class _Running:
    """An activity with its seconds, drawn anew whenever the terminal is refreshed."""

    what: str
    began_s: float
    monotonic_s: Callable[[], float]

    def __rich__(self) -> Text:
        return Text(f"{self.what}: {self.monotonic_s() - self.began_s:.0f} s", style="dim")


def _panel(report: WindowReport) -> Group:
    head, *rest = _lines(report)
    # A bar does not end its line by itself; a row of a table does.
    bar = Table.grid()
    bar.add_row(ProgressBar(total=report.total_steps, completed=report.step, width=LINE_WIDTH))
    return Group(
        bar,
        Text(head, style="bold"),
        *(Text(line, style="dim") for line in (*rest, _phases(report))),
    )
