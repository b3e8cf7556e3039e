"""Names, places, and whether the storage can decide who creates a name."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.storage.storage_errors import StorageError, StoreCannotCreateExclusively, UnsafeName
from podembed.workers.storage.store import Store, is_safe_name, validate_name
from tests.workers.storage.file_systems import CloudFileSystem


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["..", ".", "", "a", "b-1", "~", "c.json", "%2e", "-x"])).map("/".join)
)
def test_a_safe_name_stays_below_its_root(name: str) -> None:
    if is_safe_name(name):
        assert validate_name(name) == name
        joined = os.path.normpath(os.path.join("/base/run", name))
        assert joined == f"/base/run/{name}"
        assert name.isascii()
        assert name.isprintable()
    else:
        with pytest.raises(UnsafeName):
            validate_name(name)


@pytest.mark.parametrize("name", ["a" * 201, "/".join(["abc"] * 200), "a/" + "b" * 300])
def test_names_are_bounded(name: str) -> None:
    assert not is_safe_name(name)


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("run", True),
        ("/data/run", True),
        ("file:///data/run", True),
        ("local:///data/run", True),
        ("memory://run", False),
    ],
)
def test_it_knows_whether_its_files_are_on_this_machine(url: str, is_local: bool) -> None:
    assert Store(url).is_local == is_local


def test_chained_filesystems_are_refused() -> None:
    with pytest.raises(StorageError, match="chains"):
        Store("simplecache::memory://bucket/run")


def test_urls_that_nothing_opens_are_refused_with_advice() -> None:
    with pytest.raises(StorageError, match=r"Protocol not known: nosuch.*podembed\[s3\]"):
        Store("nosuch://bucket/run")


class TestExclusiveCreation:
    def test_a_filesystem_that_looks_first_is_refused(self) -> None:
        with pytest.raises(StoreCannotCreateExclusively, match="--single-writer"):
            Store("plain://bucket/run").probe()

    @pytest.mark.parametrize("option", ["mode", "overwrite"])
    def test_both_ways_of_asking_a_service_are_known(self, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
        CloudFileSystem.reset()
        real = CloudFileSystem._pipe_file

        async def like_adlfs(self, path, value, overwrite=True, **options):
            await real(self, path, value, mode="overwrite" if overwrite else "create", **options)

        if option == "overwrite":
            monkeypatch.setattr(CloudFileSystem, "_pipe_file", like_adlfs)
        store = Store("abfss://bucket/run")
        store.probe()
        assert store.create_exclusive("a", b"1") is True
        assert store.create_exclusive("a", b"2") is False

    def test_a_service_that_ignores_the_condition_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        CloudFileSystem.reset()
        real = CloudFileSystem._pipe_file

        async def careless(self, path, value, mode="overwrite", **options):
            await real(self, path, value, mode="overwrite", **options)

        monkeypatch.setattr(CloudFileSystem, "_pipe_file", careless)
        with pytest.raises(StoreCannotCreateExclusively, match="8 of 8"):
            Store("abfss://bucket/run").probe()

    def test_a_service_with_old_listings_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        CloudFileSystem.reset()

        async def stale(self, path, detail=True, **_):
            return []

        monkeypatch.setattr(CloudFileSystem, "_ls", stale)
        with pytest.raises(StoreCannotCreateExclusively, match="does not list"):
            Store("abfss://bucket/run").probe()
