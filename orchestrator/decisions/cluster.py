"""`Cluster`: the machines under a run, as far as decisions need them, and what is said of them in messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from podembed.orchestrator.api.errors import Failure, FailureKind, roots
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules, Wait
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
        """What is asked of it."""
        ...

    def place(self, avoid: frozenset[str], *, has_own_machines: bool) -> None:
        """How the next hosts are placed: off these machines, and whether each has one for itself."""
        ...

    def domain_of(self, handle: Handle) -> FailureDomain | None:
        """What the machine that a process is on fails with."""
        ...

    def began(self, handles: Sequence[HostHandles]) -> None:
        """A generation runs with these hosts."""
        ...

    def killed_for_memory(self, workers: Collection[Worker]) -> set[Worker]:
        """Those of these dead processes that the kernel may have killed for want of memory."""
        ...

    def placed(self) -> Mapping[int, FailureDomain]:
        """By host, the domain of the machine on which it was put last."""
        ...

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None:
        """Says that so many hosts are wanted, off these machines, so that a cluster that grows by demand grows."""
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


def gave_up(decision: Wait, cluster: Cluster, *, step: int, waited_s: float) -> str:
    """The message of a run that waited too long for hosts."""
    return (
        f"Found {decision.why}, for {waited_s:.0f} s. Expected room for at least {_hosts(decision.needed)} with "
        f"{_amounts(cluster)} "
        f"each. The state is intact at step {step}: add machines, then `podembed resume` goes on; or lower the "
        "minimum (--hosts MIN-MAX)."
    )


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"


def _amounts(cluster: Cluster) -> str:
    resources = cluster.rules().resources
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
