"""The watch over a made-up cluster and clock: waiting, growing, leaving, and what is remembered of faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.orchestrator.api.config import ConfigurationError, FailureConfig, ScalingConfig
from podembed.orchestrator.api.run_errors import CrashLoop, Failure, FailureKind, JobFailed, TooFewHosts, WorkerFailure
from podembed.orchestrator.decisions.failure_domain import FailureDomain
from podembed.orchestrator.decisions.host_watch import LOOK_S, SEEN_SETTLE_S, SETTLE_S, HostWatch
from podembed.orchestrator.decisions.membership import Node, Rules
from podembed.workers.liveness.progress import Phase, Progress
from podembed.workers.liveness.worker import Worker
from tests.clock import FakeClock
from tests.sentences import saying

DIED, PEER, ERROR = FailureKind.DIED, FailureKind.PEER, FailureKind.ERROR


@dataclass
class Machines(FakeClock):
    """A cluster of one-CPU machines by name, and the world's clock. `later`: what happens at which second."""

    free: dict[str, float] = field(default_factory=dict)
    draining: dict[str, float | None] = field(default_factory=dict)
    later: dict[float, Callable[[], None]] = field(default_factory=dict)
    now_s: float = 0.0
    silent: bool = False
    looks: int = 0
    avoided: frozenset[str] = frozenset()
    own_machines: bool = False
    asked: list[tuple[int, frozenset[str]] | None] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    domains: dict[str, FailureDomain] = field(default_factory=dict)
    least: int = 1
    most: int = 3
    may_share: bool = False

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        for at in sorted(at for at in self.later if at <= self.now_s):
            self.later.pop(at)()

    def domain(self, name: str) -> FailureDomain:
        return self.domains.get(name) or FailureDomain.of_machine(name)

    def left(self) -> frozenset[FailureDomain]:
        return frozenset(self.domain(name) for name in self.gone)

    def look(self, *, is_careful: bool = False) -> Sequence[Node] | None:
        self.looks += 1
        if self.silent:
            return None
        return [
            Node(
                id=name,
                domain=self.domain(name),
                total={"CPU": 1.0},
                free={"CPU": free},
                own_hosts=0 if free else 1,
                is_draining=name in self.draining,
                drain_unix_s=self.draining.get(name),
            )
            for name, free in self.free.items()
            if not (is_careful and name in self.deaf)
        ]

    def rules(self) -> Rules:
        return Rules(
            least=self.least, most=self.most, resources={"CPU": 1.0}, is_one_a_machine=False, may_share=self.may_share
        )

    def place(self, avoid: frozenset[str], *, has_own_machines: bool, slices: Sequence[Any] = ()) -> None:
        self.avoided, self.own_machines = avoid, has_own_machines

    def domain_of(self, handle: Any) -> FailureDomain | None:
        return self.domain(handle.machine)

    def began(self, handles: Sequence[Any]) -> None: ...

    def killed_for_memory(self, workers: Collection[str]) -> set[str]:
        return self.killed & set(workers)

    def machine_of(self, host: int) -> str:
        return f"10.0.0.{host}"

    def placed(self) -> Mapping[int, FailureDomain]:
        return {host: self.domain(name) for host, name in enumerate(sorted(self.free))}

    def ask(self, num_hosts: int, avoid: frozenset[str]) -> None:
        self.asked.append((num_hosts, avoid))

    def unask(self) -> None:
        self.asked.append(None)


@dataclass
class World:
    """A watch, its machines, and what was said."""

    machines: Machines
    watch: HostWatch
    said: list[str]
    is_proven: bool = True

    def begin(self, hosts: str, *, generation: int = 1) -> None:
        """A generation runs on these machines, a letter each."""
        for name in hosts:
            self.machines.free[name] = 0.0
        self.watch.began([SimpleNamespace(host=SimpleNamespace(machine=name)) for name in hosts], generation=generation)  # type: ignore[misc]

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.machines.now_s += LOOK_S
            self.watch.look()

    def fail(self, *failures: Failure, step: int | None = 7, has_committed: bool = False) -> Any:
        progress = Progress(step=step or 0, phase=Phase.GATHER, marks=1, step_unix_s=1.0)
        group: Any = SimpleNamespace(last_progress=lambda: [progress], is_proven=self.is_proven)
        if step is None:
            group = None
        return self.watch.failed(WorkerFailure(failures), group=group, has_committed=has_committed)


