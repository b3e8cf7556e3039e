"""Which processors hosts of one machine work on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.workers import actors
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.input.read_ahead import ReadAhead
from podembed.workers.liveness import memory
from podembed.workers.processors import (
    OWN_CLUSTER,
    keep_thread_to,
    number_of_processors,
    processors_of,
    roam,
)
from podembed.workers.storage.store import Store

EVERYWHERE = frozenset(os.sched_getaffinity(0))
with_two = pytest.mark.skipif(len(EVERYWHERE) < 2, reason="one processor cannot be told from all")
KEEPING = """
import json, os, threading
from podembed.workers.processors import keep_process_to, number_of_processors, roam

def seen():
    found.append(sorted(os.sched_getaffinity(0)))

def beside(*calls):
    thread = threading.Thread(target=lambda: [call() for call in calls])
    thread.start()
    thread.join()

found, go = [], threading.Event()
before = threading.Thread(target=lambda: (go.wait(), seen()))
before.start()
keep_process_to([min(os.sched_getaffinity(0))])
go.set()
before.join()
beside(seen)
beside(roam, seen)
print(json.dumps([found, number_of_processors()]))
"""


@pytest.fixture(autouse=True)
def keeps_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process keep to nothing."""
    monkeypatch.setattr("podembed.workers.processors._keeps", threading.Event())


@pytest.mark.parametrize("num_processors", [2, 3, 7, 64])
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 5])
def test_hosts_of_a_machine_get_even_parts_of_its_processors(num_hosts: int, num_processors: int) -> None:
    known = range(5, 5 + 2 * num_processors, 2)
    parts = [processors_of(host, num_hosts, threads=1, known=known) for host in range(num_hosts)]
    if num_hosts > num_processors:
        assert parts == [frozenset(known)] * num_hosts
        return
    # Neighbours stay together, and none is idle or has two hosts.
    assert [one for part in parts for one in sorted(part)] == list(known)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_parts_that_are_too_small_for_the_threads_of_a_host_are_not_made() -> None:
    assert processors_of(0, 2, threads=2, known=range(4)) == {0, 1}
    assert processors_of(0, 2, threads=2, known=range(3)) == {0, 1, 2}
    assert processors_of(1, 2, threads=3, known=range(4)) == {0, 1, 2, 3}


@with_two
def test_a_thread_that_keeps_to_less_hands_that_on_and_what_roams_does_not() -> None:
    found: list[set[int]] = []

    def beside(*calls: Callable[[], None]) -> None:
        thread = threading.Thread(target=lambda: [call() for call in calls])
        thread.start()
        thread.join()

    def seen() -> None:
        found.append(os.sched_getaffinity(0))

    def kept() -> None:
        keep_thread_to([min(EVERYWHERE)])
        seen()
        beside(seen)
        beside(roam, seen)
        seen()

    beside(kept)
    assert found == [{min(EVERYWHERE)}, {min(EVERYWHERE)}, EVERYWHERE, {min(EVERYWHERE)}]
    # Other threads, and what the process may use, are as before.
    assert os.sched_getaffinity(0) == EVERYWHERE
    assert number_of_processors() == len(EVERYWHERE)


@with_two
def test_a_process_keeps_to_less_with_all_its_threads() -> None:
    out = subprocess.run([sys.executable, "-c", KEEPING], check=True, capture_output=True, text=True).stdout
    found, count = json.loads(out)
    assert found == [[min(EVERYWHERE)], [min(EVERYWHERE)], sorted(EVERYWHERE)]
    assert count == len(EVERYWHERE)


def test_processors_that_a_process_may_not_use_are_no_error() -> None:
    keep_thread_to([max(EVERYWHERE) + 4096])
    assert os.sched_getaffinity(0) == EVERYWHERE


def beside_one_that_keeps(call: Callable[[], Any]) -> Any:
    """What a call returns in a thread that keeps to one processor."""
    found: list[Any] = []

    def work() -> None:
        keep_thread_to([min(EVERYWHERE)])
        found.append(call())
        assert os.sched_getaffinity(0) == {min(EVERYWHERE)}

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


class Looking:
    """A reader, a worker and arrays that say where they are used."""

    def read(self, step: int) -> Any:
        return os.sched_getaffinity(0)

    def close(self) -> None:
        pass

    def where(self) -> set[int]:
        return os.sched_getaffinity(0)


@with_two
def test_input_is_read_wherever_there_is_room() -> None:
    def read() -> Any:
        ahead = ReadAhead(Looking(), first_step=0).start()
        try:
            return ahead.get(0)
        finally:
            ahead.close()

    assert beside_one_that_keeps(read) == EVERYWHERE


@with_two
def test_files_are_written_wherever_there_is_room(tmp_path: Path) -> None:
    def write() -> Any:
        with FileThreads(Store(str(tmp_path))) as threads:
            return threads.submit(lambda: os.sched_getaffinity(0)).result()

    assert beside_one_that_keeps(write) == EVERYWHERE


@with_two
def test_memory_is_taken_wherever_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[int]] = []
    monkeypatch.setattr(memory, "populate", lambda arrays, *, is_over: found.append(os.sched_getaffinity(0)))
    beside_one_that_keeps(lambda: memory.Populating([np.zeros(1, np.float32)]).close())
    assert found == [EVERYWHERE]


@with_two
def test_a_method_in_the_background_works_wherever_there_is_room() -> None:
    def call() -> Any:
        # In a thread, since signals are left alone there.
        actor = actors.Actor(Looking)
        found = actor.run("where"), actor.run_in_background("where")
        keep_thread_to([min(EVERYWHERE)])
        return found

    assert beside_one_that_keeps(call) == ({min(EVERYWHERE)}, EVERYWHERE)


@dataclass(frozen=True)
class Spec:
    host: int
    num_hosts: int
    threads: int = 1


@pytest.mark.parametrize("is_own", [True, False])
def test_hosts_keep_to_processors_in_clusters_of_the_programs_own(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = frozenset(range(4))
    monkeypatch.setattr("podembed.workers.processors._ALL", known)
    monkeypatch.delenv(OWN_CLUSTER, raising=False)
    if is_own:
        monkeypatch.setenv(OWN_CLUSTER, "/tmp/folder")
    found = [
        actors._processors_for(Spec(3, 4)),
        actors._processors_for(Spec(1, 2)),
        actors._processors_for(Spec(3, 4, 2)),
    ]
    assert found == [frozenset([3]) if is_own else known, frozenset([2, 3]) if is_own else known, known]


@with_two
def test_what_somebody_else_keeps_to_stays(tmp_path: Path) -> None:
    text = (
        "import os\nfrom podembed.workers.processors import keep_thread_to, number_of_processors, roam\n"
        "everywhere = os.sched_getaffinity(0)\nos.sched_setaffinity(0, [min(everywhere)])\n"
        "roam()\nkeep_thread_to(everywhere)\n"
        "print(len(os.sched_getaffinity(0)), number_of_processors())"
    )
    assert subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout == "1 1\n"
