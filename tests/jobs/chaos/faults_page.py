"""docs/faults.md: what it says was seen is written from docs/faults.json, which `podembed chaos --record
docs/faults.json` keeps.

`python -m tests.jobs.chaos.faults_page` writes the column "seen" and the table of the campaign anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from podembed.jobs.chaos.record import HEADER, PLACES, Place, Record, Seen, by_fault, read_record
from podembed.jobs.chaos.schedule import RunShape, Schedule
from podembed.jobs.chaos.selection import curated

DOCS = Path(__file__).parents[3] / "docs"
PAGE, RECORD = DOCS / "faults.md", DOCS / "faults.json"
_ROW = re.compile(r"\| (F\d+)(?:, F\d+)* \|")
_CAMPAIGN = re.compile(r"(<!-- campaign -->\n).*?(<!-- end of campaign -->)", re.DOTALL)


def schedules(place: Place) -> list[Schedule]:
    """What a campaign of the whole list runs there."""
    if place == "Ray":
        return curated(RunShape())
    return [one for one in curated(RunShape(num_hosts=1)) if not one.needs_hosts]


def cell(number: str, record: Record) -> str:
    """What was seen of a fault, in the words of the page."""
    parts = []
    for place in PLACES:
        labels = [one.label for one in schedules(place) if one.number == number]
        found = [record[place][label] for label in labels if label in record[place]]
        if not labels:
            continue
        text = f"{place}: {sum(one.is_met for one in found)} of {len(labels)} met"
        failed = [one.label for one in found if not one.is_met]
        missing = len(labels) - len(found)
        text += f", {', '.join(failed)} not met" if failed else ""
        text += f", {missing} not run" if missing else ""
        parts.append(text if found else f"{place}: not run")
    return "; ".join(parts) or "its tests"


def campaign(record: Record) -> str:
    """The tables of what was seen, and what is not met."""
    return "\n".join(part for place in PLACES for part in _table(place, list(record[place].values())))


def _table(place: Place, rounds: Sequence[Seen]) -> list[str]:
    if not rounds:
        return []
    days = sorted({one.day for one in rounds})
    codes = ", ".join(f"`{code}`" for code in sorted({one.code for one in rounds}))
    lines = [
        f"{'On Ray' if place == 'Ray' else 'In one process'}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, code "
        f"{codes}:",
        "",
    ]
    lines += [_line(HEADER), _line(["---"] * len(HEADER)), *(_line(one.cells()) for one in by_fault(rounds))]
    seeds = [one.label.removeprefix("seed ") for one in rounds if one.number == "random"]
    lines += ["", f"Seeds: {', '.join(seeds)}."] if seeds else []
    lines += ["", *(f"* {one.label} is not met: {one.title}" for one in rounds if not one.is_met)]
    return [*lines, ""] if lines[-1] else lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(text: str, record: Record) -> str:
    """The page with its generated parts."""
    lines = []
    for line in text.split("\n"):
        row = _ROW.match(line)
        if row is not None:
            kept = line.split(" | ")[:4]
            line = " | ".join([kept[0], *(part.removesuffix(" |") for part in kept[1:]), f"{cell(row[1], record)} |"])
        lines.append(line)
    return _CAMPAIGN.sub(lambda found: f"{found[1]}{campaign(record)}\n{found[2]}", "\n".join(lines))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read_record(RECORD)), encoding="utf-8")
