"""Plans are read strictly."""

from __future__ import annotations

import pytest

from podembed.jobs.chaos.plan_file import parse_plan, plan_bytes
from podembed.workers.faults.plan import Fault, FaultPlan, FaultPlanError


def test_a_plan_survives_its_json() -> None:
    plan = FaultPlan(
        folder="/somewhere",
        faults=(
            Fault(point="step.update", action="kill", rank="host 1", step=12, nth=2),
            Fault(point="storage.write", action="http_error", match="data/s0+1", times=3, arguments={"code": 503}),
            Fault(point="driver.window", action="delay", rank="driver", for_s=2.5, arguments={"seconds": 0.5}),
        ),
    )
    assert parse_plan("plan", plan_bytes(plan)) == plan


@pytest.mark.parametrize(
    "document",
    [
        b"[]",
        b'{"faults": []}',
        b'{"folder": "", "faults": []}',
        b'{"folder": "f", "faults": {}}',
        b'{"folder": "f", "faults": [], "more": 1}',
        b'{"folder": "f", "faults": [{"point": "step.gather"}]}',
        b'{"folder": "f", "faults": [{"point": "step.gather", "action": "kill", "when": 1}]}',
        b'{"folder": "f", "faults": [{"point": "step.gather", "action": "kill", "step": "1"}]}',
        b'{"folder": "f", "faults": [{"point": "step.gather", "action": "kill", "step": true}]}',
        b'{"folder": "f", "faults": [{"point": "step.gather", "action": "kill", "nth": 1.5}]}',
        b'{"folder": "f", "folder": "g"}',
        b"not json",
    ],
)
def test_a_document_that_is_no_plan_is_refused(document: bytes) -> None:
    with pytest.raises(FaultPlanError):
        parse_plan("plan", document)
