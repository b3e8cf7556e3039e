"""Plans are read strictly, and what is wrong with one is said with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.workers.faults.plan import POINTS, Fault, FaultPlan, FaultPlanError, parse_plan


def test_a_plan_survives_its_json() -> None:
    plan = FaultPlan(
        folder="/somewhere",
        faults=(
            Fault(point="step.update", action="kill", rank="host 1", step=12, nth=2),
            Fault(point="storage.write", action="http_error", match="data/s0+1", times=3, arguments={"code": 503}),
            Fault(point="driver.window", action="delay", rank="driver", for_s=2.5, arguments={"seconds": 0.5}),
        ),
    )
    assert parse_plan("plan", plan.to_json()) == plan


def test_an_unknown_point_names_those_that_there_are() -> None:
    with pytest.raises(FaultPlanError) as refused:
        Fault(point="step.updat", action="kill")
    assert all(point in str(refused.value) for point in POINTS)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"point": "step.gather", "action": "nan"}, "kill"),
        ({"point": "step.update.mid", "action": "delay"}, "kill"),
        ({"point": "mesh.send", "action": "torn"}, "truncate"),
        ({"point": "step.gather", "action": "kill", "rank": "server 1"}, "host 0"),
        ({"point": "step.gather", "action": "kill", "nth": 0}, "at least 1"),
        ({"point": "step.gather", "action": "kill", "arguments": {"seconds": 1}}, "none"),
        ({"point": "step.gather", "action": "delay", "arguments": {"seconds": -1}}, "at least 0"),
        ({"point": "step.gather", "action": "delay", "arguments": {"seconds": True}}, "at least 0"),
        ({"point": "step.gather", "action": "raise", "arguments": {"type": "SystemExit"}}, "OSError"),
        ({"point": "driver.window", "action": "signal", "arguments": {"name": "SIGKILL"}}, "SIGTERM"),
        ({"point": "storage.write", "action": "torn", "match": "("}, "regular expression"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(FaultPlanError, match=words):
        Fault(**fault)


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
