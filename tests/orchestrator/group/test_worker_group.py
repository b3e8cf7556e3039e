"""The group on a scripted backend: what is asked of whom, how failures are grouped, and how frozen and stuck processes
are found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.group.watch import SAMPLE
from podembed.orchestrator.group.worker_errors import failure_of
from podembed.orchestrator.group.worker_group import Call, Deadlines, HostHandles, WorkerGroup
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.host.survivors.verification import RowsDamaged
from podembed.workers.liveness.progress import Phase, Progress
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.mesh_errors import MeshConnectTimeout
from tests.clock import FakeClock

NEVER = object()
QUICK = Deadlines(start_s=20.0, step_s=20.0)


@dataclass(frozen=True, eq=False)
class ScriptedCall:
    worker: Worker
    method: str
    answer: Callable[[], Any]

    @property
    def is_done(self) -> bool:
        return self.answer() is not NEVER


@dataclass
class ScriptedHandle:
    """Answers from the backend's script, a function of (worker, method, arguments) whose result may be NEVER."""

    worker: Worker
    backend: ScriptedBackend
    where: str = "a script"

    def call(self, method: str, *arguments: Any) -> Call:
        self.backend.asked.append((self.worker, method, arguments))
        return ScriptedCall(self.worker, method, self.backend.answer_of(self.worker, method, arguments))

    def background(self, method: str, *arguments: Any) -> Call:
        return self.call(method, *arguments)

    def control(self, method: str, *arguments: Any) -> Call:
        return ScriptedCall(self.worker, method, self.backend.answer_of(self.worker, f"control {method}", arguments))