def world(machines: str = "", *, least: int = 1, most: int = 3, **limits: Any) -> World:
    found = Machines(free=dict.fromkeys(machines, 1.0), least=least, most=most)
    said: list[str] = []
    watch = HostWatch(
        found,
        scaling=ScalingConfig(num_hosts=(least, most)),
        limits=FailureConfig(**limits),
        emit=saying(said),
        describe_plan=lambda num_hosts: "a host holds 3 GiB",
        clock=found,
    )
    return World(found, watch, said)


def failure(worker: Worker, kind: FailureKind = DIED, message: str = "scripted", **marks: Any) -> Failure:
    return Failure(worker=worker, kind=kind, message=message, **marks)


def nothing() -> None: ...


def test_without_a_cluster_the_number_is_fixed() -> None:
    watch = HostWatch(None, scaling=ScalingConfig(num_hosts=2), limits=FailureConfig(), emit=lambda event: None)
    assert watch.choose(nothing, step=0) == 2
    watch.began([SimpleNamespace(host=None)] * 2, generation=1)  # type: ignore[list-item]
    watch.look()
    assert watch.leaves(is_at_commit=True) is None


@pytest.mark.parametrize(("machines", "num_hosts"), [("a", 1), ("ab", 2), ("abcd", 3)])
def test_a_generation_takes_what_there_is_at_once(machines: str, num_hosts: int) -> None:
    found = world(machines)
    assert found.watch.choose(nothing, step=0) == num_hosts
    assert found.machines.now_s == 0.0
    assert found.machines.own_machines
    assert found.machines.asked == [None], "nothing is asked of a cluster that has enough"


def test_what_the_last_generation_gave_back_is_waited_for_a_moment() -> None:
    found = world("ab")
    found.machines.free["b"] = 0.4
    found.machines.later[1.0] = lambda: found.machines.free.update(b=1.0)
    assert found.watch.choose(nothing, step=0) == 2
    assert 1.0 <= found.machines.now_s <= 2.0


def test_hosts_share_no_machine_only_because_another_is_not_yet_known_to_be_free() -> None:
    found = world("ab", least=2, most=2)
    found.machines.may_share = True
    found.machines.free["b"] = 0.4
    found.machines.later[1.0] = lambda: found.machines.free.update(b=1.0)
    assert found.watch.choose(nothing, step=0) == 2
    assert found.machines.own_machines
    assert found.machines.now_s == 1.0


def test_what_others_use_is_not_waited_for_long() -> None:
    found = world("ab")
    found.machines.free["b"] = 0.4
    assert found.watch.choose(nothing, step=0) == 1
    assert SETTLE_S <= found.machines.now_s <= SETTLE_S + 1
    assert found.said == ["1 host of 1 to 3 hosts: 2 machines; room for 1 host"]


def test_below_the_minimum_it_waits_asks_and_goes_on_when_a_machine_joins() -> None:
    found = world("a", least=2)
    found.machines.draining["a"] = None
    found.machines.later[40.0] = lambda: found.machines.free.update(b=1.0, c=1.0)
    polls: list[float] = []
    assert found.watch.choose(lambda: polls.append(found.machines.now_s), step=30) == 2
    assert found.machines.now_s == 40.0
    # The heartbeat is one of the things that are done meanwhile.
    assert max(after - before for before, after in itertools.pairwise(polls)) <= 1.0
    assert found.said[0] == (
        "waiting for hosts: 2 needed, found 1 machine, 1 of them about to leave; room for 0 hosts. Everything up to "
        "step 30 is committed. The run goes on as soon as there are enough, and ends in 598 s if there are not"
    )
    assert len(found.said) == 2, "it says that it waits once a minute, and then what it uses"
    assert set(found.machines.asked[:-1]) == {(2, frozenset("a"))}
    assert found.machines.asked[-1] is None
    assert found.machines.avoided == frozenset("a")


