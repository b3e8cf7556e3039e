"""`SliceBackend`: hosts on whole TPU slices, each host on a machine of its own, numbered by slice and machine.

A run holds each of its slices until it leaves it. After a fault, hosts whose machine lives keep their rows if their
slice is used again. Another machine has taken the place of the lost one then. If the slice is not used again, they end
with it, and others read their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.cluster.places import Place, Reservation, answering_nodes, bundles_of, key_of, live_nodes
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.slices.holding import Hold, await_machines, demand_group, hold
from podembed.orchestrator.decisions.membership import Slice
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.group.backend import HostHandles
from podembed.workers.liveness.worker import WorkerKind

# A slice that is free is granted within a second. After so long somebody else has it, and the choice is made anew.
RESERVATION_TIMEOUT_S = 30.0


class SliceBackend(RayBackend):
    """See the module.

    Args:
      topology: topology of the slices.
      The others are those of `RayBackend`.

    Attributes:
      chosen: slices for the next generation, in the order of their hosts' numbers.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        emit: Emit,
        actors: tuple[Any, Any] | None = None,
        *,
        topology: Topology,
        lost: Callable[[], str | None] = lambda: None,
        answers: Callable[[], bool] | None = None,
        run: str = "a pod",
    ) -> None:
        super().__init__(scaling, emit, actors, lost=lost, answers=answers, run=run)
        self.chosen: Sequence[Slice] = ()
        self._topology = topology
        self._holds: dict[int, Hold] = {}
        self._gang: Mapping[int, dict[str, str]] = {}

    def _first_places(self, num_hosts: int, bundle: dict[str, float], on_wait: Callable[[], None]) -> Reservation:
        return self._held({}, bundle, on_wait)

    def _next_places(self, before: Reservation, kept: Sequence[int | None], on_wait: Callable[[], None]) -> Reservation:
        known = {self._holds[id(group)].name: self._holds[id(group)] for group in before.groups}
        found = self._held(known, before.bundle, on_wait)
        # Those that are left are given back with the hosts that are still on them.
        left = [group for group in before.groups if group not in found.groups]
        return Reservation([*found.groups, *left], found.places, before.bundle, before.standbys)

    def _held(self, known: Mapping[str, Hold], bundle: dict[str, float], on_wait: Callable[[], None]) -> Reservation:
        """Holds all chosen slices, as far as the run does not yet, and waits until they are complete.

        Raises:
          WorkerFailure: a slice is not to be had, or a machine left meanwhile. Nothing new is held then.
        """
        check, new = self._check(on_wait), list[Hold]()
        holds = []
        try:
            for chosen in self.chosen:
                held = known.get(chosen.name)
                if held is None:
                    held = hold(chosen, self._topology, bundle, give_back=super().give_back, check=check)
                    new.append(held)
                    self._holds[id(held.group)] = held
                holds.append(held)
            await_machines(holds, self.chosen, check, time.sleep)
        except BaseException:
            for held in new:
                self.give_back(held.group)
            raise
        places = [
            Place(held.group, worker, machine)
            for held, chosen in zip(holds, self.chosen, strict=True)
            for worker, machine in enumerate(chosen.machines)
        ]
        return Reservation([held.group for held in holds], places, bundle, [])

    def _check(self, on_wait: Callable[[], None]) -> Callable[[], None]:
        """What is asked again and again while slices are reserved."""
        names = ", ".join(chosen.name for chosen in self.chosen)
        wanted = {machine for chosen in self.chosen for machine in chosen.machines}
        deadline_s = time.monotonic() + RESERVATION_TIMEOUT_S

        def check() -> None:
            on_wait()
            why = ""
            if wanted - live_nodes():
                why = "a machine left while slices were reserved"
            elif time.monotonic() > deadline_s:
                why = f"the cluster did not give the slices {names} within {RESERVATION_TIMEOUT_S:.0f} s"
            if why:
                raise WorkerFailure([Failure(worker=None, kind=FailureKind.PEER, message=why, is_preemption=True)])

        return check

    def demand(self, num_hosts: int, usable: Set[str], *, is_one_a_machine: bool) -> Any | None:
        """As of `RayBackend`, for the slices that are missing."""
        groups = [group for reservation in self._reservations.values() for group in reservation.groups]
        held = sum(set(self._holds[id(group)].machines) <= usable for group in groups)
        missing = num_hosts // self._topology.hosts - held
        return demand_group(self._topology, missing, self.bundle(num_hosts)) if missing > 0 else None

    def give_back(self, group: Any) -> None:
        super().give_back(group)
        held = self._holds.pop(id(group), None)
        if held is not None and held.head is not None:
            super().give_back(held.head)

    def forget(self) -> None:
        super().forget()
        self._holds.clear()

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        reservation = self._reservations.get(id(handles))
        if reservation is None:
            return frozenset()
        wanted = {machine for chosen in self.chosen for machine in chosen.machines}
        now = bundles_of(reservation.groups, answering_nodes() & wanted)
        return frozenset(
            rank
            for rank, place in enumerate(reservation.places)
            if place.node and now[key_of(place)].node == place.node
        )

    def seats(self, handles: Sequence[HostHandles], alive: frozenset[int], num_hosts: int) -> Sequence[int | None]:
        """Per host of the next generation, which host of the one before it is: the one on the same machine."""
        places = self._reservations[id(handles)].places
        rank_on = {places[rank].node: rank for rank in alive}
        return tuple(rank_on.get(machine) for chosen in self.chosen for machine in chosen.machines)

    def _handles(self, reservation: Reservation, hosts: Sequence[Any | None]) -> Sequence[HostHandles]:
        self._gang = gang_variables(reservation.places, addresses())
        return super()._handles(reservation, hosts)

    def _environment(self, kind: WorkerKind, bundle: dict[str, float], place: Place) -> dict[str, str]:
        own = super()._environment(kind, bundle, place)
        return own | self._gang.get(id(place.group), {}) if kind == "device" else own


def addresses() -> dict[str, str]:
    """The address of each node in the cluster."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def gang_variables(places: Sequence[Place], address_of: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Variables of each placement group in which libtpu finds the slices that train together. A slice that trains alone
    gets them, too: those that its machines were started with may speak of others that are gone.
    """
    from ray.util.tpu import get_tpu_coordinator_env_vars

    groups = list(dict.fromkeys(id(place.group) for place in places))
    return {
        group: get_tpu_coordinator_env_vars(
            coordinator_address=address_of.get(places[0].node, ""), num_slices=len(groups), slice_id=number
        )
        for number, group in enumerate(groups)
    }
