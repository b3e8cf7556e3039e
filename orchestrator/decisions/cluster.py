"""`Cluster`: the machines under a run, as far as decisions need them, and what is said of them in messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.run_errors import Failure, FailureKind, roots
from podembed.orchestrator.api.text import plural
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules, Slice, Wait
from podembed.orchestrator.decisions.slices import choose
from podembed.orchestrator.group.worker_group import Handle, HostHandles
from podembed.workers.liveness.worker import Worker


class Cluster(Protocol):
    """The machines, as far as a run cares."""

    def look(self, *, is_careful: bool = False) -> Sequence[Node] | None:
        """Live machines, or None where the cluster does not answer; if asked to be careful, each is tried, which takes
        longer.
        """
        ...

    def left(self) -> frozenset[FailureDomain]:
        """Domains of which machines have left as they were announced or told to, at the last look."""
        ...

    def rules(self) -> Rules:
        """The requirements of the run."""
        ...

    def place(self, avoid: frozenset[str], *, has_own_machines: bool, slices: Sequence[Slice] = ()) -> None:
        """Sets how the next hosts are placed: off these machines, whether each has one for itself, and on which
        slices.
        """
        ...

    def domain_of(self, handle: Handle) -> FailureDomain | None:
        """What the machine that a process is on fails with."""
        ...

    def began(self, handles: Sequence[HostHandles]) -> None:
        """A generation runs with these hosts."""
        ...

    def killed_for_memory(self, workers: Collection[Worker]) -> set[Worker]:
        """The processes among these dead ones that the kernel may have killed for want of memory."""
        ...

    def machine_of(self, host: int) -> str:
        """Address of the machine on which a host was put last; empty where that is unknown."""
        ...

    def placed(self) -> Mapping[int, FailureDomain]:
        """The domain of the machine on which each host was put last."""
        ...

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None:
        """Requests so many hosts, off these machines, so that a cluster that grows by demand grows."""
        ...

    def unask(self) -> None:
        """Takes that back."""
        ...


def marked_by_kernel(failures: Sequence[Failure], cluster: Cluster | None) -> list[Failure]:
    """The failures, those of processes that the kernel killed for want of memory marked as such."""
    died = {
        f.worker
        for f in roots(failures)
        if f.worker and f.kind is FailureKind.DIED and not f.is_preemption and not f.memory
    }
    killed = cluster.killed_for_memory(died) if cluster is not None and died else set()
    return [
        replace(failure, memory="host", message=f"killed by the kernel for want of memory ({failure.message})")
        if failure.worker in killed
        else failure
        for failure in failures
    ]


def gave_up(decision: Wait, cluster: Cluster, step: int, *, waited_s: float, because: str = "") -> str:
    """The message of a run that waited too long for hosts.

    Args:
      because: why some rest, as the remedy of a sentence; empty where that is not known.
    """
    rules = cluster.rules()
    flag = "--hosts" if rules.topology is None else "--slices"
    return (
        f"Found {decision.why}, for {waited_s:.0f} s. Expected {needed(rules)}. The state is intact at step {step}: "
        f"{because}add machines, then `podembed resume` goes on; or lower the minimum ({flag} MIN-MAX)."
    )


def needed(rules: Rules) -> str:
    """What the cluster must have at least, in words."""
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in rules.resources.items())
    if rules.topology is None:
        return f"room for at least {plural(rules.least, 'host')} with {amounts} each"
    number = rules.least // rules.topology.hosts
    return f"at least {plural(number, 'whole slice')} of {rules.topology}, with {amounts} a host"


def check_alone(nodes: Sequence[Node], rules: Rules) -> None:
    """Refuses what a cluster that the program has started for itself never has room for: no machine joins it.

    Raises:
      ConfigurationError: there is no room, whatever is given back.
    """
    found = choose(nodes, rules, quarantined={}, as_if_free=True)
    if isinstance(found, Wait):
        raise ConfigurationError(
            f"Found {found.why}, on this machine alone, since RAY_ADDRESS names no cluster. Expected {needed(rules)}. "
            "Put the address of a cluster's head into RAY_ADDRESS, or submit the command to it (ray job submit)."
        )


def is_of_chip(failure: Failure, scaling: ScalingConfig) -> bool:
    """Whether a device process failed that has chips of a TPU slice to itself."""
    return scaling.slices is not None and failure.worker is not None and not failure.worker.is_host


def no_device(failure: Failure, cluster: Cluster) -> str:
    """Why a slice rests in which device processes do not live long, and what helps."""
    machine = cluster.machine_of(failure.worker.number) if failure.worker else ""
    found = failure.message.partition(". Expected")[0].rstrip(".")
    return (
        f"{failure.worker} on machine {machine or 'unknown'} failed twice within a minute of its start "
        f"({found}). Expected its chips for JAX. See whether libtpu is installed there (jax[tpu]), and whether another "
        "process holds them"
    )
