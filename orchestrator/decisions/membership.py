"""Which machines a run uses, how many hosts it can have, and when hosts leave, as pure functions of one look at the
cluster.

No clock, no Ray: `orchestrator.cluster.ray_nodes` looks, `orchestrator.decisions.host_watch` remembers and acts. A
machine is a node of the cluster; a host is a pair of processes with resources of its own on one of them. A machine is
used or avoided together with the others of its failure domain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.failure_domain import FailureDomain

# A commit takes about as long as the last one, but not surely.
COMMIT_MARGIN_S = 3.0
COMMIT_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMember:
    """The place of a machine in a TPU slice.

    Attributes:
      pod_type: pod type of the slice, such as `v6e-16`.
      worker: the machine's number in it.
    """

    pod_type: str
    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A whole slice that is chosen. `machines`: their ids, in the order of their numbers."""

    name: str
    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live machine of the cluster, as one look saw it.

    Attributes:
      id: id of the machine's life in the cluster; one that comes back has another.
      domain: what it fails, leaves and rests with.
      total: its resources.
      free: those that are not reserved.
      own_hosts: places for hosts that this run has reserved there; not in `free`.
      is_draining: it was announced to go.
      drain_unix_s: when it goes at the latest; None if that was not said.
      part: part of a slice, which is then its domain; None for a machine without one.
    """

    id: str
    domain: FailureDomain
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    own_hosts: int = 0
    is_draining: bool = False
    drain_unix_s: float | None = None
    part: SliceMember | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A run's requirements of the cluster.

    Attributes:
      least, most: hosts.
      resources: resources of one host.
      is_one_a_machine: a machine has one host, however much it could carry.
      may_share: where there are fewer machines than `least`, hosts share them, however small their part becomes.
      topology: topology of the slices that are used as wholes; None where hosts are counted one by one.
    """

    least: int
    most: int
    resources: Mapping[str, float]
    is_one_a_machine: bool
    may_share: bool
    topology: Topology | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Train on so many hosts.

    Attributes:
      avoid: machines on which none may be placed.
      has_own_machines: there is a machine for each.
      slices: on which the hosts are, in the order of the hosts' numbers; empty where hosts are counted one by one.
    """

    num_hosts: int
    avoid: frozenset[str]
    has_own_machines: bool
    why: str
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There are not enough. `why` says what was found."""

    found: int
    needed: int
    avoid: frozenset[str]
    why: str


def room(node: Node, rules: Rules, *, as_if_free: bool = False) -> int:
    """Hosts that a machine has room for, with those that this run has there."""
    if as_if_free:
        places = fits(node.total, rules.resources)
    else:
        places = node.own_hosts + fits(node.free, rules.resources)
    return min(places, 1) if rules.is_one_a_machine else places


def fits(amounts: Mapping[str, float], resources: Mapping[str, float]) -> int:
    # What is counted in thousandths comes back with an error in its last digits.
    needed = [(name, amount) for name, amount in resources.items() if amount > 0]
    return min((int(amounts.get(name, 0.0) / amount + 1e-6) for name, amount in needed), default=0)


def choose_hosts(
    nodes: Sequence[Node], rules: Rules, *, quarantined: Mapping[FailureDomain, float], as_if_free: bool = False
) -> Use | Wait:
    """Chooses as many hosts as there is room for, within the rules.

    Args:
      quarantined: domains not to be used, and for how many seconds yet. Not heeded for the only one of a cluster.
      as_if_free: count what others have reserved as well, and what is not yet known to be free again.
    """
    able = [node for node in nodes if fits(node.total, rules.resources) or (rules.may_share and node.total.get("CPU"))]
    is_only = len({node.domain for node in able}) == 1
    # A machine that goes takes its whole domain with it.
    going = {node.domain for node in nodes if node.is_draining}
    leaving = {node.id for node in able if node.domain in going}
    resting = {node.id: quarantined[node.domain] for node in able if node.domain in quarantined and not is_only} | {}
    avoid = frozenset(leaving | resting.keys())
    places = [room(node, rules, as_if_free=as_if_free) for node in able if node.id not in avoid]
    found, machines = sum(places), sum(1 for count in places if count)
    why = _found(able, leaving=leaving, resting={at: s for at, s in resting.items() if at not in leaving}, places=found)
    if found >= rules.least:
        num_hosts = min(found, rules.most)
        return Use(num_hosts=num_hosts, avoid=avoid, has_own_machines=machines >= num_hosts, why=why)
    if rules.may_share and len(able) > len(avoid):
        return Use(num_hosts=rules.least, avoid=avoid, has_own_machines=False, why=why)
    return Wait(found=found, needed=rules.least, avoid=avoid, why=why)


