"""What came over a line of a strategy's process."""

from __future__ import annotations

from typing import Any

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.stepwise.line_calls import of_answer
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.actors import RayPacking


class Unreadable:
    """Its content is refused wherever it arrives, like a class that only a worker can import."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_answer_that_the_driver_cannot_read_fails_the_call_and_says_why() -> None:
    failure = of_answer(Worker("device", 1), bytearray(RayPacking().pack(Unreadable())))
    assert isinstance(failure, Failure)
    assert (failure.worker, failure.kind) == (Worker("device", 1), FailureKind.ERROR)
    assert isinstance(failure.error, ValueError)
    assert "no number" in failure.message
