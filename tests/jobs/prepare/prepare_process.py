"""A preparation in a process of its own, so that it can be killed: `python -m tests.jobs.prepare.prepare_process SOURCE
OUT AWAITED`.

It stops itself (SIGSTOP) after the first piece that is done when the file AWAITED is there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from podembed.jobs.prepare.preparation import PreparationProgress, PreparedFolder, prepare
from tests.jobs.prepare.preparing import criteo_settings


def run(
    source: str, folder: Path, *, workers: int, on_progress: Callable[[PreparationProgress], None] = lambda _: None
) -> PreparedFolder:
    """Prepares in pieces of about 150 lines, with vocabularies."""
    settings = criteo_settings(piece_bytes=40_000)
    return prepare([source], folder, settings, workers=workers, max_bad_lines=5, on_progress=on_progress)


def stop_when_there(awaited: Path) -> None:
    if awaited.exists():
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    _, source, folder, awaited = sys.argv
    run(source, Path(folder), workers=2, on_progress=lambda _: stop_when_there(Path(awaited)))
