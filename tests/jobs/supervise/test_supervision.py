"""What follows an exit code, the loop over attempts with a scripted runner, and real child processes."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from podembed.jobs.supervise.supervision import (
    LONGEST_DELAY_S,
    Again,
    Done,
    LocalRunner,
    Stop,
    after_exit,
    supervise,
)
from podembed.orchestrator.api.run_errors import EXIT_CRASH_LOOP, EXIT_STOPPED
from podembed.orchestrator.api.signals import StopSignals


@pytest.mark.parametrize("exit_code", [1, 2, 86, 87, 130])
def test_codes_that_another_attempt_would_repeat_end_it(exit_code: int) -> None:
    decision = after_exit(exit_code, failures=0, max_failures=100, is_stopping=False)
    assert isinstance(decision, Stop)
    assert decision.exit_code == exit_code


def test_a_preemption_does_not_count_and_is_followed_soon() -> None:
    decision = after_exit(EXIT_STOPPED, failures=5, max_failures=5, is_stopping=False)
    assert isinstance(decision, Again)
    assert (decision.failures, decision.delay_s) == (5, 1.0)


def test_pauses_grow_with_failures_in_a_row_up_to_a_bound() -> None:
    pauses = []
    for failures in range(12):
        decision = after_exit(-signal.SIGKILL, failures=failures, max_failures=12, is_stopping=False)
        assert isinstance(decision, Again)
        assert decision.failures == failures + 1
        assert "SIGKILL" in decision.why
        pauses.append(decision.delay_s)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1]) == (1.0, 2.0, LONGEST_DELAY_S)


def test_too_many_failures_in_a_row_end_it() -> None:
    assert isinstance(after_exit(EXIT_CRASH_LOOP, failures=2, max_failures=2, is_stopping=False), Stop)


def test_a_driver_that_ray_ended_from_within_is_no_error_of_the_job() -> None:
    """Ray ends the processes of a cluster whose head is lost with code 1; no Python of the driver runs then, and its
    heartbeat stays.
    """
    decision = after_exit(1, failures=0, max_failures=5, is_stopping=False, has_left=False)
    assert isinstance(decision, Again)
    assert "Ray cluster is lost" in decision.why
    assert isinstance(after_exit(87, failures=0, max_failures=5, is_stopping=False, has_left=False), Stop)


def test_a_driver_whose_heartbeat_is_left_did_not_end_by_itself(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from podembed.orchestrator.commit.claiming import acquire\n"
        "from podembed.orchestrator.commit.holder import Holder\n"
        "from podembed.workers.storage.store import Store\n"
        "lease = acquire(Store(sys.argv[1]), holder=Holder.current('attempt'), take_over=True)\n"
        "if len(sys.argv) > 2: lease.release()\n"
        "os._exit(1)\n"
    )
    url, notices = str(tmp_path / "run"), []
    code = supervise(
        LocalRunner([sys.executable, "-c", program, url]),
        first=[],
        later=["--in-order"],
        max_failures=5,
        progress=lambda: None,
        notice=notices.append,
        stop=StopSignals(),
        url=url,
    )
    assert code == 1
    assert "as when the Ray cluster is lost" in notices[0]
    assert "the job's own error" in notices[1]


@pytest.mark.parametrize("exit_code", [EXIT_STOPPED, -9, EXIT_CRASH_LOOP])
def test_a_supervisor_that_is_to_stop_tries_nothing_again(exit_code: int) -> None:
    assert isinstance(after_exit(exit_code, failures=0, max_failures=9, is_stopping=True), Stop)
    assert after_exit(0, failures=0, max_failures=9, is_stopping=True) == Done()


@dataclass
class ScriptedRunner:
    """Attempts that end with the given codes at once."""

    codes: list[int]
    started: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    num_stops: int = 0
    num_kills: int = 0
    was_stopped_by_others: bool = False
    on_poll: Callable[[], None] = lambda: None

    def start(self, arguments: Sequence[str], attempt: int) -> None:
        self.started.append((tuple(arguments), attempt))

    def poll(self) -> int | None:
        self.on_poll()
        return self.codes[len(self.started) - 1]

    def stop(self) -> None:
        self.num_stops += 1

    def kill(self) -> None:
        self.num_kills += 1


class FakeTime:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def supervised(
    runner: ScriptedRunner,
    *,
    max_failures: int = 3,
    progress: Callable[[], str | None] = lambda: None,
    stop: StopSignals | None = None,
) -> tuple[int, float, list[str]]:
    """Exit code, seconds waited and notices."""
    time, notices = FakeTime(), []
    code = supervise(
        runner,  # type: ignore[arg-type]
        first=["train"],
        later=["train", "--resume"],
        max_failures=max_failures,
        progress=progress,
        notice=notices.append,
        stop=stop or StopSignals(),
        clock_s=lambda: time.now_s,
        sleep=time.sleep,
    )
    return code, time.now_s, notices


def test_the_first_attempt_begins_and_later_ones_go_on() -> None:
    runner = ScriptedRunner([-9, EXIT_STOPPED, 0])
    code, waited_s, notices = supervised(runner)
    assert code == 0
    assert runner.started == [(("train",), 1), (("train", "--resume"), 2), (("train", "--resume"), 3)]
    assert waited_s == pytest.approx(2.0, abs=0.3)
    assert ["SIGKILL" in notices[0], "preempted" in notices[1]] == [True, True]


def test_failures_without_progress_end_with_the_last_code() -> None:
    code, _, notices = supervised(ScriptedRunner([88] * 9), max_failures=3)
    assert code == 88
    assert len(notices) == 4
    assert "failure 4 in a row" in notices[-1]


def test_a_commit_starts_the_count_of_failures_again() -> None:
    runner = ScriptedRunner([88] * 6 + [0])
    commits = iter(f"s{at}" for at in range(100))
    code, waited_s, _ = supervised(runner, max_failures=1, progress=lambda: next(commits))
    assert (code, len(runner.started)) == (0, 7)
    assert waited_s == pytest.approx(6.0, abs=0.7)


def test_a_killed_attempt_that_is_not_tried_again_has_the_code_of_a_shell() -> None:
    assert supervised(ScriptedRunner([-9]), max_failures=0)[0] == 137


def test_a_request_to_stop_is_passed_on_once_and_ends_it() -> None:
    stop = StopSignals()
    runner = ScriptedRunner([EXIT_STOPPED])
    polls: list[int | None] = [None, None, None, EXIT_STOPPED]
    runner.poll = lambda: stop.request("SIGTERM") or polls.pop(0)  # type: ignore[method-assign,func-returns-value]
    code, _, _ = supervised(runner, stop=stop)
    assert (code, runner.num_stops, len(runner.started)) == (EXIT_STOPPED, 1, 1)


def interrupted(codes: list[int | type[KeyboardInterrupt] | None]) -> tuple[int, ScriptedRunner]:
    """A supervisor that is asked to stop before its first look, and to which these looks happen; its exit code and the
    runner.
    """
    stop, runner = StopSignals(), ScriptedRunner([])

    def poll() -> int | None:
        code = codes.pop(0)
        if isinstance(code, type):
            raise code
        return code

    stop.request("SIGINT")
    runner.poll = poll  # type: ignore[method-assign]
    return supervised(runner, stop=stop)[0], runner


def test_an_attempt_that_a_request_ends_before_it_can_take_signals_has_stopped() -> None:
    assert interrupted([None, None, -15])[0] == EXIT_STOPPED


def test_a_second_request_is_passed_on_once_more_and_no_more_often() -> None:
    """A third signal would cut short what the attempt does to leave nothing behind."""
    code, runner = interrupted([None, None, KeyboardInterrupt, None, 130])
    assert (code, runner.num_stops, runner.num_kills) == (130, 2, 0)


def test_a_second_request_that_comes_with_the_first_is_passed_on_as_two() -> None:
    code, runner = interrupted([KeyboardInterrupt, None, 130])
    assert (code, runner.num_stops, runner.num_kills) == (130, 2, 0)


def test_a_third_request_ends_the_attempt_and_leaves_no_child_behind() -> None:
    code, runner = interrupted([None, KeyboardInterrupt, None, KeyboardInterrupt, None, -9])
    assert (code, runner.num_stops, runner.num_kills) == (137, 2, 1)


def test_an_attempt_that_others_told_to_stop_is_not_made_again() -> None:
    code, _, notices = supervised(ScriptedRunner([EXIT_STOPPED], was_stopped_by_others=True))
    assert code == EXIT_STOPPED
    assert "asked to stop" in notices[0]


def test_real_children_are_started_and_stopped(tmp_path: Path) -> None:
    """A child that dies by SIGKILL, one that is asked to stop, and the argument that only later attempts have."""
    program = tmp_path / "child.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            if "--resume" not in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
            open(sys.argv[1], "w").close()
            time.sleep(600)
            """
        )
    )
    mark, stop = tmp_path / "started", StopSignals()

    class Stopping(LocalRunner):
        def poll(self) -> int | None:
            if mark.exists():
                stop.request("SIGTERM")
            return super().poll()

    code = supervise(
        Stopping([sys.executable, str(program), str(mark)]),
        first=[],
        later=["--resume"],
        max_failures=1,
        progress=lambda: None,
        notice=lambda text: None,
        stop=stop,
    )
    assert code == 85
