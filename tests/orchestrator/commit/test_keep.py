"""What the keep policy deletes, and above all what it does not."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from podembed.orchestrator.api.keep_policies import CommitMetrics, KeepBest, KeepEvery
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.keep import keep_latest, read_committed
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import commit_file
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import commit_steps, take, write_next


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path: Path) -> Store:
    return Store(tmp_path / "run" if request.param == "local" else f"memory://{secrets.token_hex(4)}/run")


def test_the_newest_stay_whole(store: Store) -> None:
    lease = take(store)
    manifests = commit_steps(store, lease, 10, 20, 30, 40)
    removal = keep_latest(store, lease, num_to_keep=2)
    assert removal.commits == (manifests[0].name, manifests[1].name)
    assert removal.num_bytes == sum(sum(manifest.file_sizes().values()) for manifest in manifests[:2])
    assert read_lineage(store) == (manifests[3].name, manifests[2].name)
    assert store.children("data") == [manifests[2].name, manifests[3].name]
    for manifest in manifests[2:]:
        assert checkpoint.verify(store, manifest).is_intact
    again = keep_latest(store, lease, num_to_keep=2)
    assert (again.commits, again.num_files) == ((), 0)


def test_attempts_of_older_generations_go(store: Store) -> None:
    first = take(store)
    commit_steps(store, first, 10)
    write_next(store, first, 20)
    late = write_next(store, first, 30)
    second = take(store, "b")
    store.create_exclusive(commit_file(late.name), b"zombie")
    (kept,) = commit_steps(store, second, 15)
    under_way = write_next(store, second, 25)
    removal = keep_latest(store, second, num_to_keep=2)
    assert removal.commits == (late.name,)
    assert store.children("data") == sorted(["s000000010-g00000001", kept.name, under_way.name])
    assert checkpoint.commit(store, under_way, second) == under_way.name


def test_a_file_that_a_kept_commit_names_stays_wherever_it_lies(store: Store) -> None:
    lease = take(store)
    first, second = commit_steps(store, lease, 10, 20)
    third = write_next(store, lease, 30)
    # As an incremental save would: the third commit refers to a table that the first one wrote.
    third = dataclasses.replace(third, tables=(first.tables[0], third.tables[1]))
    checkpoint.commit(store, third, lease)
    keep_latest(store, lease, num_to_keep=2)
    assert checkpoint.verify(store, third).is_intact
    assert checkpoint.verify(store, second).is_intact
    assert set(store.list(f"data/{first.name}")) == {name for name in first.file_sizes() if "/users/" in name}


def test_foreign_files_stay(store: Store) -> None:
    lease = take(store)
    commit_steps(store, lease, 10, 20, 30)
    foreign = ["data/notes/a.txt", "mine.txt", "commit/README", "data/s1-g1/x"]
    for name in foreign:
        store.write_new(name, [b"x"])
    keep_latest(store, lease, num_to_keep=2)
    assert set(foreign) <= set(store.list())


def test_half_written_files_of_killed_drivers_go_after_a_day(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    lease = take(store)
    commit_steps(store, lease, 10, 20)
    for folder in ("commit", "lease"):
        (tmp_path / "run" / folder / ".tmp-0123456789abcdef").write_bytes(b"torn")
    keep_latest(store, lease, num_to_keep=2)
    assert len(list((tmp_path / "run").rglob(".tmp-*"))) == 2
    keep_latest(store, lease, num_to_keep=2, unix_s=lambda: time.time() + 90_000)
    assert list((tmp_path / "run").rglob(".tmp-*")) == []


def test_a_fenced_driver_changes_nothing(store: Store) -> None:
    """Not even the record of what it would delete from between others."""
    lease = take(store)
    commit_steps(store, lease, 10, 20, 30, 40, 50)
    take(store, "other")
    before = store.sizes()
    with pytest.raises(Fenced):
        keep_latest(store, lease, num_to_keep=2, also=[KeepEvery(30)])
    assert store.sizes() == before


@dataclasses.dataclass
class TakenOverMeanwhile:
    """A policy that keeps all commits or none. While it is asked, another driver takes the run over."""

    store: Store
    keeps_all: bool

    def kept(self, commits: Sequence[CommitMetrics]) -> list[str]:
        take(self.store, "other")
        return [commit.name for commit in commits] if self.keeps_all else []


@pytest.mark.parametrize("keeps_all", [True, False])
def test_a_driver_that_is_replaced_during_the_pass_deletes_no_more(store: Store, keeps_all: bool) -> None:
    """Where all commits stay, what would go are the files of an attempt that was never committed."""
    write_next(store, take(store), 5)
    lease = take(store, "second")
    commit_steps(store, lease, 10, 20, 30)
    before = {*store.list("data"), *store.list("commit")}
    with pytest.raises(Fenced):
        keep_latest(store, lease, num_to_keep=2, also=[TakenOverMeanwhile(store, keeps_all)])
    assert {*store.list("data"), *store.list("commit")} == before


def test_a_kept_commit_that_cannot_be_read_stops_the_deletion(store: Store) -> None:
    lease = take(store)
    commit_steps(store, lease, 10, 20, 30, 40)
    store.replace(commit_file("s000000030-g00000001"), b"damaged")
    before = store.sizes()
    with pytest.raises(StorageError):
        keep_latest(store, lease, num_to_keep=2)
    assert store.sizes() == before


@pytest.mark.parametrize("count", [1, 0, -1])
def test_the_last_two_always_stay(store: Store, count: int) -> None:
    lease = take(store)
    with pytest.raises(ValueError, match="at least 2"):
        keep_latest(store, lease, num_to_keep=count)


def test_links_do_not_lead_the_deletion_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    store = Store(tmp_path / "run")
    lease = take(store)
    commit_steps(store, lease, 10, 20, 30)
    (tmp_path / "run" / "data" / "s000000005-g00000000").symlink_to(outside)
    (tmp_path / "run" / "data" / "s000000010-g00000001" / "link").symlink_to(outside)
    keep_latest(store, lease, num_to_keep=2)
    assert (outside / "precious").read_bytes() == b"x"


def test_other_policies_keep_more(store: Store) -> None:
    lease = take(store)
    manifests = []
    for step, auc in ((10, 0.5), (20, 0.9), (30, None), (40, 0.6), (50, None)):
        manifest = write_next(store, lease, step)
        manifest = dataclasses.replace(manifest, metrics={} if auc is None else {"auc": auc})
        checkpoint.commit(store, manifest, lease)
        manifests.append(manifest)
    also = [KeepBest(1, "auc"), KeepEvery(30)]
    removal = keep_latest(store, lease, num_to_keep=2, also=also)
    # 50 and 40 are the newest, 30 the first at or after 30, 20 the best, 10 the first of all.
    assert removal.commits == ()
    removal = keep_latest(store, lease, num_to_keep=2, also=also[:1])
    assert removal.commits == (manifests[0].name, manifests[2].name)
    for manifest in (manifests[1], *manifests[3:]):
        assert checkpoint.verify(store, manifest).is_intact
    assert [commit.metrics for commit in read_committed(store, read_lineage(store))] == [{}, {"auc": 0.6}, {"auc": 0.9}]


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_nothing_goes_while_the_newest_commit_is_not_whole(store: Store, damage: str) -> None:
    lease = take(store)
    *_, newest = commit_steps(store, lease, 10, 20, 30, 40)
    victim = commit_file(newest.name) if damage == "manifest" else newest.tables[0].chunks[2].name
    data = store.read(victim, max_bytes=1 << 20)
    store.delete(victim)
    if damage != "missing":
        store.write_new(victim, [data[:-1]])
    before = store.sizes()
    with pytest.raises(StorageError, match=victim):
        keep_latest(store, lease, num_to_keep=2)
    assert store.sizes() == before
