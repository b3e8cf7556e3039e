"""Runs with tables whose keys come and go: the same over kills and on other numbers of hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.opening import open_run
from podembed.tools.fsck.check import check_run
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import NUM_STEPS, Killer, train_small
from tests.run_state import assert_same_bytes, committed_state


def _losses(result: Result) -> np.ndarray:
    return np.array([result.losses[step] for step in sorted(result.losses)])


@pytest.fixture(scope="module")
def alone(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train_small(small_data, tmp_path_factory.mktemp("alone"), "one", num_hosts=1, in_process=True, dynamic=True)


def test_a_cut_run_ends_with_the_same_bytes(alone: Result, small_data: str, tmp_path: Path) -> None:
    """Rows and keys come from the commit, and the index is built of them."""
    options = {"num_hosts": 1, "in_process": True, "dynamic": True}
    train_small(small_data, tmp_path, "cut", max_steps=20, **options)
    cut = train_small(small_data, tmp_path, "cut", full_every=3, **options)
    assert min(cut.losses) == 20
    assert_same_bytes(committed_state(cut.path), committed_state(alone.path))
    # Keys were forgotten: a table whose rows are all kept has other values.
    kept = train_small(small_data, tmp_path, "kept", num_hosts=1, in_process=True)
    assert (_losses(kept) != _losses(alone)).any()
    state = committed_state(alone.path)
    is_used = state["b/last"][:, 0] > 0
    assert 0 < is_used.sum() < len(is_used)
    assert not state["b/key"][~is_used].any()


def test_a_run_goes_on_with_more_room(small_data: str, tmp_path: Path) -> None:
    """Keys keep their rows, whether the commit was one of all rows or of changes, and after a commit of each kind."""
    options = {"num_hosts": 1, "in_process": True, "dynamic": True, "audit": False}
    states = []
    for name, full_every in (("full", 1), ("changes", 3)):
        before = committed_state(
            train_small(small_data, tmp_path, name, max_steps=20, full_every=full_every, **options).path
        )
        path = str(tmp_path / name)
        run = open_run(path, settings={"room": 0.5})
        assert sum(table.num_rows for table in run.record.tables) > sum(len(before[f"{t}/key"]) for t in "ab")
        config = RunConfig(max_steps=50, checkpoint_config=CheckpointConfig(every_steps=10, full_every=full_every))
        fit(run, scaling=ScalingConfig(in_process=True), config=config, reporter=SilentReporter())
        assert not check_run(path).all_findings
        states.append(committed_state(path))
    assert_same_bytes(*states)
    rows = len(before["a/key"])
    assert len(states[0]["a/key"]) > rows
    with pytest.raises(ConfigurationError, match=r"room=0\.25.*\n.*table 'a' would have other rows \(\d+ -> \d+\)"):
        open_run(path, settings={"room": 0.25})


@pytest.mark.ray
def test_a_killed_run_that_goes_on_with_another_host_sees_the_same(
    alone: Result, ray_cluster: None, small_data: str, tmp_path: Path
) -> None:
    killer = Killer("HostActor", after_step=12, seed=3)
    # Steps behind the kill, also where the first commit is slow.
    killed = train_small(small_data, tmp_path, "two", num_hosts=2, dynamic=True, max_steps=40, reporter=killer)
    assert len(killed.recoveries) == 1
    three = train_small(small_data, tmp_path, "two", num_hosts=3, dynamic=True)
    assert sorted(three.losses) == [*range(40, NUM_STEPS)]
    np.testing.assert_allclose([*_losses(killed), *_losses(three)], _losses(alone), rtol=1e-5)
    ours, theirs = committed_state(three.path), committed_state(alone.path)
    for name, values in ours.items():
        if name.endswith(("key", "last", "count")):
            assert values.tobytes() == theirs[name].tobytes(), name


@is_long
@pytest.mark.ray
def test_a_killed_run_ends_with_the_same_bytes(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    killer = Killer("HostActor", after_step=12, seed=3)
    killed = train_small(small_data, tmp_path, "two", num_hosts=2, dynamic=True, reporter=killer)
    assert len(killed.recoveries) == 1
    undisturbed = train_small(small_data, tmp_path, "calm", num_hosts=2, dynamic=True)
    assert_same_bytes(committed_state(killed.path), committed_state(undisturbed.path))
