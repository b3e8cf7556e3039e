"""What a run tells its user while it goes on: a live panel on a terminal, plain lines elsewhere.

The driver reports facts as values; how they look is decided here and nowhere else.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podembed.orchestrator.api.config import Evaluation, Recovery
from podembed.workers.job.ranking import Baseline

LINE_INTERVAL_S = 5.0
PHASES_INTERVAL_S = 30.0
LINE_WIDTH = 80
NOTABLE_PART_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """State of a run after a window of steps.

    Attributes:
      loss: mean over the window's steps.
      phase_s: seconds a step of each phase, on host 0.
      committed_unix_s: time of the last commit, None before the first.
      staleness: as in the job.
      slowest: own work time of the slowest host over that of the others; see `orchestrator.decisions.stragglers`.
      imbalance: rows asked of the busiest owner over the mean of all.
      failed_saves: saves that failed since the last commit.
      left_s: seconds to the end of the run at the pace of this call so far; None where that is not known yet.
    """

    step: int
    total_steps: int
    samples_per_s: float
    loss: float
    phase_s: Mapping[str, float]
    num_hosts: int
    generation: int
    committed_step: int
    committed_unix_s: float | None
    staleness: int
    slowest: float = 1.0
    imbalance: float = 1.0
    failed_saves: int = 0
    left_s: float | None = None


class Reporter(Protocol):
    """Who is told about the facts of a run."""

    def activity(self, what: str) -> None:
        """What is being done from now on, while no window is trained. The next activity, the next window and `close`
        end it.
        """
        ...

    def notice(self, text: str) -> None: ...

    def window(self, report: WindowReport) -> None: ...

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None: ...

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None: ...

    def recovery(self, recovery: Recovery) -> None: ...

    def close(self) -> None: ...


class SilentReporter:
    """Tells nobody."""

    def activity(self, what: str) -> None: ...

    def notice(self, text: str) -> None: ...

    def window(self, report: WindowReport) -> None: ...

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None: ...

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None: ...

    def recovery(self, recovery: Recovery) -> None: ...

    def close(self) -> None: ...


class LastingConsole(Console):
    """A console whose program goes on when nobody reads its output any more, as behind `| head` or a `tee` that was
    killed.
    """

    def on_broken_pipe(self) -> None:
        # Rich ends the program here. Hours of training are worth more than their lines.
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        with contextlib.suppress(OSError):
            print("podembed: nobody reads the output any more; the run goes on without it", file=sys.stderr)


class ConsoleReporter:
    """Prints to a terminal or a log. Mutated: the live panel and the time of the last line."""

    def __init__(self, console: Console | None = None, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console or LastingConsole(highlight=False)
        self._monotonic_s = monotonic_s
        self._began_s = monotonic_s()
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
        best = "" if best_auc is None else f"  (best reachable {best_auc:.4f})"
        losses = "  ".join(f"{name} {value:.4f}" for name, value in evaluation.losses.items())
        shown = "  ".join(filter(None, ["  ".join(figures(evaluation, baseline)) + best, losses]))
        self.notice(f"step {evaluation.step:>6}  evaluation: {shown}  on {evaluation.num_samples:,} samples")

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.notice(f"committed {name}  {format_bytes(size_bytes)} in {seconds:.1f} s")

    def recovery(self, recovery: Recovery) -> None:
        self.notice(
            f"recovered in {recovery.total_s:.1f} s as generation {recovery.generation}: {recovery.discarded_steps} "
            "steps discarded, "
            f"back at step {recovery.base_step}; noticed within {recovery.detect_s:.1f} s, stop {recovery.stop_s:.1f} "
            "s, "
            f"start {recovery.start_s:.1f} s, restore {recovery.restore_s:.1f} s, compile {recovery.compile_s:.1f} s"
            f"{_parts(recovery)}{_kept(recovery)}"
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._is_panel = False


def _parts(recovery: Recovery) -> str:
    """What a start consists of, the parts that anybody would notice."""
    long = [f"{name} {seconds:.1f}" for name, seconds in recovery.parts_s.items() if seconds >= NOTABLE_PART_S]
    return f" (of these: {', '.join(long)})" if long else ""


def _kept(recovery: Recovery) -> str:
    """What the hosts that lived on spared."""
    if not recovery.survivors:
        return ""
    return f"; hosts that lived on: {recovery.survivors}, {describe_filling(asdict(recovery))}"


def describe_filling(filling: Mapping[str, Any]) -> str:
    """Where the rows of a generation came from, with numbers; `filling` as `WorkerGroup.filling`."""
    moved = ""
    if filling["buckets_moved"]:
        size = format_bytes(filling["bytes_moved"])
        moved = f", moved {filling['buckets_moved']} from host to host ({size} in {filling['move_s']:.1f} s)"
    size = format_bytes(filling["bytes_read"])
    return (
        f"buckets kept {filling['buckets_kept']} (undone in {filling['undo_s']:.1f} s, verified in "
        f"{filling['verify_s']:.1f} s){moved}, "
        f"read {filling['buckets_read']} ({size} in {filling['read_s']:.1f} s)"
    )


def figures(evaluation: Evaluation, baseline: Baseline | None) -> list[str]:
    """AUC, where it has a meaning, and the job's own metrics in words, each with the baseline's behind it where that is
    known.
    """
    known = {} if baseline is None else baseline.figures
    return [
        f"{name} {value:.4f}" + (f" ({baseline.name} {known[name]:.4f})" if baseline and name in known else "")
        for name, value in evaluation.figures.items()
    ]


def format_bytes(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


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
        "samples/s  "
        f"loss {report.loss:.4f}"
    ]
    for part in parts:
        if len(lines) > 1 and len(lines[-1]) + 2 + len(part) <= LINE_WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return lines


def format_rate(per_s: float) -> str:
    """Whole numbers, and millions from ten of them on."""
    return f"{per_s:,.0f}" if per_s < 1e7 else f"{per_s / 1e6:,.1f}M"


def format_duration(seconds: float) -> str:
    """Such as `7 s`, `3:20`, `1:23:45`, and days from two of them on."""
    whole = max(0, round(seconds))
    minutes, rest_s = divmod(whole, 60)
    hours, rest_m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{rest_m:02}:{rest_s:02}" if hours else f"{rest_m}:{rest_s:02}" if minutes else f"{whole} s"


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
