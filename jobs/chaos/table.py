"""The table of `podembed chaos`, one line a round, and its last line for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from podembed.jobs.chaos.oracles import Judgement
from podembed.orchestrator.api.text import columns, printable

_HEADER = ("fault", "what", "injected", "detected", "recovered", "bytes", "once", "fsck", "leaks", "round", "verdict")
MAX_TITLE = 70


def row(judged: Judgement) -> tuple[str, ...]:
    """One line of the table of rounds."""
    found = judged.round
    title = found.schedule.title
    return (
        found.schedule.label,
        title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…",
        str(len(found.records)),
        _seconds(judged.detect_s),
        _seconds(judged.recover_s),
        _answer(judged.of("O1"), "equal", "DIFFER"),
        _answer(judged.of("O2"), "yes", "NO"),
        _answer(judged.of("O3"), "intact", "DAMAGED"),
        _answer(judged.of("O5"), "none", "LEFT"),
        f"{found.seconds:.0f} s",
        "met" if judged.is_met else "NOT MET",
    )


def render(judgements: Sequence[Judgement]) -> str:
    """All rounds, and below why anything is not met."""
    notes = [
        f"  {judged.round.schedule.label} {judged.round.schedule.title}\n"
        + "\n".join(f"    {complaint}" for complaint in judged.complaints)
        + f"\n    kept in {judged.round.folder}"
        for judged in judgements
        if not judged.is_met
    ]
    parts = [
        columns([_HEADER, *map(row, judgements)]),
        "Not met\n" + "\n".join(notes) if notes else "All oracles hold",
    ]
    return printable("\n\n".join(parts))


def as_json(judgements: Sequence[Judgement], **about: Any) -> str:
    """One line: what was done, round by round."""
    rounds = [
        {
            "fault": judged.round.schedule.number,
            "label": judged.round.schedule.label,
            "title": judged.round.schedule.title,
            "struck": len(judged.round.records),
            "exit_code": judged.round.exit_code,
            "attempts": judged.round.attempts,
            "detect_s": judged.detect_s,
            "recover_s": judged.recover_s,
            "seconds": round(judged.round.seconds, 1),
            "oracles": {verdict.oracle: verdict.is_met for verdict in judged.verdicts},
            "complaints": judged.complaints,
        }
        for judged in judgements
    ]
    return json.dumps({**about, "is_met": all(judged.is_met for judged in judgements), "rounds": rounds})


def _answer(is_met: bool | None, yes: str, no: str) -> str:
    return "-" if is_met is None else yes if is_met else no


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
