"""Which TPU slices a run uses, as a pure function of one look at the cluster.

A slice is used as a whole or not at all. Its devices are joined by links of their own, and a gang without one of its
members is of no use. It counts when all its machines are there, each with all its chips, and when it is of the kind
that the run requested. What `orchestrator.decisions.membership` says of single machines goes for the whole slice here:
if one of them is announced to go, all of them are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podembed.orchestrator.api.text import plural
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import Node, Rules, Slice, Use, Wait, choose_hosts, fits, rest, room

MAX_NAMED = 3


def choose(
    nodes: Sequence[Node], rules: Rules, *, quarantined: Mapping[FailureDomain, float], as_if_free: bool = False
) -> Use | Wait:
    """As `choose_hosts`, by slices where the run asks for some."""
    if rules.topology is None:
        return choose_hosts(nodes, rules, quarantined=quarantined, as_if_free=as_if_free)
    return choose_slices(nodes, rules, rules.topology, quarantined=quarantined, as_if_free=as_if_free)


def choose_slices(
    nodes: Sequence[Node],
    rules: Rules,
    topology: Topology,
    *,
    quarantined: Mapping[FailureDomain, float],
    as_if_free: bool = False,
) -> Use | Wait:
    """Chooses as many slices as there are, within the rules. Those that the run has already come first.

    Args:
      quarantined: slices not to be used, and for how many seconds yet. Not heeded for the only one of a cluster.
      as_if_free: count what others have reserved as well, and what is not yet known to be free again.
    """
    members = _members(nodes, topology)
    whole = {domain: found for domain, found in members.items() if _is_whole(found, rules, topology)}
    leaving = {domain for domain, found in whole.items() if any(node.is_draining for node in found)}
    resting = {domain: quarantined[domain] for domain in whole if domain in quarantined and len(whole) > 1}
    able = [domain for domain in whole if domain not in leaving and domain not in resting]
    ready = [domain for domain in able if all(_has_room(node, rules, topology, as_if_free) for node in whole[domain])]
    ready.sort(key=lambda domain: (-sum(node.own_hosts > 0 for node in whole[domain]), domain.name))
    why = _found(nodes, members, whole, topology, leaving=len(leaving), resting=resting, ready=len(ready))
    avoid = frozenset(node.id for domain in leaving | resting.keys() for node in whole[domain])
    if len(ready) * topology.hosts < rules.least:
        return Wait(found=len(ready) * topology.hosts, needed=rules.least, avoid=avoid, why=why)
    taken = sorted(ready[: rules.most // topology.hosts], key=lambda domain: domain.name)
    slices = tuple(Slice(name=domain.name, machines=tuple(node.id for node in whole[domain])) for domain in taken)
    return Use(num_hosts=len(slices) * topology.hosts, avoid=avoid, has_own_machines=True, why=why, slices=slices)


def _members(nodes: Sequence[Node], topology: Topology) -> dict[FailureDomain, list[Node]]:
    """The living machines of each slice of the requested kind, in the order of their numbers."""
    members: dict[FailureDomain, list[Node]] = {}
    for node in nodes:
        if node.part is not None and node.part.pod_type == topology.pod_type:
            members.setdefault(node.domain, []).append(node)
    for found in members.values():
        found.sort(key=lambda node: node.part.worker if node.part is not None else 0)
    return members


def _is_whole(found: Sequence[Node], rules: Rules, topology: Topology) -> bool:
    numbers = [node.part.worker for node in found if node.part is not None]
    return numbers == list(range(topology.hosts)) and all(fits(node.total, rules.resources) for node in found)


def _has_room(node: Node, rules: Rules, topology: Topology, as_if_free: bool) -> bool:
    """Whether a host can be put there. The machine that stands for a slice must not stand for another program's."""
    head = f"TPU-{topology.pod_type}-head"
    is_head_free = as_if_free or not node.total.get(head) or node.own_hosts > 0 or node.free.get(head, 0.0) >= 1
    return is_head_free and room(node, rules, as_if_free=as_if_free) > 0


def _found(
    nodes: Sequence[Node],
    members: Mapping[FailureDomain, Sequence[Node]],
    whole: Mapping[FailureDomain, Sequence[Node]],
    topology: Topology,
    *,
    leaving: int,
    resting: Mapping[FailureDomain, float],
    ready: int,
) -> str:
    parts = [f"{plural(len(whole), 'whole slice')} of {topology}"]
    if leaving:
        parts.append(f"{leaving} of them about to leave")
    if resting:
        parts.append(rest(resting.values()))
    if (busy := len(whole) - leaving - len(resting) - ready) > 0:
        parts.append(f"{busy} reserved by others")
    torn = [
        f"{domain.name} with {len({node.part for node in found})} of {plural(topology.hosts, 'machine')}"
        for domain, found in sorted(members.items(), key=lambda item: item[0].name)
        if domain not in whole
    ]
    if torn:
        more = f" and {len(torn) - MAX_NAMED} more" if len(torn) > MAX_NAMED else ""
        parts.append(f"incomplete: {', '.join(torn[:MAX_NAMED])}{more}")
    others = sorted({node.part.pod_type for node in nodes if node.part and node.part.pod_type != topology.pod_type})
    if others:
        parts.append(f"others are {', '.join(others)} instead of {topology.pod_type}")
    return f"{', '.join(parts)}; room for {plural(ready * topology.hosts, 'host')}"
