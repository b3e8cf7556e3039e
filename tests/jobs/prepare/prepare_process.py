"""A preparation in a process of its own, so that it can be killed: `python -m tests.jobs.prepare.prepare_process SOURCE OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs.prepare.preparation import Prepared, prepare
from tests.jobs.prepare.preparing import criteo_settings


def run(source: str, folder: Path, *, workers: int) -> Prepared:
    """Prepares in pieces of about 150 lines, with vocabularies."""
    return prepare([source], folder, criteo_settings(piece_bytes=40_000), workers=workers, max_bad_lines=5)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), workers=2)
