"""`ReadAhead`: batches of the next steps, read by a thread of their own while the host works on the current one.

Threads: the reading thread alone calls the reader, from `start` to its end. The consumer's thread calls `get`, `seek`
and `close`. What passes between them is one deque of finished (step, batch) pairs, never longer than `depth`, under one
condition variable. A batch belongs to the consumer once it has been taken. A seek raises the reading generation, and
the thread drops a batch it was reading for an older one. An error in the thread takes the place of the batch that it
prevented. It is raised by `get` at exactly that step, and the thread then waits for a seek. `close` tells the thread to
stop and joins it with a deadline. The thread is a daemon, so a read that storage never answers cannot keep a process
alive. Every wait here has a deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Protocol

from podembed.workers.data.batch import Batch
from podembed.workers.processors import roam
from podembed.workers.tracing.recorder import Recorder

GET_TIMEOUT_S = 300.0
CLOSE_DEADLINE_S = 30.0
# The thread is woken by notify; this only bounds how long a lost wake-up could last.
_IDLE_WAIT_S = 5.0


class ReadAheadError(RuntimeError):
    """The reading thread did not do what was asked in time, or was asked out of turn."""


class StepReader(Protocol):
    """What `ReadAhead` needs of a reader; `InputReader` is one."""

    def read(self, step: int) -> Batch: ...

    def close(self) -> None: ...


class ReadAhead:
    """Reads steps in order, at most `depth` ahead of the consumer.

    What mutates: everything below, under the condition variable, by the two threads of the module docstring.

    Attributes:
      num_waits: batches that were not ready when they were requested.
    """

    def __init__(self, reader: StepReader, *, first_step: int, depth: int = 2, trace: Recorder | None = None) -> None:
        """Reads nothing until `start`.

        Raises:
          ReadAheadError: the depth is not positive.
        """
        if depth < 1:
            raise ReadAheadError(
                f"Found read-ahead depth {depth}. Expected at least 1. Use 2 to overlap input with a step."
            )
        self._reader = reader
        self._trace = trace or Recorder()
        self._depth = depth
        self._changed = threading.Condition()
        self._finished: deque[tuple[int, Batch | BaseException]] = deque()
        self._next_to_read = first_step
        self._next_to_get = first_step
        self._generation = 0
        self._has_failed = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="input-read-ahead", daemon=True)
        self.num_waits = 0

    def start(self) -> ReadAhead:
        """Starts the thread; returns self, so that construction and start fit one line."""
        self._thread.start()
        return self

    def get(self, step: int, *, timeout_s: float = GET_TIMEOUT_S) -> Batch:
        """The batch of a step. Steps are taken in order; after `seek(step)` the next is that step.

        Raises:
          ReadAheadError: another step is next, the read-ahead is closed, or `timeout_s` passed.
          InputError, OSError, ...: whatever prevented the reader from reading this step.
        """
        with self._changed:
            if step != self._next_to_get:
                raise ReadAheadError(
                    f"Found a request for step {step}. Expected step {self._next_to_get}. Call seek({step}) to read "
                    "elsewhere."
                )
            self._await_first(step, timeout_s)
            _, outcome = self._finished[0]
            if isinstance(outcome, BaseException):
                # Left in place: asking again gives the same answer until a seek.
                raise outcome
            self._finished.popleft()
            self._next_to_get += 1
            self._changed.notify_all()
            return outcome

    def seek(self, step: int) -> None:
        """Makes `step` the next one; drops what was read ahead, and a past error."""
        with self._changed:
            self._finished.clear()
            self._generation += 1
            self._has_failed = False
            self._next_to_read = self._next_to_get = step
            self._changed.notify_all()

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Stops and joins the thread, then closes the reader. Closing twice is closing once.

        Raises:
          ReadAheadError: the thread is still reading after `deadline_s`; the reader is then left to it, unclosed.
        """
        with self._changed:
            self._is_closing = True
            self._finished.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise ReadAheadError(
                f"Found the input thread still reading step {self._next_to_read} after {deadline_s:g} s. Expected one "
                "read to end by then. Check that the storage answers; the thread ends with the process."
            )
        self._reader.close()

    def __enter__(self) -> ReadAhead:
        return self if self._thread.ident is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_first(self, step: int, timeout_s: float) -> None:
        """Waits, holding the lock, until the first finished step is there."""
        if self._finished:
            return
        self.num_waits += 1
        is_there = self._changed.wait_for(lambda: bool(self._finished) or self._is_closing, timeout_s)
        if self._is_closing:
            raise ReadAheadError(
                f"Found the read-ahead closed while step {step} was requested. Expected it open. Close it after the "
                "last step."
            )
        if not is_there:
            state = "running" if self._thread.is_alive() else "not started"
            raise ReadAheadError(
                f"Found no batch for step {step} after {timeout_s:g} s; the input thread is {state}. Expected a batch "
                "in that time. Check that the storage answers, or raise timeout_s."
            )

    def _run(self) -> None:
        roam()
        while (task := self._next_task()) is not None:
            generation, step = task
            try:
                with self._trace.span("input", f"read step {step}"):
                    outcome: Batch | BaseException = self._reader.read(step)
            except BaseException as error:  # handed to the consumer, who raises it at this step
                outcome = error
            self._pass_on(generation, step, outcome)

    def _next_task(self) -> tuple[int, int] | None:
        """Waits for room; (generation, step) to read, or None to end."""
        with self._changed:
            while not self._is_closing and (self._has_failed or len(self._finished) >= self._depth):
                self._changed.wait(_IDLE_WAIT_S)
            return None if self._is_closing else (self._generation, self._next_to_read)

    def _pass_on(self, generation: int, step: int, outcome: Batch | BaseException) -> None:
        with self._changed:
            if self._is_closing or generation != self._generation:
                return
            self._finished.append((step, outcome))
            self._has_failed = isinstance(outcome, BaseException)
            self._next_to_read = step + 1
            self._changed.notify_all()
