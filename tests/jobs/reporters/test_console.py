"""What people see: lines in a log, a panel on a terminal, and sizes they can read."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from podembed.jobs.reporters.console import ConsoleReporter
from podembed.orchestrator.api.result import Evaluation, Recovery
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.ranking import Baseline
from tests.clock import FakeClock


def report(step: int, *, total_steps: int = 100, committed: bool = True, staleness: int = 0) -> WindowReport:
    return WindowReport(
        step=step,
        total_steps=total_steps,
        samples_per_s=12_345.6,
        loss=0.51234,
        phase_s={"device": 0.004, "update": 0.001, "unseen": 1e-6},
        num_hosts=2,
        generation=3,
        committed_step=40 if committed else 0,
        committed_unix_s=time.time() - 7 if committed else None,
        staleness=staleness,
    )


def recorder(*, is_terminal: bool = False) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    return ConsoleReporter(
        Console(file=out, force_terminal=is_terminal, width=120, highlight=False, _environ={"TERM": "xterm"})
    ), out


def test_a_log_gets_a_line_with_everything_that_one_asks_first() -> None:
    reporter, out = recorder()
    reporter.window(report(50))
    line = out.getvalue()
    for words in ("50/100", "12,346 samples/s", "loss 0.5123", "hosts 2", "generation 3", "committed step 40, 7 s ago"):
        assert words in line
    assert line.index("device 4.0") < line.index("update 1.0")
    assert "unseen" not in line
    assert "staleness" not in line
    assert "left" not in line
    assert "50.0%" in line


@pytest.mark.parametrize("is_terminal", [False, True])
def test_staleness_is_told(is_terminal: bool) -> None:
    reporter, out = recorder(is_terminal=is_terminal)
    reporter.window(report(50, staleness=1))
    reporter.close()
    assert "staleness 1" in out.getvalue()


def test_a_log_is_not_flooded_but_always_gets_the_last_step() -> None:
    reporter, out = recorder()
    for step in range(1, 101):
        reporter.window(report(step, committed=False))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/100", "100/100"]
    assert "no commit yet" in lines[1]
    assert sum("ms a step" in line for line in lines) == 1


def test_a_terminal_gets_a_panel_that_goes_away_and_notices_stay() -> None:
    reporter, out = recorder(is_terminal=True)
    reporter.window(report(50))
    reporter.notice("fault: [host 1] died")
    reporter.close()
    reporter.close()
    assert "[host 1] died" in out.getvalue()
    assert "50/100" in out.getvalue()


def test_events_are_one_line_each() -> None:
    reporter, out = recorder()
    evaluation = Evaluation(step=50, auc=0.71234, log_loss=0.4, num_samples=10_000)
    reporter.evaluation(evaluation, best_auc=None, baseline=None)
    reporter.evaluation(evaluation, best_auc=0.8, baseline=None)
    with_metrics = replace(evaluation, metrics={"recall@10": 0.25})
    baseline = Baseline(name="popularity", figures={"AUC": 0.65, "recall@10": 0.125})
    reporter.evaluation(with_metrics, best_auc=None, baseline=baseline)
    reporter.commit("s000000050-g00000001", size_bytes=3 << 20, seconds=1.25)
    anew = Recovery(
        generation=2,
        cause="host 1 died",
        base_step=40,
        discarded_steps=9,
        detect_s=0.3,
        stop_s=1.0,
        start_s=2.0,
        restore_s=3.0,
        compile_s=4.0,
    )
    reporter.recovery(anew)
    reporter.recovery(
        replace(
            anew,
            survivors=1,
            buckets_kept=64,
            buckets_read=32,
            bytes_read=1 << 20,
            undo_s=0.1,
            read_s=1.2,
        )
    )
    reporter.recovery(replace(anew, survivors=2, buckets_kept=64, buckets_moved=16, bytes_moved=3 << 20, move_s=0.4))
    plain, best, metrics, commit, recovery, kept, moved = out.getvalue().splitlines()
    assert "AUC 0.7123" in plain
    assert "10,000 samples" in plain
    assert "reachable" not in plain
    assert "best reachable 0.8000" in best
    assert "AUC 0.7123 (popularity 0.6500)  recall@10 0.2500 (popularity 0.1250)  log loss 0.4000" in metrics
    assert commit == "committed s000000050-g00000001  3.0 MiB in 1.2 s"
    assert "recovered in 10.0 s as generation 2: 9 steps discarded, back at step 40" in recovery
    assert "lived on" not in recovery
    assert kept.startswith(recovery)
    assert "hosts that lived on: 1, buckets kept 64 (undone in 0.1 s), read 32 (1.0 MiB in 1.2 s)" in kept
    assert "undone in 0.0 s), moved 16 from host to host (3.0 MiB in 0.4 s), read 0 (0 B in 0.0 s)" in moved


def test_the_silent_reporter_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = SilentReporter()
    reporter.notice("x")
    reporter.window(report(1))
    reporter.close()
    assert capsys.readouterr().out == ""


LARGE = WindowReport(
    step=9_999_999,
    total_steps=10_000_000,
    samples_per_s=1_234_567_890.0,
    loss=0.51234,
    phase_s=dict.fromkeys(
        ("gradient exchange", "activation exchange", "wait for save", "device", "early pool", "read"), 1000.0
    ),
    num_hosts=1000,
    generation=12_345,
    committed_step=9_876_543,
    committed_unix_s=time.time() - 86_400,
    staleness=1,
    failed_saves=3,
    left_s=99 * 3600 + 59 * 60 + 59,
)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_fit_80_columns_with_large_numbers(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=is_terminal, width=80, highlight=False, color_system=None, _environ={"TERM": "xterm"}
    )
    reporter = ConsoleReporter(console)
    reporter.window(LARGE)
    reporter.close()
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue()).replace("\r", "")
    for words in (
        "9999999/10000000",
        "100.0%",
        "4 d 3 h left",
        "1,234.6M samples/s",
        "committed step 9876543",
        "3 SAVES FAILED since",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_log_says_what_a_start_is_doing_with_its_seconds() -> None:
    clock = FakeClock()
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out, width=80, highlight=False), clock.monotonic_s)
    reporter.activity("reading the index of the data")
    clock.sleep(12.34)
    reporter.activity("starting Ray, or joining its cluster")
    assert out.getvalue().splitlines() == [
        "   0.0 s  reading the index of the data",
        "  12.3 s  starting Ray, or joining its cluster",
    ]


def test_a_terminal_shows_an_activity_until_the_next_thing_happens() -> None:
    reporter, out = recorder(is_terminal=True)
    reporter.activity("starting Ray")
    reporter.notice("told meanwhile")
    reporter.activity("compiling")
    reporter.window(report(50))
    reporter.close()
    text = out.getvalue()
    assert text.index("starting Ray: 0 s") < text.index("compiling: 0 s") < text.index("50/100")
    assert "told meanwhile" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor stays hidden"
