"""How many hosts a run has and when they change, as tables of cases over made-up clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.membership import (
    Change,
    LeaveAfterWindow,
    LeaveAtCommit,
    LeaveNow,
    Node,
    Pace,
    Rules,
    Stay,
    Use,
    Wait,
    choose_hosts,
    room,
    when_to_change,
)

NOW = 1_000.0


def machine(name: str, free: float = 1.0, *, total: float | None = None, own: int = 0) -> Node:
    total = free + own if total is None else total
    domain = FailureDomain.of_machine(name, f"10.0.0.{ord(name)}")
    return Node(id=name, domain=domain, total={"CPU": total}, free={"CPU": free}, own_hosts=own)


def together(*nodes: Node) -> list[Node]:
    """The machines as one failure domain, named after all of them."""
    name = "".join(node.id for node in nodes)
    return [replace(node, domain=FailureDomain(name, f"slice {name}")) for node in nodes]


def resting(seconds: dict[str, float]) -> dict[FailureDomain, float]:
    return {FailureDomain(name): left_s for name, left_s in seconds.items()}


def draining(node: Node, *, by: float | None = None) -> Node:
    return replace(node, is_draining=True, drain_unix_s=by)


HEAD = machine("h", 0.0)
A, B, C = machine("a"), machine("b"), machine("c")
BIG = machine("x", 8.0)


def rules(least: int, most: int, *, cpu: float = 1.0, one_each: bool = False, share: bool = False) -> Rules:
    return Rules(least=least, most=most, resources={"CPU": cpu}, is_one_a_machine=one_each, may_share=share)


@pytest.mark.parametrize(
    ("node", "cpu", "one_each", "places"),
    [
        (A, 1.0, False, 1),
        (BIG, 1.0, False, 8),
        (BIG, 3.0, False, 2),
        (BIG, 1.0, True, 1),
        (HEAD, 1.0, False, 0),
        (machine("b", 0.0, own=2), 1.0, False, 2),
        (machine("b", 1.0, own=2), 1.0, False, 3),
        (machine("b", 1.0, own=2), 1.0, True, 1),
        # A third of a CPU as the cluster counts it.
        (machine("b", 0.999), 0.333, False, 3),
    ],
)
def test_room_counts_what_is_free_and_what_the_run_holds(node: Node, cpu: float, one_each: bool, places: int) -> None:
    assert room(node, rules(1, 9, cpu=cpu, one_each=one_each)) == places


def test_what_a_host_needs_none_of_limits_nothing() -> None:
    asked = replace(rules(1, 9), resources={"CPU": 1.0, "GPU": 0.0})
    assert room(Node(id="a", domain=FailureDomain("a"), total={"CPU": 3.0}, free={"CPU": 3.0}), asked) == 3


@pytest.mark.parametrize(
    ("nodes", "asked", "quarantined", "num_hosts", "avoid", "own_machines"),
    [
        ([HEAD, A, B], rules(1, 3), {}, 2, "", True),
        ([HEAD, A, B, C], rules(1, 3), {}, 3, "", True),
        ([HEAD, A, B, C], rules(1, 2), {}, 2, "", True),
        ([HEAD, A, B, C], rules(3, 3), {}, 3, "", True),
        ([HEAD, draining(A), B, C], rules(1, 3), {}, 2, "a", True),
        ([HEAD, A, B, C], rules(1, 3), {"b": 9.0}, 2, "b", True),
        # The only machine there is is used whatever happened on it.
        ([HEAD, A], rules(1, 3), {"a": 9.0}, 1, "", True),
        # A machine that could never carry a host does not count as another one.
        ([machine("h", 0.5), A], rules(1, 3), {"a": 9.0}, 1, "", True),
        ([HEAD, BIG], rules(2, 4), {}, 4, "", False),
        ([HEAD, BIG, A], rules(1, 4, one_each=True), {}, 2, "", True),
        # A fixed number of hosts shares what machines there are, however few.
        ([HEAD, A], rules(3, 3, share=True), {}, 3, "", False),
        ([HEAD, A, B], rules(3, 3, share=True), {"b": 9.0}, 3, "b", False),
        ([machine("a", 0.0, total=2.0)], rules(2, 2, cpu=1.0, share=True), {}, 2, "", False),
        # With room for all, but not on machines of their own: Ray must not be asked for the impossible.
        ([machine("a", 0.0, total=1.0), machine("b", 2.0)], rules(2, 2), {}, 2, "", False),
        # What fails together is left, and rests, together.
        ([HEAD, *together(draining(A), B), C], rules(1, 3), {}, 1, "ab", True),
        ([HEAD, *together(A, B), C], rules(1, 3), {"ab": 9.0}, 1, "ab", True),
        # A domain that is the only one is used whatever happened in it, however many machines it has.
        ([*together(A, B)], rules(1, 3), {"ab": 9.0}, 2, "", True),
    ],
)
def test_as_many_hosts_as_there_is_room_for(
    nodes: list[Node], asked: Rules, quarantined: dict[str, float], num_hosts: int, avoid: str, own_machines: bool
) -> None:
    decision = choose_hosts(nodes, asked, quarantined=resting(quarantined))
    assert isinstance(decision, Use)
    assert (decision.num_hosts, decision.avoid, decision.has_own_machines) == (
        num_hosts,
        frozenset(avoid),
        own_machines,
    )


@pytest.mark.parametrize(
    ("nodes", "asked", "quarantined", "found", "why"),
    [
        ([HEAD], rules(1, 3), {}, 0, "0 machines; room for 0 hosts"),
        ([HEAD, A], rules(2, 3), {}, 1, "1 machine; room for 1 host"),
        ([HEAD, BIG], rules(2, 3, one_each=True), {}, 1, "1 machine; room for 1 host"),
        ([draining(A), B], rules(2, 3), {}, 1, "2 machines, 1 of them about to leave; room for 1 host"),
        ([draining(A)], rules(1, 1, share=True), {}, 0, "1 machine, 1 of them about to leave; room for 0 hosts"),
        (
            [A, B, C],
            rules(2, 3),
            {"a": 40.4, "b": 7.0},
            1,
            "3 machines, 2 in quarantine, the next one for up to 10 s yet; room for 1 host",
        ),
        (
            [*together(draining(A), B), C],
            rules(2, 3),
            {},
            1,
            "3 machines, 2 of them about to leave; room for 1 host",
        ),
        # Others use it.
        ([machine("a", 0.2, total=1.0)], rules(1, 1), {}, 0, "1 machine; room for 0 hosts"),
    ],
)
def test_below_the_minimum_it_waits_and_says_what_it_found(
    nodes: list[Node], asked: Rules, quarantined: dict[str, float], found: int, why: str
) -> None:
    decision = choose_hosts(nodes, asked, quarantined=resting(quarantined))
    assert isinstance(decision, Wait)
    assert (decision.found, decision.needed, decision.why) == (found, asked.least, why)


def test_what_is_about_to_be_free_counts_if_asked_so() -> None:
    busy = [machine("a", 0.0, total=1.0), B]
    now = choose_hosts(busy, rules(1, 2), quarantined={})
    soon = choose_hosts(busy, rules(1, 2), quarantined={}, as_if_free=True)
    assert isinstance(now, Use)
    assert isinstance(soon, Use)
    assert (now.num_hosts, soon.num_hosts) == (1, 2)


@given(
    machines=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()), max_size=8),
    least=st.integers(1, 6),
    more=st.integers(0, 6),
    one_each=st.booleans(),
    a_domain=st.integers(1, 4),
)
def test_the_range_is_kept_and_leaving_machines_are_never_counted(
    machines: list[tuple[int, int, bool, bool]], least: int, more: int, one_each: bool, a_domain: int
) -> None:
    nodes = [
        Node(
            id=str(at),
            domain=FailureDomain(str(at // a_domain)),
            total={"CPU": free + own},
            free={"CPU": free},
            own_hosts=own,
            is_draining=goes,
        )
        for at, (free, own, goes, _) in enumerate(machines)
    ]
    bad = {FailureDomain(str(at // a_domain)): 5.0 for at, (*_, rests) in enumerate(machines) if rests}
    asked = rules(least, least + more, one_each=one_each)
    decision = choose_hosts(nodes, asked, quarantined=bad)
    usable = [node for node in nodes if node.id not in decision.avoid]
    assert not any(node.is_draining and node.total["CPU"] for node in usable)
    # A domain is used as a whole or not at all.
    able = [node for node in nodes if node.total["CPU"]]
    assert not {node.domain for node in usable if node in able} & {
        node.domain for node in able if node.id in decision.avoid
    }
    places = sum(room(node, asked) for node in usable)
    if isinstance(decision, Use):
        assert least <= decision.num_hosts == min(places, least + more)
    else:
        assert places == decision.found < least


PACE = Pace(to_commit_s=20.0, commit_s=2.0)  # a commit that begins now is there within 7 s
THREE = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("nodes", "hosts", "pace", "change"),
    [
        ([A, B, C], THREE, PACE, Stay()),
        ([A, B, C], ["a", "b"], PACE, LeaveAtCommit(why="3 machines; room for 3 hosts")),
        ([A, B, C], ["a", "b", "x", "y"], PACE, Stay()),
        # Machines that are about to leave and that the run is not on.
        ([A, B, C, draining(machine("d"), by=NOW)], THREE, PACE, Stay()),
        ([draining(A), B, C], THREE, PACE, LeaveAtCommit(why="10.0.0.97 (a) is about to leave")),
        (
            [draining(A), draining(B)],
            ["a", "b"],
            PACE,
            LeaveAtCommit(why="10.0.0.97 (a), 10.0.0.98 (b) are about to leave"),
        ),
        ([draining(A, by=NOW + 30), B, C], THREE, PACE, LeaveAtCommit(why="10.0.0.97 (a) is about to leave in 30 s")),
        ([draining(A, by=NOW + 27), B, C], THREE, PACE, LeaveAtCommit(why="10.0.0.97 (a) is about to leave in 27 s")),
        (
            [draining(A, by=NOW + 26), B, C],
            THREE,
            PACE,
            LeaveAfterWindow(why="10.0.0.97 (a) is about to leave in 26 s"),
        ),
        ([draining(A, by=NOW + 7), B, C], THREE, PACE, LeaveAfterWindow(why="10.0.0.97 (a) is about to leave in 7 s")),
        (
            [A, draining(B, by=NOW + 6), C],
            THREE,
            PACE,
            LeaveNow(why="10.0.0.98 (b) is about to leave in 6 s, and a commit may take 7 s", hosts=(1,)),
        ),
        (
            [A, draining(B, by=NOW - 1), C],
            ["b", "a", "b"],
            PACE,
            LeaveNow(why="10.0.0.98 (b) is about to leave in 0 s, and a commit may take 7 s", hosts=(0, 2)),
        ),
        # Commits follow the clock: when the next one comes is not known.
        (
            [draining(A, by=NOW + 60), B, C],
            THREE,
            replace(PACE, to_commit_s=None),
            LeaveAfterWindow(why="10.0.0.97 (a) is about to leave in 60 s"),
        ),
        (
            [draining(A), B, C],
            THREE,
            replace(PACE, to_commit_s=None),
            LeaveAtCommit(why="10.0.0.97 (a) is about to leave"),
        ),
        # The earliest deadline counts.
        (
            [draining(A, by=NOW + 90), draining(B, by=NOW + 8), C],
            THREE,
            PACE,
            LeaveAfterWindow(why="10.0.0.97 (a), 10.0.0.98 (b) are about to leave in 8 s"),
        ),
        # One machine of a domain takes the hosts on the others with it.
        (
            [*together(A, draining(B, by=NOW + 6)), C],
            ["ab", "ab", "c"],
            PACE,
            LeaveNow(why="slice ab is about to leave in 6 s, and a commit may take 7 s", hosts=(0, 1)),
        ),
        (
            [*together(A, draining(machine("h", 0.0))), C],
            ["ah", "c"],
            PACE,
            LeaveAtCommit(why="slice ah is about to leave"),
        ),
    ],
)
def test_when_hosts_change(nodes: list[Node], hosts: list[str], pace: Pace, change: Change) -> None:
    wanted = choose_hosts(nodes, rules(1, 3), quarantined={})
    domains = [FailureDomain(name) for name in hosts]
    assert when_to_change(nodes, domains, wanted=wanted, pace=pace, now_unix_s=NOW) == change


def test_a_machine_that_goes_is_left_even_if_nothing_can_take_its_place() -> None:
    wanted = choose_hosts([draining(A)], rules(1, 1), quarantined={})
    assert isinstance(wanted, Wait)
    assert isinstance(
        when_to_change([draining(A)], [A.domain], wanted=wanted, pace=PACE, now_unix_s=NOW), LeaveAtCommit
    )
