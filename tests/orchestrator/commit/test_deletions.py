"""A pass of the keep policies may end at any moment: what is left is never called damage, and the next pass finishes
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from podembed.orchestrator.api.keep_policies import CommitMetrics
from podembed.orchestrator.commit.deletions import FOLDER
from podembed.orchestrator.commit.keep import keep_latest
from podembed.orchestrator.commit.manifest import commit_file
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.report import render
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import flip_byte, random_table, run_with

STEPS = (10, 20, 30, 40, 50, 60, 70)
# 10 and 20 are before all that stay, 40 and 50 between them.
KEPT = ["s000000030-g00000001", "s000000060-g00000001", "s000000070-g00000001"]


@dataclass(frozen=True)
class Wants:
    """Keeps one commit."""

    name: str

    def kept(self, commits: Sequence[CommitMetrics]) -> list[str]:
        return [self.name]


class CutShort(Exception):
    pass


class WatchedStore(Store):
    """Calls a function before each change."""

    def __init__(self, url: str, before_change: Callable[[str], None]) -> None:
        super().__init__(url)
        self._before_change = before_change

    def create_exclusive(self, name: str, data: bytes) -> bool:
        self._before_change(name)
        return super().create_exclusive(name, data)

    def delete(self, name: str) -> None:
        self._before_change(name)
        super().delete(name)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deletions") / "run"
    run_with(path, {"items": random_table(0, num_rows=5, num_buckets=2, widths={"rows": 2})}, *STEPS)
    return path


@pytest.fixture
def location(template: Path, tmp_path: Path) -> str:
    shutil.copytree(template, tmp_path / "run")
    return str(tmp_path / "run")


def delete_old(location: str, before_change: Callable[[str], None]) -> None:
    lease = take(Store(location))
    try:
        keep_latest(WatchedStore(location, before_change), lease, num_to_keep=2, also=[Wants(KEPT[0])])
    finally:
        lease.release()


def test_a_check_at_any_moment_of_a_pass_finds_no_damage(location: str) -> None:
    changes: list[str] = []

    def check(name: str) -> None:
        found = check_run(location)
        assert found.is_intact, f"before {name}, after {changes}: {render(found)}"
        changes.append(name)

    delete_old(location, check)
    assert [name.split("/")[0] for name in changes[:5]] == [FOLDER, *["commit"] * 4]
    assert changes[-1].startswith(f"{FOLDER}/")
    assert len(changes) > 12
    assert not Store(location).sizes(FOLDER)


@pytest.mark.parametrize("allowed", [1, 3, 4, 7, 13])
def test_the_next_pass_finishes_one_that_was_cut_short(location: str, allowed: int) -> None:
    with pytest.raises(CutShort):
        delete_old(location, _raise_after(allowed))
    store = Store(location)
    assert store.sizes(FOLDER)
    assert check_run(store).is_intact
    delete_old(location, lambda name: None)
    assert store.children("data") == KEPT
    assert not store.sizes(FOLDER)
    after = check_run(store)
    assert after.is_intact
    assert not after.leftovers


def test_without_its_record_a_pass_that_was_cut_short_looks_like_a_lost_manifest(location: str) -> None:
    with pytest.raises(CutShort):
        delete_old(location, _raise_after(4))
    store = Store(location)
    assert "a commit that is being deleted" in render(check_run(store))
    for name in store.sizes(FOLDER):
        store.delete(name)
    (finding,) = check_run(store).all_findings
    assert finding.found == "parent s000000040-g00000001, that is missing"


def test_what_goes_from_the_old_end_needs_no_record(location: str) -> None:
    changes: list[str] = []
    lease = take(Store(location))
    keep_latest(WatchedStore(location, changes.append), lease, num_to_keep=3)
    assert changes
    assert not [name for name in changes if name.startswith(FOLDER)]


def test_a_record_that_cannot_be_read_is_damage_until_the_next_pass(location: str) -> None:
    store = Store(location)
    assert store.create_exclusive(f"{FOLDER}/g00000001-00001.json", b"torn")
    (finding,) = check_run(store).all_findings
    assert finding.file == f"{FOLDER}/g00000001-00001.json"
    delete_old(location, lambda name: None)
    assert check_run(store).is_intact


def test_a_manifest_that_was_lost_is_still_found(location: str) -> None:
    store = Store(location)
    with pytest.raises(CutShort):
        delete_old(location, _raise_at(commit_file("s000000040-g00000001")))
    # Nobody meant to delete this one.
    store.delete(commit_file(KEPT[1]))
    (finding,) = check_run(store).all_findings
    assert KEPT[1] in finding.found
    flip_byte(store.locate(commit_file(KEPT[2])), 40)
    assert not check_run(store).is_intact


def _raise_at(file: str) -> Callable[[str], None]:
    def stop(name: str) -> None:
        if name == file:
            raise CutShort(name)

    return stop


def _raise_after(allowed: int) -> Callable[[str], None]:
    done: list[str] = []

    def stop(name: str) -> None:
        if len(done) == allowed:
            raise CutShort(name)
        done.append(name)

    return stop
