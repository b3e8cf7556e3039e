"""Losses and figures of models that use all that they are given: the same on one host, on two, and over a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.conformance.full_job import write_full_data
from tests.long_tests import is_long
from tests.run_state import committed_state
from tests.training import fit_job

NUM_STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("full")
    write_full_data(folder)
    return str(folder)


def trained(folder: str, runs: Path, name: str, kind: str, *, num_hosts: int, max_steps: int = NUM_STEPS) -> Result:
    return fit_job(
        JobReference(function="tests.conformance.full_job:full_job", arguments={"folder": folder, "kind": kind}),
        runs,
        name=name,
        num_hosts=num_hosts,
        max_steps=max_steps,
        eval_every_steps=5,
        checkpoint_config=CheckpointConfig(every_steps=5),
    )


@is_long
@pytest.mark.ray
@pytest.mark.parametrize("kind", ["towers", "tasks"])
def test_two_hosts_and_a_restart_on_one_have_the_numbers_of_one_host(
    kind: str, folder: str, tmp_path: Path, ray_cluster: None
) -> None:
    one = trained(folder, tmp_path, "one", kind, num_hosts=1)
    two = trained(folder, tmp_path, "two", kind, num_hosts=2, max_steps=NUM_STEPS // 2)
    manifest = checkpoint.load_head(Store(two.path))
    assert manifest is not None
    assert set(manifest.placement["users"]) == {0, 1}
    again = trained(folder, tmp_path, "two", kind, num_hosts=1)
    losses = two.losses | again.losses
    np.testing.assert_allclose(
        [losses[step] for step in range(NUM_STEPS)], [one.losses[step] for step in range(NUM_STEPS)], rtol=2e-5
    )
    expected = {evaluation.step: evaluation.values for evaluation in one.evaluations}
    found = {evaluation.step: evaluation.values for evaluation in (*two.evaluations, *again.evaluations)}
    assert sorted(found) == sorted(expected) == [5, 10, 15, 20]
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4), step
    state = committed_state(again.path)
    for name, values in committed_state(one.path).items():
        np.testing.assert_allclose(state[name], values, rtol=1e-3, atol=1e-5, err_msg=name)
    assert one.losses[NUM_STEPS - 1] < one.losses[0]
