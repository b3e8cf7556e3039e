"""Storage that fails beside training: a save is lost and not the run, nothing is lost of what changed, and no run ends
well without its last commit. Whole runs in this process, on a disk that is really full, and on a store that fails at
chosen files.
"""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.patience import SavesFailed
from podembed.orchestrator.driver import background_commit, committing
from podembed.orchestrator.driver.background_commit import BackgroundCommits
from podembed.orchestrator.run.history_record import read_history
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.report import render
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.long_tests import long_case
from tests.orchestrator.cluster.test_in_process import STEPS, train
from tests.orchestrator.driver.test_background_commit import PATIENCE_S, Watcher, before_each_file
from tests.run_state import assert_same_bytes, committed_state

CHAIN = CheckpointConfig(every_steps=4, num_to_keep=None, full_every=10)


class Listener(Watcher):
    """Also remembers notices, and lets a test act on each."""

    def __init__(self, on_notice: Callable[[str], None] = lambda text: None, **options: Any) -> None:
        super().__init__(**options)
        self.notices: list[str] = []
        self._on_notice = on_notice

    def notice(self, text: str) -> None:
        self.notices.append(text)
        self._on_notice(text)

    @property
    def alarms(self) -> list[str]:
        return [text for text in self.notices if "SAVE FAILED" in text]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_commit, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def undisturbed(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small_data, tmp_path_factory.mktemp("undisturbed") / "run")


def steps_of(path: str) -> list[int]:
    """Of the commits that count, oldest first."""
    parsed = [parse_commit_name(name) for name in reversed(read_lineage(Store(path)))]
    return [step[0] for step in parsed if step]


def check_whole(result: Result, undisturbed: Result) -> None:
    """The run ended as if nothing had happened, and nothing lies about."""
    assert result.step == STEPS
    assert dict(result.losses) == dict(undisturbed.losses)
    assert_same_bytes(committed_state(result.path), committed_state(undisturbed.path))
    check = check_run(result.path)
    assert check.is_intact, render(check)
    assert not check.leftovers


FULL, REFUSED = StorageError("found the disk full."), PermissionError(errno.EACCES, "no")
OF_HOST, OF_DEVICE = ("tables/b/velocity/c.3.0.0", "host 0"), ("/dense/", "device 0")


@pytest.mark.parametrize(
    ("victim", "worker", "error"),
    [
        (*OF_HOST, FULL),
        (*OF_DEVICE, REFUSED),
        long_case(*OF_HOST, REFUSED),
        long_case(*OF_DEVICE, FULL),
    ],
)
def test_a_save_that_fails_is_lost_and_the_next_one_is_made(
    undisturbed: Result,
    small_data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
    worker: str,
    error: Exception,
) -> None:
    def fail(name: str) -> None:
        if name.startswith("data/s000000010-g00000001/") and victim in name:
            raise error

    before_each_file(monkeypatch, fail)
    listener = Listener()
    result = train(small_data, tmp_path / "run", reporter=listener)
    assert steps_of(result.path) == [20, STEPS]
    assert result.failed_saves == 1
    (alarm,) = listener.alarms
    assert f"SAVE FAILED at step 10 (number 1 in a row): {worker} failed" in alarm
    assert "lead back to step 0" in alarm
    assert {w.failed_saves for w in listener.windows if w.committed_step == 0} >= {0}
    assert all(w.failed_saves == 0 for w in listener.windows if w.committed_step)
    store = Store(result.path)
    first, last = (checkpoint.load(store, name) for name in reversed(read_lineage(store)))
    assert (first.counters["failed_saves"], last.counters.get("failed_saves")) == (1, None)
    assert sorted(store.children("data")) == ["s000000020-g00000001", f"s{STEPS:09d}-g00000001"]
    check_whole(result, undisturbed)


