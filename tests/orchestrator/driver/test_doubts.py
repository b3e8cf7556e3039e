"""Which generations compare the rows that hosts kept before they train: those after a fault that such rows cause."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.decisions.failure import Budget, FaultClass, Recover
from podembed.orchestrator.driver.generation import Generation
from podembed.orchestrator.driver.recovery import LostGeneration
from podembed.workers.liveness.progress import Stopwatch
from podembed.workers.liveness.worker import Worker

NOTHING: Any = lambda *_, **__: None  # noqa: E731
IN_DOUBT = LostGeneration(cause="c", reached_step=0, detect_s=0.0, stop_s=0.0, stopped_s=0.0, doubts_rows=True)


def generation(*, is_proven: bool, is_starting: bool) -> Generation:
    shared: Any = SimpleNamespace(
        watch=SimpleNamespace(failed=lambda *_, **__: Recover(cause="c", kind=FaultClass.HOST, budget=Budget())),
        trace=SimpleNamespace(cut=NOTHING),
        clock=SimpleNamespace(wall_s=lambda: 1.0, monotonic_s=lambda: 1.0),
        claims=SimpleNamespace(generation=2),
        groups=SimpleNamespace(salvage=NOTHING),
        reporter=SimpleNamespace(close=NOTHING),
        emit=NOTHING,
    )
    lease: Any = SimpleNamespace(head_step=0)
    made = Generation(shared, lease, None, before=None, stopwatch=Stopwatch(lambda: 1.0))
    made.group = SimpleNamespace(is_proven=is_proven, last_progress=list)  # type: ignore[assignment]
    if not is_starting:
        made._committing = SimpleNamespace(commits=SimpleNamespace(leave=NOTHING))  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("kind", "is_proven", "is_starting", "before", "doubts"),
    [
        (FailureKind.DIED, True, False, None, False),
        (FailureKind.DIED, False, False, None, False),
        (FailureKind.DIED, False, False, IN_DOUBT, False),
        (FailureKind.DAMAGED, False, False, None, True),
        (FailureKind.ERROR, False, False, None, True),
        (FailureKind.ERROR, True, False, None, False),
        # It has not compared all that was in doubt.
        (FailureKind.DIED, True, True, IN_DOUBT, True),
        (FailureKind.DIED, True, True, None, False),
    ],
)
def test_which_generations_compare_first(
    kind: FailureKind, is_proven: bool, is_starting: bool, before: LostGeneration | None, doubts: bool
) -> None:
    failure = WorkerFailure([Failure(worker=Worker("host", 1), kind=kind, message="m")])
    fault = generation(is_proven=is_proven, is_starting=is_starting).lost(failure, before)
    assert fault is not None
    assert fault.doubts_rows is doubts


def test_a_fault_in_the_middle_of_a_recovery_forgets_no_step_that_is_to_be_done_again() -> None:
    failure = WorkerFailure([Failure(worker=Worker("host", 1), kind=FailureKind.DIED, message="m")])
    before = replace(IN_DOUBT, reached_step=17)
    for is_starting, reached_step in ((True, 17), (False, 0)):
        fault = generation(is_proven=True, is_starting=is_starting).lost(failure, before)
        assert fault is not None
        assert fault.reached_step == reached_step
