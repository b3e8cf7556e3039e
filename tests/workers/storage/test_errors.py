"""What the system says of a storage, as an error with its remedy."""

from __future__ import annotations

import errno
import os
import pickle
from functools import partial
from pathlib import Path

import pytest

from podembed.workers.storage.storage_errors import NotAFolder, StorageError, SystemRefused
from podembed.workers.storage.store import Store


def test_a_file_in_the_place_of_the_root_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        store = Store(root)
        calls = [partial(store.read, "a", max_bytes=9), store.list, partial(store.create_exclusive, "a", b"")]
        for call in calls:
            with pytest.raises(NotAFolder, match=rf"{tmp_path}/file is no folder.*--storage"):
                call()


def test_rights_that_are_missing_are_an_error_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of the system as before, so whoever waits for storages treats it so."""
    store = Store(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "a")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"create 'a' in .* was refused: Permission denied\..*Give it"):
        store.create_exclusive("a", b"x")
    with pytest.raises(PermissionError):
        store.create_exclusive("a", b"x")


def test_an_error_travels_from_a_host_to_the_driver_whole() -> None:
    """Ray pickles what a worker raises. Files of a storage are never unpickled."""
    with pytest.raises(SystemRefused) as refused:
        Store("/proc/x").write_new("data/a", [b"abc"])
    arrived = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  # made here
    assert (type(arrived), str(arrived)) == (SystemRefused, str(refused.value))
    assert arrived.reason == refused.value.reason
