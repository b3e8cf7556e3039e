"""The kernel's counters of processes killed for want of memory, as files have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from podembed.workers.liveness.memory import oom_kills

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
