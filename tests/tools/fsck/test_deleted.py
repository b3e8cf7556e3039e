"""Files that were deleted from a run that really trained are found, each with what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit.holder import Heartbeat, Holder
from podembed.orchestrator.run.opening import open_run
from podembed.tools.fsck.check import check_run
from podembed.workers.storage.records import encode
from podembed.workers.storage.store import Store
from tests.orchestrator.cluster.test_in_process import train
from tests.orchestrator.run.claims_of import claims_of


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three generations; the keep policy has deleted the commits of the second one."""
    path = tmp_path_factory.mktemp("deleted") / "run"
    for steps, num_to_keep in ((10, None), (20, None), (30, None)):
        policy = CheckpointConfig(every_steps=10, num_to_keep=num_to_keep)
        train(small_data, path, checkpoint_config=policy, max_steps=steps, evaluate_at_end=False)
    (path / "commit" / "s000000020-g00000002.json").unlink()
    shutil.rmtree(path / "data" / "s000000020-g00000002")
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_what_the_keep_policy_deletes_is_no_damage_and_metrics_are_not_checked(run: Path) -> None:
    shutil.rmtree(run / "metrics", ignore_errors=True)
    assert [finding for finding in check_run(str(run)).all_findings if finding.file.startswith("lease")] == []


def test_a_driver_that_was_killed_behind_its_first_commit_has_left_no_damage(small_data: str, tmp_path: Path) -> None:
    """Its heartbeat stands, and the record of the history had not been written."""
    train(small_data, tmp_path / "run", max_steps=10, evaluate_at_end=False)
    shutil.rmtree(tmp_path / "run" / "history")
    store = Store(tmp_path / "run")
    assert [finding.file for finding in check_run(store).all_findings] == ["history/"]
    beat = Heartbeat(generation=1, holder=Holder.current(""), written_unix_s=0.0)
    store.replace("lease/g00000001.hb", encode(beat))
    assert check_run(store).is_intact
    # Nor has the next one, which is stopped before it commits.
    claims_of(open_run(store.location)).acquire().release()
    assert check_run(store).is_intact


@pytest.mark.parametrize(
    ("pattern", "file", "remedy"),
    [
        ("INPUT.json", "INPUT.json", "writes it again"),
        ("history/*", "history/", "the next commit writes another"),
        ("history", "history/", "the next commit writes another"),
        ("policies/*", "policies/", "keeps the newest 3"),
        ("lease/g00000003.base.json", "lease/g00000003.base.json", "--allow-ancestor"),
        # Nothing but the base of the third generation tells that the second one had a base.
        ("lease/g00000002.base.json", "lease/g00000002.base.json", "restore it from a copy"),
        ("lease/g00000001.base.json", "lease/g00000001.base.json", "a run goes on without it"),
    ],
)
def test_what_is_deleted_is_named_with_what_to_do(run: Path, pattern: str, file: str, remedy: str) -> None:
    before = {finding.file for finding in check_run(str(run)).all_findings}
    for path in run.glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = {finding.file: finding for finding in check_run(str(run), include_uncounted=True).all_findings}
    assert file not in before
    assert file in found
    assert remedy in found[file].remedy


def test_the_next_driver_writes_the_record_of_the_data_files_again(run: Path) -> None:
    content = (run / "INPUT.json").read_bytes()
    (run / "INPUT.json").unlink()
    told: list[str] = []
    claims_of(open_run(str(run)), told=told).acquire().release()
    assert (run / "INPUT.json").read_bytes() == content
    assert [text for text in told if "INPUT.json was damaged or gone; it was written again" in text]
