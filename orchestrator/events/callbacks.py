"""`CallbackThread`: tells a job's callbacks what happens. They have a thread of their own, so that a slow one does not
keep the driver from its heartbeat.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.commits import Committed
from podembed.orchestrator.events.event import Emit, Event
from podembed.orchestrator.events.progress import Evaluated, WindowTrained
from podembed.orchestrator.events.run import CallbackFailed, CallbacksLeft
from podembed.workers.control.callback import Callback
from podembed.workers.liveness.carried_error import trace_of, words_of

# What the driver waits for a callback at most: each time, and at the end of the run.
WAIT_S = 5.0
END_WAIT_S = 60.0

# A method of `Callback`, its arguments, and what is set once all callbacks have heard it.
Told = tuple[str, tuple[Any, ...], threading.Event]


class CallbackThread:
    """See the module. A context manager: it ends with the run.

    Args:
      callbacks: callbacks of the job.
      emit: callback that takes what happens, in the driver's thread.
    """

    def __init__(self, callbacks: Sequence[Callback], *, emit: Emit) -> None:
        self._callbacks = tuple(callbacks)
        self._emit = emit
        self._told: queue.Queue[Told | None] = queue.Queue()
        self._failures: queue.SimpleQueue[CallbackFailed] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._request: Callable[[str], None] = lambda reason: None
        self._result: Result | None = None
        # The callback and the method that the thread is in.
        self._calling: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    def __enter__(self) -> CallbackThread:
        if self._callbacks:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._callbacks:
            return
        self._tell("on_end", self._result, wait_s=0.0)
        self._told.put(None)
        self._thread.join(END_WAIT_S)
        self._say()
        if self._thread.is_alive():
            self._emit(CallbacksLeft(waited_s=END_WAIT_S, untold=self._told.qsize()))

    def begin(self, path: str, arguments: dict[str, Any], request: Callable[[str], None]) -> None:
        """The run at `path` begins.

        Args:
          request: asks it to stop, with a reason.
        """
        self._request = request
        self._tell("on_begin", path, dict(arguments))

    def event(self, event: Event) -> None:
        """Takes an event on to `emit`, and to the callbacks if it is one of theirs."""
        self._emit(event)
        match event:
            case WindowTrained(report=report):
                self._tell("on_window", report)
            case Evaluated(evaluation=evaluation):
                self._tell("on_evaluation", evaluation)
            case Committed(name=name, step=step):
                self._tell("on_commit", name, step)
            case _:
                pass

    def end(self, result: Result) -> Result:
        """The run ended well; `on_end` gets its result when this closes."""
        self._result = result
        return result

    def _tell(self, method: str, *arguments: Any, wait_s: float | None = None) -> None:
        if not self._callbacks:
            return
        heard = threading.Event()
        self._told.put((method, arguments, heard))
        wait_s = WAIT_S if wait_s is None else wait_s
        if not heard.wait(wait_s) and wait_s and (calling := self._calling) is not None:
            # Said, since the seconds are in those of whatever the driver does meanwhile, such as a commit.
            name, method = calling
            late = f"it has not come back within {wait_s:g} s, for which the run waited, as it does each time"
            self._failures.put(CallbackFailed(callback=name, method=method, error=late, trace=""))
        self._say()

    def _say(self) -> None:
        """Reports what callbacks raised, each text once."""
        while not self._failures.empty():
            failure = self._failures.get()
            said = f"{failure.callback}: {failure.error}"
            if said not in self._said:
                self._said.add(said)
                self._emit(failure)

    def _run(self) -> None:
        while (told := self._told.get()) is not None:
            method, arguments, heard = told
            for callback in self._callbacks:
                self._calling = type(callback).__name__, method
                self._call(callback, method, arguments)
            self._calling = None
            heard.set()

    def _call(self, callback: Callback, method: str, arguments: tuple[Any, ...]) -> None:
        """Raises nothing at all: with this thread, all callbacks would fall silent."""
        name = type(callback).__name__
        try:
            asked = getattr(callback, method)(*arguments)
            if asked is not None and method != "on_end":
                if not isinstance(asked, str) or not asked:
                    raise TypeError(f"Found {asked!r} returned. Expected None, or a text that says why to stop.")
                self._request(f"{name} ({asked})")
        except BaseException as error:  # `sys.exit()` ends a thread, and not the program
            words = words_of(error).rstrip(".")
            said = f"{type(error).__name__}: {words}" if words else type(error).__name__
            if not isinstance(error, Exception):
                said += ". It ends nothing here; to stop the run, return a text that says why"
            self._failures.put(CallbackFailed(callback=name, method=method, error=said, trace=trace_of(error)))
