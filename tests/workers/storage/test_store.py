"""The store: names, the same behaviour on every backend, races for a name, links, and retries without waiting."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

from podembed.workers.storage import remote as remote_files
from podembed.workers.storage.errors import (
    NameNotFound,
    NameTaken,
    NotAPlainFile,
    ServiceRefused,
    StorageError,
    StorageFull,
    StoreCannotCreateExclusively,
    StoreUnavailable,
    SystemRefused,
    UnsafeName,
    WrongSize,
)
from podembed.workers.storage.retry import RetryPolicy, Waiting
from podembed.workers.storage.store import Store, is_safe_name, validate_name
from tests.object_store import PAGE_SIZE

NO_WAIT = Waiting(sleep=lambda _: None)


def key_of(path: str) -> str:
    """The name of an object without the protocol."""
    return path.split("://", 1)[-1].strip("/")


class CloudFileSystem(AsyncFileSystem):
    """Objects in a dictionary behind fsspec's asynchronous calls, with conditional puts and scripted faults."""

    protocol = "abfss"
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012  # shared by instances, as a service is
    faults: list[tuple[str, str, Exception]] = []  # noqa: RUF012

    @classmethod
    def reset(cls, *faults: tuple[str, str, Exception]) -> None:
        """Faults are (method, "before" or "after" its effect, error), each used once."""
        cls.objects, cls.faults = {}, list(faults)

    def _fault(self, method: str, when: str) -> None:
        for fault in self.faults:
            if fault[:2] == (method, when):
                self.faults.remove(fault)
                raise fault[2]

    async def _pipe_file(self, path, value, mode="overwrite", **_):
        path = key_of(path)
        self._fault("pipe", "before")
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)
        self._fault("pipe", "after")

    async def _cat_file(self, path, start=None, end=None, **_):
        self._fault("cat", "before")
        return (await self._object(path))[start:end]

    async def _info(self, path, **_):
        self._fault("info", "before")
        path = key_of(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(path + "/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path, detail=True, **_):
        self._fault("ls", "before")
        path = key_of(path)
        below = {name[len(path) + 1 :].split("/")[0] for name in self.objects if name.startswith(path + "/")}
        if not below:
            raise FileNotFoundError(path)
        entries = [await self._info(f"{path}/{name}") for name in sorted(below)]
        return entries if detail else [entry["name"] for entry in entries]

    async def _rm_file(self, path, **_):
        await self._object(path)
        del self.objects[key_of(path)]

    async def _object(self, path):
        try:
            return self.objects[key_of(path)]
        except KeyError:
            raise FileNotFoundError(path) from None


class PlainFileSystem(AbstractFileSystem):
    """A filesystem that only offers fsspec's common calls, so nothing in it decides a race."""

    protocol = "plain"
    cachable = False
    files: dict[str, bytes] = {}  # noqa: RUF012

    def pipe_file(self, path, value, mode="overwrite", **_):
        self.files[key_of(path)] = bytes(value)

    def cat_file(self, path, start=None, end=None, **_):
        return self.files[key_of(path)][start:end]

    def info(self, path, **_):
        path = key_of(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.files[path]), "type": "file"}


@pytest.fixture(scope="module", autouse=True)
def _filesystems():
    fsspec.register_implementation("abfss", CloudFileSystem, clobber=True)
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


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


class TestEveryBackend:
    def test_what_was_written_is_read(self, store: Store) -> None:
        store.write_new("data/a/c/0", [b"abc", memoryview(b"defg"), bytearray(b"")])
        assert store.read("data/a/c/0", max_bytes=7) == b"abcdefg"
        assert store.read_range("data/a/c/0", start=2, length=3) == b"cde"
        assert store.size("data/a/c/0") == 7
        first, second = bytearray(3), bytearray(4)
        store.read_into("data/a/c/0", [memoryview(first), memoryview(second)])
        assert bytes(first + second) == b"abcdefg"

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        store.write_new("empty", [])
        assert store.size("empty") == 0
        assert store.read("empty", max_bytes=0) == b""
        assert store.exists("empty")

    def test_nothing_is_written_twice(self, store: Store) -> None:
        store.write_new("data/x", [b"first"])
        with pytest.raises(NameTaken, match="data/x"):
            store.write_new("data/x", [b"second"])
        assert store.create_exclusive("data/x", b"third") is False
        assert store.read("data/x", max_bytes=100) == b"first"

    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The services here share this machine with all other tests."""
        monkeypatch.setattr(remote_files, "LONGEST_REPLACE_S", 120.0)

    def test_a_heartbeat_is_replaced_whole(self, store: Store) -> None:
        store.replace("lease/g1.hb", b"a long heartbeat")
        store.replace("lease/g1.hb", b"short")
        assert store.read("lease/g1.hb", max_bytes=100) == b"short"

    def test_a_heartbeat_waits_for_no_disk(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        store.replace("lease/g1.hb", b"first")
        monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("synced"))
        store.replace("lease/g1.hb", b"second")
        assert store.read("lease/g1.hb", max_bytes=100) == b"second"

    @pytest.mark.parametrize("name", ["missing", "data/missing", "data/a/b/missing"])
    def test_a_missing_name_is_named(self, store: Store, name: str) -> None:
        store.write_new("data/present", [b"x"])
        with pytest.raises(NameNotFound, match=name):
            store.read(name, max_bytes=10)
        with pytest.raises(NameNotFound):
            store.read_into(name, [memoryview(bytearray(1))])
        assert not store.exists(name)

    def test_listings_show_what_is_there(self, store: Store) -> None:
        assert store.sizes() == {}
        assert store.children("lease") == []
        for name, data in {"a": b"1", "lease/g1.claim": b"22", "data/x/y/z": b"333", "data/x/w": b""}.items():
            store.write_new(name, [data])
        assert store.sizes() == {"a": 1, "data/x/w": 0, "data/x/y/z": 3, "lease/g1.claim": 2}
        assert store.sizes("data/x") == {"data/x/w": 0, "data/x/y/z": 3}
        assert store.list("data") == ["data/x/w", "data/x/y/z"]
        assert store.children() == ["a", "data", "lease"]
        assert store.children("data/x") == ["w", "y"]

    def test_a_prefix_is_a_folder_not_a_beginning(self, store: Store) -> None:
        store.write_new("data/run/a", [b"1"])
        store.write_new("data/running/b", [b"1"])
        assert store.list("data/run") == ["data/run/a"]

    def test_deleting_leaves_the_others(self, store: Store) -> None:
        store.write_new("data/x/a", [b"1"])
        store.write_new("data/x/b", [b"2"])
        store.delete("data/x/a")
        store.delete("data/x/a")
        assert store.list() == ["data/x/b"]
        store.delete("data/x/b")
        assert store.children() == []

    def test_sizes_are_checked_before_reading(self, store: Store) -> None:
        store.write_new("big", [b"x" * 100])
        with pytest.raises(WrongSize, match="100 bytes"):
            store.read("big", max_bytes=99)
        with pytest.raises(WrongSize):
            store.read_range("big", start=90, length=11)
        for wrong in (99, 101):
            with pytest.raises(WrongSize):
                store.read_into("big", [memoryview(bytearray(wrong))])

    def test_one_of_many_writers_creates_a_name(self, store: Store) -> None:
        barrier = threading.Barrier(6)
        for race in range(10):
            won: list[int] = []

            def write(writer: int, race: int = race, won: list[int] = won) -> None:
                barrier.wait(timeout=20)
                if store.create_exclusive(f"lease/g{race}", f"{writer}".encode()):
                    won.append(writer)

            threads = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
            assert len(won) == 1
            assert store.read(f"lease/g{race}", max_bytes=10) == f"{won[0]}".encode()

    def test_the_probe_passes_and_leaves_nothing(self, store: Store) -> None:
        store.probe()
        assert store.list() == []

    @pytest.mark.parametrize(
        "name", ["../x", "/etc/passwd", "a/../../b", "a//b", "", ".", "c/.hidden", "a\\b", "s3://b/x", "a\nb"]
    )
    def test_names_that_could_escape_are_refused_everywhere(self, store: Store, name: str) -> None:
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


class TestLocalFiles:
    def test_links_below_the_root_are_not_followed(self, tmp_path: Path) -> None:
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

    def test_the_root_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        Store(tmp_path / "link").write_new("a", [b"x"])
        assert Store(tmp_path / "real").read("a", max_bytes=1) == b"x"

    def test_folders_pipes_and_devices_are_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        store = Store(tmp_path)
        for name in ("folder", "pipe"):
            with pytest.raises(NotAPlainFile):
                store.read(name, max_bytes=100)
        with pytest.raises(NotAPlainFile):
            store.delete("folder")

    def test_a_file_in_the_place_of_a_folder_is_named(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.write_new("data", [b"x"])
        with pytest.raises(NotAPlainFile, match="data"):
            store.write_new("data/a", [b"x"])

    def test_a_failed_write_leaves_no_file(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.write_new("seed", [b"x"])
        # The disk refuses in the middle: the second buffer is no buffer at all.
        with pytest.raises(TypeError):
            store.write_new("torn", [b"abc", object()])  # pyright: ignore[reportArgumentType]
        assert os.listdir(tmp_path) == ["seed"]

    def test_a_full_disk_is_reported_at_once_and_cleaned_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
    def test_a_place_where_nothing_can_be_made_is_refused_by_the_storage_in_its_words(self, place: str) -> None:
        with pytest.raises(StorageError, match=rf"'data/a' in {place} failed: .*Correct the path") as refused:
            Store(place, waiting=NO_WAIT).write_new("data/a", [b"abc"])
        copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301
        assert (type(copy), str(copy), copy.reason) == (SystemRefused, str(refused.value), refused.value.reason)

    @pytest.mark.parametrize("place", ["", "/tmp/a\0b"])
    def test_a_place_that_is_none_is_refused(self, place: str) -> None:
        with pytest.raises(StorageError, match=r"as the place of files\. Expected a path or a URL"):
            Store(place)

    @pytest.mark.parametrize("step", [1, 3, 7])
    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        real = os.writev
        monkeypatch.setattr(os, "writev", lambda handle, views: real(handle, [b"".join(views)[:step]]))
        store = Store(tmp_path)
        store.write_new("a", [b"abcde", b"", b"fghij", b"k"])
        assert store.read("a", max_bytes=100) == b"abcdefghijk"

    def test_temporary_files_of_a_killed_writer_are_invisible(self, tmp_path: Path) -> None:
        (tmp_path / "lease").mkdir()
        (tmp_path / "lease" / ".tmp-0123").write_bytes(b"torn")
        store = Store(tmp_path)
        assert store.list() == []
        assert store.children("lease") == []

    def test_a_network_disk_that_repeats_a_link_request_still_has_one_winner(self, tmp_path: Path, monkeypatch) -> None:
        real = os.link

        def link_twice(*arguments: object, **options: object) -> None:
            real(*arguments, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
            raise FileExistsError

        monkeypatch.setattr(os, "link", link_twice)
        assert Store(tmp_path).create_exclusive("claim", b"mine") is True
        monkeypatch.setattr(os, "link", real)
        assert Store(tmp_path).create_exclusive("claim", b"other") is False


class TestFaults:
    @pytest.fixture
    def cloud(self) -> Store:
        CloudFileSystem.reset()
        return Store(f"abfss://{secrets.token_hex(4)}/run", waiting=NO_WAIT)

    @pytest.mark.parametrize(
        "error",
        [
            ConnectionError("reset"),
            TimeoutError("slow"),
            OSError("no errno: a wrapped answer"),
            OSError(errno.EIO, "io"),
        ],
    )
    def test_passing_errors_are_retried(self, cloud: Store, error: Exception) -> None:
        cloud.write_new("a", [b"abc"])
        CloudFileSystem.faults = [("cat", "before", error), ("info", "before", error)]
        assert cloud.read("a", max_bytes=10) == b"abc"
        assert CloudFileSystem.faults == []

    def test_a_create_that_worked_without_an_answer_is_won(self, cloud: Store) -> None:
        CloudFileSystem.faults = [("pipe", "after", ConnectionError("answer lost"))]
        assert cloud.create_exclusive("claim", b"mine") is True
        CloudFileSystem.faults = [("pipe", "after", ConnectionError("answer lost"))]
        cloud.write_new("data", [b"mine"])
        assert cloud.read("data", max_bytes=10) == b"mine"

    def test_a_request_that_the_client_repeats_on_its_own_is_no_second_writer(
        self, cloud: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = CloudFileSystem._pipe_file

        async def sends_twice(self, path, value, **options):
            await real(self, path, value, **options)
            await real(self, path, value, **options)

        monkeypatch.setattr(CloudFileSystem, "_pipe_file", sends_twice)
        assert cloud.create_exclusive("claim", b"mine") is True
        assert cloud.create_exclusive("claim", b"theirs") is False
        cloud.write_new("data", [b"mine"])
        with pytest.raises(NameTaken):
            cloud.write_new("data", [b"theirs"])
        assert cloud.read("data", max_bytes=10) == b"mine"

    def test_a_heartbeat_that_hangs_soon_fails(self, cloud: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The driver's thread waits for it, and no worker hears of the driver meanwhile."""

        async def hang(self, path, value, **options):
            await asyncio.sleep(600)

        monkeypatch.setattr(CloudFileSystem, "_pipe_file", hang)
        monkeypatch.setattr(remote_files, "LONGEST_REPLACE_S", 0.2)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable):
            cloud.replace("lease/g1.hb", b"beat")
        assert time.monotonic() - began_s < 200.0

    def test_a_create_that_somebody_else_won_meanwhile_is_lost(self, cloud: Store) -> None:
        CloudFileSystem.faults = [("pipe", "before", ConnectionError("request lost"))]
        real = CloudFileSystem._fault

        def lose(self: CloudFileSystem, method: str, when: str) -> None:
            try:
                real(self, method, when)
            except ConnectionError:
                self.objects[next(iter(self.objects)).replace("seed", "claim")] = b"theirs"
                raise

        cloud.write_new("seed", [b"x"])
        CloudFileSystem.faults = [("pipe", "before", ConnectionError("request lost"))]
        CloudFileSystem._fault = lose
        try:
            assert cloud.create_exclusive("claim", b"mine") is False
        finally:
            CloudFileSystem._fault = real

    def test_permanent_errors_are_not_retried(self, cloud: Store) -> None:
        cloud.write_new("a", [b"abc"])
        CloudFileSystem.faults = [("info", "before", PermissionError("no")), ("info", "before", PermissionError("no"))]
        with pytest.raises(PermissionError):
            cloud.size("a")
        assert len(CloudFileSystem.faults) == 1

    def test_a_service_that_stays_away_is_given_up_in_bounded_time(self) -> None:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        waiting = Waiting(monotonic=lambda: now[0], sleep=sleep, random=lambda: 0.5)
        policy = RetryPolicy(max_attempts=5, first_wait_s=1.0, max_wait_s=4.0, deadline_s=100.0)
        CloudFileSystem.reset(*[("info", "before", ConnectionError(f"down {n}")) for n in range(9)])
        store = Store("abfss://bucket/run", retry=policy, waiting=waiting)
        with pytest.raises(StoreUnavailable, match=r"5 times.*down 4") as caught:
            store.size("a")
        assert caught.value.attempts == 5
        assert now[0] == pytest.approx(0.75 * (1 + 2 + 4 + 4))
        CloudFileSystem.reset(*[("info", "before", ConnectionError("down")) for _ in range(9)])
        now[0] = 0.0
        short = RetryPolicy(max_attempts=50, first_wait_s=1.0, max_wait_s=4.0, deadline_s=3.0)
        with pytest.raises(StoreUnavailable):
            Store("abfss://bucket/run", retry=short, waiting=waiting).size("a")
        assert now[0] <= 3.0


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


