"""Which processors hosts of one machine work on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from podembed.workers.processors import are_kept_to, keep_thread_to, number_of_processors, processors_of, roam

EVERYWHERE = frozenset(os.sched_getaffinity(0))
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


def test_as_many_hosts_as_processors_get_one_each() -> None:
    known = (2, 3, 7)
    assert [processors_of(host, 3, threads=1, known=known) for host in range(3)] == [{2}, {3}, {7}]


@pytest.mark.parametrize(
    ("num_hosts", "processors", "threads"), [(1, 1, 1), (2, 3, 1), (4, 2, 1), (1, 2, 1), (2, 2, 2)]
)
def test_otherwise_all_share_all(num_hosts: int, processors: int, threads: int) -> None:
    assert not are_kept_to(num_hosts, processors, threads=threads)
    known = range(processors)
    for host in range(num_hosts):
        assert processors_of(host, num_hosts, threads=threads, known=known) == frozenset(known)


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


def test_a_process_keeps_to_less_with_all_its_threads() -> None:
    out = subprocess.run([sys.executable, "-c", KEEPING], check=True, capture_output=True, text=True).stdout
    found, count = json.loads(out)
    assert found == [[min(EVERYWHERE)], [min(EVERYWHERE)], sorted(EVERYWHERE)]
    assert count == len(EVERYWHERE)


def test_processors_that_a_process_may_not_use_are_no_error() -> None:
    keep_thread_to([max(EVERYWHERE) + 4096])
    assert os.sched_getaffinity(0) == EVERYWHERE
