"""What a run tells its user while it goes on: a live panel on a terminal, plain lines elsewhere.

The driver reports facts as values; how they look is decided here and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.config import Evaluation, Recovery
from workers.ranking import Baseline

LINE_INTERVAL_S = 5.0
NOTABLE_PART_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """State of a run after a window of steps.

    Attributes:
      loss: mean over the window's steps.
      phase_s: seconds a step of each phase, on host 0.
      committed_unix_s: time of the last commit, None before the first.
      staleness: as in the job.
      slowest: own work time of the slowest host over that of the others; see `orchestrator.stragglers`.
      imbalance: rows asked of the busiest owner over the mean of all.
      failed_saves: saves that failed since the last commit.
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


class Reporter(Protocol):
    """Who is told about the facts of a run."""

    def notice(self, text: str) -> None: ...

    def window(self, report: WindowReport) -> None: ...

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None: ...

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None: ...

    def recovery(self, recovery: Recovery) -> None: ...

    def close(self) -> None: ...


class SilentReporter:
    """Tells nobody."""

    def notice(self, text: str) -> None: ...

    def window(self, report: WindowReport) -> None: ...

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None: ...

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None: ...

    def recovery(self, recovery: Recovery) -> None: ...

    def close(self) -> None: ...


class LastingConsole(Console):
    """A console whose program goes on when nobody reads its output any more, as behind `| head` or a `tee` that was killed."""

    def on_broken_pipe(self) -> None:
        # Rich ends the program here. Hours of training are worth more than their lines.
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        with contextlib.suppress(OSError):
            print("podembed: nobody reads the output any more; the run goes on without it", file=sys.stderr)


class ConsoleReporter:
    """Prints to a terminal or a log. Mutated: the live panel and the time of the last line."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or LastingConsole(highlight=False)
        self._live: Live | None = None
        self._last_line_s = 0.0

    def notice(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def window(self, report: WindowReport) -> None:
        # A dumb terminal shows no live panel at all.
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(_panel(report))
        elif time.monotonic() - self._last_line_s >= LINE_INTERVAL_S or report.step == report.total_steps:
            self._last_line_s = time.monotonic()
            self._console.print(_line(report), soft_wrap=True, markup=False)

    def evaluation(self, evaluation: Evaluation, *, best_auc: float | None, baseline: Baseline | None) -> None:
        best = "" if best_auc is None else f"  (best reachable {best_auc:.4f})"
        losses = "  ".join(f"{name} {value:.4f}" for name, value in evaluation.losses.items())
        shown = "  ".join(filter(None, ["  ".join(figures(evaluation, baseline)) + best, losses]))
        self.notice(f"step {evaluation.step:>6}  evaluation: {shown}  on {evaluation.num_samples:,} samples")

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.notice(f"committed {name}  {format_bytes(size_bytes)} in {seconds:.1f} s")

    def recovery(self, recovery: Recovery) -> None:
        self.notice(
            f"recovered in {recovery.total_s:.1f} s as generation {recovery.generation}: {recovery.discarded_steps} steps discarded, "
            f"back at step {recovery.base_step}; noticed within {recovery.detect_s:.1f} s, stop {recovery.stop_s:.1f} s, "
            f"start {recovery.start_s:.1f} s, restore {recovery.restore_s:.1f} s, compile {recovery.compile_s:.1f} s"
            f"{_parts(recovery)}{_kept(recovery)}"
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


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
        f"buckets kept {filling['buckets_kept']} (undone in {filling['undo_s']:.1f} s, verified in {filling['verify_s']:.1f} s){moved}, "
        f"read {filling['buckets_read']} ({size} in {filling['read_s']:.1f} s)"
    )


def figures(evaluation: Evaluation, baseline: Baseline | None) -> list[str]:
    """AUC, where it has a meaning, and the job's own metrics in words, each with the baseline's behind it where that is known."""
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
    longest = sorted(report.phase_s.items(), key=lambda item: -item[1])
    return "  ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in longest if seconds >= 5e-5)


def _line(report: WindowReport) -> str:
    return (
        f"step {report.step:>6}/{report.total_steps}  {report.samples_per_s:>8,.0f} samples/s  loss {report.loss:.4f}  "
        f"hosts {report.num_hosts}  generation {report.generation}{_staleness(report)}  {_age(report)}  |  ms a step: {_phases(report)}"
    )


def _staleness(report: WindowReport) -> str:
    return f"  staleness {report.staleness}" if report.staleness else ""


def _panel(report: WindowReport) -> Group:
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {report.step}/{report.total_steps}", style="bold"),
        ProgressBar(total=report.total_steps, completed=report.step, width=30),
        f"{report.samples_per_s:,.0f} samples/s",
        f"loss {report.loss:.4f}",
        f"hosts {report.num_hosts}",
        f"generation {report.generation}{_staleness(report)}",
    )
    return Group(head, Text(f"ms a step: {_phases(report)}", style="dim"), Text(_age(report), style="dim"))
