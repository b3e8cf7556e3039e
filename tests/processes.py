"""Finds the processes of a cluster that this process started, so that tests kill nothing else."""

from __future__ import annotations

import os
from pathlib import Path


def actor_processes(kind: str) -> list[int]:
    """Process ids of this session's actors of one kind: descendants of this process whose title names it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::_" + kind.encode()) and _is_descendant(int(entry.name)):
                found.append(int(entry.name))
    return sorted(found)


def _is_descendant(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False
