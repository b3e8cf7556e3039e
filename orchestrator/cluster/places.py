"""Places of hosts on a Ray cluster: bundles of placement groups, the nodes that they lie on, and the search for more of
them.

Ray looks for another node for the bundle of a lost one, and may find it at any time. The program therefore asks Ray
what a run holds whenever it matters.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from errno import EINPROGRESS
from typing import Any, Protocol

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.events.machines import HostsShareMachines
from podembed.workers.liveness.worker import WorkerKind

Address = tuple[str, int]

PLACEMENT_TIMEOUT_S = 120.0
# Long enough for the second try of a connection, of which the first was lost.
CONNECT_S = 1.5
CONNECTIONS_AT_ONCE = 200
NODE_ID_LABEL = "ray.io/node-id"  # Ray puts it on every node
HELD_STATES = ("CREATED", "RESCHEDULING")  # the latter after the loss of a node; the places on others stay


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of a host: a bundle of a placement group, and the node that it lies on, empty while Ray looks for
    another one.
    """

    group: Any
    index: int
    node: str


@dataclass(frozen=True, slots=True, eq=False)
class Standby:
    """An actor that waits to take the place of a lost one on its node. `prepared` is the call that makes it ready."""

    kind: WorkerKind
    place: Place
    actor: Any
    prepared: Any


@dataclass(slots=True, eq=False)
class Reservation:
    """What the hosts of a generation hold on the cluster. Mutated: `standbys`."""

    groups: list[Any]
    places: list[Place]
    bundle: dict[str, float]
    standbys: list[Standby]


class Reserves(Protocol):
    """Who asks Ray for places."""

    avoided: frozenset[str]
    has_own_machines: bool | None

    def reserve(
        self,
        num_hosts: int,
        *,
        strategy: str,
        bundle: dict[str, float] | None = None,
        avoid: Collection[str] = (),
    ) -> Any:
        """A placement group for so many hosts, off the avoided nodes and these; its room may come later."""
        ...

    def give_back(self, group: Any) -> None:
        """Removes a placement group of `reserve`, if the cluster can."""
        ...


def bundles_of(groups: Sequence[Any], usable: set[str]) -> dict[tuple[int, int], Place]:
    """All bundles of placement groups by `key_of`, without a node where that is not usable."""
    return {
        (id(group), index): Place(group, index, node if node in usable else "")
        for group in groups
        for index, node in enumerate(nodes_of(group))
    }


class Search:
    """Looks for places beside others of the same run.

    Args:
      backend: knows what is to be avoided, and whether hosts have a machine each.
      groups: groups that the run holds; they are searched first.
      bundle: Ray resources of a host.
      answering: nodes whose daemon answers; of those that join meanwhile Ray knows.

    Attributes:
      groups: those, and the ones that were added.
      taken: places that have a host.
    """

    def __init__(
        self, backend: Reserves, groups: Sequence[Any], bundle: dict[str, float], *, answering: set[str]
    ) -> None:
        self.groups = [*groups]
        self.taken: list[Place] = []
        self._backend = backend
        self._num_before = len(groups)
        self._bundle = bundle
        self._answering = answering
        self._silent = live_nodes() - answering

    def same(self, place: Place) -> Place | None:
        """A place of the generation before, if it may be used; it is taken then."""
        now = self._free().get(key_of(place))
        if now is None or now.node != place.node:
            return None
        self.taken.append(now)
        return now

    def others(self, count: int, on_wait: Callable[[], None]) -> list[Place]:
        """Places for more hosts: free ones, or those that Ray finds for the bundle of a lost one or for a new group.
        They are taken then.

        Raises:
          ConfigurationError, WorkerFailure: as `placement_check`.
        """
        import ray

        found: list[Place] = []
        asked, ready = None, None
        check = placement_check(count, self._bundle, self._answering, on_wait)
        try:
            while True:
                for place in self._free().values():
                    if len(found) < count and place.node not in self._occupied():
                        self.taken.append(place)
                        found.append(place)
                if len(found) == count:
                    return found
                if asked is None:
                    # The bundle of a lost one may get room that was counted on here, so that only single places can be
                    # waited for.
                    is_alone = all(node for group in self.groups for node in nodes_of(group))
                    asked = self._backend.reserve(
                        count - len(found) if is_alone else 1,
                        strategy="STRICT_SPREAD" if self._backend.has_own_machines else "SPREAD",
                        bundle=self._bundle,
                        avoid=self._occupied() | self._silent,
                    )
                    ready = asked.ready()
                if ray.wait([ready], timeout=0.2)[0]:
                    self.groups.append(asked)
                    asked = None
                check()
        finally:
            if asked is not None:
                self._backend.give_back(asked)

    def give_back(self) -> None:
        """Gives back what was added."""
        for group in self.groups[self._num_before :]:
            self._backend.give_back(group)

    def _occupied(self) -> set[str]:
        """Nodes on which no other host is put."""
        return {place.node for place in self.taken} if self._backend.has_own_machines else set()

    def _free(self) -> dict[tuple[int, int], Place]:
        taken, occupied = {key_of(place) for place in self.taken}, self._occupied()
        bundles = bundles_of(self.groups, live_nodes() - self._silent - self._backend.avoided)
        return {
            at: place for at, place in bundles.items() if place.node and at not in taken and place.node not in occupied
        }


