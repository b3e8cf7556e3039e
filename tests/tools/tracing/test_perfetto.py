"""The file format, against the schema of the package `perfetto`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.tools.tracing.clocks import ClockOffset, best
from podembed.tools.tracing.perfetto import TracedProcess, trace_bytes
from podembed.workers.tracing.recorder import Recorder, Span
from tests.tools.tracing.reading import KNOWN, read_trace

# 2**-10 s, so that no rounding moves an end.
TICK_S = 1 / 1024
TICK_NS = 1e9 / 1024
moments = st.integers(0, 40)


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    found = []
    for name in draw(st.lists(st.sampled_from("abc"), max_size=30)):
        began, length = draw(moments), draw(moments)
        found.append(
            Span(draw(st.sampled_from(["work", "input"])), name, began * TICK_S, (began + length) * TICK_S, {})
        )
    return found


@given(spans(), st.integers(-20, 20))
def test_every_span_is_in_the_file_with_its_times(recorded: list[Span], ahead: int) -> None:
    process = TracedProcess(name="host 0", spans=recorded, offset_s=(ahead - 20) * TICK_S)
    (read,) = read_trace(trace_bytes([process])).values()
    found = sorted(
        (track.split(" (")[0], one.name, one.began_ns, one.ended_ns)
        for track, slices in read.tracks.items()
        for one in slices
    )
    shift = 20 - ahead
    assert found == sorted(
        (
            one.track,
            one.name,
            round((one.began_s / TICK_S + shift) * TICK_NS),
            round((one.ended_s / TICK_S + shift) * TICK_NS),
        )
        for one in recorded
    )


def test_values_of_each_kind_come_back() -> None:
    values = {"bytes": 1 << 40, "negative": -3, "ratio": 0.1, "text": "größer\n€", "empty": ""}
    span = Span("work", "schritt ü", 1.0, 2.0, values)
    read = read_trace(trace_bytes([TracedProcess(name="host 0", spans=[span], facts=values)]))
    (one,) = read["host 0"].tracks["work"]
    assert (one.name, one.values, read["host 0"].facts) == ("schritt ü", values, values)


def test_what_the_schema_does_not_know_is_found() -> None:
    sound = trace_bytes([TracedProcess(name="host 0", spans=[])])
    with pytest.raises(AssertionError):
        read_trace(sound + b"\xfa\x7f\x00")


def test_processes_that_did_nothing_are_there() -> None:
    read = read_trace(trace_bytes([TracedProcess(name="driver", spans=[]), TracedProcess(name="host 0", spans=[])]))
    assert [*read] == ["driver", "host 0"]


def test_the_quickest_answer_says_most_of_a_clock() -> None:
    slow = ClockOffset.of(asked_s=10.0, found_s=107.0, answered_s=14.0)
    quick = ClockOffset.of(asked_s=20.0, found_s=115.25, answered_s=20.5)
    assert (slow.offset_s, slow.uncertainty_s) == (95.0, 2.0)
    assert best([slow, quick]) == quick == ClockOffset(offset_s=95.0, uncertainty_s=0.25)
    assert best([]) is None


def test_a_recorder_keeps_what_is_done_while_it_is_on() -> None:
    now = [0.0]
    recorder = Recorder(lambda: now[0], most=3)
    with recorder.span("work", "before"):
        now[0] = 1.0
        recorder.begin()
    with recorder.span("work", "whole", step=7):
        now[0] = 2.0
    with pytest.raises(ValueError, match="inside"), recorder.span("work", "raised"):
        raise ValueError("inside")
    cut = recorder.span("work", "under way")
    with cut:
        now[0] = 3.0
        recorder.add("input", "file", 2.0, 2.5)
        recorder.add("input", "no room", 2.0, 2.5)
        recorded = recorder.end()
    recorder.add("work", "after", 2.0, 3.0)
    assert recorded.num_dropped == 1
    assert [*recorded.spans] == [
        Span("work", "whole", 1.0, 2.0, {"step": 7}),
        Span("work", "raised", 2.0, 2.0, {}),
        Span("input", "file", 2.0, 2.5, {}),
        Span("work", "under way", 2.0, 3.0, {"unfinished": 1}),
    ]
    assert (recorded.process, recorder.end().spans) == (os.getpid(), ())


@pytest.mark.skipif(shutil.which("trace_processor_shell") is None, reason="needs Perfetto's trace_processor_shell")
def test_the_trace_processor_of_perfetto_opens_a_file(tmp_path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    path = tmp_path / "steps.pftrace"
    nested = [Span("work", "step 3", 1.0, 2.0, {}), Span("work", "gather", 1.25, 1.5, {"step": 3})]
    path.write_bytes(trace_bytes([TracedProcess(name="host 0", spans=nested, facts={"machine": "a"})]))
    config = TraceProcessorConfig(bin_path=shutil.which("trace_processor_shell"))
    with TraceProcessor(trace=str(path), config=config) as processor:
        rows: Any = processor.query("select name, dur, depth from slice where name != '" + KNOWN + "' order by ts")
        assert [(row.name, row.dur, row.depth) for row in rows] == [("step 3", 10**9, 0), ("gather", 25 * 10**7, 1)]
