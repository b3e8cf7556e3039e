"""The cluster and the backend of a simulated driver on slices. Which slices it uses, and when it leaves them, the real
`HostWatch` and `orchestrator.decisions.slices` say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules, Slice
from podembed.orchestrator.group.worker_group import HostHandles
from podembed.workers.liveness.worker import Worker
from tests.simulation.backend import RejoiningBackend
from tests.simulation.slices.machines import TOPOLOGY, Machine, Machines
from tests.simulation.workers import Surroundings
from tests.simulation.world import FakeClock, Process

RESERVE_S = 0.5
REFUSED_S = 5.0


class SliceBackend(RejoiningBackend):
    """Hosts on the machines of slices. `chosen`: slices for the next generation."""

    def __init__(self, driver: Process, clock: FakeClock, around: Surroundings, machines: Machines) -> None:
        super().__init__(driver, clock, around)
        self.chosen: Sequence[Slice] = ()
        self.placed: list[Machine] = []
        self.driver = driver
        self._machines = machines
        self._places: dict[int, list[Machine]] = {}
        self._kept: list[Sequence[HostHandles]] = []  # no other list may get the id of one of them
        # Ray removes what a driver made, when it is gone.
        driver.at_death(lambda: around.world.after(0.05, self._all_given_back))

    def _all_given_back(self) -> None:
        for name in self._machines.held_by(self._driver):
            self._machines.release(name, self._driver)

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        self._hold(set(), on_wait)
        return self._seated(self._launched([None] * num_hosts))

    def relaunch(
        self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
    ) -> Sequence[HostHandles]:
        before = {machine.slice for machine in self._places[id(handles)]}
        self._hold(before, on_wait)
        for name in before - {chosen.name for chosen in self.chosen}:
            self._machines.release(name, self._driver)
        del self._places[id(handles)]
        hosts: list[Any] = [None if old is None else handles[old].host for old in kept]
        return self._seated(self._launched(hosts))

    def _hold(self, known: Collection[str], on_wait: Callable[[], None]) -> None:
        new: list[str] = []
        try:
            for chosen in self.chosen:
                on_wait()
                if chosen.name not in known:
                    self._around.world.sleep(RESERVE_S)
                    self._require(self._machines.hold(chosen, self._driver))
                    new.append(chosen.name)
            if any(self._machines.missing(chosen) for chosen in self.chosen):
                self._require("a machine left while slices were reserved")
        except BaseException:
            for name in new:
                self._machines.release(name, self._driver)
            raise

    def _require(self, why: str) -> None:
        if why:
            self._around.world.sleep(REFUSED_S)
            raise WorkerFailure([Failure(worker=None, kind=FailureKind.PEER, message=why, is_preemption=True)])

    def _seated(self, handles: Sequence[HostHandles]) -> Sequence[HostHandles]:
        alive = {machine.id: machine for machine in self._machines.lives}
        self.placed = [alive[machine] for chosen in self.chosen for machine in chosen.machines]
        for pair, machine in zip(handles, self.placed, strict=True):
            machine.processes += [pair.host.process, pair.device.process]  # type: ignore[attr-defined]
            if not machine.is_alive:
                pair.host.process.kill()  # type: ignore[attr-defined]
                pair.device.process.kill()  # type: ignore[attr-defined]
        self._places[id(handles)] = self.placed
        self._kept.append(handles)
        return handles

    def seats(self, handles: Sequence[HostHandles], alive: frozenset[int], num_hosts: int) -> Sequence[int | None]:
        rank_on = {self._places[id(handles)][rank].id: rank for rank in alive}
        return tuple(rank_on.get(machine) for chosen in self.chosen for machine in chosen.machines)

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        wanted = {machine for chosen in self.chosen for machine in chosen.machines}
        places = self._places[id(handles)]
        return frozenset(rank for rank, place in enumerate(places) if place.is_alive and place.id in wanted)

    def stop(self, handles: Sequence[HostHandles]) -> None:
        super().stop(handles)
        for name in {machine.slice for machine in self._places.pop(id(handles), [])}:
            self._machines.release(name, self._driver)

    def domain(self, number: int) -> FailureDomain:
        return self.placed[number].domain


class SliceCluster:
    """What the driver's watch asks."""

    def __init__(self, backend: SliceBackend, machines: Machines, driver: Process, *, least: int, most: int) -> None:
        self._backend = backend
        self._machines = machines
        self._driver = driver
        self._rules = Rules(
            least=least * TOPOLOGY.hosts,
            most=most * TOPOLOGY.hosts,
            resources={"CPU": 1.0, "TPU": 4.0},
            is_one_a_machine=True,
            may_share=False,
            topology=TOPOLOGY,
        )
        self._seen: set[str] = set()

    def look(self, *, is_careful: bool = False) -> Sequence[Node] | None:
        nodes = self._machines.nodes(self._driver)
        self._seen |= {node.id for node in nodes}
        return nodes

    def left(self) -> frozenset[FailureDomain]:
        gone = [m for m in self._machines.lives if not m.is_alive and m.was_announced and m.id in self._seen]
        return frozenset(machine.domain for machine in gone)

    def rules(self) -> Rules:
        return self._rules

    def place(self, avoid: frozenset[str], *, has_own_machines: bool, slices: Sequence[Slice] = ()) -> None:
        self._seen = {machine for chosen in slices for machine in chosen.machines}
        self._backend.chosen = slices

    def domain_of(self, handle: Any) -> FailureDomain | None:
        return self._backend.domain(handle.worker.number)

    def began(self, handles: Sequence[HostHandles]) -> None: ...

    def killed_for_memory(self, workers: Collection[Worker]) -> set[Worker]:
        return set()

    def machine_of(self, host: int) -> str:
        return self._backend.placed[host].id if host < len(self._backend.placed) else ""

    def placed(self) -> Mapping[int, FailureDomain]:
        return {host: machine.domain for host, machine in enumerate(self._backend.placed)}

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None: ...

    def unask(self) -> None: ...
