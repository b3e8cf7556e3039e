"""What a pod makes of failing processes, with a scripted backend and a fake clock: which errors reach the user as they
are, and which cost the tables.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from podembed.embedding.tf.engine.engine import EngineSpec, Share
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.stepwise.pod import FUNCTION_GRACE_S, Pod, PodLost
from podembed.orchestrator.stepwise.pod_engine import PodEngine
from podembed.workers.liveness.process_statistics import ProcessStatistics
from podembed.workers.liveness.progress import Phase, Progress
from podembed.workers.liveness.worker import Worker
from podembed.workers.stepwise.host import StepwiseHost
from tests.orchestrator.group.test_worker_group import NEVER, ScriptedBackend

HOST_1, DEVICE_0, DEVICE_1 = Worker("host", 1), Worker("device", 0), Worker("device", 1)


@dataclass
class PodBackend(ScriptedBackend):
    """A backend in which `statistics` are what the kernel says of processes that do not answer."""

    stopped: frozenset[Worker] = frozenset()
    num_looks: int = 0

    def settled(self, calls: Sequence[Any], *, timeout_s: float) -> tuple[list[Any], list[Any]]:
        self.num_looks += 1
        return super().settled(calls, timeout_s=timeout_s)

    def statistics(self, handle: Any) -> ProcessStatistics | None:  # type: ignore[override]
        state = "T" if handle.worker in self.stopped else "S"
        return ProcessStatistics(process=1, started=1, cpu_s=1.0, state=state)


def failed(worker: Worker, error: Exception) -> Failure:
    return Failure(worker=worker, kind=FailureKind.ERROR, message=str(error), error=error)


def pod_of(script: Callable[[Worker, str], Any], *, stopped: frozenset[Worker] = frozenset()) -> tuple[Pod, PodBackend]:
    """Two hosts that start well; what they answer then says the script."""

    def answer(worker: Worker, method: str) -> Any:
        found = script(worker, method)
        if found is not None:
            return found
        return Progress(step=0, phase=Phase.IDLE, marks=0, step_unix_s=0.0) if method == "control status" else "mine"

    backend = PodBackend(answer, stopped=stopped)
    pod = Pod(backend, ExitStack(), num_hosts=2, start_timeout_s=60.0, step_timeout_s=30.0, clock=backend.clock)
    return pod, backend


def run(pod: Pod, *, timeout_s: float = 3600.0) -> list[Any]:
    """As `PodStrategy.run`."""
    return pod.ask_devices(lambda at, device: device.handle.call("run_function"), timeout_s=timeout_s)


def test_an_error_of_all_hosts_is_the_users_and_the_pod_goes_on() -> None:
    pod, backend = pod_of(
        lambda worker, method: failed(worker, KeyError(worker.number)) if method == "run_function" else None
    )
    with pytest.raises(KeyError) as raised:
        run(pod)
    # Of the first replica, whatever the order in which they ended.
    assert raised.value.args == (0,)
    assert pod.ask_hosts(lambda at, host: host.directly(StepwiseHost.next_step, None)) == ["mine", "mine"]
    assert backend.num_stops == 0
    pod.close()
    assert backend.num_stops == 1


def test_an_error_of_one_replica_is_raised_after_a_grace_and_costs_the_tables_if_others_still_wait() -> None:
    def script(worker: Worker, method: str) -> Any:
        if method != "run_function":
            return None
        return failed(worker, KeyError("mine")) if worker == DEVICE_0 else NEVER

    pod, backend = pod_of(script)
    began_s = backend.clock.now_s
    with pytest.raises(KeyError, match="mine"):
        run(pod)
    assert FUNCTION_GRACE_S < backend.clock.now_s - began_s < FUNCTION_GRACE_S + 1.0
    assert backend.num_stops == 1
    with pytest.raises(PodLost, match="device 0 failed: 'mine', while device 1 went on.*Make a new strategy"):
        run(pod)
    pod.close()
    assert backend.num_stops == 1


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.PEER])
def test_a_process_that_is_gone_costs_the_tables_at_once_and_is_named(kind: FailureKind) -> None:
    def script(worker: Worker, method: str) -> Any:
        if method != "enqueue":
            return None
        return Failure(worker=worker, kind=kind, message="gone") if worker == HOST_1 else NEVER

    pod, backend = pod_of(script)
    with pytest.raises(PodLost, match=r"lost its tables: host 1 (died|lost a peer): gone\.") as raised:
        pod.ask_hosts(lambda at, host: host.handle.call("enqueue"))
    assert isinstance(raised.value.__cause__, WorkerFailure)
    assert backend.num_stops == 1, "processes that cannot be used any more are ended, not only those of a closed one"
    with pytest.raises(PodLost, match="host 1"):
        pod.ask_hosts(lambda at, host: host.directly(StepwiseHost.next_step, None))


def test_a_host_that_dies_while_functions_run_is_named_though_only_its_device_misses_it() -> None:
    dead: list[Worker] = []

    def script(worker: Worker, method: str) -> Any:
        if method == "control status" and worker in dead:
            return Failure(worker=worker, kind=FailureKind.DIED, message="gone")
        if method != "run_function":
            return None
        missed = Failure(worker=worker, kind=FailureKind.PEER, message="The host process is gone")
        return missed if worker == DEVICE_1 else NEVER

    pod, backend = pod_of(script)
    dead.append(HOST_1)
    began_s = backend.clock.now_s
    with pytest.raises(PodLost, match=r"lost its tables: host 1 died: gone\."):
        run(pod)
    assert backend.clock.now_s - began_s < 3.0
    assert backend.num_stops == 1


@pytest.mark.parametrize("worker", [HOST_1, DEVICE_1], ids=str)
@pytest.mark.parametrize("method", ["enqueue", "run_function"])
def test_a_process_that_is_stopped_is_found_within_ten_seconds_and_named(worker: Worker, method: str) -> None:
    stopped: set[Worker] = set()

    def script(asked: Worker, what: str) -> Any:
        return NEVER if what == method or (asked in stopped and what == "control status") else None

    pod, backend = pod_of(script, stopped=frozenset({worker}))
    stopped.add(worker)
    began_s = backend.clock.now_s
    ask = run if method == "run_function" else lambda pod: pod.ask_hosts(lambda at, host: host.handle.call(method))
    with pytest.raises(PodLost, match=f"{worker} hung: .*stopped by a signal.*the process is frozen"):
        ask(pod)
    assert backend.clock.now_s - began_s <= 10.0
    assert backend.num_stops == 1


def test_a_function_that_does_not_end_in_time_names_who_is_in_it() -> None:
    def script(worker: Worker, method: str) -> Any:
        if method == "control status" and not worker.is_host:
            return Progress(step=0, phase=Phase.USER_FUNCTION, marks=0, step_unix_s=0.0, phase_s=100.0)
        return NEVER if method == "run_function" and worker == DEVICE_1 else None

    pod, _ = pod_of(script)
    with pytest.raises(PodLost, match="device 1 hung: nothing finished for .* s; it is in user function for 100 s"):
        run(pod, timeout_s=100.0)


def tell(pod: Pod) -> None:
    """As `PodEngine.enqueue` where hosts are known to have room."""
    pod.tell_hosts("enqueue", lambda at, host: host.handle.call("enqueue"))


def of_enqueue(answer: Any) -> Callable[[Worker, str], Any]:
    """A script in which hosts answer `enqueue` so; a callable gets the host."""
    return lambda worker, method: (answer(worker) if callable(answer) else answer) if method == "enqueue" else None


def test_what_hosts_are_told_is_waited_for_by_the_next_call() -> None:
    ends_s = float("inf")
    pod, backend = pod_of(of_enqueue(lambda worker: "done" if backend.clock.now_s >= ends_s else NEVER))
    tell(pod)
    began_s = backend.clock.now_s
    ends_s = began_s + 1.0
    assert run(pod) == ["mine", "mine"]
    assert 1.0 <= backend.clock.now_s - began_s < 1.5
    pod.close()


@pytest.mark.parametrize(
    "following",
    [run, lambda pod: pod.ask_hosts(lambda at, host: host.directly(StepwiseHost.next_step, None)), Pod.close],
)
def test_what_it_raises_is_raised_by_the_next_call_at_the_latest(following: Callable[[Pod], Any]) -> None:
    def script(worker: Worker, method: str) -> Any:
        if method == "enqueue":
            return failed(worker, KeyError(worker.number))
        return failed(worker, RuntimeError("an echo")) if method == "run_function" else None

    pod, backend = pod_of(script)
    tell(pod)
    with pytest.raises(KeyError) as raised:
        following(pod)
    assert raised.value.args == (0,)
    assert "raised by enqueue, before this call" in raised.value.__notes__[0]
    assert "next_step" not in [method for _, method, _ in backend.asked], "asked after a call that had failed"
    # It is raised once.
    if following is not Pod.close:
        assert pod.ask_hosts(lambda at, host: host.call(StepwiseHost.metrics)) == ["mine", "mine"]
    pod.close()
    assert backend.num_stops == 1


def test_a_host_that_dies_meanwhile_is_named_by_the_next_call() -> None:
    gone = Failure(worker=HOST_1, kind=FailureKind.DIED, message="gone")

    def script(worker: Worker, method: str) -> Any:
        if method == "run_function":
            return NEVER
        return of_enqueue(lambda worker: gone if worker == HOST_1 else NEVER)(worker, method)

    pod, backend = pod_of(script)
    tell(pod)
    with pytest.raises(PodLost, match=r"lost its tables: host 1 died: gone\."):
        run(pod)
    assert backend.num_stops == 1


def test_hosts_are_told_of_a_batch_only_if_they_have_room() -> None:
    pod, backend = pod_of(of_enqueue(NEVER))
    spec = EngineSpec(tables=(), features=(), quantization=(), is_pipelined=False)
    engine = PodEngine(pod, spec, restore_from=None)
    share = Share(features=(), is_training=True)
    engine.has_room = True
    began_s = backend.clock.now_s
    before = backend.num_looks
    engine.enqueue([share, share])
    assert backend.num_looks == before + 1, "calls over lines leave with the first look at them"
    assert (backend.clock.now_s, engine.num_enqueued, engine.has_room) == (began_s, 1, False)
    with pytest.raises(PodLost, match="nothing finished"):
        engine.enqueue([share, share])


def test_close_ends_what_an_interrupted_call_keeps_busy() -> None:
    """A function of an hour holds nobody up who closes its pod."""
    closing: list[threading.Thread] = []
    functions: list[Worker] = []

    def script(worker: Worker, method: str) -> Any:
        if method == "run_function":
            functions.append(worker)
            return NEVER
        if method == "control status" and functions and not closing:
            closing.append(threading.Thread(target=pod.close))
            closing[0].start()
            while not pod._ends_requests:
                time.sleep(0.001)
        return None

    pod, backend = pod_of(script)
    began_s = backend.clock.now_s
    with pytest.raises(PodLost, match="The strategy is closed"):
        run(pod)
    closing[0].join()
    assert backend.clock.now_s - began_s < 5.0
    assert "close" not in [method for _, method, _ in backend.asked], "asked to leave in the middle of a function"
    assert backend.num_stops == 1
    pod.close()
    assert backend.num_stops == 1


_ENDS_WITHOUT_CLOSE = """
import atexit
atexit.register(print, "Ray leaves")
from podembed.tests_of_pod import pod_of
pod, backend = pod_of(lambda worker, method: None)
stop = backend.stop
backend.stop = lambda handles: (print("the pod ends"), stop(handles))
raise KeyError("uncaught")
"""


def test_a_program_that_ends_without_close_ends_its_pod_before_ray_leaves() -> None:
    program = _ENDS_WITHOUT_CLOSE.replace("podembed.tests_of_pod", __name__)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["the pod ends", "Ray leaves"]
    assert ended.stderr.splitlines()[-1] == "KeyError: 'uncaught'"
    assert ended.stderr.count("Traceback") == 1


def test_without_a_cluster_no_process_is_asked_any_more() -> None:
    pod, backend = pod_of(lambda worker, method: None)
    pod._cluster_lost = lambda: "the program has left its Ray cluster"
    num_asked = len(backend.asked)
    with pytest.raises(PodLost, match="lost its tables: the program has left its Ray cluster"):
        pod.ask_hosts(lambda at, host: host.directly(StepwiseHost.next_step, None))
    pod.close()
    assert len(backend.asked) == num_asked
    assert backend.num_stops == 1


def test_a_start_that_fails_leaves_nothing() -> None:
    backend = PodBackend(
        lambda worker, method: (
            Failure(worker=worker, kind=FailureKind.DIED, message="no memory") if method == "connect" else "mine"
        )
    )
    with pytest.raises(PodLost, match="no memory"):
        Pod(backend, ExitStack(), num_hosts=2, start_timeout_s=60.0, step_timeout_s=30.0, clock=backend.clock)
    assert backend.num_stops == 1
