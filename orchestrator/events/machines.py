"""Events of hosts, machines and the Ray cluster under a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podembed.orchestrator.api.run_errors import listed
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.events.event import Event, Level
from podembed.workers.liveness.worker import Worker

RESTS_FOR = "hosts failed on it again and again"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsAwaited(Event, level=Level.WARNING):
    """There are too few hosts.

    Attributes:
      needed: hosts, at least.
      found: what there is, in words.
      step: step of the newest commit.
      left_s: until the run ends for it.
    """

    template = (
        "waiting for hosts: {needed} needed, found {found}. Everything up to step {step} is committed. The run goes "
        "on as soon as there are enough, and ends in {left_s:.0f} s if there are not"
    )
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

    def sentence(self) -> str:
        asked = plural(self.most, "host")
        wanted = asked if self.least == self.most else f"{self.least} to {asked}"
        return f"{plural(self.num_hosts, 'host')} of {wanted}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsWillChange(Event):
    """The generation will end in order for other hosts.

    Attributes:
      is_at_commit: at the next commit of the schedule; otherwise after this window, which is committed.
    """

    is_at_commit: bool
    reason: str

    def sentence(self) -> str:
        when = "at the next commit" if self.is_at_commit else "after this window, which is committed"
        return f"hosts change {when}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRests(Event, level=Level.WARNING):
    """A machine on which hosts failed again and again is not used for a while.

    Attributes:
      machine: its name, as people know it; of a slice, that of the slice.
      reason: the second half of a sentence.
    """

    template = "{machine} is not used for {seconds:.0f} s: {reason}"
    machine: str
    seconds: float
    reason: str = RESTS_FOR


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsShareMachines(Event):
    """There are fewer machines than hosts."""

    num_hosts: int
    machines: int

    def sentence(self) -> str:
        return f"{self.num_hosts} hosts share {plural(self.machines, 'machine')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyDiscarded(Event, level=Level.WARNING):
    """A process that stood by for lost ones could not be made ready for the job.

    Attributes:
      process: what it stood by for, `host` or `device`.
    """

    template = (
        "a standby {process} process could not be made ready and is not used ({reason}). A lost one is replaced by a "
        "new process, which takes some seconds more"
    )
    process: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NicenessFound(Event):
    """Ray runs the hosts at a lower priority than other programs."""

    template = (
        "Ray runs the hosts with a niceness of {niceness}: beside other busy programs they starve. For the usual "
        "priority put RAY_worker_niceness=0 into the environment of `ray start` on every machine"
    )
    niceness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAwaited(Event, level=Level.WARNING):
    """No process listens at the address of the Ray cluster; the run waits for one."""

    template = (
        "waiting for the Ray cluster at {address}, where no process listens. The run goes on as soon as it is back, "
        "and ends in {timeout_s:.0f} s if it is not"
    )
    address: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRestarted(Event):
    """The program's own Ray cluster was lost, and is started again."""

    template = "{reason}: the program starts its cluster again"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSilent(Event, level=Level.WARNING):
    """Ray's head takes no connection.

    Attributes:
      timeout_s, idle_timeout_s: after which the run ends: while hosts train, and where they are lost with the head.
    """

    template = (
        "Ray's head at {address} takes no connection. Until it does, the program sends it no request. The run ends "
        "if it does not within {timeout_s:.0f} s, or {idle_timeout_s:.0f} s where hosts are lost with it"
    )
    address: str
    timeout_s: float
    idle_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBack(Event):
    """Ray's head takes connections again."""

    template = "Ray's head at {address} takes connections again"
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLeftBehind(Event, level=Level.WARNING):
    """The program leaves Ray without its head, for `timeout_s` at most."""

    template = "leaving Ray without its head: for {timeout_s:.0f} s, then the rest is left to Ray's other processes"
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFound(Event):
    """The devices that a generation trains on, where some are accelerators or a host has several.

    Attributes:
      hosts: by kind of device, such as `1 x NVIDIA H200` or `4 x cpu as data=2,model=2`, the hosts that have it.
    """

    hosts: Mapping[str, tuple[int, ...]]

    def sentence(self) -> str:
        return "devices: " + "; ".join(f"{kind} for {_hosts(hosts)}" for kind, hosts in self.hosts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsMissing(Event, level=Level.WARNING):
    """Hosts reserve accelerators and found processors only.

    Attributes:
      reserved: for each host, such as `1 GPU`.
    """

    hosts: tuple[int, ...]
    reserved: tuple[str, ...]

    def sentence(self) -> str:
        return (
            f"{_hosts(self.hosts)}: found processors only, with {' and '.join(self.reserved)} reserved for each host. "
            "Training goes on there. Install JAX's plugin for the accelerator on every machine (jax[cuda13], "
            "jax[tpu]), and see what JAX_PLATFORMS is set to."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorsIdle(Event, level=Level.WARNING):
    """The cluster has accelerators, and hosts reserve none.

    Attributes:
      idle: such as `8 GPU`.
    """

    idle: tuple[str, ...]

    def sentence(self) -> str:
        return (
            f"the cluster has {' and '.join(self.idle)}, and hosts reserve none: models run on CPUs. Reserve whole "
            "ones for each host with --resources, or resources_per_host, such as --resources CPU=8 GPU=1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefused(Event, level=Level.WARNING):
    """A host let a connection in that was no other host's, and refused it.

    Attributes:
      description: who came, and why they were refused.
    """

    template = "{description}"
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWrong(Event, level=Level.ERROR):
    """Buckets of surviving hosts were not those of the commit after undo in memory; they were read from files."""

    template = (
        "{buckets} buckets of hosts that lived on did not have the digests of the commit after going back to it in "
        "memory. They were read from its files. Expected none. Look for a host with faulty memory, and report it if "
        "it comes again"
    )
    buckets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsRefused(Event, level=Level.WARNING):
    """Buckets that hosts sent did not come, or were not those of the commit; they were read from files.

    Attributes:
      hosts: to which they were sent.
    """

    buckets: int
    hosts: tuple[int, ...]

    def sentence(self) -> str:
        return (
            f"{self.buckets} buckets that hosts sent to host {', '.join(map(str, self.hosts))} did not come or did not "
            "have the digests of the commit. They were read from its files. Expected none. Look for a host with faulty "
            "memory or a faulty network, and report it if it comes again"
        )


def _hosts(numbers: tuple[int, ...]) -> str:
    return listed([Worker("host", number) for number in numbers])
