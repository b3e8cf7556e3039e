"""The store behaves the same on every backend."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

import pytest

from podembed.workers.storage import remote as remote_files
from podembed.workers.storage.storage_errors import NameNotFound, NameTaken, UnsafeName, WrongSize
from podembed.workers.storage.store import Store
from tests.workers.storage.file_systems import NO_WAIT, CloudFileSystem


@pytest.fixture(params=["local", "file", "memory", "cloud", "s3"])
def store(request, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(f"{request.getfixturevalue('s3_url')}/run", waiting=NO_WAIT)
    unique = secrets.token_hex(4)
    CloudFileSystem.reset()
    urls = {
        "local": f"{tmp_path}/run",
        "file": f"file://{tmp_path}/run",
        "memory": f"memory://{unique}/run",
        "cloud": f"abfss://{unique}/run",
    }
    return Store(urls[request.param], waiting=NO_WAIT)


def test_what_was_written_is_read(store: Store) -> None:
    store.write_new("data/a/c/0", [b"abc", memoryview(b"defg"), bytearray(b"")])
    assert store.read("data/a/c/0", max_bytes=7) == b"abcdefg"
    assert store.read_range("data/a/c/0", start=2, length=3) == b"cde"
    assert store.size("data/a/c/0") == 7
    first, second = bytearray(3), bytearray(4)
    store.read_into("data/a/c/0", [memoryview(first), memoryview(second)])
    assert bytes(first + second) == b"abcdefg"


def test_an_empty_file_is_a_file(store: Store) -> None:
    store.write_new("empty", [])
    assert store.size("empty") == 0
    assert store.read("empty", max_bytes=0) == b""
    assert store.exists("empty")


def test_nothing_is_written_twice(store: Store) -> None:
    store.write_new("data/x", [b"first"])
    with pytest.raises(NameTaken, match="data/x"):
        store.write_new("data/x", [b"second"])
    assert store.create_exclusive("data/x", b"third") is False
    assert store.read("data/x", max_bytes=100) == b"first"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services here share this machine with all other tests."""
    monkeypatch.setattr(remote_files, "LONGEST_REPLACE_S", 120.0)


def test_a_heartbeat_is_replaced_whole(store: Store) -> None:
    store.replace("lease/g1.hb", b"a long heartbeat")
    store.replace("lease/g1.hb", b"short")
    assert store.read("lease/g1.hb", max_bytes=100) == b"short"


def test_a_heartbeat_waits_for_no_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.replace("lease/g1.hb", b"first")
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("synced"))
    store.replace("lease/g1.hb", b"second")
    assert store.read("lease/g1.hb", max_bytes=100) == b"second"


@pytest.mark.parametrize("name", ["missing", "data/missing", "data/a/b/missing"])
def test_a_missing_name_is_named(store: Store, name: str) -> None:
    store.write_new("data/present", [b"x"])
    with pytest.raises(NameNotFound, match=name):
        store.read(name, max_bytes=10)
    with pytest.raises(NameNotFound):
        store.read_into(name, [memoryview(bytearray(1))])
    assert not store.exists(name)


def test_listings_show_what_is_there(store: Store) -> None:
    assert store.sizes() == {}
    assert store.children("lease") == []
    for name, data in {"a": b"1", "lease/g1.claim": b"22", "data/x/y/z": b"333", "data/x/w": b""}.items():
        store.write_new(name, [data])
    assert store.sizes() == {"a": 1, "data/x/w": 0, "data/x/y/z": 3, "lease/g1.claim": 2}
    assert store.sizes("data/x") == {"data/x/w": 0, "data/x/y/z": 3}
    assert store.list("data") == ["data/x/w", "data/x/y/z"]
    assert store.children() == ["a", "data", "lease"]
    assert store.children("data/x") == ["w", "y"]


def test_a_prefix_is_a_folder_not_a_beginning(store: Store) -> None:
    store.write_new("data/run/a", [b"1"])
    store.write_new("data/running/b", [b"1"])
    assert store.list("data/run") == ["data/run/a"]


def test_deleting_leaves_the_others(store: Store) -> None:
    store.write_new("data/x/a", [b"1"])
    store.write_new("data/x/b", [b"2"])
    store.delete("data/x/a")
    store.delete("data/x/a")
    assert store.list() == ["data/x/b"]
    store.delete("data/x/b")
    assert store.children() == []


def test_sizes_are_checked_before_reading(store: Store) -> None:
    store.write_new("big", [b"x" * 100])
    with pytest.raises(WrongSize, match="100 bytes"):
        store.read("big", max_bytes=99)
    with pytest.raises(WrongSize):
        store.read_range("big", start=90, length=11)
    for wrong in (99, 101):
        with pytest.raises(WrongSize):
            store.read_into("big", [memoryview(bytearray(wrong))])


def test_one_of_many_writers_creates_a_name(store: Store) -> None:
    barrier = threading.Barrier(6)
    for race in range(10):
        won: list[int] = []

        def write(writer: int, race: int = race, won: list[int] = won) -> None:
            barrier.wait(timeout=120)
            if store.create_exclusive(f"lease/g{race}", f"{writer}".encode()):
                won.append(writer)

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert len(won) == 1
        assert store.read(f"lease/g{race}", max_bytes=10) == f"{won[0]}".encode()


def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    store.probe()
    assert store.list() == []


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../b", "a//b", "", ".", "c/.hidden", "a\\b", "s3://b/x", "a\nb"]
)
def test_names_that_could_escape_are_refused_everywhere(store: Store, name: str) -> None:
    for use in (
        lambda: store.read(name, max_bytes=1),
        lambda: store.write_new(name, [b"x"]),
        lambda: store.create_exclusive(name, b"x"),
        lambda: store.replace(name, b"x"),
        lambda: store.delete(name),
        lambda: store.size(name),
        lambda: store.read_into(name, []),
    ):
        with pytest.raises(UnsafeName):
            use()
