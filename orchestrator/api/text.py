"""Plain text for terminals: aligned columns, numbers that people read, and nothing that a terminal would obey."""

from __future__ import annotations

import re
from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Rows of equal length with their cells aligned to the left, one line a row."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(indent + line for line in lines)


def printable(text: str) -> str:
    """The text with control characters replaced: names and messages come from files, and a terminal must not obey
    them.
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def number(value: float) -> str:
    """Few digits, without a fraction where there is none."""
    return f"{value:.6g}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} PiB"


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


_FRAME = re.compile(r'  File "(?P<path>.+)", line \d+, in ')
# Of podembed, what it is built on, and Python itself. Jobs that come with podembed are read as a user's.
_MACHINERY = re.compile(
    r"/podembed/(embedding|orchestrator|serving|tools|workers)/"
    r"|/(site|dist)-packages/(equinox|flax|haiku|jax|jaxlib|numba|numpy|optax|ray)/"
    r"|/lib(64)?/python3\.\d+/(?!(site|dist)-packages/)"
    r"|^<frozen "
)
_OF_JAX = ("--------------------", "For simplicity, JAX has removed its internal frames")


def without_machinery(report: str) -> str:
    """A traceback with the frames of the user's code, and the frame that raised; as it is where none is the user's.

    Args:
      report: report as `traceback.format_exception` writes it, or Ray, which takes lines out of it.
    """
    kept: list[str] = []
    frames: list[tuple[bool, list[str]]] = []
    num_users = 0

    def end_of_frames() -> None:
        last = len(frames) - 1
        kept.extend(line for at, (is_users, lines) in enumerate(frames) if is_users or at == last for line in lines)
        frames.clear()

    for line in report.splitlines():
        found = _FRAME.match(line)
        if found is not None:
            is_users = _MACHINERY.search(found["path"]) is None
            num_users += is_users
            frames.append((is_users, [line]))
        elif frames and line.startswith("    "):
            frames[-1][1].append(line)
        elif line.strip(" ^~") or not line:
            end_of_frames()
            if not line.startswith(_OF_JAX):
                kept.append(line)
    end_of_frames()
    return "\n".join(kept) if num_users else report