def test_the_wait_ends_with_what_was_found_and_where_the_state_is() -> None:
    found = world("a", least=2, wait_for_hosts_s=90.0)
    with pytest.raises(TooFewHosts) as caught:
        found.watch.choose(nothing, step=30)
    assert 90.0 <= found.machines.now_s <= 91.0
    text = str(caught.value)
    assert text.startswith(
        "Found 1 machine; room for 1 host, for 90 s. Expected room for at least 2 hosts with 1 CPU each."
    )
    assert "The state is intact at step 30" in text
    assert found.machines.asked[-1] is None
    assert sum(said.startswith("waiting") for said in found.said) == 2


def test_a_stop_ends_the_wait() -> None:
    def stop() -> None:
        if found.machines.now_s >= 5.0:
            raise KeyboardInterrupt

    found = world("", least=2)
    with pytest.raises(KeyboardInterrupt):
        found.watch.choose(stop, step=0)
    assert found.machines.asked[-1] is None


def test_a_cluster_that_does_not_answer_is_waited_for() -> None:
    found = world("a")
    found.machines.silent = True
    found.machines.later[10.0] = lambda: setattr(found.machines, "silent", False)
    assert found.watch.choose(nothing, step=0) == 1
    assert "the cluster does not answer" in found.said[0]


def test_a_machine_that_joins_is_used_after_a_commit_once_it_was_seen_twice() -> None:
    found = world("ab")
    found.begin("ab")
    found.look(3)
    assert found.watch.leaves(is_at_commit=True) is None
    found.machines.free["c"] = 1.0
    found.look()
    assert found.watch.leaves(is_at_commit=True) is None
    found.look()
    assert found.watch.leaves(is_at_commit=False) is None
    why = found.watch.leaves(is_at_commit=True)
    assert why == "3 machines; room for 3 hosts"
    assert found.said == ["hosts change at the next commit: 3 machines; room for 3 hosts"]
    found.watch.left(why, step=40)
    found.machines.now_s += 6.0
    assert found.watch.choose(nothing, step=40) == 3
    found.begin("abc", generation=2)
    (change,) = found.watch.changes
    assert (change.generation, change.step, change.before, change.after, change.seconds) == (2, 40, 2, 3, 6.0)
    assert found.said[-1] == "hosts changed from 2 to 3 at step 40 in 6.0 s: 3 machines; room for 3 hosts"
    found.look(3)
    assert found.watch.leaves(is_at_commit=True) is None


@pytest.mark.parametrize(("free_again_s", "num_hosts"), [(12.0, 2), (60.0, 1)])
def test_what_a_generation_ended_for_is_waited_for_longer(free_again_s: float, num_hosts: int) -> None:
    found = world("a")
    found.begin("a")
    found.machines.free["b"] = 1.0
    found.look(2)
    found.watch.left(str(found.watch.leaves(is_at_commit=True)), step=40)
    # The room is being given to this run: neither free any more nor known to be its own.
    left_s = found.machines.now_s
    found.machines.free["b"] = 0.4
    found.machines.later[left_s + free_again_s] = lambda: found.machines.free.update(b=1.0)
    assert found.watch.choose(nothing, step=40) == num_hosts
    assert found.machines.now_s - left_s == pytest.approx(min(free_again_s, SEEN_SETTLE_S), abs=0.5)


def test_a_machine_that_does_not_listen_yet_is_waited_for_where_a_generation_ended_for_it() -> None:
    found = world("a")
    found.begin("a")
    found.machines.free["b"] = 1.0
    found.look(2)
    found.watch.left(str(found.watch.leaves(is_at_commit=True)), step=40)
    left_s = found.machines.now_s
    found.machines.deaf.add("b")
    found.machines.later[left_s + 8.0] = found.machines.deaf.clear
    assert found.watch.choose(nothing, step=40) == 2
    assert found.machines.now_s == left_s + 8.0


