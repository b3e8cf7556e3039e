"""File descriptors: how many a process may have, and whether that is enough for the hosts that it is about to meet.

Each other host costs a process a connection, and one on the same machine a piece of shared memory. A process that finds
none left while it meets the others looks to them like a machine that does not answer. The process therefore counts what
it needs before, and raises the soft limit.
"""

from __future__ import annotations

import os
import resource
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM

# What a process would like beside what it cannot do without: for connections of intruders, files of a save, the input,
# an object store.
SPARE = 192
# Ray raises the limit as far; some programs walk through all descriptors that they may have.
_ENOUGH = 65_536
_FEWEST_FILES = 16
_EXHAUSTED = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})


class DescriptorsExhausted(Exception):
    """The process may not open as much as it has to.

    Attributes:
      found: what there is.
      expected: what is needed, and for what.
    """

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        return (
            f"Found {self.found}. Expected {self.expected}. Raise the limit where the processes of this machine are "
            "started: `ulimit -n 65536` before podembed or `ray start`, or LimitNOFILE=65536 of its service."
        )


def is_exhaustion(error: OSError) -> bool:
    """Whether a descriptor or socket could not be made for lack of room, here or in the whole machine."""
    return error.errno in _EXHAUSTED


def exhausted(what: str, error: OSError) -> DescriptorsExhausted:
    """What to raise where a descriptor was refused after all."""
    # How many are open cannot be asked without one more.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorsExhausted(
        f"no room for {what} ({error.strerror}; this process may have {soft} files and connections)",
        "room for one with each host",
    )


def in_use() -> int:
    """How many this process has."""
    # The listing has one of its own.
    return len(os.listdir("/proc/self/fd")) - 1


def require_descriptors(count: int, *, purpose: str) -> None:
    """Makes sure that so many more can be opened, and raises the soft limit where the hard one leaves room.

    Raises:
      DescriptorsExhausted: the hard limit does not.
    """
    used, needed = in_use(), count + _FEWEST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < used + needed + SPARE:
        soft = _raised(soft, hard, used + needed + SPARE)
    if soft < used + needed:
        raise DescriptorsExhausted(
            f"room for {max(0, soft - used)} more open files and connections (limit {soft}, {used} are open)",
            f"room for {needed}: {count} for {purpose}, and {_FEWEST_FILES} for files",
        )


def _raised(soft: int, hard: int, wanted: int) -> int:
    """The soft limit after an attempt to raise it."""
    limit = max(wanted, _ENOUGH) if hard == resource.RLIM_INFINITY else min(hard, max(wanted, _ENOUGH))
    if limit <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        # The machine's own limit lies lower.
        return soft
    return limit


def needed_by_host(num_hosts: int) -> int:
    """What a host process opens for the others."""
    # A connection, and the memory of a host on the same machine: a mapping keeps the descriptor of what it maps.
    return 2 * (num_hosts - 1)


def require_for_host(num_hosts: int) -> None:
    """Before a host process listens for the others.

    Raises:
      DescriptorsExhausted: they are too many for its limit.
    """
    others = num_hosts - 1
    require_descriptors(needed_by_host(num_hosts), purpose=f"connections and shared memory with {others} other hosts")


def require_for_device(num_hosts: int) -> None:
    """Before a device process joins its gang, whose first member is also asked by all of them.

    Raises:
      DescriptorsExhausted: they are too many for its limit.
    """
    others = num_hosts - 1
    # A connection of the gang and one of its coordinator; on CPUs those of gloo take the place of an interconnect.
    require_descriptors(2 * others, purpose=f"connections with {others} other device processes")
