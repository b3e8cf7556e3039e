"""What the kernel says of real processes: running, stopped, starved, gone, and found by a mark in their environment."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from podembed.workers.liveness.process_statistics import (
    OpenFiles,
    ProcessStatistics,
    own_usage,
    processes_with,
    read_statistics,
)

PATIENCE_S = 120.0
MARK = "PODEMBED_TEST_SIGNS"


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that computes for ever, and the mark in its environment."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], env={**os.environ, MARK: mark})
    yield process, mark
    process.kill()
    process.wait(PATIENCE_S)


def statistics_when(process: int, is_so: Callable[[ProcessStatistics], bool]) -> ProcessStatistics:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        statistics = read_statistics(process)
        if statistics is not None and is_so(statistics):
            return statistics
        time.sleep(0.01)
    raise TimeoutError(f"process {process} did not come to the expected state: {read_statistics(process)}")


def test_a_running_process_uses_time_and_a_stopped_one_none(child: tuple[subprocess.Popen[bytes], str]) -> None:
    process, _ = child
    before = statistics_when(process.pid, lambda statistics: statistics.cpu_s > 0)
    statistics_when(process.pid, lambda statistics: statistics.cpu_s > before.cpu_s)
    process.send_signal(signal.SIGSTOP)
    stopped = statistics_when(process.pid, lambda statistics: statistics.is_stopped)
    time.sleep(0.1)
    assert read_statistics(process.pid) == stopped
    process.send_signal(signal.SIGCONT)
    awake = statistics_when(process.pid, lambda statistics: statistics.cpu_s > stopped.cpu_s)
    assert not awake.is_stopped
    assert awake.started == before.started


def test_what_is_gone_or_only_remains_has_no_statistics() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + PATIENCE_S
    while read_statistics(process.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read_statistics(process.pid) is None, "a process that nobody has waited for is no living one"
    process.wait(PATIENCE_S)
    assert read_statistics(process.pid) is None


def test_processes_are_found_by_what_they_began_with(child: tuple[subprocess.Popen[bytes], str]) -> None:
    process, mark = child
    statistics_when(process.pid, lambda statistics: statistics.cpu_s > 0)
    assert processes_with(MARK, {mark, "another"}) == {mark: process.pid}
    assert processes_with(MARK, set()) == {}


def test_a_name_that_is_no_text_hides_nothing() -> None:
    """The kernel cuts names after 15 bytes, also within a letter."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff', 0, 0, 0); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        statistics = read_statistics(process.pid)
        assert statistics is not None
        assert statistics.state in "SRD"
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_open_files_are_counted_again_after_five_seconds_of_processor_time() -> None:
    counter = OpenFiles()
    files, sockets = counter.counts(cpu_s=100.0)
    with socket.socket(), open(__file__, encoding="utf-8"):
        assert counter.counts(cpu_s=104.9) == (files, sockets)
        assert counter.counts(cpu_s=105.0) == (files + 2, sockets + 1)
    assert counter.counts(cpu_s=0.1) == (files, sockets), "a child process begins at 0"


def test_the_first_look_at_this_process_has_its_files() -> None:
    usage = own_usage()
    assert usage is not None
    assert usage.num_files > usage.num_sockets >= 0
    assert usage.memory_bytes > 0