def test_a_generation_does_not_end_for_a_machine_that_does_not_listen_yet() -> None:
    found = world("a")
    found.begin("a")
    found.machines.free["b"] = 1.0
    found.machines.deaf.add("b")
    found.look(4)
    assert found.watch.leaves(is_at_commit=True) is None
    found.machines.deaf.clear()
    found.look(2)
    assert found.watch.leaves(is_at_commit=True) == "2 machines; room for 2 hosts"


def test_a_machine_that_joins_and_goes_again_changes_nothing() -> None:
    found = world("ab")
    found.begin("ab")
    found.machines.free["c"] = 1.0
    found.look()
    del found.machines.free["c"]
    found.look()
    found.machines.free["c"] = 1.0
    found.look()
    assert found.watch.leaves(is_at_commit=True) is None


def test_the_cluster_is_not_asked_more_often_than_every_few_seconds() -> None:
    found = world("ab")
    found.begin("ab")
    for _ in range(600):
        found.machines.now_s += 0.05
        found.watch.look()
    assert found.machines.looks == pytest.approx(30 / LOOK_S, abs=1)


def test_a_draining_machine_is_left_at_the_next_commit_if_there_is_time() -> None:
    found = world("ab")
    found.begin("ab")
    found.watch.committed(2.0)
    found.watch.paced(to_commit_s=10.0)
    found.machines.draining["b"] = 40.0
    found.look()
    assert found.watch.leaves(is_at_commit=False) is None
    assert found.watch.leaves(is_at_commit=True) == "machine (b) is about to leave in 37 s"
    # The next commit has come to be too far away.
    found.watch.paced(to_commit_s=60.0)
    found.look()
    assert found.watch.leaves(is_at_commit=False) == "machine (b) is about to leave in 34 s"
    assert found.said[-1].startswith("hosts change after this window, which is committed")


def test_a_machine_that_goes_too_soon_is_given_up_at_once_and_costs_nothing() -> None:
    found = world("ab", max_failures=0)
    found.begin("ab")
    found.watch.committed(2.0)
    found.machines.draining["b"] = 5.0
    with pytest.raises(WorkerFailure) as caught:
        found.look()
    assert [failed.worker for failed in caught.value.failures] == [Worker("host", 1)]
    found.look(3)  # said once
    decision = found.fail(*caught.value.failures)
    assert decision.cause.startswith("host 1 lost its machine: machine (b) is about to leave in 2 s")
    assert found.watch.budget.preemptions == 1
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("b")


def test_a_commit_for_a_machine_that_goes_is_not_given_up_while_it_is_made() -> None:
    found = world("ab")
    found.begin("ab")
    found.watch.committed(2.0)
    found.machines.draining["b"] = 12.0
    found.look()
    why = found.watch.leaves(is_at_commit=False)
    assert why is not None
    found.watch.left(why, step=33)
    found.look(4)


@pytest.mark.parametrize(
    ("failures", "draining", "is_preemption"),
    [
        ([failure(Worker("host", 1)), failure(Worker("device", 1))], "b", True),
        ([failure(Worker("host", 1))], "a", False),
        ([failure(Worker("host", 1))], "", False),
        # What the others notice first: the end of a connection, the abort of a gang that lost a member.
        ([failure(Worker("host", 0), PEER)], "b", True),
        ([failure(Worker("device", 0)), failure(Worker("host", 0), PEER)], "b", True),
        ([failure(Worker("host", 0)), failure(Worker("host", 1))], "b", False),
    ],
)
def test_losses_of_announced_machines_are_no_faults(
    failures: list[Failure], draining: str, is_preemption: bool
) -> None:
    found = world("ab")
    found.begin("ab")
    found.machines.draining = dict.fromkeys(draining)
    found.fail(*failures)
    assert (found.watch.budget.preemptions, found.watch.budget.host_faults) == ((1, 0) if is_preemption else (0, 1))


def test_a_machine_that_is_gone_by_now_was_announced_before() -> None:
    found = world("ab")
    found.begin("ab")
    found.machines.draining["b"] = None
    found.look()
    del found.machines.free["b"]
    found.fail(failure(Worker("host", 1)))
    assert found.watch.budget.preemptions == 1