class TestObjectStore:
    """What only a real service and its real client show."""

    def test_files_of_several_parts_are_created_exclusively_too(self, s3_url: str) -> None:
        store = Store(f"{s3_url}/run")
        data = np.random.default_rng(0).bytes(101 << 20)
        store.write_new("big", [data[: 1 << 20], data[1 << 20 :]])
        other = bytearray(data)
        other[-1] ^= 1
        with pytest.raises(NameTaken):
            store.write_new("big", [other])
        read = bytearray(len(data))
        store.read_into("big", [memoryview(read)])
        assert read == data

    def test_more_files_than_one_listing_shows(self, s3_url: str) -> None:
        store = Store(f"{s3_url}/run")
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(lambda at: store.write_new(f"data/{at}", [b"x"]), range(2 * PAGE_SIZE + 3))]
        assert len(store.sizes("data")) == len(store.children("data")) == 2 * PAGE_SIZE + 3

    def test_a_bucket_that_is_not_there_is_named(self, s3_url: str) -> None:
        with pytest.raises(StorageError, match="failed: .*bucket does not exist"):
            Store("s3://no-such-bucket/run", waiting=NO_WAIT).probe()

    def test_missing_credentials_are_told_at_once(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, "/dev/null")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(ServiceRefused, match="credentials"):
            Store(f"{s3_url}/run").create_exclusive("x", b"x")

    def test_a_service_that_is_away_is_reported_in_words(self, s3_url: str) -> None:
        once = RetryPolicy(max_attempts=1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            options = {"client_kwargs": {"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}"}}
        options["config_kwargs"] = {"retries": {"max_attempts": 0}}
        with pytest.raises(StoreUnavailable, match="Could not connect"):
            Store(f"{s3_url}/run", storage_options=options, retry=once).size("RUN.json")


def test_urls_that_nothing_opens_are_refused_with_advice() -> None:
    with pytest.raises(StorageError, match=r"Protocol not known: nosuch.*podembed\[s3\]"):
        Store("nosuch://bucket/run")
