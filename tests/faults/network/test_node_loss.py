"""A machine of the cluster disappears, with its host, its device process and its Ray daemon; a spare machine takes its
place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.orchestrator.api.result import Result
from tests.processes import said_by
from tests.run_state import assert_same_bytes, committed_state

TIMEOUT_S = 900


@pytest.mark.ray
@pytest.mark.slow
def test_a_lost_machine_costs_steps_and_nothing_else(two_hosts: Result, small_data: str, tmp_path: Path) -> None:
    lost = said_by("tests.faults.network.node_loss_process", small_data, str(tmp_path), timeout_s=TIMEOUT_S)
    assert lost["step"] == 50
    assert len(lost["recoveries"]) >= 1
    kinds = [event["kind"] for event in lost["events"]]
    assert "hosts_share_machines" not in kinds, "the two hosts should be on two nodes"
    assert [event["niceness"] for event in lost["events"] if event["kind"] == "niceness_found"] == [1]
    assert lost["losses"] == [two_hosts.losses[step] for step in sorted(two_hosts.losses)]
    assert_same_bytes(committed_state(lost["path"]), committed_state(two_hosts.path))
