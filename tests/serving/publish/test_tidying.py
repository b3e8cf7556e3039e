"""What past versions left goes, and nothing that one may come back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import commit_file
from podembed.orchestrator.commit.published import add_pointer, hold, newest_pointer, pointer_numbers, read_pins
from podembed.serving.publish import listing, tidying
from podembed.serving.publish.listing import render_versions, roll_back
from podembed.serving.publish.publisher import publish, require_whole
from podembed.serving.publish.versions import FILES, read_refusals, read_version, version_names, write_file
from podembed.tools.fsck.check import check_run
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.orchestrator.committed_tables import flip_byte
from tests.small_job import small_job
from tests.training import fit_job

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_what_is_left_of_versions(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(folder=small_data, audit=False, evaluate=True)
    checkpoints = CheckpointConfig(every_steps=2, num_to_keep=9)
    run = fit_job(job, tmp_path, max_steps=8, checkpoint_config=checkpoints).path
    store = Store(run)
    monkeypatch.setattr(tidying, "MOST_POINTERS", 3)
    first, second, third, refused = reversed(read_lineage(store))
    versions = [publish(run, commit=name, job=job).version.name for name in (first, second, third)]
    versions.append(publish(run, commit=refused, job=job, require="auc>=2").version.name)
    for _ in range(3):
        add_pointer(store, version=versions[2], action="publish", keep=2, unix_s=0.0)
    left = write_file(store, b"of a publisher that was killed").sha256
    for name in (first, refused):
        store.delete(commit_file(name))
    held = hold(store, third, reason="another publisher", unix_s=100.0, seconds=10.0)
    before = store.list("publish")
    tidying.tidy(store, now_unix_s=105.0)
    assert store.list("publish") == before
    store.delete(held)
    tidying.tidy(store, now_unix_s=105.0)
    # The second is named by no pointer any more, but can be gone back to.
    assert version_names(store) == versions[1:3]
    assert pointer_numbers(store) == [4, 5, 6]
    assert read_refusals(store) == {}
    kept = {file.sha256 for name in versions[1:3] for file in read_version(store, name).files.values()}
    assert left not in kept == set(store.children(FILES))
    assert roll_back(store, versions[1]).number == 7
    assert not read_pins(store)
    # From time to time a publisher does it.
    monkeypatch.setattr("podembed.serving.publish.publisher.TIDY_EVERY", 8)
    publish(run, commit=third, job=job)
    assert pointer_numbers(store) == [6, 7, 8]


def test_a_rollback_holds_its_commit(small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, max_steps=4, checkpoint_config=CheckpointConfig(every_steps=2)).path
    store = Store(run)
    newest, older = read_lineage(store)
    for name in (older, newest):
        publish(run, commit=name, job=job)
    seen = []

    def look(store: Store, version: object) -> None:
        seen.extend(pin.commit for pin in read_pins(store))
        require_whole(store, version)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(listing, "require_whole", look)
    roll_back(store, None)
    assert seen == [older]
    assert not read_pins(store)


def test_a_damaged_pointer_is_named(small_data: str, tmp_path: Path) -> None:
    job = small_job(folder=small_data, audit=False)
    run = fit_job(job, tmp_path, max_steps=4, checkpoint_config=CheckpointConfig(every_steps=2)).path
    store = Store(run)
    for name in reversed(read_lineage(store)):
        publish(run, commit=name, job=job)
    path = Path(run, "publish/pointers/00000002.json")
    flip_byte(path, 20)
    what = f"Move {path} away: without it the pointer before it counts"
    for command in (lambda: publish(run, job=job), lambda: roll_back(store, None), lambda: render_versions(store)):
        with pytest.raises(DocumentRefused) as found:
            command()
        assert what in str(found.value)
    path.rename(tmp_path / "away")
    assert newest_pointer(store).number == 1  # pyright: ignore[reportOptionalMemberAccess]
    assert publish(run, job=job).is_new
    assert check_run(run).is_intact
