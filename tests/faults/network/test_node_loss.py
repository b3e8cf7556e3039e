"""A machine of the cluster disappears, with its host, its device process and its Ray daemon; a spare machine takes its
place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import said_by
from tests.run_state import assert_same_bytes, committed_state

TIMEOUT_S = 240


@pytest.mark.ray
@pytest.mark.slow
def test_a_lost_machine_costs_steps_and_nothing_else(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    from tests.orchestrator.driver.test_equality import train_small

    lost = said_by("tests.faults.network.node_loss_process", small_data, str(tmp_path), timeout_s=TIMEOUT_S)
    assert lost["step"] == 50
    assert len(lost["recoveries"]) >= 1
    kinds = [event["kind"] for event in lost["events"]]
    assert "hosts_share_machines" not in kinds, "the two hosts should be on two nodes"
    assert [event["niceness"] for event in lost["events"] if event["kind"] == "niceness_found"] == [15]
    undisturbed = train_small(small_data, tmp_path, "undisturbed", num_hosts=2)
    assert lost["losses"] == [undisturbed.losses[step] for step in sorted(undisturbed.losses)]
    assert_same_bytes(committed_state(lost["path"]), committed_state(undisturbed.path))
