"""`RequestThread`: the one thread of a pod that talks to its processes.

The program's threads hand functions in and wait for what they return. So a Ctrl-C, or whatever else strikes one of
them, ends that thread's wait and nothing else. A message is never left between its seal and its queueing, nor a step
between the calls to two hosts. Requests run one at a time in the order in which they came, so several threads of a
program may use a pod. One that nobody waits for any more goes on to its end, and the next one begins after that.

The thread is a daemon, which no end of a program waits for. It ends when its `RequestThread` is forgotten.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Answer = TypeVar("Answer")

PATIENCE_S = 0.5
_logger = logging.getLogger(__name__)


class _Request:
    """A function to call. Mutated: `is_left`, whether the thread that asked has stopped waiting."""

    __slots__ = ("answer", "do", "is_left", "what")

    def __init__(self, what: str, do: Callable[[], Any]) -> None:
        self.what, self.do = what, do
        self.answer: Future[Any] = Future()
        self.is_left = False


class RequestThread:
    """See the module. Thread-safe.

    Args:
      name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        # Its `put` is one step for the interpreter, which nothing interrupts half-way.
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._running: list[_Request] = []
        self._thread = threading.Thread(target=_serve, args=(self._queue, self._running), name=name, daemon=True)
        self._thread.start()
        # Not at the program's end: what closes pods there needs the thread.
        weakref.finalize(self, self._queue.put, None).atexit = False

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def request(self, what: str, do: Callable[[], Answer]) -> Answer:
        """Returns what `do` returns, or raises what it raises, once all requests before it have ended. Inside of a
        request it is called at once.

        Args:
          what: what the program calls it, for messages.
        """
        if threading.current_thread() is self._thread:
            return do()
        request = _Request(what, do)
        try:
            self._queue.put(request)
            try:
                return request.answer.result(PATIENCE_S)
            except TimeoutError:
                if not request.answer.done():
                    self._say_what_is_waited_for(request)
            return request.answer.result()
        finally:
            request.is_left = not request.answer.done()

    def _say_what_is_waited_for(self, request: _Request) -> None:
        for running in self._running[:1]:
            if running is not request and running.is_left:
                _logger.warning(
                    "%s waits for an earlier %s, which was interrupted here and still runs on the hosts. Expected it "
                    "to end. Wait, or call close() on the strategy, which ends it and gives up the tables.",
                    request.what,
                    running.what,
                )


def _serve(requests: SimpleQueue[_Request | None], running: list[_Request]) -> None:
    while True:
        request = requests.get()
        if request is None:
            return
        running.append(request)
        try:
            found = request.do()
        except BaseException as error:
            running.clear()
            request.answer.set_exception(error)
            del error
        else:
            running.clear()
            request.answer.set_result(found)
            del found
        # What it refers to would live on until the next one comes.
        del request
