"""`AskingFunction`: a function of the user that may ask the driver something and wait for the answer.

The call that began it has then returned, with the question in place of a result. The driver calls again with the
answer, whichever way its calls take. So the function has a thread of its own, which lives as long as the function. The
thread of the driver's calls waits for it whenever it works: never do both run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """A question of a function that goes on with `StepwiseDevice.go_on`."""

    question: Any


@dataclass(frozen=True, slots=True)
class _Ended:
    value: Any
    error: BaseException | None


class FunctionGivenUp(BaseException):
    """Raised in a function whose answer will not come. Not an Exception, which the function might take for one of its
    own.
    """


class AskingFunction:
    """One call of a function. Mutable.

    Args:
      call: call that gets `ask`, which it may call with a question, on its own thread alone. That returns the answer.
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._call = call
        self._said: SimpleQueue[UserQuestion | _Ended] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._is_given_up = False

    def start(self) -> Any:
        """Runs until the function ends or asks. Returns its value or `UserQuestion`; raises what it raised."""
        work = copy_context().run
        # A function that waits for ever must not keep the process from its end.
        threading.Thread(target=work, args=(self._work,), name="function of the user", daemon=True).start()
        return self._next()

    def go_on(self, answer: Any) -> Any:
        """Answers the question; the rest as `start`."""
        self._answers.put(answer)
        return self._next()

    def give_up(self) -> None:
        """Ends the function, whose answer will not come, and waits for that."""
        self._is_given_up = True
        self._answers.put(None)
        self._said.get()

    def _work(self) -> None:
        try:
            self._said.put(_Ended(self._call(self._ask), None))
        except BaseException as error:
            self._said.put(_Ended(None, error))

    def _ask(self, question: Any) -> Any:
        if not self._is_given_up:
            self._said.put(UserQuestion(question))
            answer = self._answers.get()
            if not self._is_given_up:
                return answer
        raise FunctionGivenUp("The driver gives no answer, since something failed there or on another replica.")

    def _next(self) -> Any:
        said = self._said.get()
        if isinstance(said, UserQuestion):
            return said
        if said.error is not None:
            raise said.error
        return said.value
