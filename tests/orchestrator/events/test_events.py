"""Every event has a kind, values that JSON holds, and a sentence; the page of events names them all."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from podembed.orchestrator.api.result import Evaluation, HostsChange, Recovery
from podembed.orchestrator.events import commits, health, machines, progress, run, tracing
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.reporter import SilentReporter, tell
from podembed.workers.liveness.progress import Phase

ROOT = Path(__file__).parents[3]
TYPES = [
    kind
    for module in (run, progress, commits, machines, health, tracing)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]
RESTORE = {
    "buckets_kept": 4,
    "undo_s": 0.1,
    "buckets_moved": 1,
    "bytes_moved": 1 << 20,
    "move_s": 0.3,
    "buckets_read": 2,
    "bytes_read": 2 << 20,
    "read_s": 0.4,
}


def example(declared: Any) -> Any:
    """A value of a declared type."""
    if isinstance(declared, UnionType):
        return example(next(choice for choice in get_args(declared) if choice is not NoneType))
    if dataclasses.is_dataclass(declared):
        hints = get_type_hints(declared)
        shown = [field.name for field in dataclasses.fields(declared) if field.repr]
        return declared(**{name: example(hints[name]) for name in shown})
    if declared is Phase:
        return Phase.GATHER
    origin = get_origin(declared) or declared
    if origin is tuple:
        first, *_ = get_args(declared)
        return (example(first), example(first))
    if origin is Literal:
        return get_args(declared)[0]
    if issubclass(origin, Enum):
        return next(iter(origin))
    if origin in (str, int, float, bool):
        return {str: "text", int: 3, float: 1.5, bool: True}[origin]
    key, value = get_args(declared)
    return dict(RESTORE) if value is Any else {example(key): example(value)}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.kind)
def test_every_event_has_values_for_json_and_a_sentence(kind: type[Event]) -> None:
    event = example(kind)
    values = event.values()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    told = event.sentence()
    assert told
    assert "{" not in told
    reported: list[Event] = []
    reporter = SilentReporter()
    reporter.event = reported.append  # type: ignore[method-assign]
    tell(reporter, event)
    assert reported == [event]


def test_kinds_are_distinct_words() -> None:
    kinds = [kind.kind for kind in TYPES]
    assert len(set(kinds)) == len(kinds) > 50
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", kind) for kind in kinds)


def test_values_inside_lie_flat_and_numbers_that_are_none_are_null() -> None:
    evaluation = Evaluation(step=7, auc=math.nan, log_loss=0.5, num_samples=10, metrics={"recall": math.inf})
    values = progress.Evaluated(evaluation=evaluation, best_auc=None, baseline=None).values()
    assert (values["step"], values["auc"], values["metrics"], values["baseline"]) == (7, None, {"recall": None}, None)
    change = HostsChange(generation=2, step=9, before=1, after=2, cause="a machine joined", seconds=3.0)
    assert run.HostsChanged(change=change).values() == dataclasses.asdict(change)
    slow = progress.HostSlow(host=1, ratio=2.0, phase=Phase.ACTIVATION_EXCHANGE, phase_s=1.0, others_phase_s=0.5)
    assert slow.values()["phase"] == "activation exchange"


def test_a_reporter_that_is_older_than_events_hears_sentences() -> None:
    told: list[str] = []

    class Older:
        def notice(self, text: str) -> None:
            told.append(text)

        def recovery(self, recovery: Recovery) -> None:
            told.append(recovery.cause)

    older: Any = Older()
    tell(older, machines.HeadBack(address="10.0.0.1:6379"))
    tell(older, run.Recovered(recovery=example(Recovery)))
    assert told == ["Ray's head at 10.0.0.1:6379 takes connections again", "text"]


def test_the_page_names_every_event_with_its_values() -> None:
    text = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    page = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) == 3}
    assert page == {kind.kind: set(example(kind).values()) for kind in TYPES}


def test_programs_that_are_compiled_in_the_middle_are_counted() -> None:
    compiled = progress.ProgramsCompiled(step=24, num_programs=2, seconds=3.25, total=5)
    assert (
        compiled.sentence() == "step 24: compiled 2 programs for bags or sequences of other lengths in 3.2 s, 5 so far"
    )
