"""Memory that is taken early, and the kernel's counters of processes killed for want of it, as files have them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.cluster.worker_environment import MALLOC_TUNABLES
from podembed.workers.liveness.memory import Populating, oom_kills, populate

EVENTS = "low 0\nhigh 4\nmax 9\noom 3\noom_kill 2\noom_group_kill 7\n"
VMSTAT = "nr_free_pages 1\noom_kill 5\n"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"sys/fs/cgroup/memory.events": EVENTS, "proc/vmstat": VMSTAT}, 2),
        ({"proc/vmstat": VMSTAT}, 5),
        ({"sys/fs/cgroup/memory.events": "low 0\n", "proc/vmstat": VMSTAT}, 5),
        ({"proc/vmstat": "nr_free_pages 1\n"}, 0),
        ({}, 0),
    ],
)
def test_the_nearest_counter_is_read(files: dict[str, str], count: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == count


def test_this_machine_answers() -> None:
    assert oom_kills() >= 0


def page_faults() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_memory_that_was_taken_early_costs_no_faults_later() -> None:
    array = np.empty(64 << 20, np.uint8)
    array[100] = 7
    populate([array])
    assert array[100] == 7
    before = page_faults()
    array[:] = 3
    # A page in two hundred: others may take some meanwhile.
    assert page_faults() - before < (64 << 20) // 4096 // 200


def test_what_an_allocator_keeps_goes_back() -> None:
    """With the allocator of worker processes, which keeps what is freed."""
    code = (
        "import os, numpy as np\n"
        "from podembed.workers.liveness.memory import give_back_free\n"
        "pages = lambda: int(open('/proc/self/statm').read().split()[1])\n"
        "kept = [np.ones(1 << 20, np.uint8) for _ in range(64)]\n"
        "del kept[:-1]\n"
        "before = pages()\n"
        "give_back_free()\n"
        "print((before - pages()) * os.sysconf('SC_PAGE_SIZE') >> 20)"
    )
    environ = {**os.environ, "GLIBC_TUNABLES": MALLOC_TUNABLES}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 60


def test_it_ends_when_it_is_told_to() -> None:
    asked: list[bool] = []
    populate([np.empty(64 << 20, np.uint8)], is_over=lambda: asked.append(True) or len(asked) == 3)
    assert len(asked) == 3
    populating = Populating([np.empty(1 << 20, np.uint8)])
    populating.close()
    populating.close()
