"""`RayBackend`: worker processes as actors on a Ray cluster. How the program gets one:
`orchestrator.cluster.connection`.

Meshes and JAX gangs of hosts that share a machine listen on the loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from typing import Any

from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.cluster.connection import LOOPBACK, compile_cache
from podembed.orchestrator.cluster.marked_processes import VARIABLE, MarkedProcesses, await_end
from podembed.orchestrator.cluster.places import (
    Address,
    Place,
    Reservation,
    Search,
    Standby,
    answering_nodes,
    await_placement,
    bundles_of,
    daemon_of,
    group_off,
    held_bundles,
    key_of,
    live_nodes,
    nodes_of,
    placement_check,
    spread,
    taking_connections,
)
from podembed.orchestrator.cluster.ray_calls import RayHandle, ended_unix_s, handles_of, of_ray, outcome, settled
from podembed.orchestrator.cluster.worker_environment import (
    PLATFORMS,
    accelerators_of,
    idle_accelerators,
    worker_environment,
)
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import StandbyDiscarded
from podembed.orchestrator.group.backend import Call, Handle, HostHandles
from podembed.workers.host.spec import HostSpec
from podembed.workers.job.reference import AnyJob
from podembed.workers.liveness.lease_watch import LeaseTerms
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.worker import Worker, WorkerKind

EXIT_TIMEOUT_S = 15.0
STANDBY_ANSWER_S = 0.5


class RayBackend:
    """Hosts as pairs of actors, one placement group bundle a host. A lost one is replaced in its bundle.

    Args:
      scaling: resources and threads of a host.
      emit: callback that is told once about facts that a user should know, such as hosts that share a machine.
      actors: classes of a host's two actors; None for those of a run.
      lost: why the cluster is gone, so that calls of Ray are of no use and may not come back; None while all is well.
      answers: whether its head answers now; without one Ray lets what gives places back wait for a minute. By default,
        while it is not lost.
      run: name of the run, by which Ray shows its processes and placement groups.

    Attributes:
      avoided: nodes on which no host is placed.
      has_own_machines: whether each host is to have a machine for itself; None finds out.
      placed: by host, the node on which the newest launch put it.
      chosen: of `SliceBackend`, the slices for the next generation; empty where hosts are counted.
      handle_class: class of the handles of actors.
    """

    handle_class: type[RayHandle] = RayHandle

    def __init__(
        self,
        scaling: ScalingConfig,
        emit: Emit,
        actors: tuple[Any, Any] | None = None,
        lost: Callable[[], str | None] = lambda: None,
        answers: Callable[[], bool] | None = None,
        run: str = "a pod",
    ) -> None:
        self._scaling = scaling
        self._run = run
        self._emit = emit
        self._actors = actors
        self._lost = lost
        self._answers = answers or (lambda: lost() is None)
        self.avoided: frozenset[str] = frozenset()
        self.has_own_machines: bool | None = None
        self.placed: dict[int, str] = {}
        self.chosen: Sequence[Any] = ()
        self._reservations: dict[int, Reservation] = {}
        self._daemons: dict[str, Address] = {}
        self._processes = MarkedProcesses()
        self._marks: dict[Any, str] = {}
        self._has_named_idle = False

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        bundle = self.bundle(num_hosts)
        self._name_idle_accelerators(bundle)
        try:
            reservation = self._first_places(num_hosts, bundle, on_wait)
        except ConfigurationError as error:
            if not self.placed:
                raise
            # There was room once, and a moment ago; somebody else took it, and the run can wait for it.
            taken = Failure(worker=None, kind=FailureKind.PEER, message=str(error))
            raise WorkerFailure([taken]) from error
        return self._handles(reservation, [None] * num_hosts)

    def _first_places(self, num_hosts: int, bundle: dict[str, float], on_wait: Callable[[], None]) -> Reservation:
        """Room for hosts that are all new."""
        group = self._granted(num_hosts, bundle, on_wait)
        return Reservation(
            [group], [Place(group, index, node) for index, node in enumerate(nodes_of(group))], bundle, []
        )

    def _name_idle_accelerators(self, bundle: dict[str, float]) -> None:
        import ray

        idle = idle_accelerators(bundle, ray.cluster_resources(), platforms=os.environ.get(PLATFORMS))
        if idle is not None and not self._has_named_idle:
            self._has_named_idle = True
            self._emit(idle)

    def _environment(self, kind: WorkerKind, bundle: dict[str, float], place: Place) -> dict[str, str]:
        """Variables of a process that is about to start in a place."""
        threads, platforms = self._scaling.threads_per_host, self._scaling.jax_platforms
        return worker_environment(kind, resources=bundle, threads=threads, environ=os.environ, platforms=platforms)

    def fit(self, handles: Sequence[HostHandles]) -> frozenset[int]:
        reservation = self._reservations.get(id(handles))
        if reservation is None:
            return frozenset()
        now = bundles_of(reservation.groups, answering_nodes() - self.avoided)
        return frozenset(rank for rank, place in enumerate(reservation.places) if now[key_of(place)].node == place.node)

    def relaunch(
        self, handles: Sequence[HostHandles], kept: Sequence[int | None], on_wait: Callable[[], None]
    ) -> Sequence[HostHandles]:
        before = self._reservations[id(handles)]
        reservation = self._next_places(before, kept, on_wait)
        del self._reservations[id(handles)]
        actors = [None if old is None else of_ray(handles[old].host).actor for old in kept]
        self._let_go(reservation)
        return self._handles(reservation, actors)

    def _next_places(self, before: Reservation, kept: Sequence[int | None], on_wait: Callable[[], None]) -> Reservation:
        """Room for the next generation, of which some hosts live on; it may hold more than it needs."""
        search = Search(self, before.groups, before.bundle, answering=answering_nodes())
        # A host that lives on keeps its place, and so does one that is replaced, where it can.
        chosen = {rank: before.places[old] for rank, old in enumerate(kept) if old is not None}
        search.taken.extend(chosen.values())
        for rank, old in enumerate(kept):
            if old is None and rank < len(before.places) and (place := search.same(before.places[rank])):
                chosen[rank] = place
        try:
            missing = [rank for rank in range(len(kept)) if rank not in chosen]
            chosen |= zip(missing, search.others(len(missing), on_wait), strict=True)
        except BaseException:
            search.give_back()
            raise
        return Reservation(search.groups, [chosen[rank] for rank in range(len(kept))], before.bundle, before.standbys)

    def _let_go(self, reservation: Reservation) -> None:
        """Gives back the groups in which no host is any more. What Ray looks for in place of a lost one would take the
        room of others.
        """
        used = {id(place.group) for place in reservation.places}
        gone = [standby for standby in reservation.standbys if id(standby.place.group) not in used]
        self._end([standby.actor for standby in gone])
        reservation.standbys = [standby for standby in reservation.standbys if standby not in gone]
        for group in reservation.groups:
            if id(group) not in used:
                self.give_back(group)
        reservation.groups = [group for group in reservation.groups if id(group) in used]

    def _handles(self, reservation: Reservation, hosts: Sequence[Any | None]) -> Sequence[HostHandles]:
        """Actors for all places; of the hosts those that are given, all others from the standbys or new."""
        import ray

        self.placed = {rank: place.node for rank, place in enumerate(reservation.places)}
        self._daemons = {node["NodeID"]: daemon_of(node) for node in ray.nodes()}
        # Hosts that share one machine have no reason to be heard outside it; otherwise each binds to its machine's
        # address.
        bind_address = LOOPBACK if len({*self.placed.values()}) == 1 else ""
        cache = compile_cache(self._scaling.threads_per_host) if self._actors is None else ""
        self._drop_dead(reservation)
        own = zip(reservation.places, hosts, strict=True)
        handles = handles_of(
            [actor or self._take("host", rank, reservation, place) for rank, (place, actor) in enumerate(own)],
            [self._take("device", rank, reservation, place) for rank, place in enumerate(reservation.places)],
            kind=self.handle_class,
            machines=[place.node for place in reservation.places],
            bind_address=bind_address,
            compile_cache=cache,
        )
        self._reservations[id(handles)] = reservation
        return handles

    def _take(self, kind: WorkerKind, rank: int, reservation: Reservation, place: Place) -> Any:
        """A standby on the node of a place, or else a new actor in it."""
        for standby in reservation.standbys:
            # Of another placement group it would end with that.
            if standby.kind == kind and standby.place.group is place.group and standby.place.node == place.node:
                reservation.standbys.remove(standby)
                return standby.actor
        return self._new_actor(kind, reservation.bundle, place, label=f"{kind} {rank} of {self._run}")

    def _new_actor(
        self,
        kind: WorkerKind,
        bundle: dict[str, float],
        place: Place,
        *,
        label: str,
        leases: Sequence[LeaseTerms] | None = None,
    ) -> Any:
        """A process of a generation; with `leases`, even with none in it, one that stands by and follows them."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from podembed.orchestrator.cluster.worker_path import driver_path
        from podembed.workers.actors import DeviceActor, HostActor

        host_class, device_class = self._actors or (HostActor, DeviceActor)
        mark = self._processes.new_mark()
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=place.index
            ),
            "num_cpus": 0 if leases is not None else bundle.get("CPU", 0.0) / 2,
            "runtime_env": {"env_vars": self._environment(kind, bundle, place) | mark},
        }
        if kind == "device" and leases is None:
            options["num_gpus"] = bundle.get("GPU", 0)
            options["resources"] = {n: amount for n, amount in bundle.items() if n not in ("CPU", "GPU", "memory")}
        made = (host_class if kind == "host" else device_class).options(**options)
        actor = made.remote(*(leases or ()), label=label, path=driver_path())
        self._marks[actor._actor_id] = mark[VARIABLE]
        return actor

    def stand_by(
        self,
        handles: Sequence[HostHandles],
        job: AnyJob,
        table_buckets: tuple[int, ...],
        spec: HostSpec | None = None,
    ) -> None:
        leases = []
        if spec is not None:
            terms = LeaseTerms(storage_url=spec.storage_url, generation=spec.generation, timeout_s=spec.lease_timeout_s)
            leases.append(terms)
        reservation = self._reservations[id(handles)]
        self._drop_dead(reservation)
        wanted: list[tuple[WorkerKind, Place]] = [("host", reservation.places[0])]
        # Accelerators belong to the process that Ray gave them to; only on CPUs can another one take its place.
        if self._scaling.platform == "cpu" or not accelerators_of(reservation.bundle):
            wanted.extend(("device", place) for place in reservation.places)
        there = [(standby.kind, standby.place.node) for standby in reservation.standbys]
        for kind, place in wanted:
            if (kind, place.node) in there:
                there.remove((kind, place.node))
            elif place.node:
                label = f"spare {kind} of {self._run}"
                actor = self._new_actor(kind, reservation.bundle, place, label=label, leases=leases)
                prepared = actor.prepare.remote(job, table_buckets)
                reservation.standbys.append(Standby(kind, place, actor, prepared))

    def _drop_dead(self, reservation: Reservation) -> None:
        """Leaves out standbys that do not answer; one that is still coming up is taken for good."""
        import ray
        import ray.exceptions

        asked = {standby.actor.identity.remote(): standby for standby in reservation.standbys}
        if not asked:
            return
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=STANDBY_ANSWER_S)
        for reference in answered:
            standby = asked[reference]
            try:
                ray.get(reference)
                # One that could not be made ready is of no use, either.
                ray.get(ray.wait([standby.prepared], timeout=0)[0])
            except ray.exceptions.RayTaskError as error:
                said = str(error.cause).splitlines()
                reason = f"{type(error.cause).__name__}: {said[0]}" if said else type(error.cause).__name__
                self._emit(StandbyDiscarded(process=standby.kind, reason=reason))
                silent.append(reference)
            except ray.exceptions.RayError:
                silent.append(reference)
        for reference in silent:
            standby = asked[reference]
            if reference in answered or ray.wait([standby.prepared], timeout=0)[0]:
                reservation.standbys.remove(standby)
                self._end([standby.actor])

    def _granted(self, num_hosts: int, bundle: dict[str, float], on_wait: Callable[[], None]) -> Any:
        """A placement group for so many hosts, with its room."""
        strategy = spread(num_hosts, avoided=self.avoided, has_own_machines=self.has_own_machines, emit=self._emit)
        group = self.reserve(num_hosts, strategy=strategy, bundle=bundle)
        try:
            await_placement(group, placement_check(num_hosts, bundle, live_nodes(), on_wait))
        except BaseException:
            self.give_back(group)
            raise
        return group

    def reserve(
        self,
        num_hosts: int,
        *,
        strategy: str,
        bundle: dict[str, float] | None = None,
        avoid: Collection[str] = (),
    ) -> Any:
        """A placement group for so many hosts, off the avoided nodes and these; its room may come later."""
        bundles = [bundle or self.bundle(num_hosts)] * num_hosts
        return group_off({*self.avoided, *avoid}, bundles, strategy=strategy, name=f"hosts of {self._run}")

    def demand(self, num_hosts: int, usable: Set[str], *, is_one_a_machine: bool) -> Any | None:
        """A placement group for what is missing on usable machines, so that a cluster that grows by demand grows."""
        held = {node: count for node, count in self.held_places().items() if node in usable}
        missing = num_hosts - (len(held) if is_one_a_machine else sum(held.values()))
        strategy = "STRICT_SPREAD" if is_one_a_machine else "SPREAD"
        return self.reserve(missing, strategy=strategy, avoid=held if is_one_a_machine else ()) if missing > 0 else None

    def give_back(self, group: Any) -> None:
        """Removes a placement group of `reserve`. That needs a head. Ray removes those of a driver that is gone."""
        import ray.util

        if self._answers():
            ray.util.remove_placement_group(group)

    def held_places(self, others: Sequence[Any] = ()) -> dict[str, int]:
        """The number of hosts with reserved room on each node, in this backend's placement groups and in `others`."""
        own = {id(group): group for reservation in self._reservations.values() for group in reservation.groups}
        return held_bundles([*own.values(), *others])

    def bundle(self, num_hosts: int) -> dict[str, float]:
        """Ray resources of one of so many hosts.

        Raises:
          ConfigurationError: the cluster has no CPUs.
        """
        import ray

        if self._scaling.reserved is not None:
            return dict(self._scaling.reserved)
        total = ray.cluster_resources().get("CPU", 0.0)
        # Rounded down to what Ray can count; both processes of a host take half.
        share = min(1.0, int(total / num_hosts * 1000) / 1000)
        if share <= 0:
            raise ConfigurationError(f"The cluster has {total} CPUs for {num_hosts} hosts. Expected some. Start nodes.")
        return {"CPU": share}

    def settled(self, calls: Sequence[Call[Any]], *, timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
        return (list(calls), []) if self._lost() is not None else self._settled(calls, timeout_s)

    def _settled(self, calls: Sequence[Call[Any]], timeout_s: float) -> tuple[list[Call[Any]], list[Call[Any]]]:
        return settled(calls, timeout_s=timeout_s)

    def result(self, call: Call[Any]) -> Any | Failure:
        lost = self._lost()
        # Of a cluster that is lost no value must be fetched.
        if lost is not None:
            return Failure(worker=call.worker, kind=FailureKind.DIED, message=lost)
        result = self._outcome(call)
        if isinstance(result, Failure) and result.kind is FailureKind.DIED and self._answers():
            return replace(result, ended_unix_s=ended_unix_s(call))
        return result

    def _outcome(self, call: Call[Any]) -> Any | Failure:
        return outcome(call)

    def statistics(self, handle: Handle) -> ProcessStatistics | None:
        mark = self._marks.get(of_ray(handle).actor._actor_id)
        return None if mark is None else self._processes.statistics(mark)

    def cut_off(self, workers: Sequence[Handle]) -> frozenset[Worker]:
        machine_of = {handle.worker: of_ray(handle).machine for handle in workers}
        asked = {at: self._daemons[at] for at in machine_of.values() if at is not None and at in self._daemons}
        taking = taking_connections(asked)
        return frozenset(worker for worker, machine in machine_of.items() if machine in asked.keys() - taking)

    def end(self, workers: Sequence[Handle]) -> None:
        self._end([of_ray(worker).actor for worker in workers])

    def stop(self, handles: Sequence[HostHandles]) -> None:
        reservation = self._reservations.pop(id(handles), None)
        actors = [of_ray(handle).actor for pair in handles for handle in (pair.host, pair.device)]
        self._end(actors + [standby.actor for standby in (reservation.standbys if reservation else [])])
        for group in reservation.groups if reservation else []:
            self.give_back(group)

    def forget(self) -> None:
        """The cluster is gone, and another one takes its place: what was reserved and started there is, too."""
        self._reservations.clear()
        self._daemons.clear()
        self._processes.kill(self._marks.values())
        self._marks.clear()

    def _end(self, actors: Sequence[Any]) -> None:
        """Kills actors and waits until those on this machine are gone: only then are their memory and their chips
        free.
        """
        import ray

        marked = {
            actor._actor_id: self._marks.pop(actor._actor_id) for actor in actors if actor._actor_id in self._marks
        }
        marks = list(marked.values())
        for actor in actors if self._answers() else []:
            # One that has no mark was ended before, perhaps with its cluster.
            if actor._actor_id in marked:
                ray.kill(actor, no_restart=True)
        # A frozen process takes Ray seconds to kill, and the kernel none.
        processes = self._processes.kill(marks)
        await_end(processes, timeout_s=EXIT_TIMEOUT_S)
