"""Slices of a made-up cluster: their machines come and go, and drivers hold them as a whole or not at all.

Stands for Ray: what it knows of machines, and what it grants. What a driver holds is written down here, so that nothing
is granted twice and nothing is left when a driver has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Slice, SliceMember
from tests.simulation.world import STARTED_WALL_S, Process, World

TOPOLOGY = Topology.of("2x2x2", "TPU-V4")
OTHER = Topology.of("2x2x4", "TPU-V4")


@dataclass(slots=True, eq=False)
class Machine:
    """One life of a machine in the cluster. Mutated."""

    id: str
    slice: str
    worker: int
    kind: Topology
    is_alive: bool = True
    was_announced: bool = False
    drains_at_s: float | None = None
    processes: list[Process] = field(default_factory=list)

    @property
    def domain(self) -> FailureDomain:
        return FailureDomain(self.slice, f"slice {self.slice}")


@dataclass(slots=True, eq=False)
class Machines:
    """See the module. Mutated: `refusals`, reservations that will not be granted."""

    world: World
    violated: Callable[[str, str], None]
    lives: list[Machine] = field(default_factory=list)
    holders: dict[str, Process] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    refusals: int = 0
    num_refused: int = 0

    def add(self, name: str, *, kind: Topology = TOPOLOGY) -> None:
        """The machines of a slice that are not there."""
        for worker in range(kind.hosts):
            if not any(one.is_alive and (one.slice, one.worker) == (name, worker) for one in self.lives):
                self.add_machine(name, worker, kind=kind)

    def add_machine(self, name: str, worker: int, *, kind: Topology = TOPOLOGY) -> None:
        self.lives.append(Machine(f"m{len(self.lives)}", name, worker, kind))

    def alive(self, name: str, worker: int | None = None) -> list[Machine]:
        return [m for m in self.lives if m.is_alive and m.slice == name and worker in (None, m.worker)]

    def lose(self, machine: Machine) -> None:
        """With all that runs there."""
        machine.is_alive = False
        for process in machine.processes:
            process.kill()

    def drain(self, machine: Machine, seconds: float) -> None:
        machine.drains_at_s = self.world.now_s + seconds
        machine.was_announced = True
        self.world.after(seconds, lambda: self.lose(machine))

    def nodes(self, driver: Process) -> list[Node]:
        """As the cluster shows them to a driver."""
        return [self._node(machine, driver) for machine in self.lives if machine.is_alive]

    def _node(self, machine: Machine, driver: Process) -> Node:
        total = {"CPU": 1.0, "TPU": 4.0} | ({f"TPU-{machine.kind.pod_type}-head": 1.0} if not machine.worker else {})
        holder = self.holders.get(machine.slice)
        is_free = holder is None and machine.slice not in self.taken
        drains_at_s = machine.drains_at_s
        return Node(
            id=machine.id,
            domain=machine.domain,
            total=total,
            free=total if is_free else {},
            own_hosts=int(holder is driver),
            is_draining=drains_at_s is not None,
            drain_unix_s=None if drains_at_s is None else STARTED_WALL_S + drains_at_s,
            part=SliceMember(pod_type=machine.kind.pod_type, worker=machine.worker),
        )

    def hold(self, chosen: Slice, driver: Process) -> str:
        """Reserves a slice for a driver. Returns why it is not to be had; empty if it is held now."""
        why = self._hold(chosen, driver)
        self.num_refused += bool(why)
        return why

    def _hold(self, chosen: Slice, driver: Process) -> str:
        if self.refusals:
            self.refusals -= 1
            return f"the cluster did not give {chosen.name}"
        if chosen.name in self.taken or self.holders.get(chosen.name) not in (None, driver):
            return f"{chosen.name} is somebody else's"
        if self.holders.get(chosen.name) is driver:
            self.violated("I20", f"{driver} reserves {chosen.name}, which it has")
        if self.missing(chosen):
            return f"a machine of {chosen.name} left"
        self.holders[chosen.name] = driver
        return ""

    def missing(self, chosen: Slice) -> bool:
        """Whether a machine that was chosen is gone."""
        return {m.id for m in self.alive(chosen.name)} != set(chosen.machines)

    def release(self, name: str, driver: Process) -> None:
        if self.holders.get(name) is driver:
            del self.holders[name]

    def held_by(self, driver: Process) -> list[str]:
        return sorted(name for name, holder in self.holders.items() if holder is driver)
