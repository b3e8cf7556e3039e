"""Keeps what `podembed chaos` saw of each schedule in docs/faults.json, and writes docs/faults.md from it.

    podembed chaos --only all | tee chaos.txt
    python benchmarks/faults_page.py chaos.txt

The last line of a campaign's output says what came of its rounds. The file keeps the last round of each schedule, on
Ray and in one process apart, with the day and the code. Without an argument the page alone is written anew. A test
compares both.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podembed.jobs.chaos.schedule import RunShape, Schedule
from podembed.jobs.chaos.selection import curated

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "faults.md", ROOT / "docs" / "faults.json"
PLACES = ("Ray", "one process")
FORMAT_VERSION = 2
HEADER = (
    "fault",
    "schedules met",
    "times injected",
    "detected in",
    "recovered in",
    "bytes equal",
    "samples exactly once",
)
_ROW = re.compile(r"\| (F\d+)(?:, F\d+)* \|")
_CAMPAIGN = re.compile(r"(<!-- campaign -->\n).*?(<!-- end of campaign -->)", re.DOTALL)

# By place and label: what came of a schedule.
Record = dict[str, dict[str, dict[str, Any]]]


def read_record(path: Path) -> Record:
    """What the file holds; nothing if there is none."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"format_version": FORMAT_VERSION}
    if document["format_version"] != FORMAT_VERSION:
        raise ValueError(f"Found format {document['format_version']} in {path}. Expected {FORMAT_VERSION}. Remove it.")
    return {place: {entry["label"]: entry for entry in document.get(place, [])} for place in PLACES}


def write_record(path: Path, record: Record) -> None:
    """Replaces the file; one line an entry, so that a change of one is a change of one line."""
    lines = ["{", f'"format_version": {FORMAT_VERSION}']
    for place in PLACES:
        entries = [json.dumps(one, ensure_ascii=False) for one in sorted(record[place].values(), key=_order)]
        lines[-1] += ","
        lines += [f'"{place}": [', *(f"{entry}," for entry in entries[:-1]), *entries[-1:], "]"]
    path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def keep(record: Record, said: Mapping[str, Any], *, day: str, code: str) -> None:
    """Puts the rounds of a campaign into the record, in place of what it said of the same schedules."""
    for one in said["rounds"]:
        if one["label"].startswith("plan"):
            # Of somebody's own plan, which the page does not know.
            continue
        record["one process" if said["in_process"] else "Ray"][one["label"]] = {
            "label": one["label"],
            "title": one["title"],
            "injected": one["struck"],
            "detect_s": one["detect_s"] and round(one["detect_s"], 1),
            "recover_s": one["recover_s"] and round(one["recover_s"], 1),
            "bytes_equal": one["oracles"].get("O1"),
            "samples_once": one["oracles"].get("O2"),
            "is_met": not one["complaints"],
            "why": one["complaints"],
            "day": day,
            "code": code,
        }


def _order(one: Mapping[str, Any]) -> tuple[bool, tuple[int, ...]]:
    """F2.1 before F10.1, and those before seeds."""
    label = one["label"]
    return label.startswith("seed"), tuple(int(part) for part in label.replace("seed ", "").lstrip("F").split("."))


def _number(one: Mapping[str, Any]) -> str:
    """The number of the fault: `F6`; `random` for drawn schedules."""
    return "random" if one["label"].startswith("seed") else one["label"].partition(".")[0]


def by_fault(rounds: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Cells as `HEADER` has them, one row a fault in the order in which faults first appear. Times are the longest."""
    rows = []
    for number in dict.fromkeys(map(_number, rounds)):
        own = [one for one in rounds if _number(one) == number]
        met = f"{sum(one['is_met'] for one in own)} of {len(own)}"
        injected = str(sum(one["injected"] for one in own))
        seconds = [max((one[kind] for one in own if one[kind] is not None), default=None) for kind in _SECONDS]
        answers = [[one[kind] for one in own if one[kind] is not None] for kind in _ANSWERS]
        times = ["-" if value is None else f"{value:.1f} s" for value in seconds]
        rows.append((number, met, injected, *times, *(f"{sum(of)} of {len(of)}" if of else "-" for of in answers)))
    return rows


_SECONDS, _ANSWERS = ("detect_s", "recover_s"), ("bytes_equal", "samples_once")


def schedules(place: str) -> list[Schedule]:
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
        text = f"{place}: {sum(one['is_met'] for one in found)} of {len(labels)} met"
        failed = [one["label"] for one in found if not one["is_met"]]
        missing = len(labels) - len(found)
        text += f", {', '.join(failed)} not met" if failed else ""
        text += f", {missing} not run" if missing else ""
        parts.append(text if found else f"{place}: not run")
    return "; ".join(parts) or "its tests"


def campaign(record: Record) -> str:
    """The tables of what was seen, and what is not met."""
    return "\n".join(part for place in PLACES for part in _table(place, list(record[place].values())))


def _table(place: str, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rounds:
        return []
    days = sorted({one["day"] for one in rounds})
    codes = ", ".join(f"`{code}`" for code in sorted({one["code"] for one in rounds}))
    lines = [
        f"{'On Ray' if place == 'Ray' else 'In one process'}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, code "
        f"{codes}:",
        "",
    ]
    lines += [_line(HEADER), _line(["---"] * len(HEADER)), *map(_line, by_fault(rounds))]
    seeds = [one["label"].removeprefix("seed ") for one in rounds if _number(one) == "random"]
    lines += ["", f"Seeds: {', '.join(seeds)}."] if seeds else []
    lines += ["", *(f"* {one['label']} is not met: {one['title']}" for one in rounds if not one["is_met"])]
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


def _code() -> str:
    """The commit of this checkout, with `+` if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Keeps what a campaign of `podembed chaos` saw, and writes the page.")
    parser.add_argument("output", nargs="?", type=Path, help="what the campaign printed")
    output, record = parser.parse_args().output, read_record(RECORD)
    if output is not None:
        said = json.loads(output.read_text(encoding="utf-8").rstrip().rpartition("\n")[2])
        keep(record, said, day=time.strftime("%Y-%m-%d", time.gmtime()), code=_code())
        write_record(RECORD, record)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
