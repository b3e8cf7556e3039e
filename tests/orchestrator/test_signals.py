"""The first signal asks, the second interrupts, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from orchestrator.signals import StopSignals


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
