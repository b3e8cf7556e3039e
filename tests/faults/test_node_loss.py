"""A machine of the cluster disappears, with its host, its device process and its Ray daemon; a spare machine takes its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_state import assert_same_bytes, committed_state

TIMEOUT_S = 240


def _train(data: str, storage: Path, module: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", module, data, str(storage)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.slow
def test_a_lost_machine_costs_steps_and_nothing_else(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    from tests.orchestrator.test_equality import train_small

    lost = _train(small_data, tmp_path, "tests.faults.node_loss_process")
    assert lost["step"] == 50
    assert len(lost["recoveries"]) >= 1
    assert not any("share" in notice for notice in lost["notices"]), "the two hosts should be on two nodes"
    undisturbed = train_small(small_data, tmp_path, "undisturbed", num_hosts=2)
    assert lost["losses"] == [undisturbed.losses[step] for step in sorted(undisturbed.losses)]
    assert_same_bytes(committed_state(lost["path"]), committed_state(undisturbed.path))
