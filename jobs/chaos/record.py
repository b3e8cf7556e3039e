"""What was seen of each schedule of faults: one line a schedule, sums over the schedules of a fault, and a file that
keeps them.

`podembed chaos --record` writes the file, and a test checks docs/faults.md against it. It holds the last round of each
schedule, on Ray and in one process apart. It holds what the oracles said, and nothing of how that came about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from podembed.jobs.chaos.oracles import Judgement
from podembed.workers.storage.strict_json import parse_strictly

Place = Literal["Ray", "one process"]
PLACES: tuple[Place, ...] = ("Ray", "one process")
FORMAT_VERSION = 2
MAX_RECORD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one schedule. None where an oracle had nothing to say.

    Attributes:
      label: `F6.3`, or `seed 17`.
      injected: how many faults struck.
      detect_s, recover_s: longest of the round.
      why: what is not met.
      day: day of the run, in UTC.
      code: what was run: the commit of a checkout, with `+` if it had changes, or else the version that is installed.
    """

    label: str
    title: str
    injected: int
    detect_s: float | None
    recover_s: float | None
    bytes_equal: bool | None
    samples_once: bool | None
    is_met: bool
    why: tuple[str, ...]
    day: str
    code: str

    @property
    def number(self) -> str:
        """The number of the fault: `F6`; `random` for drawn schedules."""
        return "random" if self.label.startswith("seed") else self.label.partition(".")[0]


def seen(judged: Judgement, *, day: str, code: str) -> Seen:
    """What is kept of a round."""
    return Seen(
        label=judged.round.schedule.label,
        title=judged.round.schedule.title,
        injected=len(judged.round.records),
        detect_s=_rounded(judged.detect_s),
        recover_s=_rounded(judged.recover_s),
        bytes_equal=judged.of("O1"),
        samples_once=judged.of("O2"),
        is_met=judged.is_met,
        why=tuple(judged.complaints),
        day=day,
        code=code,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSum:
    """All schedules of one fault. Pairs are (yes, asked)."""

    number: str
    num_rounds: int
    num_met: int
    injected: int
    detect_s: float | None
    recover_s: float | None
    bytes_equal: tuple[int, int]
    samples_once: tuple[int, int]

    def cells(self) -> tuple[str, ...]:
        """As `HEADER` has it."""
        return (
            self.number,
            f"{self.num_met} of {self.num_rounds}",
            str(self.injected),
            seconds(self.detect_s),
            seconds(self.recover_s),
            _share(self.bytes_equal),
            _share(self.samples_once),
        )


HEADER = (
    "fault",
    "schedules met",
    "times injected",
    "detected in",
    "recovered in",
    "bytes equal",
    "samples exactly once",
)


def by_fault(rounds: Sequence[Seen]) -> list[FaultSum]:
    """One sum a fault, in the order in which faults first appear. Times are the longest."""
    numbers = dict.fromkeys(one.number for one in rounds)
    return [_sum(number, [one for one in rounds if one.number == number]) for number in numbers]


def _sum(number: str, rounds: Sequence[Seen]) -> FaultSum:
    return FaultSum(
        number=number,
        num_rounds=len(rounds),
        num_met=sum(one.is_met for one in rounds),
        injected=sum(one.injected for one in rounds),
        detect_s=max((one.detect_s for one in rounds if one.detect_s is not None), default=None),
        recover_s=max((one.recover_s for one in rounds if one.recover_s is not None), default=None),
        bytes_equal=_yes([one.bytes_equal for one in rounds]),
        samples_once=_yes([one.samples_once for one in rounds]),
    )


def _yes(answers: Sequence[bool | None]) -> tuple[int, int]:
    return sum(answer is True for answer in answers), sum(answer is not None for answer in answers)


# ---------------------------------------------------------------------- the file

Record = Mapping[Place, Mapping[str, Seen]]


def read_record(path: Path) -> dict[Place, dict[str, Seen]]:
    """What the file holds: per place, label → what was seen. Nothing if there is no file.

    Raises:
      DocumentRefused: it is no record.
      ValueError: it is one of another form.
    """
    if not path.exists():
        return {place: {} for place in PLACES}
    document = parse_strictly(path.name, path.read_bytes(), max_bytes=MAX_RECORD_BYTES)
    if document.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"Found format {document.get('format_version')} in {path}. Expected {FORMAT_VERSION}. Remove the file, and "
            "run the campaign again."
        )
    return {place: {entry["label"]: _entry(entry) for entry in document.get(place, [])} for place in PLACES}


def _entry(entry: Mapping[str, Any]) -> Seen:
    return Seen(**{**entry, "why": tuple(entry["why"])})


def keep(path: Path, place: Place, one: Seen) -> None:
    """Puts a round into the file, in place of what it said of the same schedule.

    Raises:
      As `read_record`.
    """
    record = read_record(path)
    record[place][one.label] = one
    write_record(path, record)


def write_record(path: Path, record: Record) -> None:
    """Replaces the file; one line an entry, so that a change of one is a change of one line."""
    lines = ["{", f'"format_version": {FORMAT_VERSION}']
    for place in PLACES:
        entries = [json.dumps(asdict(one), ensure_ascii=False) for one in sorted(record[place].values(), key=_order)]
        lines[-1] += ","
        lines += [f'"{place}": [', *_commas(entries), "]"]
    path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def _commas(entries: Sequence[str]) -> list[str]:
    return [f"{entry}," for entry in entries[:-1]] + list(entries[-1:])


def _order(one: Seen) -> tuple[bool, tuple[int, ...]]:
    """F2.1 before F10.1, and those before seeds."""
    return one.number == "random", tuple(int(part) for part in one.label.replace("seed ", "").lstrip("F").split("."))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def seconds(value: float | None) -> str:
    """Seconds as a table shows them."""
    return "-" if value is None else f"{value:.1f} s"


def _share(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}" if pair[1] else "-"
