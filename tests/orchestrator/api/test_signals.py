"""The first signal asks, the second interrupts, and the handlers that were there come back."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from podembed.jobs import trainer
from podembed.orchestrator.api.config import RunConfig, ScalingConfig
from podembed.orchestrator.api.signals import StopSignals
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.liveness.process_statistics import read_statistics
from tests.processes import wait_for
from tests.small_job import small_job


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """As in a terminal, also where the tests themselves were started with `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_says_so_and_the_second_means_now(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with StopSignals() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
        out = capsys.readouterr().out
        assert number.name in out
        assert "Once more to leave at once" in out
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_closed_terminal_asks_and_never_means_now(capsys: pytest.CaptureFixture[str]) -> None:
    """Shell and kernel both send SIGHUP then, and a service manager may send SIGTERM beside it."""
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "SIGHUP"
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reason, stop.is_now) == ("SIGTERM", False)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert "SIGHUP" in capsys.readouterr().out


def test_a_program_that_ignores_closed_terminals_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_said_after_the_terminal_is_gone_is_no_error() -> None:
    text = (
        "import os, sys, time; from podembed.orchestrator.api.signals import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    print('ready', flush=True)\n"
        # `signal.pause` would wait for ever where the signal came before it.
        "    deadline_s = time.monotonic() + 60\n"
        "    while stop.reason is None and time.monotonic() < deadline_s: time.sleep(0.01)\n"
        "    print('still here', flush=True); print('and here', file=sys.stderr, flush=True)\n"
        "    sys.exit(85 if stop.reason == 'SIGHUP' else 1)"
    )
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", text])
    assert b"ready" in os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 85


def test_a_signal_after_another_kind_of_request_means_now() -> None:
    with StopSignals() as stop:
        stop.request("a notebook")
        assert stop.reason == "a notebook"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_from_before_come_back_even_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def fail() -> None:
        with StopSignals():
            assert signal.getsignal(signal.SIGTERM) != before[1]
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        fail()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone_but_requests_work() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def run() -> None:
        with StopSignals() as stop:
            stop.request("asked")
            seen.extend([signal.getsignal(signal.SIGINT), stop.reason])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [before, "asked"]


PRINTING = """
from podembed.orchestrator.api.signals import StopSignals
with StopSignals() as stop:
    while stop.reason is None:
        print("x" * 4000, flush=True)
print("left in order", flush=True)
"""


def is_full(program: subprocess.Popen[bytes]) -> bool:
    """Whether it has filled its pipe and sleeps."""
    assert program.stdout is not None
    (held,) = struct.unpack("i", fcntl.ioctl(program.stdout, termios.FIONREAD, bytes(4)))
    statistics = read_statistics(program.pid)
    room = fcntl.fcntl(program.stdout, fcntl.F_GETPIPE_SZ) - held
    return room < 4096 and statistics is not None and statistics.state == "S"


def test_a_signal_in_the_middle_of_a_print_is_no_error() -> None:
    """As where somebody looks at the output page by page: the print waits for room, and its buffer cannot be entered
    again.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = subprocess.Popen(
        [sys.executable, "-c", PRINTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    wait_for("print that waits for room", lambda: is_full(program), seconds=120)
    program.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=0.5)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert out.endswith(b"left in order\n")
    assert b"SIGTERM" in err


def test_a_signal_while_ray_connects_and_answers_it_itself_is_a_stop(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray installs a handler of SIGTERM that leaves with 15, before ours is back."""

    def leave(*_: object, **__: object) -> None:
        sys.exit(signal.SIGTERM)

    monkeypatch.setattr("podembed.orchestrator.cluster.joining.shared_connection", leave)
    fit = trainer.Trainer(
        small_job(folder=small_data),
        scaling_config=ScalingConfig(num_hosts=2),
        run_config=RunConfig(storage_path=str(tmp_path), name="run"),
        reporter=SilentReporter(),
    ).fit
    result = fit()
    assert (result.step, result.commit, result.stopped_by) == (0, None, "SIGTERM")