def key_of(place: Place) -> tuple[int, int]:
    """Tells the bundles of a run apart."""
    return id(place.group), place.index


def placement_check(
    num_hosts: int, bundle: dict[str, float], before: set[str], on_wait: Callable[[], None]
) -> Callable[[], None]:
    """What is asked again and again while the cluster looks for room; `before`: the nodes that were there.

    Raises:
      ConfigurationError: it has found none within the deadline.
      WorkerFailure: a machine left meanwhile, perhaps the one that was counted on.
    """
    deadline = time.monotonic() + PLACEMENT_TIMEOUT_S

    def check() -> None:
        import ray

        on_wait()
        if before - live_nodes():
            left = "a machine left while hosts were placed"
            raise WorkerFailure([Failure(worker=None, kind=FailureKind.PEER, message=left, is_preemption=True)])
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"The cluster did not give {num_hosts} hosts {bundle} each within {PLACEMENT_TIMEOUT_S:.0f} s; it "
                f"offers {ray.available_resources()}. Add nodes, lower num_hosts, or lower resources_per_host."
            )

    return check


def nodes_of(group: Any) -> list[str]:
    """The node of each bundle of a placement group; empty while it has none."""
    from ray.util.placement_group import placement_group_table

    alive = live_nodes()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [node if node in alive else "" for _, node in sorted(nodes.items())]


def this_node() -> str:
    """Id of the node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def live_nodes() -> set[str]:
    """Nodes that Ray takes for alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def answering_nodes() -> set[str]:
    """Live nodes whose daemon takes connections. Ray itself needs some 15 s to miss a machine that was lost, and a
    minute for one that is cut off.
    """
    import ray

    return taking_connections({node["NodeID"]: daemon_of(node) for node in ray.nodes() if node["Alive"]})


def daemon_of(node: Mapping[str, Any]) -> Address:
    """The address of the daemon of a node of `ray.nodes`."""
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def taking_connections(daemons: Mapping[str, Address], *, timeout_s: float = CONNECT_S) -> set[str]:
    """Machines whose daemon takes a connection. Kernels take them, however busy a machine is, so that one which
    does not is gone or cut off.
    """
    todo = [*daemons.items()]
    batches = [todo[at : at + CONNECTIONS_AT_ONCE] for at in range(0, len(todo), CONNECTIONS_AT_ONCE)]
    return {machine for batch in batches for machine in _taking(batch, timeout_s)}


def _taking(daemons: Sequence[tuple[str, Address]], timeout_s: float) -> set[str]:
    """The same for so many as may be asked at once."""
    taking: set[str] = set()
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for machine, (host, port) in daemons:
            connection = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                if connection.connect_ex((host, port)) in (0, EINPROGRESS):
                    selector.register(connection, selectors.EVENT_WRITE, machine)
        deadline_s = time.monotonic() + timeout_s
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # type: ignore[union-attr]
                    taking.add(key.data)
    return taking


def await_placement(group: Any, check: Callable[[], None]) -> None:
    """Waits until the cluster has room for a placement group; `check` is asked meanwhile, and raises to give up."""
    import ray

    ready = group.ready()
    while not ray.wait([ready], timeout=0.2)[0]:
        check()
    ray.get(ready)


def held_bundles(groups: Sequence[Any]) -> dict[str, int]:
    """The number of bundles of these placement groups on each node."""
    from ray.util.placement_group import placement_group_table

    counts: dict[str, int] = {}
    for group in groups:
        table = placement_group_table(group)
        for node in table["bundles_to_node_id"].values() if table.get("state") in HELD_STATES else ():
            counts[node] = counts.get(node, 0) + 1
    return counts


def spread(num_hosts: int, *, avoided: frozenset[str], has_own_machines: bool | None, emit: Emit) -> str:
    """Ray's strategy for placing hosts, on machines of their own or not.

    Args:
      avoided: nodes that do not count.
      has_own_machines: whether each host is to have a machine for itself; None finds out.
      emit: callback that is told where there are fewer machines than hosts.
    """
    import ray

    able = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    machines = len([node for node in able if node["NodeID"] not in avoided])
    if machines >= num_hosts if has_own_machines is None else has_own_machines:
        return "STRICT_SPREAD"
    emit(HostsShareMachines(num_hosts=num_hosts, machines=machines))
    return "SPREAD"


def group_off(avoided: Collection[str], bundles: Sequence[dict[str, float]], *, strategy: str, name: str) -> Any:
    """A placement group with these bundles, none of them on the avoided nodes; its room may come later.

    Args:
      name: for people, in Ray's dashboard. Ray takes each name once, so some digits are put behind it.
    """
    from ray.util.placement_group import placement_group

    selector = {NODE_ID_LABEL: f"!in({', '.join(sorted(avoided))})"} if avoided else {}
    return placement_group(
        list(bundles),
        strategy=strategy,
        name=f"{name} {secrets.token_hex(4)}",
        bundle_label_selector=[selector] * len(bundles) if selector else None,  # type: ignore[arg-type]
    )
