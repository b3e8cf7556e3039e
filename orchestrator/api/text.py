"""Plain text for terminals: aligned columns, numbers that people read, and nothing that a terminal would obey."""

from __future__ import annotations

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
