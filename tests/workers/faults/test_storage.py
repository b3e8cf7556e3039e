"""A storage that fails as a plan says, met by the store above it as a real one would be."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from podembed.workers.faults.inject import FaultPoints, ProcessActs
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.faults.storage import with_faults
from podembed.workers.storage.retry import RetryClock
from podembed.workers.storage.storage_errors import StorageFull, StoreUnavailable
from podembed.workers.storage.store import Store


class Struck(Exception):
    """Stands for the end of the process."""


def _end(number: int) -> None:
    raise Struck(signal.Signals(number).name)


def faulty(folder: Path, *faults: Fault, slept: list[float] | None = None) -> Store:
    records = folder / "records"
    records.mkdir(exist_ok=True)
    plan = FaultPlan(folder=str(records), faults=faults)
    acts = ProcessActs(send_signal=_end, sleep=[].append if slept is None else slept.append)
    waiting = RetryClock(sleep=lambda seconds: None)
    return with_faults(Store(folder / "run", waiting=waiting), FaultPoints.of(plan, "driver", acts))


def at_write(action: str, **more: Any) -> Fault:
    return Fault(point="storage.write", action=action, **more)


def plain(folder: Path) -> Store:
    return Store(folder / "run")


def test_without_a_storage_fault_there_is_no_layer(tmp_path: Path) -> None:
    store = plain(tmp_path)
    assert with_faults(store, None) is store
    plan = FaultPlan(folder=str(tmp_path), faults=(Fault(point="step.update", action="kill"),))
    assert with_faults(store, FaultPoints.of(plan, "driver")) is store


def test_answers_503_are_asked_again_and_then_given_up(tmp_path: Path) -> None:
    faulty(tmp_path, at_write("http_error", times=2, arguments={"code": 503})).write_new("data/a", [b"abc"])
    assert plain(tmp_path).read("data/a", max_bytes=10) == b"abc"
    with pytest.raises(StoreUnavailable):
        faulty(tmp_path, *[at_write("http_error", match="b", times=99)] * 2).write_new("data/b", [b"abc"])


def test_a_lost_answer_does_not_make_a_write_fail(tmp_path: Path) -> None:
    store = faulty(tmp_path, at_write("lost_answer"), Fault(point="storage.create", action="lost_answer"))
    store.write_new("data/a", [b"ab", b"c"])
    assert store.create_exclusive("commit/a", b"mine")
    assert plain(tmp_path).read("data/a", max_bytes=10) == b"abc"


def test_a_412_for_the_own_file_is_recognized(tmp_path: Path) -> None:
    store = faulty(tmp_path, Fault(point="storage.create", action="precondition_failed"))
    assert store.create_exclusive("commit/a", b"mine")
    assert not store.create_exclusive("commit/a", b"another's")


def test_torn_lost_and_changed_writes_are_reported_as_done(tmp_path: Path) -> None:
    store = faulty(tmp_path, *(at_write(action, match=action) for action in ("torn", "lost", "flip")))
    for action in ("torn", "lost", "flip"):
        store.write_new(f"data/{action}", [b"abcdefgh"])
    left = plain(tmp_path)
    assert left.read("data/torn", max_bytes=10) == b"abcd"
    assert not left.exists("data/lost")
    changed = left.read("data/flip", max_bytes=10)
    assert len(changed) == 8
    assert changed != b"abcdefgh"


def test_a_kill_in_the_middle_leaves_half_a_file(tmp_path: Path) -> None:
    with pytest.raises(Struck, match="SIGKILL"):
        faulty(tmp_path, at_write("kill_midway")).write_new("data/a", [b"abcdefgh"])
    assert plain(tmp_path).size("data/a") == 4


def test_a_kill_after_a_write_finds_the_file_whole(tmp_path: Path) -> None:
    with pytest.raises(Struck):
        faulty(tmp_path, Fault(point="storage.written", action="kill")).write_new("data/a", [b"abcdefgh"])
    assert plain(tmp_path).size("data/a") == 8


def test_no_space_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        faulty(tmp_path, at_write("no_space")).write_new("data/a", [b"abc"])
    assert plain(tmp_path).list() == []


def test_short_and_changed_reads(tmp_path: Path) -> None:
    plain(tmp_path).write_new("data/a", [b"abcdefgh"])
    short = faulty(tmp_path, Fault(point="storage.read", action="short_read"))
    assert short.read("data/a", max_bytes=10) == b"abcd"
    (tmp_path / "records").rename(tmp_path / "used")
    changed = faulty(tmp_path, Fault(point="storage.read", action="flip"))
    buffer = bytearray(8)
    changed.read_into("data/a", [memoryview(buffer)])
    assert bytes(buffer) != b"abcdefgh"
    changed.read_into("data/a", [memoryview(buffer)])
    assert bytes(buffer) == b"abcdefgh"


def test_an_error_of_the_disk_is_asked_again(tmp_path: Path) -> None:
    plain(tmp_path).write_new("data/a", [b"abc"])
    store = faulty(tmp_path, Fault(point="storage.read", action="raise", arguments={"type": "TimeoutError"}))
    assert store.read("data/a", max_bytes=10) == b"abc"


def test_a_stale_listing_misses_the_newest_name(tmp_path: Path) -> None:
    for name in ("commit/a", "commit/b"):
        plain(tmp_path).write_new(name, [b"x"])
    store = faulty(tmp_path, Fault(point="storage.list", action="stale", times=2))
    assert list(store.children("commit")) == ["a"]
    assert store.list("commit") == ["commit/a"]
    assert list(store.children("commit")) == ["a", "b"]


def test_a_slow_storage_takes_time_for_its_bytes(tmp_path: Path) -> None:
    slept: list[float] = []
    store = faulty(tmp_path, at_write("throttle", arguments={"bytes_per_s": 4}), slept=slept)
    store.write_new("data/a", [b"abcdefgh"])
    assert slept == [2.0]
