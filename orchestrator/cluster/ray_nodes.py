"""`RayNodes`: the machines of a Ray cluster as `orchestrator.decisions.membership` sees them: alive, free, draining,
and what this run holds there.

Ray marks a node as draining in four cases. Its autoscaler takes it away, a cloud announces a preemption, a user calls
`ray drain-node`, or `ray start --block` gets a SIGTERM. The mark has the time by which the node goes, if that is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.cluster.connection import Connection
from podembed.orchestrator.cluster.places import daemon_of, taking_connections
from podembed.orchestrator.cluster.ray_backend import RayBackend
from podembed.orchestrator.cluster.ray_calls import RayHandle
from podembed.orchestrator.cluster.slices.holding import demanded
from podembed.orchestrator.cluster.slices.labels import domain_of, part_of
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules, Slice
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import ClusterRestarted, NicenessFound
from podembed.orchestrator.group.worker_group import Handle, HostHandles
from podembed.workers.liveness.worker import Worker

ANSWER_S = 1.0
# Of Ray's NodeDeathInfo: told to end (a SIGTERM to its daemon), drained and preempted, drained and idle.
ANNOUNCED_DEATHS = (1, 3, 4)


class RayNodes:
    """See the module. Mutated: what is asked of the cluster, and what the backend avoids.

    Args:
      backend: which places the hosts.
      scaling: what the user requested.
      connection: one to a cluster of the program's own is renewed where that is lost; others have to mend theirs.
      emit: callback that is told about that.
    """

    def __init__(self, backend: RayBackend, scaling: ScalingConfig, *, connection: Connection, emit: Emit) -> None:
        self._backend = backend
        self._scaling = scaling
        self._topology = scaling.slices
        self._connection = connection
        self._emit = emit
        self._is_own = connection.is_own
        self._demand: Any = None
        self._asked: tuple[int, frozenset[str]] | None = None
        self._handles: Sequence[HostHandles] = ()
        self._domains: Mapping[str, FailureDomain] = {}
        self._addresses: Mapping[str, str] = {}
        # Since the last placement. A slice keeps its name when machines in it are replaced, so those that left before
        # say nothing of it.
        self._seen: set[str] = set()
        self._announced: frozenset[FailureDomain] = frozenset()
        self._usable: frozenset[str] = frozenset()
        self._unreachable: frozenset[str] = frozenset()
        self._kills = KillCounters()
        self._niceness: list[Any] | None = None

    def look(self, *, is_careful: bool = False) -> Sequence[Node] | None:
        """Live machines. A handful of calls to Ray's head, some milliseconds; None where it does not answer.

        Args:
          is_careful: leave out those whose daemon takes no connection. Ray itself needs some 15 s to miss a machine
            that was lost, and a minute for one that is cut off.
        """
        import ray
        import ray.exceptions
        from ray._private.state import available_resources_per_node, state

        if not self._connection.answers():
            return None
        self._tell_niceness()
        try:
            # Ray has no public name for draining nodes; its own libraries (Train, Data) ask in this way.
            draining = state.get_draining_nodes()
            free = available_resources_per_node()
            known = ray.nodes()
            held = self._backend.held_places([self._demand] if self._demand is not None else [])
        except (ray.exceptions.RayError, ConnectionError, TimeoutError):
            return None
        domains = self._domains = {node["NodeID"]: domain_of(node, self._topology) for node in known}
        self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in known}
        alive = [node for node in known if node["Alive"]]
        self._seen.update(node["NodeID"] for node in alive)
        self._announced = frozenset(
            domains[node["NodeID"]]
            for node in known
            if node.get("DeathReason") in ANNOUNCED_DEATHS and (self._topology is None or node["NodeID"] in self._seen)
        )
        if is_careful:
            taking = taking_connections({node["NodeID"]: daemon_of(node) for node in alive})
            self._unreachable = frozenset(node["NodeID"] for node in alive) - taking
            alive = [node for node in alive if node["NodeID"] in taking]
        self._usable = frozenset(node["NodeID"] for node in alive)
        return [
            Node(
                id=node["NodeID"],
                domain=domains[node["NodeID"]],
                total=dict(node["Resources"]),
                free=dict(free.get(node["NodeID"], {})),
                own_hosts=held.get(node["NodeID"], 0),
                is_draining=node["NodeID"] in draining,
                # 0 stands for no deadline.
                drain_unix_s=draining[node["NodeID"]] / 1000 if draining.get(node["NodeID"]) else None,
                part=part_of(node, self._topology),
            )
            for node in alive
        ]

    def left(self) -> frozenset[FailureDomain]:
        """Domains of which machines have left as they were announced or told to, at the last look."""
        return self._announced

    def rules(self) -> Rules:
        """What is asked of the cluster. Without resources of their own, the hosts of a range take a machine each; a
        fixed number may share.

        Raises:
          TooFewHosts: it is one of others, and its head is gone.
        """
        self._renew()
        scaling = self._scaling
        has_resources = scaling.reserved is not None
        return Rules(
            least=scaling.least_hosts,
            most=scaling.most_hosts,
            resources=self._backend.bundle(scaling.least_hosts),
            is_one_a_machine=self._topology is not None or (scaling.is_range and not has_resources),
            may_share=not has_resources and (self._is_own or not scaling.is_range),
            topology=self._topology,
        )

    def _renew(self) -> None:
        """Brings the cluster back where the program started it, since no other program would."""
        lost = self._connection.lost() if self._is_own else None
        if lost is None:
            self._connection.require()
            return
        self._emit(ClusterRestarted(reason=lost))
        self._backend.forget()
        self._demand, self._asked, self._handles = None, None, ()
        self._connection.renew()

    def _tell_niceness(self, *, timeout_s: float = 0.0) -> None:
        """Reports once how nice the hosts are to other programs: beside a busy one it looks like training that is
        merely slow.
        """
        import ray
        import ray.exceptions

        asked = self._niceness or []
        if not asked or len(ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0]) < len(asked):
            return
        self._niceness = []
        try:
            found = max(ray.get(asked))
        except ray.exceptions.RayError:
            # One of them is lost; those of the next generation are asked.
            self._niceness = None
            return
        if found > 0:
            self._emit(NicenessFound(niceness=found))

    def place(self, avoid: frozenset[str], *, has_own_machines: bool, slices: Sequence[Slice] = ()) -> None:
        """How the next hosts are placed."""
        self._seen = {*self._usable}
        self._backend.chosen = slices
        # Ray goes on to place on machines that it has not missed yet.
        self._backend.avoided = avoid | self._unreachable
        self._backend.has_own_machines = has_own_machines

    def domain_of(self, handle: Handle) -> FailureDomain | None:
        """What the machine that a process was placed on fails with."""
        return self._domain(handle.machine) if isinstance(handle, RayHandle) and handle.machine else None

    def _domain(self, machine: str) -> FailureDomain:
        """The failure domain of a machine. One that joined after the last look is taken to fail alone."""
        return self._domains.get(machine) or FailureDomain.of_machine(machine)

    def began(self, handles: Sequence[HostHandles]) -> None:
        """A generation runs with these hosts."""
        self._handles = handles
        self._kills.begin(handles)
        if not self._is_own and self._niceness is None:
            self._niceness = [pair.host.actor.niceness.remote() for pair in handles if isinstance(pair.host, RayHandle)]
            # They answer at once, as a rule, and a short run has no later look at its machines.
            self._tell_niceness(timeout_s=ANSWER_S)

    def killed_for_memory(self, workers: Collection[Worker]) -> set[Worker]:
        """The processes among these dead ones that the kernel may have killed for want of memory."""
        return self._kills.grown(workers, self._handles) if self._connection.answers() else set()

    def machine_of(self, host: int) -> str:
        """Address of the machine on which a host was put last; empty where that is unknown."""
        return self._addresses.get(self._backend.placed.get(host, ""), "")

    def placed(self) -> Mapping[int, FailureDomain]:
        """The domain of the machine on which each host was put last."""
        return {host: self._domain(machine) for host, machine in self._backend.placed.items() if machine}

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None:
        """A placement group that no host uses yet: Ray's autoscaler starts nodes for what waits for room. Surviving
        hosts keep theirs.
        """
        if self._asked == (num_hosts, avoid):
            return
        self.unask()
        self._asked = (num_hosts, avoid)
        self._backend.avoided = avoid | self._unreachable
        is_one_a_machine = self.rules().is_one_a_machine
        self._demand = self._backend.demand(num_hosts, self._usable - avoid, is_one_a_machine=is_one_a_machine)

    def ask_for_most(self) -> None:
        """Asks the cluster's autoscaler for the most that the run can use, until `withdraw`. Ray keeps one such request
        for a whole cluster.
        """
        from ray.autoscaler.sdk import request_resources

        most, bundle = self._scaling.most_hosts, self._backend.bundle(self._scaling.most_hosts)
        if self._topology is None:
            request_resources(bundles=[bundle] * most)
            return
        # Without the labels it would start machines of whichever group has such chips.
        bundles, labels = demanded(self._topology, most // self._topology.hosts, bundle)
        request_resources(bundles=bundles, bundle_label_selectors=labels)

    def withdraw(self) -> None:
        """Takes that back."""
        from ray.autoscaler.sdk import request_resources

        if self._connection.answers():
            request_resources(bundles=[])

    def unask(self) -> None:
        """Gives back what `ask` requested, also if the cluster granted it meanwhile: its places are then free for the
        hosts.
        """
        if self._demand is not None:
            self._backend.give_back(self._demand)
        self._demand = self._asked = None


class KillCounters:
    """Whether the kernel killed hosts for want of memory. A process that is gone cannot say, so the other one of its
    host is asked, whose machine is the same. Mutated: the counts at the start of the generation.
    """

    def __init__(self) -> None:
        self._before: dict[Worker, Any] = {}

    def begin(self, handles: Sequence[HostHandles]) -> None:
        """Asks all processes of a generation for their counts; the answers come when they come."""
        self._before = {handle.worker: _asked(handle) for pair in handles for handle in (pair.host, pair.device)}

    def grown(self, workers: Collection[Worker], handles: Sequence[HostHandles]) -> set[Worker]:
        """Workers on whose machine the kernel has killed since. Waits a moment for the answers."""
        partners = {
            own.worker: other for pair in handles for own, other in ((pair.host, pair.device), (pair.device, pair.host))
        }
        asked = {
            worker: (self._before.get(partners[worker].worker), _asked(partners[worker]))
            for worker in workers
            if worker in partners
        }
        found = set()
        for worker, calls in asked.items():
            before, now = (_answer(call) for call in calls)
            if before is not None and now is not None and now > before:
                found.add(worker)
        return found


def _asked(handle: Handle) -> Any:
    return handle.actor.oom_kills.remote() if isinstance(handle, RayHandle) else None


def _answer(call: Any) -> int | None:
    import ray
    import ray.exceptions

    try:
        return None if call is None else ray.get(call, timeout=ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError):
        return None
