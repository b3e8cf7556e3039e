"""Requests to the one thread of a pod: their order, and what an interrupted caller leaves behind."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from podembed.orchestrator.stepwise import request_thread
from podembed.orchestrator.stepwise.request_thread import RequestThread


def test_requests_return_and_raise_and_may_ask_in_turn() -> None:
    requests = RequestThread("test")
    assert requests.request("outer", lambda: requests.request("inner", threading.current_thread)).name == "test"
    with pytest.raises(KeyError, match="mine"):
        requests.request("fails", lambda: {}["mine"])
    with pytest.raises(TimeoutError, match="the function's own"):
        requests.request("times out", lambda: (_ for _ in ()).throw(TimeoutError("the function's own")))


def test_requests_of_several_threads_run_one_at_a_time() -> None:
    requests, inside, most = RequestThread("test"), [], []

    def request() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(requests.request, "a request", request) for _ in range(64)]:
            future.result()
    assert most == [1] * 64


def test_what_an_interrupted_caller_asked_ends_before_the_next_request(monkeypatch, caplog) -> None:
    monkeypatch.setattr(request_thread, "PATIENCE_S", 0.05)
    requests, may_end, ended = RequestThread("test"), threading.Event(), []

    def long() -> None:
        may_end.wait(60.0)
        ended.append("run")

    # A shell that starts tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            requests.request("run", long)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ended, "the caller is free at once"

    class EndsOnceTold(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            may_end.set()

    handler = EndsOnceTold()
    request_thread._logger.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING):
            requests.request("discard", lambda: ended.append("discard"))
    finally:
        request_thread._logger.removeHandler(handler)
    assert ended == ["run", "discard"]
    assert "discard waits for an earlier run, which was interrupted here and still runs on the hosts" in caplog.text


def test_the_thread_ends_with_its_object_and_keeps_nothing_alive() -> None:
    class Value:
        pass

    def ask(requests: RequestThread) -> weakref.ref[Value]:
        value = Value()
        requests.request("refers", lambda: repr(value))
        return weakref.ref(value)

    requests = RequestThread("test")
    kept, thread = ask(requests), requests._thread
    requests.request("next", lambda: None)
    gc.collect()
    assert kept() is None
    del requests
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()
