"""Decisions as tables of cases: when to pause, commit and evaluate, how long a window is, what to do after a
failure.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.run_errors import (
    CrashLoop,
    Failure,
    FailureKind,
    JobFailed,
    WorkerFailure,
    WorkerRefused,
    cause,
    is_host_fault,
    listed,
    roots,
)
from podembed.orchestrator.decisions.failure import (
    CALL_CPU_S,
    CALLS_PER_HOST,
    LONGEST_WINDOW_S,
    WINDOW_TARGET_S,
    Budget,
    FaultClass,
    GiveUp,
    Recover,
    StepSchedule,
    after_failure,
    ending,
    fault_class,
    window_end,
    window_target_s,
)
from podembed.orchestrator.driver.saves import Saves
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.workers.data.input_errors import InputError
from podembed.workers.device.gang_errors import GangError
from podembed.workers.host.survivors.verification import RowsDamaged
from podembed.workers.job.job import JobError
from podembed.workers.liveness.worker import Worker
from podembed.workers.storage.storage_errors import StorageError, StoreUnavailable

DIED, HUNG, PEER, ERROR = FailureKind.DIED, FailureKind.HUNG, FailureKind.PEER, FailureKind.ERROR
DAMAGED = FailureKind.DAMAGED


def failures(*kinds: FailureKind) -> list[Failure]:
    return [Failure(worker=Worker("host", at), kind=kind, message=f"m{at}") for at, kind in enumerate(kinds)]


def saves_of(*, total: int, commit_every: int | None, eval_every: int | None) -> Saves:
    policies = CheckpointConfig(every_steps=commit_every).save_policies
    return Saves(StepSchedule(total_steps=total, save_policies=policies, eval_every=eval_every), monotonic=lambda: 0.0)


@pytest.mark.parametrize(
    ("total", "commit_every", "eval_every", "step", "boundary"),
    [
        (50, None, None, 0, 50),
        (50, 10, None, 0, 10),
        (50, 10, None, 10, 20),
        (50, 10, None, 45, 50),
        (50, 10, 7, 0, 7),
        (50, 10, 7, 7, 10),
        (50, 10, 7, 19, 20),
        (50, 100, 100, 3, 50),
        (5, 1, 1, 4, 5),
    ],
)
def test_the_next_boundary(
    total: int, commit_every: int | None, eval_every: int | None, step: int, boundary: int
) -> None:
    saves = saves_of(total=total, commit_every=commit_every, eval_every=eval_every)
    saves.begin(step, ())
    assert saves.next_boundary(step) == boundary


@pytest.mark.parametrize(
    ("step", "commits", "evaluates"),
    [(5, False, False), (10, True, False), (15, False, True), (30, True, True), (35, True, False)],
)
def test_what_happens_at_a_step(step: int, commits: bool, evaluates: bool) -> None:
    """The last step commits, whatever its number; its evaluation is the driver's last act and not asked for here."""
    saves = saves_of(total=35, commit_every=10, eval_every=15)
    assert (saves.take(step, {}), saves.schedule.evaluates_at(step)) == (commits, evaluates)


@given(
    total=st.integers(1, 300),
    commit_every=st.none() | st.integers(1, 50),
    eval_every=st.none() | st.integers(1, 50),
    step_s=st.none() | st.floats(0, 100),
)
def test_windows_reach_the_end_and_pause_at_every_commit_and_evaluation(
    total: int, commit_every: int | None, eval_every: int | None, step_s: float | None
) -> None:
    saves = saves_of(total=total, commit_every=commit_every, eval_every=eval_every)
    step, commits, evaluations = 0, [], []
    while step < total:
        end = window_end(step=step, boundary=saves.next_boundary(step), step_s=step_s)
        assert step < end <= total
        step = end
        metrics = {"auc": 0.5} if saves.schedule.evaluates_at(step) else {}
        evaluations += [step] if metrics else []
        commits += [step] if saves.take(step, metrics) else []
    expected_evaluations = [] if eval_every is None else [*range(eval_every, total, eval_every)]
    assert evaluations == expected_evaluations
    on_the_way = expected_evaluations if commit_every is None else range(commit_every, total, commit_every)
    assert commits == [*on_the_way, total]


