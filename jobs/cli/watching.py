"""`podembed report` and `podembed top`: their flags, and what they print."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a report of one run, or of several side by side, as one HTML file that needs no network. The runs may be in
    training, and nothing of them is changed. It needs the extra `report`: pip install 'podembed[report]'.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders or URLs of runs."""
    out: str
    """HTML file to write; it appears when it is complete."""
    force: bool = False
    """Replace a file that is there."""


@dataclass(frozen=True, kw_only=True)
class Top:
    """Show a run while it trains: progress, speed, loss, what each host waits for, memory, commits and faults. It ends
    with the run, or with Ctrl-C. Into a pipe it prints a line for each window. It reads the run's folder alone.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder or URL of the run."""


Watching = Report | Top

WatchingCommand = Annotated[Report, tyro.conf.subcommand("report")] | Annotated[Top, tyro.conf.subcommand("top")]


def run(command: Watching) -> int:
    """Carries out a command and returns its exit code.

    Raises:
      ConfigurationError, StorageError: see `jobs.outcomes` for the words and codes.
    """
    return _report(command) if isinstance(command, Report) else _top(command)


def _top(command: Top) -> int:
    from rich.console import Console

    from podembed.orchestrator.api.clock import SYSTEM_CLOCK
    from podembed.tools.live.watching import watch

    try:
        return watch(command.run, console=Console(highlight=False), clock=SYSTEM_CLOCK)
    except KeyboardInterrupt:
        # The usual way to leave it; nothing was interrupted.
        return 0


def _report(command: Report) -> int:
    from podembed.orchestrator.api.clock import SYSTEM_CLOCK
    from podembed.orchestrator.api.config import ConfigurationError
    from podembed.orchestrator.api.text import format_bytes, printable
    from podembed.serving.new_files import new_file
    from podembed.tools.report.material import distinct_names, read_material
    from podembed.tools.report.page import render_report
    from podembed.version import version
    from podembed.workers.storage.store import place

    if not command.runs:
        raise ConfigurationError(
            "Found no run. Expected at least one. Add some: podembed report RUN --out report.html."
        )
    now_unix_s, out = SYSTEM_CLOCK.wall_s(), place(command.out)
    # The file is opened first: whoever named a wrong one should know at once.
    with new_file(out, force=command.force) as file:
        names = distinct_names([*command.runs])
        materials = [
            read_material(run, name=name, now_unix_s=now_unix_s) for run, name in zip(command.runs, names, strict=True)
        ]
        file.write(render_report(materials, version=version(), now_unix_s=now_unix_s).encode(errors="replace"))
    size = format_bytes(os.stat(out).st_size)
    print(printable(f"{os.path.abspath(out)}: {', '.join(names)}, {size}"))
    for material in materials:
        for note in material.notes():
            print(printable(f"{material.name}: {note}"), file=sys.stderr)
    return 0
