"""Where a driver goes back to that recovers, and what it says of a commit that it had."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit.checkpoint import NoLoadableCommit
from podembed.orchestrator.run.opening import open_run
from podembed.orchestrator.run.run import OpenRun
from tests.orchestrator.cluster.test_in_process import train
from tests.orchestrator.committed_tables import flip_byte
from tests.orchestrator.run.claims_of import claims_of

FIRST, SECOND = "s000000010-g00000001", "s000000020-g00000001"


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("claims") / "run"
    policy = CheckpointConfig(every_steps=10, num_to_keep=None)
    train(small_data, path, checkpoint_config=policy, max_steps=20, evaluate_at_end=False)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> OpenRun:
    return open_run(str(shutil.copytree(trained, tmp_path / "run")))


def manifest_of(run: OpenRun, name: str) -> Path:
    return Path(run.url.removeprefix("file://")) / "commit" / f"{name}.json"


def damage(run: OpenRun, name: str) -> None:
    flip_byte(
        next(
            path for path in sorted(manifest_of(run, name).parents[1].glob(f"data/{name}/**/c/**/*")) if path.is_file()
        )
    )


def test_the_manifest_that_a_generation_began_from_is_gone_and_a_fault_leads_back_behind_it(run: OpenRun) -> None:
    told: list[str] = []
    claims = claims_of(run, told=told)
    assert claims.acquire().head == SECOND
    manifest_of(run, SECOND).unlink()
    lease = claims.acquire()
    assert (lease.generation, lease.head) == (3, FIRST)
    assert [text for text in told if "VANISHED" in text and SECOND in text and f"goes back to {FIRST}" in text]
    assert claims.acquire().head == FIRST


def test_a_new_driver_is_refused_until_it_is_allowed(run: OpenRun) -> None:
    claims_of(run).acquire().release()
    manifest_of(run, SECOND).unlink()
    with pytest.raises(NoLoadableCommit, match=f"{SECOND}.*--allow-ancestor"):
        claims_of(run).acquire()
    assert claims_of(replace(run, allow_ancestor=True)).acquire().head == FIRST


def test_a_fault_does_not_lead_back_to_the_first_step_where_no_commit_is_left(run: OpenRun) -> None:
    claims = claims_of(run)
    claims.acquire()
    for name in (FIRST, SECOND):
        manifest_of(run, name).unlink()
    with pytest.raises(NoLoadableCommit, match="manifest is gone.*No other commit counts.*from a copy"):
        claims.acquire()


def test_a_commit_whose_files_are_damaged_has_not_vanished(run: OpenRun) -> None:
    told: list[str] = []
    claims = claims_of(replace(run, allow_ancestor=True), told=told)
    assert claims.acquire().head == SECOND
    damage(run, SECOND)
    assert claims.acquire().head == FIRST
    assert [text for text in told if f"commit {SECOND} is damaged and passed over" in text and "data/" in text]
    assert not [text for text in told if "VANISHED" in text]