@pytest.mark.parametrize(
    ("step_s", "num_steps"), [(None, 1), (WINDOW_TARGET_S / 8, 8), (WINDOW_TARGET_S * 9, 1), (0.0, 1000)]
)
def test_a_window_takes_about_its_target_time(step_s: float | None, num_steps: int) -> None:
    assert window_end(step=100, boundary=1100, step_s=step_s) == 100 + num_steps


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 64, 256, 700])
def test_the_calls_of_a_window_take_at_most_a_hundredth_of_it(num_hosts: int) -> None:
    spent_s = num_hosts * CALLS_PER_HOST * CALL_CPU_S
    assert spent_s <= 0.01001 * window_target_s(num_hosts)
    assert WINDOW_TARGET_S <= window_target_s(num_hosts) <= LONGEST_WINDOW_S


def test_a_window_of_many_hosts_still_ends_soon_enough_to_be_stopped() -> None:
    assert window_target_s(100_000) == LONGEST_WINDOW_S


@pytest.mark.parametrize(
    ("kinds", "is_fault", "root"),
    [
        ([DIED], True, "host 0 died: m0"),
        ([HUNG], True, "host 0 hung: m0"),
        ([PEER], True, "host 0 lost a peer: m0"),
        ([ERROR], False, "host 0 failed: m0"),
        ([ERROR, ERROR], False, "host 0 failed: m0"),
        ([PEER, DIED], True, "host 1 died: m1"),
        ([PEER, PEER, HUNG], True, "host 2 hung: m2"),
        # A collective that lost a member raises in the survivors before Ray knows of the death.
        ([ERROR, DIED], True, "host 1 died: m1"),
        ([ERROR, HUNG], True, "host 1 hung: m1"),
        ([ERROR, PEER], True, "host 0 failed: m0"),
        ([PEER, ERROR], True, "host 1 failed: m1"),
        ([DAMAGED], True, "host 0 had wrong rows: m0"),
        ([PEER, ERROR, DAMAGED], True, "host 2 had wrong rows: m2"),
        ([DAMAGED, DIED], True, "host 1 died: m1"),
    ],
)
def test_the_root_of_a_group_of_failures(kinds: list[FailureKind], is_fault: bool, root: str) -> None:
    assert is_host_fault(failures(*kinds)) is is_fault
    assert cause(failures(*kinds)) == root


def hosts_of(*workers: Worker, kind: FailureKind = ERROR, message: str = "m", **marks: object) -> list[Failure]:
    return [Failure(worker=worker, kind=kind, message=message, **marks) for worker in workers]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([Worker("host", 0)], "host 0"),
        ([Worker("host", 0), Worker("host", 1)], "hosts 0-1"),
        ([Worker("host", at) for at in (9, 0, 1, 2, 5)], "hosts 0-2, 5, 9"),
        ([Worker("device", 3), Worker("host", 0), Worker("device", 4)], "devices 3-4 and host 0"),
        ([Worker("host", 2), Worker("host", 2)], "host 2"),
        ([None], "the cluster"),
    ],
)
def test_many_workers_are_named_in_few_words(workers: list[Worker | None], words: str) -> None:
    assert listed(workers) == words


def test_equal_errors_of_many_hosts_are_said_once_with_the_hosts() -> None:
    failures = [*hosts_of(*[Worker("host", at) for at in range(64)]), *hosts_of(Worker("device", 7), message="other")]
    assert cause(failures) == "hosts 0-63 failed: m"
    assert str(WorkerFailure(failures)) == "hosts 0-63 error: m; device 7 error: other"


def ended(*processes: tuple[str, int, float | None], **marks: object) -> list[Failure]:
    """Processes that died: kind, number and time."""
    return [
        Failure(worker=Worker(kind, number), kind=DIED, message="m", ended_unix_s=at, **marks)  # type: ignore[arg-type]
        for kind, number, at in processes
    ]


