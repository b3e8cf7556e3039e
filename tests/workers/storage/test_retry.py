"""Which errors are worth another try, and how long."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.storage.retry import RetryClock, RetryPolicy, call_with_retries, is_transient
from podembed.workers.storage.storage_errors import NameTaken, StoreUnavailable


class HttpError(Exception):
    def __init__(self, code: object):
        super().__init__(f"answer {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, ""), True),
        (OSError("wrapped"), True),
        (HttpError(503), True),
        (HttpError("429"), True),
        (HttpError(403), False),
        (HttpError("InvalidBucket"), False),
        (OSError(errno.ENOSPC, ""), False),
        (OSError(errno.EROFS, ""), False),
        (FileNotFoundError(), False),
        (FileExistsError(), False),
        (PermissionError(), False),
        (NameTaken("a", "b"), False),
        (ValueError(), False),
    ],
)
def test_only_errors_that_pass_by_themselves_are_transient(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


@given(
    attempts=st.integers(1, 12),
    first=st.floats(0.01, 2),
    longest=st.floats(0.01, 10),
    deadline=st.floats(0.0, 30),
    chances=st.lists(st.floats(0, 0.999), min_size=12, max_size=12),
)
def test_waits_stay_below_the_deadline_and_the_number_of_attempts(attempts, first, longest, deadline, chances) -> None:
    now, waits, calls = [0.0], [], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    def fail(attempt: int) -> None:
        calls.append(attempt)
        raise ConnectionError

    policy = RetryPolicy(max_attempts=attempts, first_wait_s=first, max_wait_s=longest, deadline_s=deadline)
    waiting = RetryClock(monotonic=lambda: now[0], sleep=sleep, random=iter(chances).__next__)
    with pytest.raises(StoreUnavailable):
        call_with_retries(fail, what="read 'a'", policy=policy, waiting=waiting)
    assert calls == list(range(len(waits) + 1))
    assert len(calls) <= attempts
    assert now[0] <= deadline + 1e-9
    assert all(wait <= max(first, longest) for wait in waits)


def test_an_answer_after_faults_is_returned() -> None:
    def third_time(attempt: int) -> str:
        if attempt < 2:
            raise ConnectionError
        return "answer"

    assert (
        call_with_retries(third_time, what="x", policy=RetryPolicy(), waiting=RetryClock(sleep=lambda _: None))
        == "answer"
    )


def test_other_errors_leave_unchanged_at_once() -> None:
    calls = []

    def fail(attempt: int) -> None:
        calls.append(attempt)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        call_with_retries(fail, what="x", policy=RetryPolicy())
    assert calls == [0]