def test_a_machine_that_was_told_to_end_without_notice_is_no_fault_either() -> None:
    found = world("ab")
    found.begin("ab")
    del found.machines.free["b"]
    found.machines.gone = {"b"}
    found.fail(failure(Worker("host", 1)), failure(Worker("device", 1)))
    assert (found.watch.budget.preemptions, found.watch.budget.host_faults) == (1, 0)


def test_a_machine_on_which_hosts_fail_again_and_again_rests_and_comes_back() -> None:
    found = world("ab", max_failures=9, quarantine_s=30.0)
    found.begin("ab")
    found.look()
    found.fail(failure(Worker("host", 1)), failure(Worker("device", 1)), failure(Worker("device", 0)))
    assert found.watch.choose(nothing, step=0) == 2, "once is no habit"
    found.begin("ab")
    found.look()
    found.fail(failure(Worker("device", 1)), failure(Worker("host", 0), PEER))
    assert found.said[-1] == "machine (b) is not used for 30 s: hosts failed on it again and again"
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("b")
    found.begin("a")
    found.machines.free["b"] = 1.0
    found.look(5)
    assert found.watch.leaves(is_at_commit=True) is None
    found.machines.now_s += 30.0
    found.look(2)
    assert found.watch.leaves(is_at_commit=True) == "2 machines; room for 2 hosts"


def pair_and_single(**limits: Any) -> World:
    """Machines a, b and c, of which a and b fail as one."""
    found = world("abc", max_failures=9, **limits)
    found.machines.domains = dict.fromkeys("ab", FailureDomain("slice", "slice 0"))
    found.begin("abc")
    found.look()
    return found


def test_what_fails_as_one_is_charged_once_and_rests_as_a_whole() -> None:
    found = pair_and_single(quarantine_s=30.0)
    found.fail(failure(Worker("host", 0)), failure(Worker("host", 1)))
    assert found.watch.choose(nothing, step=0) == 3, "one fault, though two of its machines saw it"
    found.begin("abc")
    found.look()
    found.fail(failure(Worker("host", 1)))
    assert found.said[-1] == "slice 0 is not used for 30 s: hosts failed on it again and again"
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("ab")


def test_the_notice_of_one_machine_is_that_of_its_whole_domain() -> None:
    found = pair_and_single()
    found.watch.committed(2.0)
    found.machines.draining["a"] = 5.0
    with pytest.raises(WorkerFailure) as caught:
        found.look()
    assert [failed.worker for failed in caught.value.failures] == [Worker("host", 0), Worker("host", 1)]
    # The host on the other machine is lost with it, and that is no fault.
    found.fail(failure(Worker("host", 1)))
    assert (found.watch.budget.preemptions, found.watch.budget.host_faults) == (1, 0)
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("ab")


def test_machines_are_charged_with_hosts_that_fail_to_start() -> None:
    found = world("ab", max_failures=9)
    for _ in range(2):
        assert found.watch.choose(nothing, step=0) == 2
        found.fail(failure(Worker("host", 0)), step=None)
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("a")


NO_TPU = "Found no TPU for JAX on machine m1. Expected the chips. Install jax[tpu] on it."


def on_slices(machines: str, **limits: Any) -> World:
    """As `world`, with device processes that have chips. Each machine is a slice of its own."""
    found = world(machines, max_failures=9, **limits)
    slices = ScalingConfig(topology="2x4", accelerator_type="TPU-V6E", num_slices=(1, 3))
    found.watch = HostWatch(
        found.machines, scaling=slices, limits=FailureConfig(**limits), emit=saying(found.said), clock=found.machines
    )
    return found


