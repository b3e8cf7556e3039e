"""Files of a local disk: links, odd files, failed and short writes, and leftovers of killed writers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from podembed.workers.storage.storage_errors import NameTaken, NotAPlainFile, StorageError, StorageFull
from podembed.workers.storage.store import Store
from tests.workers.storage.file_systems import NO_WAIT


def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_bytes(b"secret")
    root = tmp_path / "run"
    (root / "data").mkdir(parents=True)
    (root / "data" / "file").symlink_to(secret)
    (root / "data" / "folder").symlink_to(secret.parent)
    store = Store(root)
    for name in ("data/file", "data/folder/secret"):
        with pytest.raises(NotAPlainFile):
            store.read(name, max_bytes=100)
    with pytest.raises((NotAPlainFile, NameTaken)):
        store.write_new("data/folder/new", [b"x"])
    with pytest.raises(NameTaken):
        store.write_new("data/file", [b"x"])
    with pytest.raises(NotAPlainFile):
        store.delete("data/folder/secret")
    assert store.sizes() == {}
    assert store.children("data") == []
    assert secret.read_bytes() == b"secret"
    assert os.listdir(secret.parent) == ["secret"]


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Store(tmp_path / "link").write_new("a", [b"x"])
    assert Store(tmp_path / "real").read("a", max_bytes=1) == b"x"


def test_folders_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    store = Store(tmp_path)
    for name in ("folder", "pipe"):
        with pytest.raises(NotAPlainFile):
            store.read(name, max_bytes=100)
    with pytest.raises(NotAPlainFile):
        store.delete("folder")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_new("data", [b"x"])
    with pytest.raises(NotAPlainFile, match="data"):
        store.write_new("data/a", [b"x"])


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_new("seed", [b"x"])
    # The disk refuses in the middle: the second buffer is no buffer at all.
    with pytest.raises(TypeError):
        store.write_new("torn", [b"abc", object()])  # pyright: ignore[reportArgumentType]
    assert os.listdir(tmp_path) == ["seed"]


def test_a_full_disk_is_reported_at_once_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(handle: int, views: object) -> int:
        calls.append(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StorageFull, match=r"write 'data/a' in .* failed: No space left.*keep fewer commits"):
        Store(tmp_path, waiting=NO_WAIT).write_new("data/a", [b"abc"])
    assert len(calls) == 1
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize("place", ["/proc/nope/x", "/proc/x", f"/tmp/{'x' * 300}"])
def test_a_place_where_nothing_can_be_made_is_refused_by_the_storage_in_its_words(place: str) -> None:
    with pytest.raises(StorageError, match=rf"'data/a' in {place} failed: .*Correct the path"):
        Store(place, waiting=NO_WAIT).write_new("data/a", [b"abc"])


@pytest.mark.parametrize("place", ["", "/tmp/a\0b"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(StorageError, match=r"as the place of files\. Expected a path or a URL"):
        Store(place)


@pytest.mark.parametrize("step", [1, 3, 7])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda handle, views: real(handle, [b"".join(views)[:step]]))
    store = Store(tmp_path)
    store.write_new("a", [b"abcde", b"", b"fghij", b"k"])
    assert store.read("a", max_bytes=100) == b"abcdefghijk"


def test_temporary_files_of_a_killed_writer_are_invisible(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / ".tmp-0123").write_bytes(b"torn")
    store = Store(tmp_path)
    assert store.list() == []
    assert store.children("lease") == []


def test_a_network_disk_that_repeats_a_link_request_still_has_one_winner(tmp_path: Path, monkeypatch) -> None:
    real = os.link

    def link_twice(*arguments: object, **options: object) -> None:
        real(*arguments, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
        raise FileExistsError

    monkeypatch.setattr(os, "link", link_twice)
    assert Store(tmp_path).create_exclusive("claim", b"mine") is True
    monkeypatch.setattr(os, "link", real)
    assert Store(tmp_path).create_exclusive("claim", b"other") is False
