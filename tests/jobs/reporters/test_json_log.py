"""Lines of JSON for programs that gather logs."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from podembed.jobs.reporters.json_log import JsonReporter
from podembed.orchestrator.events.commits import CommitLost, Committed
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.reporter import tell
from podembed.tools.metrics.catalog import CATALOG
from tests.orchestrator.events.test_events import TYPES, example
from tests.tools.metrics.windows import recovery, window


def lines_of(*events: Event) -> list[dict[str, Any]]:
    out = io.StringIO()
    reporter = JsonReporter(out, wall_s=lambda: 0.25)
    for event in events:
        tell(reporter, event)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_every_event_is_one_line_with_its_level() -> None:
    for kind in TYPES:
        event = example(kind)
        (line,) = lines_of(event)
        assert line["event"] == kind.kind
        assert line["level"] == event.level
        assert line["time"] == "1970-01-01T00:00:00.250Z"
        assert line["message"]


def test_what_costs_steps_is_an_error_and_progress_is_none() -> None:
    committed = Committed(name="c", step=1, size_bytes=1, seconds=0.1)
    levels = [line["level"] for line in lines_of(committed, example(CommitLost), window(0, 10))]
    assert levels == ["info", "error", "info"]


def test_a_window_has_the_names_of_measurements() -> None:
    first, again = lines_of(window(0, 10), recovery(base_step=0, generation=2, discarded_steps=10))
    assert first["values"]["loss"] == 0.5
    assert first["values"]["samples_per_second"] == 640
    assert set(first["values"]) - {"first_step"} <= set(CATALOG)
    assert again["values"]["generation"] == 2


def test_words_that_are_no_event_are_lines_too() -> None:
    out = io.StringIO()
    reporter = JsonReporter(out)
    reporter.activity("starting")
    tell(reporter, window(0, 10))
    reporter.notice("job synthetic: 10 samples")
    kinds = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert kinds == ["activity", "window", "notice"]


class Unread(io.StringIO):
    num_tries = 0

    def write(self, text: str) -> int:
        self.num_tries += 1
        raise BrokenPipeError


def test_a_run_goes_on_when_no_process_reads() -> None:
    out = Unread()
    reporter = JsonReporter(out)
    tell(reporter, window(0, 10))
    tell(reporter, window(10, 20))
    assert out.num_tries == 1, "what no process reads is not written again"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_run_goes_on_when_the_disk_of_its_log_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonReporter(Full())
    tell(reporter, window(0, 10))
    tell(reporter, window(10, 20))
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_numbers_of_numpy_are_numbers() -> None:
    out = io.StringIO()
    JsonReporter(out).line("evaluation", "words", {"auc": np.float32(0.5)})
    assert json.loads(out.getvalue())["values"] == {"auc": 0.5}
