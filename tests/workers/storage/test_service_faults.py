"""Faults of a service: what passes is tried again without waiting, and a lost answer makes no second writer."""

from __future__ import annotations

import asyncio
import errno
import secrets
import time

import pytest

from podembed.workers.storage import remote as remote_files
from podembed.workers.storage.retry import RetryClock, RetryPolicy
from podembed.workers.storage.storage_errors import NameTaken, StoreUnavailable
from podembed.workers.storage.store import Store
from tests.workers.storage.file_systems import NO_WAIT, CloudFileSystem


@pytest.fixture
def cloud() -> Store:
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
def test_passing_errors_are_retried(cloud: Store, error: Exception) -> None:
    cloud.write_new("a", [b"abc"])
    CloudFileSystem.faults = [("cat", "before", error), ("info", "before", error)]
    assert cloud.read("a", max_bytes=10) == b"abc"
    assert CloudFileSystem.faults == []


def test_a_create_that_worked_without_an_answer_is_won(cloud: Store) -> None:
    CloudFileSystem.faults = [("pipe", "after", ConnectionError("answer lost"))]
    assert cloud.create_exclusive("claim", b"mine") is True
    CloudFileSystem.faults = [("pipe", "after", ConnectionError("answer lost"))]
    cloud.write_new("data", [b"mine"])
    assert cloud.read("data", max_bytes=10) == b"mine"


def test_a_request_that_the_client_repeats_on_its_own_is_no_second_writer(
    cloud: Store, monkeypatch: pytest.MonkeyPatch
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


def test_a_heartbeat_that_hangs_soon_fails(cloud: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's thread waits for it, and no worker hears of the driver meanwhile."""

    async def hang(self, path, value, **options):
        await asyncio.sleep(600)

    monkeypatch.setattr(CloudFileSystem, "_pipe_file", hang)
    monkeypatch.setattr(remote_files, "LONGEST_REPLACE_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        cloud.replace("lease/g1.hb", b"beat")
    assert time.monotonic() - began_s < 200.0


def test_a_create_that_somebody_else_won_meanwhile_is_lost(cloud: Store) -> None:
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


def test_permanent_errors_are_not_retried(cloud: Store) -> None:
    cloud.write_new("a", [b"abc"])
    CloudFileSystem.faults = [("info", "before", PermissionError("no")), ("info", "before", PermissionError("no"))]
    with pytest.raises(PermissionError):
        cloud.size("a")
    assert len(CloudFileSystem.faults) == 1


def test_a_service_that_stays_away_is_given_up_in_bounded_time() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    waiting = RetryClock(monotonic=lambda: now[0], sleep=sleep, random=lambda: 0.5)
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
