"""Committing, finding and pruning checkpoints, on disk and in memory."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.checkpoint import CommitRefused, NoLoadableCommit
from podembed.orchestrator.commit.lease import Fenced
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import Manifest, commit_file, commit_name
from podembed.orchestrator.commit.run_record import open_or_create
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.storage import strict_json
from podembed.workers.storage.storage_errors import NameNotFound
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.orchestrator.commit.checkpoint_samples import (
    RECORD,
    TABLES,
    commit_steps,
    take,
    values_of,
    write_attempt,
    write_next,
)


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path: Path) -> Store:
    return Store(tmp_path / "run" if request.param == "local" else f"memory://{secrets.token_hex(4)}/run")


def file_of(manifest: Manifest, kind: str) -> str:
    return next(name for name in manifest.file_sizes() if kind in name)


class LyingStore(Store):
    """Reports success for writes that it does not keep as they were given."""

    about = "none"

    def lie(self, data: bytes) -> bytes | None:
        return data

    def write_new(self, name, buffers) -> None:
        data = b"".join(buffers)
        kept = self.lie(data) if self.about in name else data
        if kept is not None:
            super().write_new(name, [kept])


class TestCommit:
    def test_what_was_committed_is_loaded(self, store: Store) -> None:
        lease = take(store)
        assert checkpoint.load_head(store) is None
        first, second = commit_steps(store, lease, 10, 20)
        assert checkpoint.load_head(store) == second
        assert checkpoint.load(store, first.name) == first
        assert second.parent == first.name == commit_name(step=10, generation=1)
        for table in second.tables:
            for bucket in range(table.num_buckets):
                for read, array in zip(read_bucket(store, table, bucket), TABLES[table.name][2], strict=True):
                    np.testing.assert_array_equal(read, values_of(20, table.name, array)[bucket])
        assert [int(read_dense(store, leaf).ravel()[0]) for leaf in second.dense] == [20, 20]

    def test_a_commit_follows_the_leases_head(self, store: Store) -> None:
        lease = take(store)
        commit_steps(store, lease, 10)
        manifest = write_attempt(store, step=20, generation=1, parent=None)
        with pytest.raises(CommitRefused, match="as the lease says"):
            checkpoint.commit(store, manifest, lease)
        assert read_lineage(store) == ("s000000010-g00000001",)

    def test_a_fenced_driver_publishes_nothing(self, store: Store) -> None:
        old = take(store)
        manifest = write_next(store, old, 10)
        take(store, "other")
        with pytest.raises(Fenced):
            checkpoint.commit(store, manifest, old)
        assert store.children("commit") == []

    @pytest.mark.parametrize(
        "kind", ["rows/c.2", "accumulator/c.0", "rows/zarr.json", "dense/w/c", "dense/count/zarr.json"]
    )
    def test_a_lost_file_prevents_the_commit(self, store: Store, kind: str) -> None:
        lease = take(store)
        manifest = write_next(store, lease, 10)
        lost = file_of(manifest, kind)
        store.delete(lost)
        with pytest.raises(CommitRefused, match=f"no file in {lost}"):
            checkpoint.commit(store, manifest, lease)
        assert checkpoint.load_head(store) is None

    def test_an_incomplete_manifest_prevents_the_commit(self, store: Store) -> None:
        lease = take(store)
        manifest = write_next(store, lease, 10)
        users, items = manifest.tables
        cut = dataclasses.replace(users, chunks=users.chunks[:-1])
        with pytest.raises(CommitRefused, match="7 chunks"):
            checkpoint.commit(store, dataclasses.replace(manifest, tables=(cut, items)), lease)

    def test_a_manifest_that_no_reader_takes_is_no_commit(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        lease = take(store)
        (first,) = commit_steps(store, lease, 10)
        manifest = write_next(store, lease, 20)
        with monkeypatch.context() as patched:
            patched.setattr(strict_json, "MAX_VALUES", 50)
            with pytest.raises(CommitRefused, match=r"found a manifest of about \d+ values .* expected at most 50"):
                checkpoint.commit(store, manifest, lease)
        assert checkpoint.load_head(store) == first
        checkpoint.commit(store, manifest, lease)
        assert checkpoint.load_head(store) == manifest

    def test_the_run_goes_on_after_a_refused_commit(self, store: Store) -> None:
        lease = take(store)
        commit_steps(store, lease, 10)
        manifest = write_next(store, lease, 20)
        store.delete(file_of(manifest, "rows/c.1"))
        with pytest.raises(CommitRefused):
            checkpoint.commit(store, manifest, lease)
        commit_steps(store, lease, 30)
        assert read_lineage(store) == ("s000000030-g00000001", "s000000010-g00000001")


class TestStorageThatLies:
    """Writes that reported success and were not kept: sizes find torn and lost ones, reading back finds all."""

    @pytest.mark.parametrize("about", ["rows/c.1", "zarr.json", "dense/w"])
    @pytest.mark.parametrize(
        "lie", [lambda data: data[:-1], lambda data: b"", lambda data: None, lambda data: data + b"\0"]
    )
    def test_torn_and_lost_writes_are_found_by_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str, lie
    ) -> None:
        store = LyingStore(tmp_path / "run")
        lease = take(store)
        commit_steps(store, lease, 10)
        store.about = about
        monkeypatch.setattr(store, "lie", lie)
        manifest = write_next(store, lease, 20)
        with pytest.raises(CommitRefused):
            checkpoint.commit(store, manifest, lease)
        assert read_lineage(store) == ("s000000010-g00000001",)

    @pytest.mark.parametrize("about", ["rows/c.1", "zarr.json", "dense/w"])
    def test_changed_writes_are_found_by_reading_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str
    ) -> None:
        store = LyingStore(tmp_path / "run")
        lease = take(store)
        store.about = about
        monkeypatch.setattr(store, "lie", lambda data: bytes([data[0] ^ 1]) + data[1:])
        manifest = write_next(store, lease, 20)
        with pytest.raises(CommitRefused, match="CRC-32C"):
            checkpoint.commit(store, manifest, lease, read_back=True)
        assert store.children("commit") == []
        # Unless asked, nothing is read again.
        assert checkpoint.commit(store, manifest, lease) == manifest.name


class TestStartingPoint:
    def skipped(self) -> tuple[list[str], dict]:
        names: list[str] = []
        return names, {"on_skip": lambda name, reason: names.append(name)}

    def test_a_good_head_is_taken(self, store: Store) -> None:
        commit_steps(store, take(store), 10, 20)
        names, options = self.skipped()
        head = "s000000020-g00000001"
        assert checkpoint.newest_loadable(store, head, allow_ancestors=True, **options) == head
        assert checkpoint.newest_loadable(store, None, allow_ancestors=False, **options) is None
        assert names == []

    @pytest.mark.parametrize("damage", ["manifest", "missing manifest", "chunk"])
    def test_a_damaged_head_is_refused_unless_ancestors_are_allowed(self, store: Store, damage: str) -> None:
        _, second, third = commit_steps(store, take(store), 10, 20, 30)
        file = commit_file(third.name) if damage != "chunk" else file_of(third, "rows/c.3")
        store.delete(file)
        if damage == "manifest":
            store.write_new(file, [b"{}"])
        names, options = self.skipped()
        if damage == "missing manifest":
            # Without its name nobody knows that it was there: the one before is the head.
            assert checkpoint.load_head(store) == second
            return
        with pytest.raises(NoLoadableCommit, match=third.name):
            checkpoint.newest_loadable(store, third.name, allow_ancestors=False, **options)
        assert checkpoint.newest_loadable(store, third.name, allow_ancestors=True, **options) == second.name
        assert names == [third.name]

    def test_a_lost_base_is_an_error_and_not_a_new_beginning(self, store: Store) -> None:
        (first,) = commit_steps(store, take(store), 10)
        take(store)
        store.delete(commit_file(first.name))
        with pytest.raises(NameNotFound, match=first.name):
            checkpoint.load_head(store)

    def test_a_commit_of_another_run_is_refused(self, store: Store) -> None:
        (manifest,) = commit_steps(store, take(store), 10)
        open_or_create(store, dataclasses.replace(RECORD, run_id="another"))
        _, options = self.skipped()
        with pytest.raises(NoLoadableCommit, match="belongs to run run-1, not to another"):
            checkpoint.newest_loadable(store, manifest.name, allow_ancestors=True, **options)

    def test_nothing_good_is_an_error(self, store: Store) -> None:
        for manifest in commit_steps(store, take(store), 10, 20):
            store.delete(file_of(manifest, "dense/w/c"))
        names, options = self.skipped()
        with pytest.raises(NoLoadableCommit, match="dense/w"):
            checkpoint.newest_loadable(store, "s000000020-g00000001", allow_ancestors=True, **options)
        assert len(names) == 2


class TestList:
    def test_leftovers_are_marked(self, store: Store) -> None:
        first = take(store)
        commit_steps(store, first, 10)
        late = write_next(store, first, 20)
        second = take(store, "b")
        commit_steps(store, second, 15)
        # A zombie's publication, after its successor chose a base.
        store.create_exclusive(commit_file(late.name), b"zombie")
        infos = checkpoint.list_commits(store)
        shown = [(info.name, info.counts, info.is_head, info.problem is None) for info in infos]
        assert shown == [
            ("s000000015-g00000002", True, True, True),
            ("s000000010-g00000001", True, False, True),
            (late.name, False, False, False),
        ]

    def test_a_damaged_manifest_does_not_hide_its_ancestors(self, store: Store) -> None:
        commit_steps(store, take(store), 10, 20, 30)
        store.replace(commit_file("s000000020-g00000001"), b"damaged")
        infos = checkpoint.list_commits(store)
        assert [(info.step, info.counts, info.problem is None) for info in infos] == [
            (30, True, True),
            (20, True, False),
            (10, True, True),
        ]
        with pytest.raises(DocumentRefused):
            checkpoint.load(store, "s000000020-g00000001")
