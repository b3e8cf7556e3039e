"""`WorkerGroup`: the hosts of one generation, and the calls that the driver makes to all of them at once.

It knows what is asked of a host and of a device process, in which order and with which deadline; it does not know how they are reached.
That is a `Backend`: Ray actors (`orchestrator.cluster`) or threads of this process (`orchestrator.in_process`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.beginning import Beginning
from orchestrator.errors import Failure, FailureKind, WorkerFailure
from orchestrator.manifest import Manifest
from workers.device_process import DenseReceipt, DeviceReady, DeviceSpec, DeviceWindow
from workers.host import HostReady, HostSpec, HostWindow, ScoredSamples, ShardReceipt
from workers.progress import Progress

Receipts = tuple[list[ShardReceipt], list[DenseReceipt]]


class Call(Protocol):
    """A call under way."""

    @property
    def worker(self) -> str: ...


class Handle(Protocol):
    """One worker process."""

    @property
    def worker(self) -> str:
        """Label such as `host 1`."""
        ...

    @property
    def where(self) -> str:
        """Process id and address, for messages."""
        ...

    def call(self, method: str, *arguments: Any) -> Call:
        """Starts a method that works: one at a time per process."""
        ...

    def background(self, method: str, *arguments: Any) -> Call:
        """Starts a long method beside those that work: one at a time per process."""
        ...

    def control(self, method: str, *arguments: Any) -> Call:
        """Starts a method that answers while another one works."""
        ...


@dataclass(frozen=True, slots=True)
class HostHandles:
    """The two processes of a host."""

    host: Handle
    device: Handle


class Backend(Protocol):
    """How worker processes are started, waited for and stopped."""

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        """Starts the processes of all hosts, without waiting for them. While it waits for room, it calls `on_wait` at least once a second."""
        ...

    def settled(self, calls: Sequence[Call], *, timeout_s: float) -> tuple[list[Call], list[Call]]:
        """Waits up to `timeout_s` for at least one call to end. Returns (ended, still running)."""
        ...

    def result(self, call: Call) -> Any | Failure:
        """What an ended call returned, or how it failed."""
        ...

    def stop(self, handles: Sequence[HostHandles]) -> None:
        """Ends all processes and waits until they are gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. `silence_s`: how long a process may leave a control call unanswered; `grace_s`: how long after a first failure
    the others are waited for, so that equal causes are reported together; `close_s`: to leave in order; `stall_s`: without progress
    for so long, every process is asked for its status, not only the first `sample`."""

    start_s: float = 300.0
    step_s: float = 120.0
    silence_s: float = 30.0
    grace_s: float = 1.5
    close_s: float = 20.0
    poll_s: float = 1.0
    stall_s: float = 3.0
    sample: int = 16


@dataclass(slots=True)
class WorkerGroup:
    """The hosts of one generation. Mutated: `progress`, the last answers of the hosts' status.

    Attributes:
      handles: one entry a host.
      ready: what each host said when it had started.
      spent_s: seconds of the parts of the start, for the recovery report.
    """

    backend: Backend
    handles: Sequence[HostHandles]
    deadlines: Deadlines
    on_poll: Callable[[], None]
    progress: dict[str, Progress] = field(default_factory=dict)
    ready: Sequence[HostReady] = ()
    spent_s: dict[str, float] = field(default_factory=dict)
    is_stopped: bool = False

    @staticmethod
    def start(
        backend: Backend,
        host_specs: Sequence[HostSpec],
        device_spec: Callable[[int, HostReady, str], DeviceSpec],
        *,
        deadlines: Deadlines,
        on_poll: Callable[[], None],
    ) -> WorkerGroup:
        """Starts all processes, joins the mesh and the gang, and compiles.

        Args:
          host_specs: one a host.
          device_spec: (host number, the host's answer, gang coordinator) → spec of its device process.

        Raises:
          WorkerFailure: a process failed or did not answer in time. Everything that was started is stopped.
        """
        started = time.monotonic()
        group = WorkerGroup(backend, backend.launch(len(host_specs), on_poll), deadlines, on_poll)
        try:
            ready = group.ready = group._hosts("start", [(spec,) for spec in host_specs])
            (coordinator,) = group._gather(
                [group.handles[0].device.call("reserve_coordinator", ready[0].mesh_address[0])], deadlines.start_s
            )
            group.spent_s["start"] = time.monotonic() - started
            addresses = [host.mesh_address for host in ready]
            calls = [h.host.call("connect", addresses, deadlines.start_s) for h in group.handles]
            calls += [
                h.device.call("start", device_spec(rank, ready[rank], coordinator))
                for rank, h in enumerate(group.handles)
            ]
            answers = group._gather(calls, deadlines.start_s)
            devices: list[DeviceReady] = answers[len(group.handles) :]
            group.spent_s["compile"] = max(device.compile_s for device in devices)
            group.spent_s["start"] = time.monotonic() - started - group.spent_s["compile"]
        except BaseException:
            group.stop()
            raise
        return group

    @property
    def num_hosts(self) -> int:
        return len(self.handles)

    def restore(self, manifest: Manifest | None) -> None:
        """Brings every shard and every dense replica to a commit, or to its first values."""
        started = time.monotonic()
        calls = [h.host.call("restore", manifest and manifest.tables) for h in self.handles]
        calls += [h.device.call("restore", manifest and manifest.dense) for h in self.handles]
        self._gather(calls, self.deadlines.start_s, counts_marks=True)
        self.spent_s["restore"] = time.monotonic() - started

    def warm_start(self, beginning: Beginning) -> None:
        """Brings every shard and every dense replica to the state that a new run begins from."""
        started = time.monotonic()
        location, plan = beginning.location, beginning.plan
        calls = [h.host.call("warm_start", location, plan.tables) for h in self.handles]
        calls += [h.device.call("warm_start", location, plan.dense, plan.dense_parts) for h in self.handles]
        self._gather(calls, self.deadlines.start_s, counts_marks=True)
        self.spent_s["restore"] = time.monotonic() - started

    def train(
        self, first_step: int, last_step: int, *, is_followed: bool = False
    ) -> tuple[list[HostWindow], list[DeviceWindow]]:
        """Runs steps `first_step` to `last_step - 1` on all hosts; `is_followed` as in `HostWorker.train`."""
        calls = [h.host.call("train", first_step, last_step, is_followed) for h in self.handles]
        calls += [h.device.call("serve_window") for h in self.handles]
        answers = self._gather(calls, self.deadlines.step_s, counts_marks=True)
        return answers[: self.num_hosts], answers[self.num_hosts :]

    def evaluate(self) -> list[ScoredSamples]:
        """Scores the evaluation data once. Returns each host's part."""
        calls = [h.host.call("evaluate") for h in self.handles]
        calls += [h.device.call("serve_window") for h in self.handles]
        return self._gather(calls, self.deadlines.step_s, counts_marks=True)[: self.num_hosts]

    def begin_save(self, attempt: str, *, is_delta: bool) -> Sequence[Call]:
        """Freezes the present moment on all workers and starts to write it below `data/<attempt>`; training may go on at once.

        Args:
          is_delta: of the tables only the rows that changed since the save before, or since the commit that was restored.

        Returns:
          The calls under way, for `receipts` and `await_receipts`.
        """
        calls = [h.host.call("begin_save") for h in self.handles] + [h.device.call("begin_save") for h in self.handles]
        self._gather(calls, self.deadlines.start_s)
        writing = [h.host.background("write_save", attempt, is_delta) for h in self.handles]
        return writing + [h.device.background("write_save", attempt, rank == 0) for rank, h in enumerate(self.handles)]

    def receipts(self, writing: Sequence[Call]) -> Receipts | None:
        """What a save wrote, or None while it is still being written. Does not wait.

        A process that is gone makes this None for ever: the calls that work report it.

        Raises:
          WorkerFailure: a worker could not write.
        """
        ended, running = self.backend.settled(writing, timeout_s=0.0)
        answers = {id(call): self.backend.result(call) for call in ended}
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        errors = [failure for failure in failures if failure.kind is FailureKind.ERROR]
        if errors:
            raise WorkerFailure(errors)
        return None if running or failures else self._sides([answers[id(call)] for call in writing])

    def await_receipts(self, writing: Sequence[Call]) -> Receipts:
        """Waits for what a save wrote. Every device answers with the digest of its replica; one of them wrote it.

        Raises:
          WorkerFailure: a worker could not write, is gone, or has written nothing for too long.
        """
        return self._sides(self._gather(writing, self.deadlines.start_s, counts_marks=True))

    def _sides(self, answers: Sequence[Any]) -> Receipts:
        return list(answers[: self.num_hosts]), list(answers[self.num_hosts :])

    def last_progress(self) -> list[Progress]:
        """What each host last said of itself; survivors of a fault are asked once more."""
        calls = [h.host.control("status") for h in self.handles]
        deadline = time.monotonic() + 1.0
        while calls and time.monotonic() < deadline:
            ended, calls = self.backend.settled(calls, timeout_s=max(0.0, deadline - time.monotonic()))
            for call in ended:
                self._note(call)
        return list(self.progress.values())

    def close(self) -> None:
        """Lets every worker leave in order: meshes say goodbye, the gang dissolves. For healthy groups; `stop` follows."""
        calls = [h.device.call("close") for h in self.handles] + [h.host.call("close") for h in self.handles]
        self._gather(calls, self.deadlines.close_s)

    def stop(self) -> None:
        """Ends every process of the group and waits until they are gone. Safe to call twice."""
        if not self.is_stopped:
            self.backend.stop(self.handles)
            self.is_stopped = True

    def _hosts(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [h.host.call(method, *args) for h, args in zip(self.handles, arguments, strict=True)]
        return self._gather(calls, self.deadlines.start_s)

    def _gather(self, calls: Sequence[Call], timeout_s: float, *, counts_marks: bool = False) -> list[Any]:
        """Waits for all calls; their results in order.

        Args:
          timeout_s: for all calls together.
          counts_marks: the time starts again whenever a worker finishes a step or a file, however many there are.

        Raises:
          WorkerFailure: with every failure that was seen within the grace period after the first.
        """
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        number = {id(call): at for at, call in enumerate(calls)}
        running = list(calls)
        watch = _Watch(self, timeout_s=timeout_s, counts_marks=counts_marks)
        failed_at: float | None = None
        while running:
            ended, running = self.backend.settled(running, timeout_s=0.05 if failures else 0.2)
            for call in ended:
                result = self.backend.result(call)
                if isinstance(result, Failure):
                    failures.append(result)
                else:
                    results[number[id(call)]] = result
            if failures:
                failed_at = failed_at or time.monotonic()
                if not running or time.monotonic() - failed_at > self.deadlines.grace_s:
                    raise WorkerFailure(failures)
            else:
                self.on_poll()
                failures += watch.check(running)
        if failures:
            raise WorkerFailure(failures)
        return [results[at] for at in range(len(calls))]

    def _note(self, call: Call) -> None:
        answer = self.backend.result(call)
        if isinstance(answer, Progress):
            self.progress[call.worker] = answer


class _Watch:
    """Asks the workers' control side how far they are while they work, and finds those that are frozen or stuck.

    While steps are finished, only the first processes are asked: hosts wait for each other in every step, so one that is frozen stops
    them all, and then all are asked. So a watch over a thousand hosts costs the driver no more than one over ten.
    """

    def __init__(self, group: WorkerGroup, *, timeout_s: float, counts_marks: bool) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._counts_marks = counts_marks
        self._started = self._moved = time.monotonic()
        self._asked: dict[str, tuple[Call, float]] = {}
        self._handles = [handle for pair in group.handles for handle in (pair.host, pair.device)]
        self._next = self._started + group.deadlines.poll_s

    def check(self, running: Sequence[Call]) -> list[Failure]:
        """Failures found since the last call; called often, asks once per poll interval."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + self._group.deadlines.poll_s
        before = dict(self._group.progress)
        self._collect()
        if self._counts_marks and any(p.marks != before.get(w, p).marks for w, p in self._group.progress.items()):
            self._moved = now
        self._ask(now)
        silent = [(w, now - since) for w, (_, since) in self._asked.items() if now - since > self._silence_s(w)]
        if silent:
            return [
                Failure(
                    worker=w,
                    kind=FailureKind.HUNG,
                    message=f"no answer to a status call for {s:.0f} s; the process is frozen",
                )
                for w, s in silent
            ]
        if now - (self._moved if self._counts_marks else self._started) > self._timeout_s:
            return self._stuck(running)
        return []

    def _silence_s(self, worker: str) -> float:
        """A process that has never answered may still be coming up; it has the time of the start for that."""
        deadlines = self._group.deadlines
        return deadlines.silence_s if worker in self._group.progress else max(deadlines.silence_s, deadlines.start_s)

    def _ask(self, now: float) -> None:
        is_stalled = now - self._moved > self._group.deadlines.stall_s
        for handle in self._handles if is_stalled else self._handles[: self._group.deadlines.sample]:
            if handle.worker not in self._asked:
                self._asked[handle.worker] = (handle.control("status"), now)

    def _collect(self) -> None:
        calls = [call for call, _ in self._asked.values()]
        ended, _ = self._group.backend.settled(calls, timeout_s=0.0) if calls else ([], [])
        for call in ended:
            self._group._note(call)
            self._asked.pop(call.worker, None)

    def _stuck(self, running: Sequence[Call]) -> list[Failure]:
        phases: Mapping[str, Progress] = self._group.progress
        return [
            Failure(
                worker=call.worker,
                kind=FailureKind.HUNG,
                message=f"nothing finished for {self._timeout_s:.0f} s; it is in {phases[call.worker].phase} of step {phases[call.worker].step}"
                if call.worker in phases
                else f"no answer for {self._timeout_s:.0f} s",
            )
            for call in running
        ]
