"""What the kernel says of processes that it killed for want of memory."""

from __future__ import annotations

from pathlib import Path

# In a container the first counts those of its own control group; the second counts those of the whole machine.
_COUNTERS = ("sys/fs/cgroup/memory.events", "proc/vmstat")


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed so far for want of memory, 0 where it does not say.

    Args:
      root: of the file system; for tests.
    """
    for name in _COUNTERS:
        try:
            lines = (root / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [int(count) for key, _, count in (line.partition(" ") for line in lines) if key == "oom_kill"]
        if counts:
            return counts[0]
    return 0
