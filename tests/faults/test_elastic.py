"""Machines join, vanish and drain under a run with a range of hosts; each sample is trained once an epoch all the same.

They take minutes and run with `make elastic`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.commit import checkpoint
from podembed.workers.storage.store import Store
from tests.faults.elastic_process import COMMIT_EVERY
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import expected_audit
from tests.processes import said_by
from tests.run_state import committed_state
from tests.small_job import small_job

pytestmark = is_long
TIMEOUT_S = 1800
EPOCHS = 400  # more than there is time for: the run is told to stop


def _run(form: str, data: str, storage: Path) -> dict:
    """What a form of `elastic_process` saw, after the checks that hold for both."""
    seen = said_by("tests.faults.elastic_process", form, data, str(storage), str(EPOCHS), timeout_s=TIMEOUT_S)
    # Changes come in order, after commits of the schedule; the killed machine is the only fault, and hosts on the
    # others live on.
    assert all(step % COMMIT_EVERY == 0 for _, _, step, _ in seen["changes"])
    (recovery,) = seen["recoveries"]
    assert recovery[1:] > [0, 0], seen["events"]
    assert not any(event["kind"] == "survivors_dropped" for event in seen["events"]), seen["events"]

    head = checkpoint.load_head(Store(seen["path"]))
    assert head is not None
    assert (seen["step"], head.step, head.hosts) == (seen["steps_with_loss"], seen["step"], 2)
    assert seen["stopped_by"] == "SIGINT"
    audit = committed_state(seen["path"])["audit/rows"][:, 0]
    expected = expected_audit(small_job(folder=data, epochs=EPOCHS), seen["step"])
    np.testing.assert_allclose(audit, expected, rtol=1e-5)
    return seen


@pytest.mark.ray
@pytest.mark.slow
def test_a_machine_is_lost_another_joins_and_every_sample_counts_once(small_data: str, tmp_path: Path) -> None:
    seen = _run("short", small_data, tmp_path)
    assert [hosts for hosts, _ in seen["hosts"]] == [2, 1, 2], seen["events"]
    assert [change[:2] for change in seen["changes"]] == [[1, 2]]


@pytest.mark.ray
@pytest.mark.slow
def test_hosts_come_and_go_and_every_sample_counts_once(small_data: str, tmp_path: Path) -> None:
    seen = _run("long", small_data, tmp_path)
    assert [hosts for hosts, _ in seen["hosts"]] == [2, 3, 2, 2], seen["events"]
    joined, left = seen["changes"]
    assert joined[:2] == [2, 3]
    assert left[:2] == [2, 2]
    assert "is about to leave" in left[3]
    assert [event["needed"] for event in seen["events"] if event["kind"] == "hosts_awaited"] == [2]
