"""Events of hosts, machines and the Ray cluster under a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from podembed.orchestrator.events.event import Event, Level

RESTS_FOR = "hosts failed on it again and again"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsAwaited(Event):
    """There are too few hosts.

    Attributes:
      needed: hosts, at least.
      found: what there is, in words.
      step: step of the newest commit.
      left_s: until the run ends for it.
    """

    level: ClassVar[Level] = Level.WARNING
    needed: int
    found: str
    step: int
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsChosen(Event):
    """The next generation has fewer hosts than it might, or avoids machines.

    Attributes:
      least, most: that were requested.
    """

    num_hosts: int
    least: int
    most: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsWillChange(Event):
    """The generation will end in order for other hosts.

    Attributes:
      is_at_commit: at the next commit of the schedule; otherwise after this window, which is committed.
    """

    is_at_commit: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRests(Event):
    """A machine on which hosts failed again and again is not used for a while.

    Attributes:
      machine: its name, as people know it; of a slice, that of the slice.
      reason: the second half of a sentence.
    """

    level: ClassVar[Level] = Level.WARNING
    machine: str
    seconds: float
    reason: str = RESTS_FOR


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsShareMachines(Event):
    """There are fewer machines than hosts."""

    num_hosts: int
    machines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NicenessFound(Event):
    """Ray runs the hosts at a lower priority than other programs."""

    niceness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAwaited(Event):
    """No process listens at the address of the Ray cluster; the run waits for one."""

    level: ClassVar[Level] = Level.WARNING
    address: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRestarted(Event):
    """The program's own Ray cluster was lost, and is started again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSilent(Event):
    """Ray's head takes no connection.

    Attributes:
      timeout_s, idle_timeout_s: after which the run ends: while hosts train, and where they are lost with the head.
    """

    level: ClassVar[Level] = Level.WARNING
    address: str
    timeout_s: float
    idle_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBack(Event):
    """Ray's head takes connections again."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLeftBehind(Event):
    """The program leaves Ray without its head, for `timeout_s` at most."""

    level: ClassVar[Level] = Level.WARNING
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFound(Event):
    """The devices that a generation trains on, where some are accelerators or a host has several.

    Attributes:
      hosts: by kind of device, such as `1 x NVIDIA H200` or `4 x cpu as data=2,model=2`, the hosts that have it.
    """

    hosts: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsMissing(Event):
    """Hosts reserve accelerators and found processors only.

    Attributes:
      reserved: for each host, such as `1 GPU`.
    """

    level: ClassVar[Level] = Level.WARNING
    hosts: tuple[int, ...]
    reserved: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsIdle(Event):
    """The cluster has accelerators, and hosts reserve none.

    Attributes:
      idle: such as `8 GPU`.
    """

    level: ClassVar[Level] = Level.WARNING
    idle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefused(Event):
    """A host let a connection in that was no other host's, and refused it.

    Attributes:
      description: who came, and why they were refused.
    """

    level: ClassVar[Level] = Level.WARNING
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWrong(Event):
    """Buckets of surviving hosts were not those of the commit after undo in memory; they were read from files."""

    level: ClassVar[Level] = Level.ERROR
    buckets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsRefused(Event):
    """Buckets that hosts sent did not come, or were not those of the commit; they were read from files.

    Attributes:
      hosts: to which they were sent.
    """

    level: ClassVar[Level] = Level.WARNING
    buckets: int
    hosts: tuple[int, ...]