@pytest.mark.parametrize(
    ("failures", "said", "charged"),
    [
        (ended(("device", 0, 5.2), ("device", 1, 5.1)), "device 1 died: m; device 0 ended after that", ["device 1"]),
        (
            ended(("device", 0, 5.2), ("device", 1, 5.1), ("device", 2, 5.3)),
            "device 1 died: m; devices 0, 2 ended after that",
            ["device 1"],
        ),
        (ended(("device", 0, None), ("device", 1, None)), "devices 0-1 died: m", ["device 0"]),
        (
            ended(("device", 0, 5.0), ("host", 1, 5.1), ("device", 1, 5.2)),
            "host 1 and device 1 died: m; device 0 ended after that",
            ["host 1"],
        ),
        (ended(("device", 0, 5.2), ("device", 1, 5.1), is_preemption=True), "devices 0-1 lost its machine: m", None),
        (ended(("host", 0, 5.2), ("host", 1, 5.1)), "hosts 0-1 died: m", ["host 0", "host 1"]),
    ],
)
def test_of_a_gang_the_member_that_died_first_is_named(
    failures: list[Failure], said: str, charged: list[str] | None
) -> None:
    assert cause(failures) == said
    if charged is not None:
        assert [str(failure.worker) for failure in roots(failures)] == charged


GONE = {"kind": DIED, "is_preemption": True}


@pytest.mark.parametrize(
    ("failures", "charged"),
    [
        (hosts_of(Worker("host", 1), kind=DIED), FaultClass.HOST),
        (hosts_of(Worker("host", 1), kind=HUNG), FaultClass.HOST),
        (hosts_of(Worker("host", 1), kind=PEER), FaultClass.HOST),
        (hosts_of(Worker("host", 1), **GONE), FaultClass.PREEMPTION),
        ([*hosts_of(Worker("host", 1), **GONE), *hosts_of(Worker("host", 2), kind=DIED)], FaultClass.HOST),
        # JAX aborts the device processes of a gang that lost a member: they say nothing about their own machines.
        ([*hosts_of(Worker("device", 2), kind=DIED), *hosts_of(Worker("host", 1), **GONE)], FaultClass.PREEMPTION),
        ([*hosts_of(Worker("device", 2), kind=DIED), *hosts_of(Worker("host", 0), kind=PEER)], FaultClass.HOST),
        (hosts_of(Worker("host", 0)), FaultClass.USER),
        (hosts_of(Worker("host", 0), refusal=WorkerRefused), FaultClass.REFUSAL),
        ([*hosts_of(Worker("host", 0), refusal=WorkerRefused), *hosts_of(Worker("device", 0))], FaultClass.USER),
        (hosts_of(Worker("host", 0), memory="host"), FaultClass.HOST_MEMORY),
        (hosts_of(Worker("host", 0), kind=DIED, memory="host"), FaultClass.HOST_MEMORY),
        (
            [*hosts_of(Worker("host", 1), kind=PEER), *hosts_of(Worker("device", 0), memory="device")],
            FaultClass.DEVICE_MEMORY,
        ),
    ],
)
def test_what_a_failure_is_charged_to(failures: list[Failure], charged: FaultClass) -> None:
    assert fault_class(failures) is charged
    # Rows that nobody has compared yet may be why a job failed, and why nothing else did.
    is_of_job = charged in (FaultClass.USER, FaultClass.REFUSAL)
    assert fault_class(failures, is_proven=False) is (FaultClass.HOST if is_of_job else charged)


def test_who_is_looked_at_after_wrong_rows() -> None:
    damaged = hosts_of(Worker("host", 1), kind=DAMAGED)
    peer = hosts_of(Worker("host", 0), kind=PEER)
    device = hosts_of(Worker("device", 0), kind=DIED)
    assert roots([*peer, *damaged]) == damaged
    assert roots([*damaged, *device]) == device


def test_wrong_rows_are_a_fault_of_their_host() -> None:
    found = failure_of(Worker("host", 1), RowsDamaged("Found rows"))
    assert (found.kind, found.refusal) == (FailureKind.DAMAGED, None)
    decision = after_failure([found], budget=Budget(), max_failures=3)
    assert decision == Recover(
        cause="host 1 had wrong rows: RowsDamaged: Found rows", kind=FaultClass.HOST, budget=Budget(host_faults=1)
    )


def test_a_job_that_fails_on_rows_in_doubt_is_tried_again() -> None:
    failed = failures(ERROR)
    assert isinstance(after_failure(failed, budget=Budget(), max_failures=3), GiveUp)
    decision = after_failure(failed, budget=Budget(), max_failures=3, is_proven=False)
    assert isinstance(decision, Recover)
    assert (decision.kind, decision.budget) == (FaultClass.HOST, Budget(host_faults=1))
    assert decision.cause.startswith("host 0 failed: m0. Rows that hosts had kept were not compared")
    # Without tries left, it ends as what it looks like.
    refused = hosts_of(Worker("host", 0), refusal=WorkerRefused)
    for kind, own in ((FaultClass.USER, failed), (FaultClass.REFUSAL, refused)):
        decision = after_failure(own, budget=Budget(host_faults=3), max_failures=3, is_proven=False)
        assert isinstance(decision, GiveUp)
        assert decision.kind is kind


