"""Who is at fault when nothing is finished: by following who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podembed.orchestrator.api.run_errors import Failure, FailureKind, cause
from podembed.orchestrator.group.waiting import blocked, charged, severed
from podembed.workers.liveness.progress import Phase, Progress
from podembed.workers.liveness.worker import Worker


def at(phase: str, *waits_for: Worker, step: int = 812, phase_s: float = 12.0) -> Progress:
    return Progress(step=step, phase=Phase(phase), marks=1, step_unix_s=1.0, phase_s=phase_s, waits_for=waits_for)


def kinds(progress: dict[Worker, Progress], workers: list[Worker] | None = None) -> dict[Worker, str]:
    found = blocked(progress, workers or list(progress), timeout_s=30.0)
    return {failure.worker: failure.kind.value for failure in found}


def test_the_host_that_waits_for_nobody_is_at_fault_and_the_pair_is_named() -> None:
    progress = {
        Worker("host", 0): at("activation exchange", Worker("host", 1)),
        Worker("host", 1): at("update", step=811, phase_s=14.0),
        Worker("host", 2): at("activation exchange", Worker("host", 1)),
    }
    failures = blocked(progress, list(progress), timeout_s=30.0)
    assert (failures[0].worker, failures[0].kind) == (Worker("host", 1), FailureKind.HUNG)
    assert {f.kind for f in failures[1:]} == {FailureKind.PEER}
    assert (
        "it is in update of step 811 for 14 s; host 0 has waited 12 s in activation exchange of step 812 for host 1"
        in failures[0].message
    )
    assert "and 1 more wait for it" in failures[0].message
    assert (
        failures[1].message
        == "has waited 12 s in activation exchange of step 812 for host 1, which is in update of step 811"
    )
    assert cause(failures).startswith("host 1 hung: nothing finished for 30 s")


def test_a_chain_leads_to_its_end() -> None:
    progress = {
        Worker("host", 0): at("id exchange", Worker("host", 2)),
        Worker("device", 0): at("wait for host", Worker("host", 0)),
        Worker("host", 2): at("device", Worker("device", 2)),
        Worker("device", 2): at("serve"),
    }
    assert kinds(progress) == {
        Worker("device", 2): "hung",
        Worker("host", 0): "peer",
        Worker("device", 0): "peer",
        Worker("host", 2): "peer",
    }


def test_two_that_wait_for_each_other_are_a_cut_network_and_others_only_wait() -> None:
    progress = {
        Worker("host", 0): at("activation exchange", Worker("host", 1)),
        Worker("host", 1): at("activation exchange", Worker("host", 0)),
        Worker("host", 2): at("gradient exchange", Worker("host", 0), Worker("host", 1)),
    }
    failures = {f.worker: f for f in blocked(progress, list(progress), timeout_s=30.0)}
    assert {w: f.kind.value for w, f in failures.items()} == {
        Worker("host", 0): "hung",
        Worker("host", 1): "hung",
        Worker("host", 2): "peer",
    }
    assert (
        "they wait for each other, so look at the network between host 0 and host 1"
        in failures[Worker("host", 0)].message
    )
    assert "network" not in failures[Worker("host", 2)].message


def test_a_longer_circle_is_found_too() -> None:
    progress = {Worker("host", host): at("activation exchange", Worker("host", (host + 1) % 3)) for host in range(3)}
    assert set(kinds(progress).values()) == {"hung"}


def test_one_that_never_answered_is_at_fault_and_said_to_be_silent() -> None:
    failures = blocked(
        {Worker("host", 0): at("id exchange", Worker("host", 1))},
        [Worker("host", 0), Worker("host", 1)],
        timeout_s=30.0,
    )
    assert [(f.worker, f.kind.value) for f in failures] == [(Worker("host", 1), "hung"), (Worker("host", 0), "peer")]
    assert failures[0].message == "no answer for 30 s"
    assert "host 1, which does not answer" in failures[1].message


def test_many_that_are_waited_for_are_not_all_listed() -> None:
    progress = {Worker("host", 0): at("id exchange", *(Worker("host", host) for host in range(1, 10)))}
    (failure,) = blocked(progress, [Worker("host", 0)], timeout_s=30.0)
    assert "and 5 more" in failure.message
    assert "host 9" not in failure.message


@pytest.mark.parametrize("num_hosts", [2, 3, 8])
def test_there_is_always_somebody_at_fault(num_hosts: int) -> None:
    every = [Worker("host", host) for host in range(num_hosts)]
    for phases in (
        {host: at("update") for host in every},
        {host: at("activation exchange", *(other for other in every if other != host)) for host in every},
        {},
    ):
        assert any(f.kind is FailureKind.HUNG for f in blocked(phases, every, timeout_s=30.0))


def hears_not(**unheard_s: float) -> Progress:
    return replace(at("id exchange"), unheard_s={int(name[1:]): seconds for name, seconds in unheard_s.items()})


@pytest.mark.parametrize(
    ("progress", "silent", "guilty"),
    [
        ({Worker("host", 0): hears_not(h1=6.0), Worker("host", 1): hears_not(h0=6.0)}, (), Worker("host", 1)),
        ({Worker("host", 0): hears_not(), Worker("host", 1): hears_not(h0=6.0)}, (), Worker("host", 1)),
        (
            {Worker("host", 1): hears_not(h0=6.0), Worker("host", 0): at("idle")},
            (Worker("host", 0),),
            Worker("host", 0),
        ),
        (
            {
                Worker("host", 0): hears_not(h1=6.0),
                Worker("host", 2): hears_not(h1=6.0),
                Worker("host", 1): hears_not(h0=6.0, h2=6.0),
            },
            (),
            Worker("host", 1),
        ),
        (
            {
                Worker("host", 0): hears_not(h1=6.0, h2=6.0),
                Worker("host", 1): hears_not(),
                Worker("host", 2): hears_not(),
            },
            (),
            Worker("host", 0),
        ),
    ],
    ids=["both say so", "one says so", "the other one is silent", "one lacks two", "two lack one"],
)
def test_of_hosts_that_do_not_hear_each_other_the_one_with_most_such_links_is_at_fault(
    progress: dict[Worker, Progress], silent: tuple[Worker, ...], guilty: Worker
) -> None:
    first, *others = severed(progress, silent=silent, unheard_s=5.0)
    assert (first.worker, first.kind) == (guilty, FailureKind.HUNG)
    assert all(failure.kind is FailureKind.PEER and failure.worker != guilty for failure in others)


def test_short_silences_and_those_that_a_silent_host_spoke_of_before_are_nothing() -> None:
    assert severed({Worker("host", 0): hears_not(h1=4.0)}, silent=(), unheard_s=5.0) == []
    assert severed({Worker("host", 0): hears_not(h1=9.0)}, silent=(Worker("host", 0),), unheard_s=5.0) == []


def no_way(worker: Worker, *others: Worker) -> Failure:
    return Failure(worker=worker, kind=FailureKind.PEER, message="no connection", unreached=others)


def test_a_host_that_the_others_found_no_way_to_is_charged() -> None:
    first, *rest = charged([no_way(Worker("host", 1), Worker("host", 0)), no_way(Worker("host", 2), Worker("host", 0))])
    assert (first.worker, first.kind, len(rest)) == (Worker("host", 0), FailureKind.HUNG, 2)
    assert "between host 1 and host 0" in first.message


def test_of_two_that_found_no_way_to_each_other_the_same_one_is_charged_each_time() -> None:
    assert charged([no_way(Worker("host", 1), Worker("host", 0))])[0].worker == Worker("host", 1)


def test_where_somebody_died_or_nobody_lacks_a_way_nobody_else_is_charged() -> None:
    died = Failure(worker=Worker("host", 0), kind=FailureKind.DIED, message="killed")
    assert list(charged([died, no_way(Worker("host", 1), Worker("host", 0))])) == [
        died,
        no_way(Worker("host", 1), Worker("host", 0)),
    ]
    assert list(charged([no_way(Worker("host", 1))])) == [no_way(Worker("host", 1))]
