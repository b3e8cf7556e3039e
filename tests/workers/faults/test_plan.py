"""What is wrong with a fault is said with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from podembed.workers.faults.plan import POINTS, Fault, FaultPlanError


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
