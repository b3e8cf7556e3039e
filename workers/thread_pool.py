"""`ThreadPool`: the threads of a host's kernels, or of its CPU device.

Threads: the caller's own thread and helpers, which wait for work and do nothing else. The caller hands over a list of
calls. All of them take the next call from the list until none is left. The caller takes calls as well, and returns when
the last one has ended. A helper that wakes late finds the list empty, so no thread waits for it. Between two lists the
helpers own nothing. They end when the pool is closed or forgotten.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from podembed.embedding.kernels.threads import is_worth_sharing


class _Shift:
    """One list of calls, and how far it is. `next` of a counter is one step of the interpreter, so it needs no lock."""

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self._calls = calls
        self._taken = itertools.count()
        self._ended = itertools.count(1)
        # By position of the call.
        self._errors: dict[int, BaseException] = {}
        self._all_ended = threading.Lock()
        self._all_ended.acquire()

    def work(self) -> None:
        """Makes calls until none is left."""
        calls = self._calls
        while (at := next(self._taken)) < len(calls):
            try:
                # What stands before a call that failed is made all the same, as one thread would have done.
                if at < min(list(self._errors), default=len(calls)):
                    calls[at]()
            except BaseException as error:
                self._errors[at] = error
            finally:
                if next(self._ended) == len(calls):
                    self._all_ended.release()

    def wait(self) -> None:
        """Returns when no thread is within a call any more.

        Raises:
          BaseException: what a call raised; of several the first in the list, as with one thread.
        """
        self._all_ended.acquire()
        if self._errors:
            raise self._errors[min(self._errors)]


class ThreadPool:
    """So many threads, the caller's included. Helpers start with the first work that is worth it.

    Args:
      num_threads: at least 1.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._shifts: queue.SimpleQueue[_Shift | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._shifts, self._helpers)

    def run(self, calls: Sequence[Callable[[], None]], *, size: int) -> None:
        """As `Threads.run`. With too little work for several threads, all in the caller's."""
        if self.num_threads == 1 or len(calls) < 2 or not is_worth_sharing(size, len(calls)):
            for call in calls:
                call()
            return
        if not self._helpers:
            self._start()
        shift = _Shift(calls)
        for _ in range(min(self.num_threads, len(calls)) - 1):
            self._shifts.put(shift)
        shift.work()
        shift.wait()

    def _start(self) -> None:
        for number in range(1, self.num_threads):
            helper = threading.Thread(target=_help, args=(self._shifts,), name=f"kernels-{number}", daemon=True)
            helper.start()
            self._helpers.append(helper)

    def close(self) -> None:
        """Ends the helpers. Safe to call twice; no `run` may follow."""
        self._end()


def _help(shifts: queue.SimpleQueue[_Shift | None]) -> None:
    while (shift := shifts.get()) is not None:
        shift.work()
        # Until the next one comes, nothing of this one is kept alive.
        del shift


def _end(shifts: queue.SimpleQueue[_Shift | None], helpers: Sequence[threading.Thread]) -> None:
    for _ in helpers:
        shifts.put(None)
    for helper in helpers:
        if helper is not threading.current_thread():
            helper.join()