def test_a_slice_whose_devices_do_not_come_up_rests_for_long_and_the_machine_is_named() -> None:
    found = on_slices("ab", quarantine_after=9, wait_for_hosts_s=50.0)
    for _ in range(2):
        assert found.watch.choose(nothing, step=0) == 2
        found.fail(failure(Worker("device", 1), message=NO_TPU), step=None)
    assert found.watch.choose(nothing, step=0) == 1
    assert found.machines.avoided == frozenset("b")
    rests = next(text for text in found.said if "is not used" in text)
    assert rests.startswith("machine (b) is not used for 3600 s: device 1 on machine 10.0.0.1 failed twice within")
    assert "libtpu" in rests
    found.machines.least = 2
    with pytest.raises(TooFewHosts, match=r"1 in quarantine.*device 1 on machine 10\.0\.0\.1 failed twice.*libtpu"):
        found.watch.choose(nothing, step=0)
    # The time that is left changes all the while, and is no news.
    assert sum(text.startswith("waiting") for text in found.said) == 1


@pytest.mark.parametrize(("worker", "after_s"), [("host", 1.0), ("device", 61.0)])
def test_what_fails_later_or_has_no_chips_rests_as_always(worker: Any, after_s: float) -> None:
    found = on_slices("ab", quarantine_after=9)
    for _ in range(2):
        found.begin("ab")
        found.machines.now_s += after_s
        found.fail(failure(Worker(worker, 1)))
    assert not any("is not used" in text for text in found.said)


def test_below_the_minimum_a_resting_machine_is_waited_for() -> None:
    found = world("ab", least=2, max_failures=9, quarantine_s=20.0)
    for _ in range(2):
        found.begin("ab")
        found.fail(failure(Worker("host", 1)))
        found.machines.free.update(a=1.0, b=1.0)
    assert found.watch.choose(nothing, step=0) == 2
    assert found.machines.now_s == pytest.approx(20.0, abs=1.0)
    assert "1 in quarantine" in found.said[0]


def test_faults_in_a_row_end_the_run_and_a_commit_in_between_does_not() -> None:
    found = world("ab", max_failures=1)
    for has_committed in (False, True, True):
        found.begin("ab")
        found.fail(failure(Worker("host", 1)), has_committed=has_committed)
    found.begin("ab")
    with pytest.raises(CrashLoop, match="fault 2 in a row"):
        found.fail(failure(Worker("host", 1)))


def test_faults_with_a_change_of_hosts_in_between_are_no_row() -> None:
    """As with a machine that cannot be reached from the others: each time it is tried again costs a fault, and those
    that are left train on.
    """
    found = world("ab", max_failures=1, quarantine_after=9)
    for _ in range(3):
        found.begin("ab")
        found.fail(failure(Worker("host", 1)))
        found.begin("a")
        found.watch.left("2 machines; room for 2 hosts", step=40)
    assert found.watch.budget.host_faults == 0


def test_the_jobs_own_exception_is_tried_once_more() -> None:
    found = world("ab", max_user_errors=5)
    found.begin("ab")
    found.fail(failure(Worker("device", 0), ERROR, details="Traceback"), step=12)
    found.begin("ab")
    with pytest.raises(JobFailed, match="(?s)device 0 failed: scripted\nIt came twice at step 12.*Traceback"):
        found.fail(failure(Worker("device", 0), ERROR, details="Traceback"), step=12)


def test_an_exception_at_the_start_is_not() -> None:
    found = world("ab", max_user_errors=5)
    found.watch.choose(nothing, step=0)
    with pytest.raises(JobFailed):
        found.fail(failure(Worker("device", 0), ERROR), step=None)


def test_a_plan_for_which_hosts_are_killed_is_tried_once_more_and_then_refused() -> None:
    found = world("ab", max_failures=9, quarantine_after=9)
    found.machines.killed = {Worker("host", 1)}
    assert found.watch.choose(nothing, step=0) == 2
    found.begin("ab")
    decision = found.fail(failure(Worker("host", 1)), failure(Worker("device", 0)))
    assert decision.cause.startswith("host 1 died: killed by the kernel for want of memory (scripted)")
    assert found.watch.choose(nothing, step=0) == 2
    found.begin("ab")
    with pytest.raises(
        ConfigurationError, match="second time with 2 hosts. The plan: a host holds 3 GiB. .*Use more hosts"
    ):
        found.fail(failure(Worker("host", 1)))
