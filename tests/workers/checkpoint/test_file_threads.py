"""Threads that write files: as many as were asked for and no more, errors that reach the caller, and files that are
durable at the end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from podembed.workers.checkpoint.file_threads import SYNC_FILES, FileThreads
from podembed.workers.storage.storage_errors import NameTaken, StorageFull
from podembed.workers.storage.store import Store

PATIENCE_S = 120.0


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes that were synced, in order."""
    real, inodes = os.fsync, list[int]()

    def fsync(handle: int) -> None:
        inodes.append(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return inodes


def write_some(store: Store, threads: FileThreads, count: int) -> None:
    def write(at: int) -> None:
        with threads.writes():
            store.write_new(f"data/a/c/{at}/0", [bytes(at)])

    for at in range(count):
        threads.submit(lambda at=at: write(at))


def test_every_file_and_every_folder_is_durable_at_the_end(tmp_path: Path, synced: list[int]) -> None:
    store = Store(tmp_path / "run")
    count = SYNC_FILES * 2 + 5
    with FileThreads(store) as threads:
        write_some(store, threads, count)
        threads.finish()
    inodes = {path.stat().st_ino for path in (tmp_path / "run").rglob("*")} | {(tmp_path / "run").stat().st_ino}
    assert len(inodes) == 2 * count + 4
    assert inodes <= {*synced}
    assert len(synced) < 2 * count + 40, "folders that many files share are synced with each of them"
    assert store.sizes() == {f"data/a/c/{at}/0": at for at in sorted(range(count), key=str)}


def test_other_writes_are_synced_at_once(tmp_path: Path, synced: list[int]) -> None:
    store = Store(tmp_path)
    with FileThreads(store) as threads:

        def write() -> None:
            with threads.writes():
                store.write_new("later", [b"x"])
            store.write_new("now", [b"x"])

        threads.submit(write).result(PATIENCE_S)
        assert (tmp_path / "now").stat().st_ino in synced
        assert (tmp_path / "later").stat().st_ino not in synced
        threads.finish()
    assert (tmp_path / "later").stat().st_ino in synced


def test_no_more_jobs_are_taken_than_there_are_threads(tmp_path: Path) -> None:
    gate, at_work = threading.Semaphore(0), threading.Semaphore(0)
    submitted: list[int] = []

    def wait() -> None:
        at_work.release()
        assert gate.acquire(timeout=PATIENCE_S)

    def caller() -> None:
        with FileThreads(Store(tmp_path), num_threads=3) as threads:
            for at in range(5):
                threads.submit(wait)
                submitted.append(at)

    thread = threading.Thread(target=caller)
    thread.start()
    assert all(at_work.acquire(timeout=PATIENCE_S) for _ in range(3)), "jobs do not run side by side"
    assert not at_work.acquire(timeout=0.2)
    assert submitted == [0, 1, 2]
    gate.release(5)
    thread.join(PATIENCE_S)
    assert submitted == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["next submit", "finish"])
def test_an_error_reaches_the_caller_and_names_the_file(tmp_path: Path, how: str) -> None:
    store = Store(tmp_path)
    store.write_new("data/a/c/7/0", [b"somebody else's"])
    ran: list[int] = []
    with FileThreads(store, num_threads=1) as threads:
        failed = threads.submit(lambda: store.write_new("data/a/c/7/0", [b"x"]))
        assert isinstance(failed.exception(PATIENCE_S), NameTaken)
        ask = threads.finish if how == "finish" else lambda: threads.submit(lambda: ran.append(1))
        with pytest.raises(NameTaken, match="data/a/c/7/0"):
            ask()
    assert ran == []


def test_a_file_that_cannot_be_synced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with FileThreads(store) as threads:
        write_some(store, threads, 3)

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        for _ in range(3):
            threads.submit(lambda: None)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull, match=r"sync 'data/a/c/\d/0'"):
            threads.finish()


def test_leaving_early_waits_for_what_has_begun_and_begins_nothing(tmp_path: Path) -> None:
    begun, gate, ended = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        ended.append(1)

    def leave() -> None:
        with FileThreads(Store(tmp_path), num_threads=1) as threads:
            threads.submit(slow)
            assert begun.wait(PATIENCE_S)
            raise InterruptedError("a test")

    threading.Timer(0.2, gate.set).start()
    with pytest.raises(InterruptedError):
        leave()
    assert ended == [1]


def test_a_check_ends_the_wait(tmp_path: Path) -> None:
    gate, aborted = threading.Event(), threading.Event()

    def check() -> None:
        if aborted.is_set():
            gate.set()
            raise InterruptedError("aborted")

    with FileThreads(Store(tmp_path), num_threads=1, check=check) as threads:
        threads.submit(lambda: gate.wait(PATIENCE_S))
        aborted.set()
        with pytest.raises(InterruptedError):
            threads.submit(lambda: None)


def test_nothing_is_synced_while_training_waits_and_all_of_it_later(tmp_path: Path, synced: list[int]) -> None:
    waiting = True
    with FileThreads(Store(tmp_path), is_urgent=lambda: waiting) as threads:
        write_some(threads._store, threads, 3 * SYNC_FILES)
        threads._wait_for_jobs()
        assert synced == [], "a job waited for the disk"
        waiting = False
        threads.finish()
    assert {path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()} <= {*synced}