@pytest.mark.parametrize(
    ("kinds", "before", "max_failures", "decision"),
    [
        ([DIED], 0, 3, Recover(cause="host 0 died: m0", kind=FaultClass.HOST, budget=Budget(host_faults=1))),
        ([DIED], 2, 3, Recover(cause="host 0 died: m0", kind=FaultClass.HOST, budget=Budget(host_faults=3))),
        ([DIED], 3, 3, GiveUp(cause="host 0 died: m0", kind=FaultClass.HOST)),
        ([DIED], 0, 0, GiveUp(cause="host 0 died: m0", kind=FaultClass.HOST)),
        ([ERROR], 0, 3, GiveUp(cause="host 0 failed: m0", kind=FaultClass.USER)),
        ([ERROR], 9, 3, GiveUp(cause="host 0 failed: m0", kind=FaultClass.USER)),
        ([ERROR, DIED], 0, 3, Recover(cause="host 1 died: m1", kind=FaultClass.HOST, budget=Budget(host_faults=1))),
    ],
)
def test_what_to_do_after_a_failure(
    kinds: list[FailureKind], before: int, max_failures: int, decision: Recover | GiveUp
) -> None:
    assert after_failure(failures(*kinds), budget=Budget(host_faults=before), max_failures=max_failures) == decision


def test_announced_losses_use_up_nothing() -> None:
    budget = Budget(host_faults=3)
    for number in range(1, 10):
        decision = after_failure(hosts_of(Worker("host", 1), **GONE), budget=budget, max_failures=3)
        assert isinstance(decision, Recover)
        budget = decision.budget
        assert budget == Budget(host_faults=3, preemptions=number)


@pytest.mark.parametrize(
    ("steps", "messages", "borne", "ends_with"),
    [
        ((7,), "m", 0, "devices 0-1 failed: m"),
        ((7, 7), "mm", 5, "devices 0-1 failed: m\nIt came twice at step 7, so it would come again."),
        # Hosts work ahead of their devices by up to one step.
        ((7, 8), "mm", 5, "It came twice at step 8, so it would come again."),
        ((7, 9, 9), "mmm", 5, "It came twice at step 9, so it would come again."),
        ((7, 7, 7), "mnm", 2, "devices 0-1 failed: m"),
        ((None,), "m", 5, "devices 0-1 failed: m"),
    ],
)
def test_exceptions_of_the_job_are_tried_again_until_they_repeat(
    steps: tuple[int | None, ...], messages: str, borne: int, ends_with: str
) -> None:
    budget, decisions = Budget(host_faults=2), []
    for step, message in zip(steps, messages, strict=True):
        failed = hosts_of(Worker("device", 0), Worker("device", 1), message=message)
        decision = after_failure(failed, budget=budget, max_failures=3, max_user_errors=borne, step=step)
        decisions.append(decision)
        budget = decision.budget if isinstance(decision, Recover) else budget
    *tried, last = decisions
    assert all(isinstance(decision, Recover) for decision in tried)
    assert isinstance(last, GiveUp)
    assert last.kind is FaultClass.USER
    assert last.cause.endswith(ends_with)
    assert (budget.host_faults, budget.user_errors) == (2, len(tried))