def rest(seconds: Collection[float]) -> str:
    """How many machines or slices are in quarantine, and for how long the next one is yet. In words that change seldom:
    a run that waits says again what there is when that has changed.
    """
    least = min(seconds)
    left = f"{math.ceil(least / 60)} min" if least > 120 else f"{10 * math.ceil(least / 10)} s"
    return f"{len(seconds)} in quarantine, the next one for up to {left} yet"


def _found(able: Sequence[Node], *, leaving: Collection[str], resting: Mapping[str, float], places: int) -> str:
    parts = [f"{len(able)} machine{'' if len(able) == 1 else 's'}"]
    if leaving:
        parts.append(f"{len(leaving)} of them about to leave")
    if resting:
        parts.append(rest(resting.values()))
    return f"{', '.join(parts)}; room for {places} host{'' if places == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Go on as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAtCommit:
    """Change hosts after the next commit of the schedule."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAfterWindow:
    """Commit at the end of this window and change hosts then: a machine goes before the next commit of the schedule."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNow:
    """A machine goes before a commit can be made. `hosts`: those on it; they are lost, and the steps since the last
    commit with them.
    """

    why: str
    hosts: tuple[int, ...]


Change = Stay | LeaveAtCommit | LeaveAfterWindow | LeaveNow


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace at which commits can be made.

    Attributes:
      to_commit_s: until the step of the next commit of the schedule; None if that is not known.
      commit_s: seconds that a commit takes.
    """

    to_commit_s: float | None
    commit_s: float

    @property
    def needed_s(self) -> float:
        """Seconds until a commit that begins now stands."""
        return COMMIT_FACTOR * self.commit_s + COMMIT_MARGIN_S


def when_to_change(
    nodes: Sequence[Node],
    hosts: Sequence[FailureDomain | None],
    *,
    wanted: Use | Wait,
    pace: Pace,
    now_unix_s: float,
) -> Change:
    """Whether the hosts of a generation should change, and when.

    Args:
      nodes: nodes of the last look.
      hosts: by host, the domain that it is in.
      wanted: what `choose_hosts` says to these nodes.
    """
    going = [node for node in nodes if node.is_draining and node.domain in hosts]
    domains = {node.domain for node in going}
    leaving = tuple(host for host, domain in enumerate(hosts) if domain in domains)
    if leaving:
        labels = sorted(domain.label for domain in domains)
        why = (
            f"{', '.join(labels)} is about to leave" if len(labels) == 1 else f"{', '.join(labels)} are about to leave"
        )
        deadlines = [node.drain_unix_s for node in going if node.drain_unix_s is not None]
        if not deadlines:
            return LeaveAtCommit(why=why)
        left_s = min(deadlines) - now_unix_s
        why = f"{why} in {max(0.0, left_s):.0f} s"
        if pace.to_commit_s is not None and pace.to_commit_s + pace.needed_s <= left_s:
            return LeaveAtCommit(why=why)
        if pace.needed_s <= left_s:
            return LeaveAfterWindow(why=why)
        return LeaveNow(why=f"{why}, and a commit may take {pace.needed_s:.0f} s", hosts=leaving)
    if isinstance(wanted, Use) and wanted.num_hosts > len(hosts):
        return LeaveAtCommit(why=wanted.why)
    return Stay()
