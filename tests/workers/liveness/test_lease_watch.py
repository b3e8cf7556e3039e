"""When a worker ends itself: by the signs alone with time as a number, and with real files and a real thread."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.orchestrator.api.run_errors import EXIT_FENCED
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.workers.liveness import lease_watch
from podembed.workers.liveness.lease_watch import LeaseSigns, LeaseWatch, StoredLease
from podembed.workers.storage.storage_errors import StoreUnavailable
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.long_tests import examples

TIMEOUT_S = 30.0
PAUSE_S = 5.0
PATIENCE_S = 120.0


class Files:
    """A lease in memory. `is_away` makes the storage fail."""

    def __init__(self) -> None:
        self.beats: dict[int, bytes] = {}
        self.holders: dict[int, Any] = {1: {"process": 1}}
        self.is_away = False
        self.num_looks = 0

    def heartbeat(self, generation: int) -> bytes:
        self._answer()
        return self.beats.get(generation, b"")

    def holder(self, generation: int) -> Any:
        self._answer()
        return self.holders.get(generation)

    def _answer(self) -> None:
        self.num_looks += 1
        if self.is_away:
            raise StoreUnavailable("read", attempts=1, elapsed_s=0.0, last=OSError("away"))


def signs_of(files: Files) -> LeaseSigns:
    return LeaseSigns(files, generation=1, timeout_s=TIMEOUT_S)


def ends_after(signs: LeaseSigns, *, looks: int = 40, was_called: bool = False, beat: Any = None) -> float | None:
    """Seconds until it says to end."""
    for at in range(1, looks + 1):
        if beat is not None:
            beat(at)
        if signs.look(passed_s=PAUSE_S, was_called=was_called) is not None:
            return at * PAUSE_S
    return None


def test_without_calls_and_heartbeats_it_ends_within_the_timeout() -> None:
    signs = signs_of(Files())
    assert signs.pause_s == PAUSE_S
    assert ends_after(signs) == TIMEOUT_S


def test_calls_alone_keep_it_and_cost_the_storage_nothing() -> None:
    files = Files()
    assert ends_after(signs_of(files), was_called=True) is None
    assert files.num_looks == 0


def test_heartbeats_alone_keep_it() -> None:
    """A host in the middle of a long window is asked nothing while its driver lives."""
    files = Files()

    def beat(at: int) -> None:
        files.beats[1] = f"beat {at // 2}".encode()

    assert ends_after(signs_of(files), beat=beat) is None


def test_silence_counts_from_the_last_sign() -> None:
    files, signs = Files(), None
    signs = signs_of(files)
    assert ends_after(signs, looks=5) is None
    assert signs.look(passed_s=PAUSE_S, was_called=True) is None
    assert ends_after(signs) == TIMEOUT_S


def test_a_storage_that_is_away_ends_nobody_and_its_time_does_not_count() -> None:
    files, signs = Files(), None
    signs = signs_of(files)
    files.is_away = True
    assert ends_after(signs, looks=100) is None
    files.is_away = False
    # The first look that sees anything knows nothing of the time before, but that no call came.
    files.beats[1] = b"an old beat"
    later = ends_after(signs, beat=lambda at: files.beats.update({1: f"{at}".encode()}))
    assert later is None


def test_a_machine_that_was_suspended_ends_nobody_at_once() -> None:
    signs = signs_of(Files())
    assert signs.look(passed_s=1e6, was_called=False) is None
    assert signs.look(passed_s=1e6, was_called=False) is None


def test_another_driver_ends_it_at_once_and_its_own_that_goes_on_without_it_after_the_timeout() -> None:
    files = Files()
    files.holders[2] = {"process": 2}
    why = signs_of(files).look(passed_s=PAUSE_S, was_called=False)
    assert why is not None
    assert "generation 2 was claimed by another driver" in why
    files = Files()
    files.holders[2] = {"process": 1}
    assert ends_after(signs_of(files), beat=lambda at: files.beats.update({2: f"{at}".encode()})) == TIMEOUT_S


def test_one_that_stands_by_follows_its_driver_from_generation_to_generation_and_ends_without_it() -> None:
    files = Files()
    signs = LeaseSigns(files, generation=1, timeout_s=TIMEOUT_S, follows=True)

    def recovers(at: int) -> None:
        """A new generation every 50 s, and heartbeats of the newest one alone."""
        generation = 1 + at // 10
        files.holders[generation] = {"process": 1}
        files.beats[generation] = f"{at}".encode()

    assert ends_after(signs, looks=45, beat=recovers) is None
    assert ends_after(signs) == TIMEOUT_S
    files.holders[max(files.holders) + 1] = {"process": 2}
    assert signs.look(passed_s=PAUSE_S, was_called=False) is not None


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans(), st.booleans()), max_size=60))
def test_it_never_ends_within_the_timeout_after_a_sign(looks: list[tuple[float, bool, bool, bool]]) -> None:
    """Whatever the gaps, outages, calls and beats: between the last sign that it saw and the end lies the timeout."""
    files = Files()
    signs = signs_of(files)
    quiet_s, number = 0.0, 0
    for passed_s, was_called, beats, is_away in looks:
        files.is_away = is_away
        if beats:
            number += 1
            files.beats[1] = f"{number}".encode()
        why = signs.look(passed_s=passed_s, was_called=was_called)
        quiet_s = 0.0 if was_called else quiet_s + passed_s
        if why is not None:
            assert quiet_s >= TIMEOUT_S
            assert not was_called
            assert not is_away
            return


def holder(process: int) -> Holder:
    return Holder(submission=f"s{process}", hostname="h", process=process, machine="")


def test_the_files_of_a_real_lease(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    lease = acquire(store, holder=holder(1))
    files = StoredLease(str(tmp_path))
    first = files.heartbeat(1)
    assert first
    assert files.holder(1)["process"] == 1
    assert files.holder(2) is None
    lease.release()
    assert files.heartbeat(1) == b""
    signs = LeaseSigns(files, generation=1, timeout_s=TIMEOUT_S)
    assert signs.look(passed_s=1.0, was_called=False) is None
    acquire(store, holder=holder(2), take_over=True)
    assert "another driver" in (signs.look(passed_s=1.0, was_called=False) or "")


def test_a_damaged_claim_is_no_sign(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    acquire(store, holder=holder(1))
    (tmp_path / "lease" / "g00000002.claim").write_bytes(b"{}")
    signs = LeaseSigns(StoredLease(str(tmp_path)), generation=1, timeout_s=TIMEOUT_S)
    assert signs.look(passed_s=TIMEOUT_S, was_called=False) is None


def test_the_thread_ends_the_process_when_calls_stop() -> None:
    ended = threading.Event()
    ends_at_s: list[float] = []
    clock, last_call_s = FakeClock(0.0), 1_000.0

    def sleep(seconds: float) -> None:
        """The driver calls before each look, until it does no more."""
        clock.sleep(seconds)
        if clock.now_s <= last_call_s:
            watch.heard()

    def end(why: str) -> None:
        assert "no call of the driver" in why
        ends_at_s.append(clock.now_s)
        ended.set()

    watch = LeaseWatch(end=end, monotonic_s=clock.monotonic_s, sleep=sleep)
    watch.begin(Files(), generation=1, timeout_s=TIMEOUT_S)
    assert ended.wait(PATIENCE_S)
    assert last_call_s + TIMEOUT_S <= ends_at_s[0] <= last_call_s + TIMEOUT_S + 3 * PAUSE_S


def test_the_exit_code_is_that_of_a_fenced_driver() -> None:
    assert lease_watch.EXIT_FENCED == EXIT_FENCED


@pytest.mark.parametrize("timeout_s", [0.3, 30.0, 3600.0])
def test_the_pause_leaves_several_looks_within_the_timeout(timeout_s: float) -> None:
    assert LeaseSigns(Files(), generation=1, timeout_s=timeout_s).pause_s * 6 <= timeout_s + 1e-9


# Its driver beats before each of the first looks. Then it waits to be told that time goes on without it.
WORKER = """
import socket, sys, time
from tests.clock import FakeClock
from podembed.workers.liveness.lease_watch import LeaseWatch, StoredLease
from podembed.workers.storage.store import Store
listener = socket.create_server(("127.0.0.1", 0))
store, clock, beats_left = Store(sys.argv[1]), FakeClock(), int(sys.argv[2])
def sleep(seconds):
    global beats_left
    clock.sleep(seconds)
    if beats_left:
        store.replace("lease/g00000001.hb", b"beat %d" % beats_left)
        beats_left -= 1
        if not beats_left:
            print(listener.getsockname()[1], flush=True)
            sys.stdin.readline()
watch = LeaseWatch(monotonic_s=clock.monotonic_s, sleep=sleep)
watch.begin(StoredLease(sys.argv[1]), generation=1, timeout_s=30.0)
time.sleep(600)
"""


def test_a_real_process_lives_by_heartbeats_alone_and_ends_without_them(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    acquire(store, holder=holder(1))
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), "30"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stdout is not None
        # Five times as long as it lives without them.
        port = int(process.stdout.readline())
        socket.create_connection(("127.0.0.1", port)).close()
        _, errors = process.communicate("\n", timeout=PATIENCE_S)
        assert process.returncode == EXIT_FENCED
        assert "this worker ends itself: no call of the driver and no heartbeat of generation 1" in errors
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        process.kill()
        process.wait()


def test_a_process_ends_although_it_can_write_no_log(tmp_path: Path) -> None:
    """Whoever read its output may have gone with the driver."""
    acquire(Store(str(tmp_path)), holder=holder(1))
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), "0"],
            stdout=subprocess.DEVNULL,
            stderr=full,
            cwd=Path(__file__).parents[3],
        )
    try:
        assert process.wait(timeout=PATIENCE_S) == EXIT_FENCED
    finally:
        process.kill()
        process.wait()
