"""Bounded repetition of storage calls that fail with errors which usually pass.

Time, sleep and chance come in as arguments, so the schedule is tested without waiting. What may be repeated safely is
the caller's
decision: this module only knows which errors are worth another try.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from podembed.workers.storage.storage_errors import StorageError, StoreUnavailable

Answer = TypeVar("Answer")

_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
    }
)
_TRANSIENT_HTTP_CODES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number and length of retries. Waits double from `first_wait_s` to `max_wait_s`, each multiplied by a random
    factor in [0.5, 1).
    """

    max_attempts: int = 6
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    deadline_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryClock:
    """The passing of time and chance, as values that tests replace."""

    monotonic: Callable[[], float] = field(default=time.monotonic)
    sleep: Callable[[float], None] = field(default=time.sleep)
    random: Callable[[], float] = field(default=random.random)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later without anybody changing anything.

    Remote filesystems wrap HTTP failures in many types. What they share is a numeric `code` or `status`, or an
    `OSError` that carries no errno because no system call failed.
    """
    if isinstance(error, StorageError | FileNotFoundError | FileExistsError | PermissionError | NotADirectoryError):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    code = http_code(error)
    if code is not None:
        return code in _TRANSIENT_HTTP_CODES
    return isinstance(error, OSError) and (error.errno is None or error.errno in _TRANSIENT_ERRNOS)


def http_code(error: BaseException) -> int | None:
    """The status that a service answered with, where the exception carries one."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    return int(code) if isinstance(code, int | str) and str(code).isdecimal() else None


def call_with_retries(
    call: Callable[[int], Answer], *, what: str, policy: RetryPolicy, waiting: RetryClock | None = None
) -> Answer:
    """Calls until it answers.

    Args:
      call: function of the number of earlier attempts (0 at first), so that it can tell whether an earlier one may have
        taken effect.
      what: names the operation in the error.

    Raises:
      StoreUnavailable: the last allowed attempt failed with a transient error, or the next wait would pass the
        deadline.
      Exception: whatever is not transient, at once and unchanged.
    """
    waiting = waiting or RetryClock()
    started_s = waiting.monotonic()
    wait_s = policy.first_wait_s
    for attempt in range(policy.max_attempts):
        try:
            return call(attempt)
        except Exception as error:
            if not is_transient(error):
                raise
            # Random, so that hosts which failed together do not come back together.
            pause_s = wait_s * (0.5 + 0.5 * waiting.random())
            elapsed_s = waiting.monotonic() - started_s
            if attempt + 1 == policy.max_attempts or elapsed_s + pause_s > policy.deadline_s:
                raise StoreUnavailable(what, attempts=attempt + 1, elapsed_s=elapsed_s, last=error) from error
        waiting.sleep(pause_s)
        wait_s = min(2 * wait_s, policy.max_wait_s)
    raise ValueError(f"max_attempts is {policy.max_attempts}; at least 1 expected. Raise it in RetryPolicy.")
