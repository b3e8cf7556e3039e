"""Frozen, starved, cut off and stuck are told apart; time passes by a fake clock, and the processes are described by a
script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.orchestrator.api.run_errors import Failure, FailureKind
from podembed.orchestrator.group.watch import CallWatch, Deadlines, Silence, why_frozen
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.progress import Phase, Progress, Tracker
from podembed.workers.liveness.worker import Worker
from tests.clock import FakeClock

DEADLINES = Deadlines()


def statistics(cpu_s: float = 1.0, state: str = "S", process: int = 7) -> ProcessStatistics:
    return ProcessStatistics(process=process, started=1, cpu_s=cpu_s, state=state)


@dataclass
class Scripted(FakeClock):
    """A group of hosts, its backend and its clock in one. `frozen` answer nothing; the status calls of `dead` fail;
    `looks` are what the kernel says of a worker; the machines of `lost` take no connection; `unheard_s` is what workers
    say that they do not hear.
    """

    hosts: int = 2
    deadlines: Deadlines = DEADLINES
    frozen: set[Worker] = field(default_factory=set)
    dead: set[Worker] = field(default_factory=set)
    lost: set[Worker] = field(default_factory=set)
    unheard_s: dict[Worker, dict[int, float]] = field(default_factory=dict)
    looks: dict[Worker, Callable[[float], ProcessStatistics | None]] = field(default_factory=dict)
    marks: Callable[[float], int] = lambda now_s: int(now_s)
    phase: str = "update"
    now_s: float = 0.0
    progress: dict[Worker, Progress] = field(default_factory=dict)
    silences: dict[Worker, Any] = field(default_factory=dict)

    @property
    def clock(self) -> Any:
        return self

    @property
    def backend(self) -> Any:
        return self

    @property
    def handles(self) -> Any:
        return [
            SimpleNamespace(host=Handle(Worker("host", at)), device=Handle(Worker("device", at)))
            for at in range(self.hosts)
        ]

    def settled(self, calls: Sequence[Any], *, timeout_s: float) -> tuple[list[Any], list[Any]]:
        return [c for c in calls if c.worker not in self.frozen], [c for c in calls if c.worker in self.frozen]

    def result(self, call: Any) -> Failure | None:
        if call.worker in self.dead:
            return Failure(worker=call.worker, kind=FailureKind.DIED, message="Worker unexpectedly exits")
        return None

    def note(self, worker: Worker, answer: Any) -> None:
        self.progress[worker] = Progress(
            step=3,
            phase=Phase(self.phase),
            marks=self.marks(self.now_s),
            step_unix_s=1.0,
            phase_s=1.0,
            unheard_s=self.unheard_s.get(worker, {}),
        )

    def cut_off(self, workers: Sequence[Any]) -> frozenset[Worker]:
        return frozenset(handle.worker for handle in workers if handle.worker in self.lost)

    def statistics(self, handle: Any) -> ProcessStatistics | None:
        return self.looks.get(handle.worker, lambda _: None)(self.now_s)


@dataclass(frozen=True)
class Handle:
    worker: Worker

    def control(self, method: str) -> Any:
        assert method == "status"
        return self

    def call(self) -> Any:
        return self


def run(
    group: Scripted,
    *,
    until_s: float = 400.0,
    timeout_s: float = 120.0,
    counts_marks: bool = True,
    gap_s: float = 0.2,
    runs_function: bool = False,
) -> Any:
    """(seconds until the first failures, those failures), or None if there were none by `until_s`.

    With `runs_function` only device processes have something to do, a function of the user.
    """
    devices: Any = [pair.device for pair in group.handles]
    patient_with = {device.worker for device in devices} if runs_function else ()
    watch = CallWatch(group, timeout_s=timeout_s, counts_marks=counts_marks, patient_with=patient_with)  # type: ignore[arg-type]
    began_s = group.now_s
    running: Any = [*([] if runs_function else [pair.host for pair in group.handles]), *devices]
    while group.now_s < began_s + until_s:
        group.now_s += gap_s
        if failures := watch.check(running):
            return group.now_s - began_s, failures
    return None


def settle(group: Scripted) -> None:
    """Lets everybody answer once."""
    frozen, group.frozen = group.frozen, set()
    assert run(group, until_s=4.0) is None
    group.frozen = frozen


def stopped(_: float) -> ProcessStatistics:
    return statistics(state="T")


def starved(now_s: float) -> ProcessStatistics:
    return statistics(cpu_s=0.01 * int(now_s))


def test_a_process_that_stopped_in_one_round_of_calls_is_found_in_the_next_one_without_a_new_wait() -> None:
    """A start is made of rounds that take seconds each."""
    group = Scripted(frozen={Worker("device", 1)}, looks={Worker("device", 1): stopped})
    assert run(group, until_s=4.0) is None
    seconds, (failure,) = run(group)
    assert 4.0 + seconds <= 9.0
    assert failure.worker == Worker("device", 1)


def test_a_stopped_process_is_found_within_ten_seconds_while_the_others_go_on() -> None:
    group = Scripted(frozen={Worker("device", 1)}, looks={Worker("device", 1): stopped})
    settle(group)
    seconds, (failure,) = run(group)
    assert seconds <= 9.0
    assert (failure.worker, failure.kind) == (Worker("device", 1), FailureKind.HUNG)
    assert "no answer to a status call" in failure.message
    assert "stopped by a signal" in failure.message


@pytest.mark.parametrize(("phase", "seconds"), [("device", 30.0), ("compile", 300.0), ("read", 120.0)])
def test_a_step_that_compiles_or_reads_has_longer(phase: str, seconds: float) -> None:
    """A device compiles in the middle of a run where sequences need another room."""
    found = run(Scripted(phase=phase, marks=lambda _: 1), timeout_s=30.0)
    assert found is not None
    assert seconds <= found[0] <= seconds + 5.0


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.has_own_deadline])
def test_a_long_stay_in_a_phase_with_its_own_deadline_is_not_held_against_the_next(phase: Phase) -> None:
    group = Scripted()
    tracker = Tracker(lambda: group.now_s)
    group.note = lambda worker, answer: group.progress.update({worker: tracker.progress()})
    watch = CallWatch(group, timeout_s=30.0, counts_marks=True)  # type: ignore[arg-type]

    def found_after_s(until_s: float) -> float | None:
        began_s = group.now_s
        while group.now_s < began_s + until_s:
            group.now_s += 0.2
            if watch.check([pair.device for pair in group.handles]):  # type: ignore[arg-type]
                return group.now_s - began_s
        return None

    with tracker.phase(Phase.SERVE):
        assert found_after_s(25.0) is None
        with tracker.phase(phase):
            assert found_after_s(110.0) is None, "time before it is not held against it"
        assert found_after_s(25.0) is None, "nor its time against the step that waited for it"
        with tracker.phase(phase):
            assert found_after_s(110.0) is None, "another one in the same step"
        found_s = found_after_s(100.0)
        assert found_s is not None
        assert 30.0 <= found_s <= 33.0, "a step that hangs after it"


def test_it_is_found_as_soon_where_it_never_answered() -> None:
    group = Scripted(frozen={Worker("host", 1)}, looks={Worker("host", 1): stopped})
    seconds, (failure,) = run(group, counts_marks=False)
    assert (failure.worker, seconds <= 9.0) == (Worker("host", 1), True)


def test_a_starved_process_is_given_time_and_not_for_ever() -> None:
    group = Scripted(frozen={Worker("host", 0)}, looks={Worker("host", 0): starved})
    settle(group)
    seconds, (failure,) = run(group)
    assert 30.0 <= seconds <= 33.0
    assert failure.worker == Worker("host", 0)


def test_a_process_that_comes_up_slowly_is_not_taken_for_frozen_though_it_waits() -> None:
    group = Scripted(frozen={Worker("host", 0)}, looks={Worker("host", 0): lambda _: statistics(state="D")})
    assert run(group, until_s=200.0, timeout_s=300.0, counts_marks=False) is None


def test_on_another_machine_the_others_must_stand_still() -> None:
    group = Scripted(frozen={Worker("host", 1)})
    settle(group)
    seconds, _ = run(group)
    assert seconds >= 30.0, "the others finished steps all the time"
    group = Scripted(frozen={Worker("host", 1)}, marks=lambda now_s: min(4, int(now_s)))
    settle(group)
    seconds, (failure,) = run(group)
    assert seconds <= 10.0
    assert "while the others stand still" in failure.message


@pytest.mark.parametrize("counts_marks", [True, False], ids=["training", "starting"])
def test_a_machine_that_takes_no_connection_is_given_up_at_once_although_the_others_go_on(counts_marks: bool) -> None:
    group = Scripted(frozen={Worker("host", 1), Worker("device", 1)}, lost={Worker("host", 1), Worker("device", 1)})
    settle(group)
    seconds, failures = run(group, counts_marks=counts_marks)
    assert seconds <= 8.0
    assert {failure.worker for failure in failures} == {Worker("host", 1), Worker("device", 1)}
    assert "takes no connection" in failures[0].message


def test_hosts_that_do_not_hear_each_other_are_found_though_both_answer() -> None:
    group = Scripted(marks=lambda now_s: min(4, int(now_s)), unheard_s={Worker("host", 0): {1: 6.0}})
    settle(group)
    seconds, (failure, echo) = run(group)
    assert seconds <= 10.0
    assert (failure.worker, failure.kind) == (Worker("host", 1), FailureKind.HUNG)
    assert (echo.worker, echo.kind) == (Worker("host", 0), FailureKind.PEER)
    assert "over the network between host 0 and host 1 for 6 s" in failure.message


def test_a_silent_link_is_no_fault_while_steps_are_finished() -> None:
    assert run(Scripted(unheard_s={Worker("host", 0): {1: 6.0}}), until_s=60.0) is None


def test_a_driver_that_reaches_nobody_waits_longer() -> None:
    """A short outage of its own network should not cost a generation."""
    everybody = {Worker("host", 0), Worker("device", 0), Worker("host", 1), Worker("device", 1)}
    group = Scripted(frozen=everybody, lost=everybody, marks=lambda _: 1)
    settle(group)
    seconds, failures = run(group)
    assert seconds >= 30.0
    assert len(failures) == 4


@pytest.mark.parametrize("gap_s", [60.0, 1000.0])
def test_a_driver_that_was_stopped_blames_nobody_for_that_time(gap_s: float) -> None:
    group = Scripted(
        frozen={Worker("host", 1)}, looks={Worker("host", 1): starved}, marks=lambda now_s: int(now_s / 100)
    )
    settle(group)
    watch = CallWatch(group, timeout_s=30.0, counts_marks=True)  # type: ignore[arg-type]
    for _ in range(10):
        group.now_s += 0.2
        assert watch.check([]) == []
    group.now_s += gap_s
    assert watch.check([]) == []
    group.frozen.clear()
    for _ in range(50):
        group.now_s += 0.2
        assert watch.check([]) == []


SILENT_LOOKS = {
    "holds the interpreter's lock and sleeps": lambda _: statistics(),
    "holds it and computes": lambda now_s: statistics(cpu_s=now_s),
    "waits for a disk": lambda _: statistics(state="D"),
    "is on another machine": lambda _: None,
}


@pytest.mark.parametrize("looks", SILENT_LOOKS.values(), ids=SILENT_LOOKS)
@pytest.mark.parametrize("counts_marks", [True, False])
def test_a_function_of_the_user_may_be_silent_until_its_deadline(
    looks: Callable[[float], ProcessStatistics | None], counts_marks: bool
) -> None:
    device = Worker("device", 1)
    group = Scripted(frozen={device}, looks={device: looks}, marks=lambda _: 1)
    settle(group)
    seconds, failures = run(group, timeout_s=3600.0, until_s=4000.0, runs_function=True, counts_marks=counts_marks)
    assert 3600.0 < seconds < 3610.0
    assert {failure.worker for failure in failures} == {Worker("device", 0), device}


@pytest.mark.parametrize("worker", [Worker("device", 1), Worker("host", 1)], ids=str)
@pytest.mark.parametrize("has_answered", [True, False])
def test_what_is_stopped_by_a_signal_is_found_while_functions_of_the_user_run(
    worker: Worker, has_answered: bool
) -> None:
    group = Scripted(frozen={worker}, looks={worker: stopped})
    if has_answered:
        settle(group)
    seconds, (failure,) = run(group, timeout_s=3600.0, runs_function=True, counts_marks=False)
    assert (failure.worker, seconds <= 9.0) == (worker, True)
    assert "stopped by a signal" in failure.message


def test_a_machine_that_takes_no_connection_is_found_while_functions_of_the_user_run() -> None:
    group = Scripted(frozen={Worker("device", 1)}, lost={Worker("device", 1)})
    settle(group)
    seconds, _ = run(group, timeout_s=3600.0, runs_function=True, counts_marks=False)
    assert seconds <= 8.0


def test_a_host_that_died_while_only_devices_work_is_found_by_its_status() -> None:
    group = Scripted(dead={Worker("host", 1)})
    seconds, (failure,) = run(group, timeout_s=3600.0, runs_function=True, counts_marks=False)
    assert (failure.worker, failure.kind, seconds <= 3.0) == (Worker("host", 1), FailureKind.DIED, True)


def test_a_worker_with_a_call_under_way_reports_its_death_by_that() -> None:
    assert run(Scripted(dead={Worker("host", 1)}), until_s=20.0) is None


def test_beyond_the_sample_a_frozen_one_is_found_within_ten_seconds() -> None:
    group = Scripted(hosts=40, frozen={Worker("device", 39)}, marks=lambda now_s: min(2, int(now_s)))
    settle(group)
    group.progress[Worker("device", 39)] = Progress(step=1, phase=Phase.SERVE, marks=0, step_unix_s=0.0)
    seconds, (failure,) = run(group)
    assert (failure.worker, seconds <= 10.0) == (Worker("device", 39), True)


@pytest.mark.parametrize(("phase", "seconds"), [("update", 30.0), ("read", 120.0), ("wait for save", 120.0)])
def test_storage_has_more_time_than_a_step(phase: str, seconds: float) -> None:
    group = Scripted(phase=phase, marks=lambda _: 1)
    found_s, failures = run(group, timeout_s=30.0)
    assert seconds < found_s < seconds + 3
    assert len(failures) == 4
    assert f"it is in {phase}" in failures[0].message


def test_the_deadline_of_calls_that_make_no_marks_counts_from_their_beginning() -> None:
    found_s, _ = run(Scripted(), timeout_s=20.0, counts_marks=False)
    assert 20.0 < found_s < 23.0


def silence(silent_s: float, idle_s: float | None, look: ProcessStatistics | None) -> Silence:
    return Silence(call=None, handle=None, silent_s=silent_s, idle_s=idle_s, statistics=look)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "has_answered", "still_s", "is_frozen"),
    [
        (silence(7, 7, statistics()), True, 0.0, True),
        (silence(7, 4, statistics()), True, 0.0, False),
        (silence(4, 7, statistics()), True, 0.0, False),
        (silence(7, 7, statistics()), False, 0.0, False),
        (silence(7, 7, statistics(state="T")), False, 0.0, True),
        (silence(7, None, None), True, 7.0, True),
        (silence(7, None, None), True, 4.0, False),
        (silence(7, None, None), False, 7.0, False),
        (silence(31, 0, statistics()), True, 0.0, True),
        (silence(31, 0, statistics()), False, 0.0, False),
        (silence(301, 0, statistics()), False, 0.0, True),
    ],
)
def test_when_a_silent_process_is_given_up(seen: Silence, has_answered: bool, still_s: float, is_frozen: bool) -> None:
    why = why_frozen(seen, has_answered=has_answered, others_stand_still_s=still_s, start_s=DEADLINES.start_s)
    assert (why is not None) is is_frozen


def test_another_process_of_the_same_number_is_no_idle_one() -> None:
    seen = silence(0, None, None)
    for look in (statistics(), statistics(), ProcessStatistics(process=7, started=2, cpu_s=1.0, state="S")):
        seen.pass_time(1.0, look)
    assert (seen.silent_s, seen.idle_s) == (3.0, 0.0)
