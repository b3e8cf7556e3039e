"""Which slices a run uses, as cases over made-up clusters. A slice here has two machines of four chips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import (
    LeaveAfterWindow,
    LeaveAtCommit,
    Node,
    Pace,
    Rules,
    SliceMember,
    Use,
    Wait,
    when_to_change,
)
from podembed.orchestrator.decisions.slices import choose

CUBE = Topology.of("2x2x2", "TPU-V4")
OTHER = Topology.of("2x2x4", "TPU-V4")


def machine(name: str, worker: int, *, kind: Topology = CUBE, **marks: Any) -> Node:
    own = marks.pop("own_hosts", 0)
    resources = {"CPU": 8.0, "TPU": 4.0} | ({f"TPU-{kind.pod_type}-head": 1.0} if not worker else {})
    return Node(
        id=f"{name}{worker}",
        domain=FailureDomain(name, f"slice {name}"),
        total=resources,
        free=dict.fromkeys(resources, 0.0) if own else resources,
        own_hosts=own,
        part=SliceMember(pod_type=kind.pod_type, worker=worker),
        **marks,
    )


def whole(names: str, **marks: Any) -> list[Node]:
    return [machine(name, worker, **marks) for name in names for worker in (1, 0)]


def rules(least: int, most: int) -> Rules:
    return Rules(
        least=2 * least,
        most=2 * most,
        resources={"CPU": 1.0, "TPU": 4.0},
        is_one_a_machine=True,
        may_share=False,
        topology=CUBE,
    )


def names(found: Use | Wait) -> str:
    assert isinstance(found, Use), found
    assert found.num_hosts == 2 * len(found.slices)
    return "".join(chosen.name for chosen in found.slices)


def chosen(nodes: Sequence[Node], least: int = 1, most: int = 2, resting: str = "", **how: Any) -> Use | Wait:
    return choose(nodes, rules(least, most), quarantined={FailureDomain(name): 9.0 for name in resting}, **how)


def test_hosts_are_numbered_by_slice_and_machine() -> None:
    found = chosen(whole("ba"))
    assert isinstance(found, Use)
    assert [one.machines for one in found.slices] == [("a0", "a1"), ("b0", "b1")]
    assert found.has_own_machines


@pytest.mark.parametrize(
    ("nodes", "slices", "why"),
    [
        (whole("abc"), "ab", "3 whole slices of 2x2x2 TPU-V4; room for 6 hosts"),
        ([*whole("a"), machine("b", 1)], "a", "incomplete: b with 1 of 2 machines"),
        ([*whole("a"), *whole("b", is_draining=True)], "a", "1 of them about to leave"),
        ([*whole("a"), machine("b", 0), machine("b", 1, is_draining=True)], "a", "1 of them about to leave"),
        ([*whole("a"), *whole("b", kind=OTHER)], "a", "others are v4-32 instead of v4-16"),
        ([*whole("a"), machine("b", 0), replace(machine("b", 1), free={"CPU": 8.0})], "a", "1 reserved by others"),
        ([*whole("a"), replace(machine("b", 0), free={"CPU": 8.0, "TPU": 4.0}), machine("b", 1)], "a", "1 reserved"),
        ([*whole("a"), machine("b", 0), machine("b", 0)], "a", "incomplete: b"),
        ([*whole("a"), machine("b", 0), replace(machine("b", 1), total={"TPU": 2.0})], "a", "incomplete: b"),
        # Those that are held go first, and the order is by name all the same.
        ([*whole("ab"), *whole("cd", own_hosts=1)], "cd", "4 whole"),
        ([*whole("ab"), *whole("c", own_hosts=1)], "ac", "3 whole"),
    ],
)
def test_a_slice_counts_as_a_whole(nodes: Sequence[Node], slices: str, why: str) -> None:
    found = chosen(nodes)
    assert names(found) == slices
    assert why in found.why


def test_a_slice_that_rests_is_left_as_a_whole_unless_it_is_the_only_one() -> None:
    assert names(chosen(whole("ab"), resting="a")) == "b"
    assert chosen(whole("ab"), resting="a").avoid == {"a0", "a1"}
    assert names(chosen(whole("a"), resting="a")) == "a"
    both = chosen(whole("ab"), resting="ab")
    assert isinstance(both, Wait)
    assert "2 in quarantine, the next one for up to 10 s yet" in both.why


def test_too_few_are_waited_for_and_what_is_given_back_counts_soon() -> None:
    busy = [replace(node, free={}) for node in whole("ab")]
    found = chosen(busy, 2, 2)
    assert (found.found, found.needed) == (0, 4) if isinstance(found, Wait) else False
    assert names(chosen(busy, 2, 2, as_if_free=True)) == "ab"


def test_machines_without_a_slice_are_no_part_of_one() -> None:
    plain = Node(id="x", domain=FailureDomain("x"), total={"CPU": 9.0, "TPU": 4.0}, free={"CPU": 9.0, "TPU": 4.0})
    assert names(chosen([plain, *whole("a")])) == "a"
    assert isinstance(chosen([plain]), Wait)


def test_a_notice_for_one_machine_is_one_for_its_slice() -> None:
    nodes = [*whole("a", own_hosts=1), machine("b", 0, own_hosts=1), machine("b", 1, own_hosts=1, is_draining=True)]
    hosts = [FailureDomain(name) for name in "aabb"]
    pace = Pace(to_commit_s=5.0, commit_s=1.0)
    change = when_to_change(nodes, hosts, wanted=chosen(nodes), pace=pace, now_unix_s=0.0)
    assert isinstance(change, LeaveAtCommit)
    assert "slice b is about to leave" in change.why
    soon = [replace(node, drain_unix_s=8.0 if node.is_draining else None) for node in nodes]
    assert isinstance(when_to_change(soon, hosts, wanted=chosen(soon), pace=pace, now_unix_s=0.0), LeaveAfterWindow)
    assert names(chosen(nodes)) == "a"


def test_a_slice_that_joins_is_taken_up_at_a_commit() -> None:
    nodes = [*whole("a", own_hosts=1), *whole("b")]
    pace = Pace(to_commit_s=5.0, commit_s=1.0)
    hosts = [FailureDomain("a")] * 2
    assert isinstance(when_to_change(nodes, hosts, wanted=chosen(nodes), pace=pace, now_unix_s=0.0), LeaveAtCommit)


@given(
    machines=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.booleans(), st.sampled_from([CUBE, CUBE, OTHER]))
    ),
    resting=st.sets(st.sampled_from("abcd")),
    least=st.integers(1, 2),
    most=st.integers(2, 4),
)
def test_whatever_there_is_no_machine_is_used_twice_or_alone(
    machines: list[tuple[str, int, bool, Topology]], resting: set[str], least: int, most: int
) -> None:
    nodes = [
        replace(machine(name, worker, kind=kind, is_draining=drains), id=str(at))
        for at, (name, worker, drains, kind) in enumerate(machines)
    ]
    found = chosen(nodes, least, most, resting="".join(resting))
    if isinstance(found, Wait):
        assert found.found < 2 * least
        return
    assert 2 * least <= found.num_hosts <= 2 * most
    used = [node for one in found.slices for node in one.machines]
    assert len(used) == len(set(used)) == found.num_hosts
    for one in found.slices:
        parts = [nodes[int(node)] for node in one.machines]
        assert [(node.domain.name, node.part and node.part.worker) for node in parts] == [(one.name, 0), (one.name, 1)]
        assert not any(node.is_draining for node in parts)