def test_a_plan_that_did_not_fit_twice_is_not_tried_again() -> None:
    """With another number of hosts it is another plan."""
    full = hosts_of(
        Worker("host", 0), Worker("host", 1), memory="host", message="MemoryError: Unable to allocate 3 GiB"
    )
    first = after_failure(full, budget=Budget(), max_failures=3, num_hosts=2)
    assert isinstance(first, Recover)
    other = after_failure(full, budget=first.budget, max_failures=3, num_hosts=3)
    assert isinstance(other, Recover)
    device = after_failure(
        hosts_of(Worker("device", 0), memory="device"), budget=first.budget, max_failures=3, num_hosts=2
    )
    assert isinstance(device, Recover)
    second = after_failure(full, budget=first.budget, max_failures=3, num_hosts=2)
    assert isinstance(second, GiveUp)
    error = ending(second, full, max_failures=3, plan="a host holds 3.0 GiB of rows and slots")
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(
        "hosts 0-1 failed: MemoryError: Unable to allocate 3 GiB. It was the second time with 2 hosts. The plan: a "
        "host holds 3.0 GiB"
    )
    assert "Use more hosts (--hosts)" in str(error)


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        (InputError("Found id 99"), InputError),
        (StoreUnavailable("reading", attempts=2, elapsed_s=1.0, last=OSError("no route")), StorageError),
        (JobError("Found dense arrays"), JobError),
        (GangError("Found 1 JAX processes"), WorkerRefused),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_is_caught_by_its_public_name(raised: Exception, caught: type[Exception]) -> None:
    """Whichever process found it: a program names the types of docs/names.md."""
    failure = failure_of(Worker("host", 0), raised)
    decision = after_failure([failure], budget=Budget(), max_failures=3)
    assert isinstance(decision, GiveUp)
    ended = ending(decision, [failure], max_failures=3, plan="")
    assert isinstance(ended, caught)
    assert isinstance(ended, WorkerRefused)
    assert str(raised) in str(ended)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (FaultClass.USER, JobFailed, "why\nTraceback of one"),
        (FaultClass.REFUSAL, WorkerRefused, "why"),
        (FaultClass.HOST, CrashLoop, "fault 4 in a row"),
        (FaultClass.DEVICE_MEMORY, ConfigurationError, "Lower the batch size"),
    ],
)
def test_how_a_run_ends(kind: FaultClass, error: type[Exception], words: str) -> None:
    failed = [
        *hosts_of(Worker("host", 0)),
        *hosts_of(Worker("host", 1), details="Traceback of one"),
        *hosts_of(Worker("host", 2), details="of two"),
    ]
    ended = ending(GiveUp(cause="why", kind=kind), failed, max_failures=3, plan="")
    assert type(ended) is error
    assert words in str(ended)
    assert "of two" not in str(ended)


def test_what_ran_out_of_memory_is_told_by_type() -> None:
    import numpy as np
    from jax.errors import JaxRuntimeError

    from podembed.orchestrator.group.worker_errors import failure_of

    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 50)
    assert failure_of(Worker("host", 0), caught.value).memory == "host"
    assert failure_of(Worker("device", 0), JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")).memory == "device"
    assert failure_of(Worker("device", 0), ValueError("RESOURCE_EXHAUSTED")).memory == ""


def test_a_broken_collective_reports_a_peer_and_not_the_job() -> None:
    """A gang member that dies with its whole machine is noticed by JAX before Ray."""
    from jax.errors import JaxRuntimeError

    from podembed.orchestrator.group.worker_errors import failure_of

    lost = failure_of(Worker("device", 0), JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    own = failure_of(Worker("device", 0), JaxRuntimeError("INTERNAL: a custom call raised"))
    assert (lost.kind, own.kind) == (FailureKind.PEER, FailureKind.ERROR)
    assert isinstance(after_failure([lost], budget=Budget(), max_failures=3), Recover)
    assert isinstance(after_failure([own], budget=Budget(), max_failures=3), GiveUp)


def test_an_accelerator_gang_that_broke_is_told_from_one_that_cannot_be() -> None:
    from jax.errors import JaxRuntimeError

    from podembed.orchestrator.group.worker_errors import failure_of
    from podembed.workers.device.gang_errors import GangError

    nccl = "INTERNAL: NCCL operation {} failed: {}. Last NCCL warning(error) log entry (may be unrelated) '{}'"
    lost = failure_of(Worker("device", 0), JaxRuntimeError(nccl.format("ncclGroupEnd()", "remote process exited", "")))
    shared = failure_of(
        Worker("device", 1), JaxRuntimeError(nccl.format("ncclCommInitRank", "invalid usage", "Duplicate GPU detected"))
    )
    alone = failure_of(Worker("device", 0), GangError("Found 1 JAX processes"))
    assert (lost.kind, shared.kind) == (FailureKind.PEER, FailureKind.ERROR)
    assert alone.kind is FailureKind.ERROR
    assert alone.refusal is not None
