"""The threads of a thread pool: all calls are made, by several threads at a time, and none is left behind."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from podembed.workers.thread_pool import ThreadPool

LARGE = 1 << 30
PATIENCE_S = 120.0


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_call_is_made_once(num_threads: int) -> None:
    thread_pool = ThreadPool(num_threads)
    for num_calls in (0, 1, 2, 7, 300):
        counts = [0] * num_calls

        def count(at: int, counts: list[int] = counts) -> None:
            counts[at] += 1

        thread_pool.run([lambda at=at: count(at) for at in range(num_calls)], size=LARGE)
        assert counts == [1] * num_calls
    thread_pool.close()


def test_as_many_calls_at_a_time_as_threads() -> None:
    together = threading.Barrier(3)
    thread_pool = ThreadPool(3)
    thread_pool.run([lambda: together.wait(PATIENCE_S)] * 3, size=LARGE)  # type: ignore[list-item]
    thread_pool.close()


def test_little_work_stays_with_the_caller() -> None:
    seen: list[str] = []
    ThreadPool(4).run([lambda: seen.append(threading.current_thread().name)] * 6, size=1000)
    assert seen == [threading.current_thread().name] * 6


def test_an_error_arrives_when_no_call_is_under_way_any_more() -> None:
    is_late, fails = threading.Event(), threading.Barrier(2)

    def fail() -> None:
        fails.wait(PATIENCE_S)
        raise ValueError("this one")

    def be_late() -> None:
        fails.wait(PATIENCE_S)
        time.sleep(0.05)
        is_late.set()

    thread_pool = ThreadPool(2)
    with pytest.raises(ValueError, match="this one"):
        thread_pool.run([fail, be_late], size=LARGE)
    assert is_late.is_set()
    thread_pool.run([is_late.clear, is_late.clear], size=LARGE)
    assert not is_late.is_set()
    thread_pool.close()


def test_of_several_errors_the_first_call_s_arrives() -> None:
    """Whichever thread is faster."""
    has_failed = threading.Event()

    def fail_late() -> None:
        assert has_failed.wait(PATIENCE_S)
        time.sleep(0.05)
        raise ValueError("the first")

    def fail_at_once() -> None:
        has_failed.set()
        raise ValueError("the second")

    thread_pool = ThreadPool(2)
    with pytest.raises(ValueError, match="the first"):
        thread_pool.run([fail_late, fail_at_once], size=LARGE)
    thread_pool.close()


def kernel_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kernels-")]


def test_helpers_end_with_their_thread_pool() -> None:
    assert kernel_threads() == []
    thread_pool = ThreadPool(3)
    thread_pool.run([lambda: None] * 3, size=LARGE)
    assert kernel_threads() == ["kernels-1", "kernels-2"]
    thread_pool.close()
    thread_pool.close()
    assert kernel_threads() == []
    forgotten = ThreadPool(3)
    forgotten.run([lambda: None] * 3, size=LARGE)
    del forgotten
    gc.collect()
    assert kernel_threads() == []