@pytest.mark.parametrize("lost", ["no file", "half a file"])
def test_files_that_a_store_lost_after_taking_them_are_found_before_the_manifest(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The writers were told that all is well; the changed rows of the lost save are in the next delta."""
    real = Store.write_new

    def write_new(self: Store, name: str, buffers: Any) -> None:
        if name.startswith("data/s000000012") and "/tables/b/" in name and name.endswith("velocity/c/0/0"):
            if lost == "no file":
                return
            buffers = [b"".join(buffers)[:-7]]
        real(self, name, buffers)

    monkeypatch.setattr(Store, "write_new", write_new)
    listener = Listener()
    result = train(small_data, tmp_path / "run", reporter=listener, checkpoint_config=CHAIN)
    (alarm,) = listener.alarms
    assert "at step 12" in alarm
    assert "FilesLost" in alarm
    assert steps_of(result.path) == [4, 8, 16, 20, STEPS]
    store = Store(result.path)
    kinds = [checkpoint.load(store, name).num_deltas for name in reversed(read_lineage(store))]
    assert kinds == [0, 1, 2, 3, 4]
    check_whole(result, undisturbed)


def test_deltas_go_back_to_the_last_commit_however_many_saves_failed(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fails while rows are written, one while the dense state is, one when it is published: what hosts remember
    differs each time.
    """

    def fail(name: str) -> None:
        if name.startswith("data/s000000008") and "/tables/" in name:
            raise StorageError("rows")
        if name.startswith("data/s000000012") and "/dense/" in name:
            raise StorageError("dense")

    before_each_file(monkeypatch, fail)
    real = Store.sizes

    def sizes(self: Store, prefix: str = "") -> dict[str, int]:
        found = real(self, prefix)
        return (
            {}
            if prefix.startswith("data/s000000016")
            and threading.current_thread().name.startswith("publish")
            and not cleared.is_set()
            else found
        )

    cleared = threading.Event()
    monkeypatch.setattr(Store, "sizes", sizes)
    listener = Listener(on_notice=lambda text: cleared.set() if "at step 16" in text else None)
    result = train(
        small_data,
        tmp_path / "run",
        reporter=listener,
        checkpoint_config=CHAIN,
        failure_config=FailureConfig(max_failed_saves=9),
    )
    assert [alarm.partition(":")[0] for alarm in listener.alarms] == [
        f"SAVE FAILED at step {step} (number {number} in a row)" for number, step in enumerate((8, 12, 16), 1)
    ]
    assert steps_of(result.path) == [4, 20, STEPS]
    assert_same_bytes(committed_state(result.path), committed_state(undisturbed.path))
    assert check_run(result.path).is_intact


def test_the_last_step_is_saved_again_until_it_is_committed(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(3))

    def fail(name: str) -> None:
        if name.startswith(f"data/s{STEPS:09d}") and name.endswith("rows/zarr.json") and next(left, None) is not None:
            raise StorageError("not yet")

    before_each_file(monkeypatch, fail)
    listener = Listener()
    result = train(small_data, tmp_path / "run", reporter=listener)
    assert result.failed_saves == 3
    assert "Training waits and tries again" in listener.alarms[-1]
    assert steps_of(result.path) == [10, 20, STEPS]
    check_whole(result, undisturbed)


def test_no_run_ends_well_without_a_commit_of_its_last_step(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name.startswith(f"data/s{STEPS:09d}"):
            raise StorageError("away")

    before_each_file(monkeypatch, fail)
    # All of the time that there is passes in the pauses between two saves.
    monkeypatch.setattr(
        committing, "BackgroundCommits", lambda *a, **o: BackgroundCommits(*a, **o | {"clock": FakeClock()})
    )
    listener = Listener()
    with pytest.raises(SavesFailed, match=r"within 0 s: .* failed: StorageError: away.*the commit of step 20 stands"):
        train(small_data, tmp_path / "run", reporter=listener, failure_config=FailureConfig(storage_timeout_s=0.3))
    assert len(listener.alarms) > 1, "it was tried once"
    assert steps_of(str(tmp_path / "run")) == [10, 20]
    monkeypatch.undo()
    assert steps_of(train(small_data, tmp_path / "run").path) == [10, 20, STEPS]


def test_after_some_failures_training_waits_until_a_save_succeeds(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two may fail. The third save is awaited: not a step is done until it stands, although it fails twice more."""
    config = {
        "checkpoint_config": CheckpointConfig(every_steps=4, num_to_keep=None),
        "failure_config": FailureConfig(max_failed_saves=2),
    }
    away = threading.Event()
    away.set()

    def fail(name: str) -> None:
        if away.is_set():
            raise StorageError("away")

    def mend(text: str) -> None:
        if "(number 4 in a row)" in text:
            away.clear()

    before_each_file(monkeypatch, fail)
    listener = Listener(on_notice=mend)
    result = train(small_data, tmp_path / "run", reporter=listener, **config)  # type: ignore[arg-type]
    assert ["waits and tries again" in alarm for alarm in listener.alarms] == [False, True, True, True]
    first = listener.events.index(("commit", 12))
    assert max(step for kind, step in listener.events[:first] if kind == "step") == 12
    assert steps_of(result.path) == [12, 16, 20, STEPS]
    check_whole(result, undisturbed)


def test_a_run_that_bears_no_failed_save_ends_with_the_first(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name.startswith("data/s000000020"):
            raise StorageError("found the disk full.")

    before_each_file(monkeypatch, fail)
    with pytest.raises(SavesFailed, match="found the disk full.*the commit of step 10 stands"):
        train(small_data, tmp_path / "run", failure_config=FailureConfig(max_failed_saves=0))
    monkeypatch.undo()
    again = train(small_data, tmp_path / "run")
    assert sorted(again.losses) == list(range(10, STEPS))


@pytest.mark.parametrize("was_created", [False, True])
def test_a_publication_without_an_answer_is_settled_before_anything_else(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_created: bool
) -> None:
    """The storage fails while the manifest is created; training goes on, and whether the commit stands is asked until
    there is an answer.
    """
    real, left = Store.create_exclusive, iter(range(3))

    def create_exclusive(self: Store, name: str, data: bytes) -> bool:
        if name.startswith("commit/s000000010") and next(left, None) is not None:
            if was_created:
                real(self, name, data)
            raise ConnectionError("answer lost")
        return real(self, name, data)

    monkeypatch.setattr(Store, "create_exclusive", create_exclusive)
    monkeypatch.setattr(Store, "answers_late", True)
    listener = Listener()
    result = train(small_data, tmp_path / "run", reporter=listener)
    assert listener.alarms == []
    assert any("step 10: " in text and "nobody knows whether it stands" in text for text in listener.notices)
    assert steps_of(result.path) == [10, 20, STEPS]
    check_whole(result, undisturbed)


def test_a_commit_that_was_settled_late_has_its_history_like_any_other(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = Store.create_exclusive, iter(range(2))

    def create_exclusive(self: Store, name: str, data: bytes) -> bool:
        if name.startswith(f"commit/s{STEPS:09d}") and next(left, None) is not None:
            raise ConnectionError("answer lost")
        return real(self, name, data)

    monkeypatch.setattr(Store, "create_exclusive", create_exclusive)
    monkeypatch.setattr(Store, "answers_late", True)
    result = train(small_data, tmp_path / "run", evaluate_at_end=False)
    assert read_history(Store(result.path)).windows[-1].step == STEPS


def test_leftovers_that_cannot_be_removed_are_named_and_go_with_a_later_commit(
    undisturbed: Result, small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name.startswith("data/s000000010") and "/dense/" in name:
            raise StorageError("away")

    def refuse(self: Store, folder: str) -> None:
        raise StorageError("nothing can be deleted")

    before_each_file(monkeypatch, fail)
    monkeypatch.setattr(Store, "delete_folder", refuse)
    listener = Listener()
    result = train(small_data, tmp_path / "run", reporter=listener)
    (alarm,) = listener.alarms
    assert "Its files are still there and go with a later commit: StorageError: nothing can be deleted" in alarm
    check_whole(result, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few commits and no more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs rights that this user does not have")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_loses_a_save_and_no_more(
    undisturbed: Result, small_data: str, small_disk: Path
) -> None:
    """A foreign file takes the room after the first commit; somebody removes it when the alarm comes."""
    ballast = small_disk / "foreign"

    def fill() -> None:
        free = os.statvfs(small_disk)
        ballast.write_bytes(bytes(free.f_bavail * free.f_frsize))

    done = threading.Event()

    def make_room(text: str) -> None:
        if "SAVE FAILED" in text:
            assert "StorageFull" in text
            ballast.write_bytes(b"")
            done.set()

    class Filler(Listener):
        def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
            super().commit(name, size_bytes=size_bytes, seconds=seconds)
            if not ballast.exists():
                fill()

    listener = Filler(on_notice=make_room)
    result = train(
        small_data, small_disk / "run", reporter=listener, failure_config=FailureConfig(storage_timeout_s=PATIENCE_S)
    )
    assert done.is_set()
    assert result.failed_saves >= 1
    assert steps_of(result.path)[-1] == STEPS
    check_whole(result, undisturbed)