@dataclass
class ScriptedBackend:
    script: Callable[[Worker, str], Any]
    asked: list[tuple[Worker, str, tuple[Any, ...]]] = field(default_factory=list)
    num_stops: int = 0
    clock: FakeClock = field(default_factory=FakeClock)

    def answer_of(self, worker: Worker, method: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        def answer() -> Any:
            result = self.script(worker, method)
            return result() if callable(result) else result

        return answer

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        return [
            HostHandles(ScriptedHandle(Worker("host", at), self), ScriptedHandle(Worker("device", at), self))
            for at in range(num_hosts)
        ]

    def settled(self, calls: Sequence[Call], *, timeout_s: float) -> tuple[list[Call], list[Call]]:
        deadline = self.clock.now_s + timeout_s
        while not (done := [call for call in calls if call.is_done]) and self.clock.now_s < deadline:  # type: ignore[attr-defined]
            self.clock.sleep(0.002)
        return done, [call for call in calls if call not in done]

    def result(self, call: Call) -> Any:
        return call.answer()  # type: ignore[attr-defined]

    def statistics(self, handle: Any) -> None:
        """As of processes on other machines."""

    def stop(self, handles: Sequence[HostHandles]) -> None:
        self.num_stops += 1


def failure(worker: Worker, kind: FailureKind = FailureKind.ERROR) -> Failure:
    return Failure(worker=worker, kind=kind, message="scripted")


def progress(marks: int, *, step: int = 7, phase: str = "activation exchange") -> Progress:
    return Progress(step=step, phase=Phase(phase), marks=marks, step_unix_s=1.0)


def ticking() -> Callable[[], Progress]:
    """A status whose marks grow with every look."""
    marks = iter(range(1_000_000))
    return lambda: progress(next(marks))


def group_of(
    script: dict[tuple[Worker, str], Any],
    *,
    num_hosts: int = 2,
    deadlines: Deadlines = QUICK,
    on_poll: Callable[[], None] = lambda: None,
) -> tuple[WorkerGroup, ScriptedBackend]:
    """A group whose workers answer None, and their status, unless the script says otherwise."""

    def answer(worker: Worker, method: str) -> Any:
        default = progress(1) if method == "control status" else None
        return script.get((worker, method), default)

    backend = ScriptedBackend(answer)
    return WorkerGroup(backend, backend.launch(num_hosts, on_poll), deadlines, on_poll, clock=backend.clock), backend


def test_start_asks_hosts_then_devices_with_what_the_hosts_answered() -> None:
    def script(worker: Worker, method: str) -> Any:
        number = worker.number
        match worker.kind, method:
            case "host", "start":
                return SimpleNamespace(mesh_address=("10.0.0.1", 5000 + number))
            case "device", "reserve_coordinator":
                backend.clock.now_s = begun_s + 9.0
                return "10.0.0.1:6000"
            case "device", "start":
                return SimpleNamespace(compile_s=0.5 + number, start_s={"gang": 1.0 + number, "backend": 0.1})
        return None

    backend = ScriptedBackend(script)
    begun_s = backend.clock.now_s

    def device_spec(rank: int, ready: Any, coordinator: str) -> Any:
        return (rank, ready.mesh_address[1], coordinator)

    specs: Any = ["spec 0", "spec 1", "spec 2"]
    group = WorkerGroup.start(backend, specs, device_spec, deadlines=QUICK, on_poll=lambda: None, clock=backend.clock)
    assert backend.asked[:3] == [(Worker("host", at), "start", (f"spec {at}",)) for at in range(3)]
    assert backend.asked[3] == (Worker("device", 0), "reserve_coordinator", ("10.0.0.1",))
    addresses = [("10.0.0.1", 5000 + at) for at in range(3)]
    assert backend.asked[4:7] == [(Worker("host", at), "connect", (addresses, QUICK.start_s)) for at in range(3)]
    assert backend.asked[7:] == [
        (Worker("device", at), "start", ((at, 5000 + at, "10.0.0.1:6000"),)) for at in range(3)
    ]
    assert group.num_hosts == 3
    # Nine seconds in all.
    assert group.spent_s == {"compile": 2.5, "start": 6.5}
    assert list(group.start_s) == ["host processes", "coordinator", "gang", "backend"]
    assert (group.start_s["gang"], group.start_s["backend"]) == (3.0, 0.1)
    assert backend.num_stops == 0


@pytest.mark.parametrize("method", ["start", "connect"])
def test_a_host_that_fails_to_start_stops_everything(method: str) -> None:
    def script(worker: Worker, asked: str) -> Any:
        if (worker, asked) == (Worker("host", 1), method):
            return failure(Worker("host", 1))
        return (
            SimpleNamespace(mesh_address=("127.0.0.1", 1), compile_s=0.0, start_s={})
            if asked == "start"
            else "127.0.0.1:2"
        )

    backend = ScriptedBackend(script)
    specs: Any = ["spec"] * 2
    with pytest.raises(WorkerFailure) as caught:
        WorkerGroup.start(backend, specs, lambda *_: None, deadlines=QUICK, on_poll=lambda: None, clock=backend.clock)  # type: ignore[arg-type,return-value]
    assert caught.value.failures == (failure(Worker("host", 1)),)
    assert backend.num_stops == 1


def test_hosts_without_a_way_to_each_other_are_a_fault_of_one_of_them() -> None:
    error = MeshConnectTimeout([0], 8.0, {0: "its machine does not answer"})

    def script(worker: Worker, asked: str) -> Any:
        if (worker, asked) == (Worker("host", 1), "connect"):
            return failure_of(Worker("host", 1), error)
        return SimpleNamespace(mesh_address=("127.0.0.1", 1), compile_s=0.0, start_s={}) if asked == "start" else None

    specs: Any = ["spec"] * 2
    backend = ScriptedBackend(script)
    with pytest.raises(WorkerFailure, match="host 1 hung: found no way over the network between host 0 and host 1"):
        WorkerGroup.start(
            backend,
            specs,
            lambda *_: None,  # type: ignore[arg-type,return-value]
            deadlines=QUICK,
            on_poll=lambda: None,
            clock=backend.clock,
        )


def test_a_stop_request_while_starting_stops_everything() -> None:
    backend = ScriptedBackend(lambda worker, method: NEVER)

    def interrupted() -> None:
        raise KeyboardInterrupt

    specs: Any = ["spec"]
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup.start(backend, specs, lambda *_: None, deadlines=QUICK, on_poll=interrupted, clock=backend.clock)  # type: ignore[arg-type,return-value]
    assert backend.num_stops == 1


def test_answers_come_back_in_the_order_of_the_hosts_and_to_the_right_side() -> None:
    script = {
        (Worker(side, at), method): (side, at)
        for side, method in (("host", "train"), ("device", "serve_window"))
        for at in range(3)
    }
    group, backend = group_of(script, num_hosts=3)
    hosts, devices = group.train(5, 9)
    assert hosts == [("host", 0), ("host", 1), ("host", 2)]
    assert devices == [("device", 0), ("device", 1), ("device", 2)]
    assert (Worker("host", 2), "train", (5, 9, False, False, False)) in backend.asked


def test_save_has_one_dense_writer_and_restore_hands_each_side_its_part() -> None:
    group, backend = group_of({})
    group.begin_save("s1-g1", is_delta=False)
    assert [(method, arguments) for worker, method, arguments in backend.asked if worker.kind == "device"] == [
        ("begin_save", ()),
        ("begin_save", ()),
        ("write_save", ("s1-g1", True)),
        ("write_save", ("s1-g1", False)),
    ]
    backend.asked.clear()
    group.begin_save("s2-g1", is_delta=True, before_failed=True)
    hosts = [(method, arguments) for worker, method, arguments in backend.asked if worker.is_host]
    assert hosts == [("begin_save", ("s2-g1", True))] * 2 + [("write_save", ("s2-g1", True))] * 2
    backend.asked.clear()
    group.restore(SimpleNamespace(name="s1-g1", tables="tables", dense="dense"))  # type: ignore[arg-type]
    assert {(worker.kind, arguments) for worker, _, arguments in backend.asked} == {
        ("host", ("tables",)),
        ("device", ("dense",)),
    }
    backend.asked.clear()
    group.restore(None)
    assert {arguments for _, _, arguments in backend.asked} == {(None,)}


def test_failures_that_follow_the_first_are_reported_with_it() -> None:
    seen = iter([NEVER] * 20)
    echo = failure(Worker("device", 0), FailureKind.ERROR)
    group, _ = group_of(
        {
            (Worker("host", 1), "train"): failure(Worker("host", 1), FailureKind.DIED),
            (Worker("host", 0), "train"): failure(Worker("host", 0), FailureKind.PEER),
            (Worker("device", 0), "serve_window"): lambda: next(seen, echo),
            (Worker("device", 1), "serve_window"): NEVER,
        },
    )
    with pytest.raises(WorkerFailure) as caught:
        group.train(0, 5)
    assert {(f.worker, f.kind.value) for f in caught.value.failures} == {
        (Worker("host", 1), "died"),
        (Worker("host", 0), "peer"),
        (Worker("device", 0), "error"),
    }
    assert "host 1 died: scripted" in str(caught.value)


def test_all_failing_at_once_do_not_wait_for_the_grace_period() -> None:
    script = {
        (Worker(side, at), method): failure(Worker(side, at))
        for side, method in (("host", "train"), ("device", "serve_window"))
        for at in range(2)
    }
    group, _ = group_of(script)
    with pytest.raises(WorkerFailure) as caught:
        group.train(0, 1)
    assert len(caught.value.failures) == 4


def test_a_frozen_process_is_found_by_its_silence() -> None:
    answered = iter([progress(1)] * 3)
    group, _ = group_of(
        {
            **{
                (Worker(side, at), method): NEVER
                for side, method in (("host", "train"), ("device", "serve_window"))
                for at in range(2)
            },
            (Worker("host", 0), "control status"): ticking(),
            (Worker("host", 1), "control status"): lambda: next(answered, NEVER),
        },
        deadlines=Deadlines(start_s=20, step_s=200),
    )
    with pytest.raises(WorkerFailure) as caught:
        group.train(0, 5)
    (found,) = caught.value.failures
    assert (found.worker, found.kind) == (Worker("host", 1), FailureKind.HUNG)
    assert "no answer to a status call" in found.message


def test_of_many_hosts_a_few_are_asked_until_nothing_moves_and_then_all() -> None:
    """The frozen one is found although its turn has not come: the others stand still because of it."""
    asked: list[Worker] = []
    num_hosts, moving = 50, 8 * SAMPLE
    frozen = Worker("host", 49)

    def script(worker: Worker, method: str) -> Any:
        if method != "control status":
            return NEVER
        if worker == frozen:
            return NEVER
        return progress(min(len(asked), moving))

    @dataclass
    class Counting(ScriptedBackend):
        def answer_of(self, worker: Worker, method: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
            if method == "control status":
                asked.append(worker)
            return ScriptedBackend.answer_of(self, worker, method, arguments)

    backend, seen = Counting(script), []
    deadlines = Deadlines(start_s=30, step_s=200, stall_s=90)
    handles = backend.launch(num_hosts, lambda: None)
    group = WorkerGroup(backend, handles, deadlines, lambda: seen.append(len(asked)), clock=backend.clock)
    with pytest.raises(WorkerFailure) as caught:
        group.train(0, 5)
    assert [f.worker for f in caught.value.failures] == [frozen]
    asked_each_time = [after - before for before, after in itertools.pairwise(seen)]
    assert set(asked_each_time[:8]) <= {0, SAMPLE}
    assert max(asked_each_time) >= 2 * num_hosts - 1


def test_a_process_that_is_still_coming_up_is_not_taken_for_frozen() -> None:
    calls = iter([NEVER] * 200)
    group, _ = group_of(
        {
            (Worker("host", 0), "train"): lambda: next(calls, "trained"),
            (Worker("host", 0), "control status"): NEVER,
        },
        num_hosts=1,
        deadlines=Deadlines(start_s=200, step_s=200),
    )
    assert group.train(0, 1)[0] == ["trained"]


def test_a_process_that_never_answers_is_found_after_the_time_of_the_start() -> None:
    group, _ = group_of(
        {(Worker("host", 0), "train"): NEVER, (Worker("host", 0), "control status"): NEVER},
        num_hosts=1,
        deadlines=Deadlines(start_s=40, step_s=200),
    )
    with pytest.raises(WorkerFailure, match="host 0 hung: no answer to a status call"):
        group.train(0, 1)


def test_a_step_that_does_not_finish_is_named_with_its_phase() -> None:
    group, _ = group_of(
        {
            (Worker("host", 0), "train"): NEVER,
            (Worker("device", 0), "serve_window"): NEVER,
            (Worker("host", 0), "control status"): progress(3, step=41, phase="gradient exchange"),
        },
        deadlines=Deadlines(start_s=20, step_s=9),
    )
    with pytest.raises(WorkerFailure) as caught:
        group.train(40, 50)
    messages = {f.worker: f.message for f in caught.value.failures}
    assert set(messages) == {Worker("host", 0), Worker("device", 0)}
    assert "gradient exchange of step 41" in messages[Worker("host", 0)]


def written_by(num_hosts: int, **others: Any) -> dict[tuple[Worker, str], Any]:
    workers = [Worker(kind, at) for kind in ("host", "device") for at in range(num_hosts)]
    return {
        (worker, "write_save"): others.get(f"{worker.kind}_{worker.number}", f"{worker} wrote") for worker in workers
    }


def test_receipts_are_there_when_the_last_worker_has_written_and_nobody_waits_for_them() -> None:
    left = iter([NEVER] * 3)
    group, _ = group_of(written_by(2, device_1=lambda: next(left, "device 1 wrote")))
    writing = group.begin_save("s1-g1", is_delta=False)
    assert group.receipts(writing) is None
    expected = (["host 0 wrote", "host 1 wrote"], ["device 0 wrote", "device 1 wrote"])
    assert group.await_receipts(writing) == expected
    assert group.receipts(writing) == expected


def test_a_worker_that_cannot_write_is_an_error_and_one_that_is_gone_is_left_to_the_calls_that_work() -> None:
    group, _ = group_of(written_by(2, host_0=failure(Worker("host", 0)), host_1=NEVER))
    with pytest.raises(WorkerFailure, match="host 0 failed|host 0 error"):
        group.receipts(group.begin_save("s1-g1", is_delta=False))
    group, _ = group_of(written_by(2, host_0=failure(Worker("host", 0), FailureKind.DIED), host_1=NEVER))
    writing = group.begin_save("s1-g1", is_delta=False)
    assert group.receipts(writing) is None
    with pytest.raises(WorkerFailure, match="host 0 died"):
        group.await_receipts(writing)


def test_a_storage_that_fails_one_worker_is_told_when_all_have_ended() -> None:
    full = Failure(worker=Worker("host", 0), kind=FailureKind.ERROR, message="full", is_storage=True)
    left = iter([NEVER] * 300)
    group, _ = group_of(written_by(2, host_0=full, device_1=lambda: next(left, "device 1 wrote")))
    writing = group.begin_save("s1-g1", is_delta=False)
    assert group.receipts(writing) is None
    with pytest.raises(WorkerFailure, match="full"):
        group.await_receipts(writing)
    assert next(left, None) is None
    with pytest.raises(WorkerFailure, match="full"):
        group.receipts(writing)


@pytest.mark.parametrize("method", ["train", "write_save", "restore", "evaluate"])
def test_work_that_goes_on_may_take_any_time(method: str) -> None:
    """Each finished step or file starts the deadline again: a shard of a terabyte is saved in many small pieces."""
    group, backend = group_of(
        {
            (Worker("host", 0), method): lambda: "done" if backend.clock.now_s > done_at else NEVER,
            (Worker("host", 0), "control status"): ticking(),
        },
        num_hosts=1,
        deadlines=Deadlines(start_s=9, step_s=9),
    )
    done_at = backend.clock.now_s + 13
    match method:
        case "train":
            assert group.train(0, 5)[0] == ["done"]
        case "write_save":
            assert group.await_receipts(group.begin_save("s", is_delta=False))[0] == ["done"]
        case "restore":
            group.restore(None)
        case "evaluate":
            assert group.evaluate() == ["done"]
    assert backend.clock.now_s > done_at


def test_the_heart_beats_while_workers_work() -> None:
    left, beats = iter([NEVER] * 400), []
    group, _ = group_of({(Worker("host", 0), "train"): lambda: next(left, None)}, on_poll=lambda: beats.append(1))
    group.train(0, 1)
    assert beats


def test_last_progress_asks_survivors_once_more_and_does_not_wait_for_the_dead() -> None:
    group, _ = group_of(
        {
            (Worker("host", 0), "control status"): progress(9, step=12),
            (Worker("host", 1), "control status"): failure(Worker("host", 1), FailureKind.DIED),
        }
    )
    group.progress[Worker("host", 1)] = progress(8, step=11)
    assert [p.step for p in group.last_progress()] == [11, 12]


def test_close_asks_everybody_and_stop_stops_once() -> None:
    group, backend = group_of({})
    group.close()
    assert sorted(worker for worker, method, _ in backend.asked if method == "close") == [
        Worker("device", 0),
        Worker("device", 1),
        Worker("host", 0),
        Worker("host", 1),
    ]
    group.stop()
    group.stop()
    assert backend.num_stops == 1


@pytest.mark.parametrize("method", ["evaluate", "begin_save"])
def test_rows_that_hosts_kept_are_proven_once_before_anything_lasts(method: str) -> None:
    group, backend = group_of({(Worker("host", 1), "restore"): Restored(buckets_kept=3, buckets_to_compare=2)})
    group.restore(None)
    assert not group.is_proven

    def ask() -> list[str]:
        begun = len(backend.asked)
        group.evaluate() if method == "evaluate" else group.begin_save("s000000001-g00000001", is_delta=False)
        return [asked for worker, asked, _ in backend.asked[begun:] if worker.is_host]

    assert ask()[:3] == ["verify", "verify", method]
    assert group.is_proven
    assert "verify" not in ask()


@pytest.mark.parametrize("method", ["evaluate", "begin_save"])
def test_a_host_with_wrong_rows_ends_the_generation_before_anything_lasts(method: str) -> None:
    damaged = failure_of(Worker("host", 0), RowsDamaged("Found rows"))
    script = {(Worker("host", 0), "restore"): Restored(buckets_to_compare=1), (Worker("host", 0), "verify"): damaged}
    group, backend = group_of(script)
    group.restore(None)
    with pytest.raises(WorkerFailure, match="host 0 damaged: RowsDamaged"):
        group.evaluate() if method == "evaluate" else group.begin_save("s000000001-g00000001", is_delta=False)
    assert not group.is_proven
    assert method not in [asked for _, asked, _ in backend.asked]
