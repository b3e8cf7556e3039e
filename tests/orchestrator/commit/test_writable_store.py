"""Opening storage for writing: one that cannot keep a second driver out is refused, or used with a warning that says
what is lost.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import ConfigurationError, RunConfig, ScalingConfig
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.run.opening import create_run, open_run
from podembed.tools.inspect.compact import compact
from podembed.tools.inspect.prune import prune
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.local import Unsynced
from podembed.workers.storage.storage_errors import SingleWriterStore, StoreCannotCreateExclusively, SyncRefused
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import commit_steps, take
from tests.small_job import small_job


class FolderFileSystem(type(fsspec.filesystem("file"))):
    """Files of a folder through fsspec's common calls: it looks for a name first and writes then."""

    protocol = "folder"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("folder://"))


@pytest.fixture(autouse=True)
def _filesystem() -> None:
    fsspec.register_implementation("folder", FolderFileSystem, clobber=True)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir()
    return f"folder://{tmp_path}/run"


@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_storage_that_decides_races_needs_no_word(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = {"local": str(tmp_path / "run"), "memory": f"memory://{tmp_path.name}/run"}.get(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SingleWriterStore)
        for single_writer in (False, True):
            store = open_for_writing(url or request.getfixturevalue("s3_url"), single_writer=single_writer)
            assert store.list() == []


def test_other_storage_is_refused_or_accepted_with_a_warning(plain: str) -> None:
    with pytest.raises(StoreCannotCreateExclusively, match="--single-writer"):
        open_for_writing(plain, single_writer=False)
    with pytest.warns(SingleWriterStore, match=r"second driver.*acknowledged may be lost.*delete files"):
        store = open_for_writing(plain, single_writer=True)
    assert store.create_exclusive("a", b"1") is True
    assert store.create_exclusive("a", b"2") is False


def test_a_service_that_ignores_the_condition_can_be_used_by_one_writer(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3-compatible services do that were written before conditional puts."""
    s3 = fsspec.get_filesystem_class("s3")
    real = s3._pipe_file

    async def careless(self, path, data, mode="overwrite", **options):
        await real(self, path, data, **options)

    monkeypatch.setattr(s3, "_pipe_file", careless)
    with pytest.raises(StoreCannotCreateExclusively, match="8 of 8"):
        open_for_writing(s3_url, single_writer=False)
    with pytest.warns(SingleWriterStore, match="8 of 8 writers create one name"):
        open_for_writing(s3_url, single_writer=True)


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_mount_without_hard_links_can_be_used_by_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """As exFAT, FAT and mounted buckets are."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    place = str(tmp_path / "run")
    with pytest.raises(StoreCannotCreateExclusively, match="without hard links.*--single-writer"):
        open_for_writing(place, single_writer=False)
    with pytest.warns(SingleWriterStore, match=r"without hard links.*second driver"):
        store = open_for_writing(place, single_writer=True)
    assert store.list() == []
    assert store.create_exclusive("a", b"1") is True
    assert store.create_exclusive("a", b"2") is False
    assert store.read("a", max_bytes=9) == b"1"
    assert os.listdir(place) == ["a"], "no temporary file is left"
    lease = take(store)
    commit_steps(store, lease, 1, 2, 3)
    lease.release()
    with pytest.warns(SingleWriterStore):
        assert len(prune(place, num_to_keep=2, single_writer=True).commits) == 1


@pytest.mark.parametrize("fails_of", [stat.S_ISREG, stat.S_ISDIR])
def test_a_mount_that_cannot_sync_is_refused_with_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_of: Callable[[int], bool]
) -> None:
    real = os.fsync

    def refuse(handle: int) -> None:
        if fails_of(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(handle)

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "fsync", refuse)
    for single_writer in (False, True):
        with pytest.raises(SyncRefused, match=r"fsync fails \(Invalid argument\).*Use a local disk, NFS"):
            open_for_writing(str(tmp_path / "run"), single_writer=single_writer)
    unsynced = Unsynced()
    store = Store(tmp_path / "run")
    with store.sync_later(unsynced):
        store.write_new("b", [b"1"])
    with pytest.raises(SyncRefused):
        store.sync(unsynced)


def test_every_program_that_writes_asks(plain: str, small_data: str) -> None:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data, "audit": False})
    job = reference.resolve()
    with pytest.raises(StoreCannotCreateExclusively):
        create_run(plain, job, reference)
    with pytest.warns(SingleWriterStore):
        create_run(plain, job, reference, single_writer=True)
    with pytest.raises(StoreCannotCreateExclusively):
        open_run(plain)
    with pytest.warns(SingleWriterStore):
        assert open_run(plain, single_writer=True).record.seed == job.seed


def test_compacting_asks_too(plain: str) -> None:
    store = Store(plain)
    lease = take(store)
    *_, head = commit_steps(store, lease, 1, 2)
    lease.release()
    with pytest.raises(StoreCannotCreateExclusively):
        compact(plain)
    with pytest.warns(SingleWriterStore):
        assert compact(plain, single_writer=True) == head


def test_pruning_asks_too(plain: str) -> None:
    store = Store(plain)
    lease = take(store)
    commit_steps(store, lease, 1, 2, 3)
    lease.release()
    with pytest.raises(StoreCannotCreateExclusively):
        prune(plain, num_to_keep=2)
    with pytest.warns(SingleWriterStore):
        assert len(prune(plain, num_to_keep=2, single_writer=True).commits) == 1


def test_memory_is_not_shared_by_processes(small_data: str) -> None:
    before = {*MemoryFileSystem.store}
    trainer = Trainer(
        small_job(folder=small_data, audit=False),
        scaling_config=ScalingConfig(num_hosts=2),
        run_config=RunConfig(storage_path="memory://runs"),
    )
    with pytest.raises(ConfigurationError, match="in_process=True"):
        trainer.fit()
    assert {*MemoryFileSystem.store} == before
