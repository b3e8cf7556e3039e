"""`WorkerGroup`: the hosts of one generation, and the calls that the driver makes to all of them at once.

It knows what is asked of a host and of a device process, in which order and with which deadline. How answers are
waited for and frozen processes found is in `ProcessGroup`. How processes are reached is the business of a `Backend`:
Ray actors (`orchestrator.cluster.ray_backend`) or threads of this process (`orchestrator.cluster.in_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.run_errors import Failure, FailureKind, WorkerFailure
from podembed.orchestrator.commit.manifest import Manifest
from podembed.orchestrator.group.backend import Backend, Call, Handle, HostHandles, Rejoining
from podembed.orchestrator.group.calls import Calls, answers_within
from podembed.orchestrator.group.process_group import ProcessGroup
from podembed.orchestrator.group.watch import Deadlines
from podembed.orchestrator.run.beginning import Beginning
from podembed.workers.checkpoint.shard import ShardReceipt
from podembed.workers.device.process import DenseReceipt, DeviceProcess, DeviceReady, DeviceSpec, DeviceWindow
from podembed.workers.host.host import HostWorker
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow, ScoredSamples
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.job.reference import AnyJob
from podembed.workers.liveness.progress import Progress, Stopwatch

__all__ = ["Backend", "Call", "Deadlines", "Handle", "HostHandles", "Receipts", "Rejoining", "WorkerGroup"]

Receipts = tuple[list[ShardReceipt], list[DenseReceipt]]
LAST_WORD_S = 1.0
CLOSE_S = 20.0
"""For all workers to leave in order."""
SALVAGE_S = 2.0
"""For a host to answer when its generation is given up."""
SETTLE_S = 8.0
"""To end what it does then."""


@dataclass(slots=True)
class WorkerGroup(ProcessGroup):
    """The hosts of one generation.

    Attributes:
      ready, devices: answer of each host and of each device process when it had started.
      spent_s: seconds of the parts of the start, for the recovery report.
      start_s: the same in more detail; of what all devices do at once, that of the slowest.
      refusals: connections that hosts did not let in while they joined, one line each.
      restored: answer of each host on how its shard was restored.
      is_proven: whether no host has rows that are still to be compared with the commit.
      activity: listener for what a start is doing.
    """

    ready: Sequence[HostReady] = ()
    devices: Sequence[DeviceReady] = ()
    spent_s: dict[str, float] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    restored: Sequence[Restored] = ()
    is_proven: bool = True
    _restoring: list[Call[Any]] = field(default_factory=list)
    _spec: HostSpec | None = None
    refusals: Sequence[str] = ()
    activity: Callable[[str], None] = lambda what: None

    @staticmethod
    def start(
        backend: Backend,
        host_specs: Sequence[HostSpec],
        device_spec: Callable[[int, HostReady, str], DeviceSpec],
        *,
        deadlines: Deadlines,
        on_poll: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> WorkerGroup:
        """Starts all processes, joins the mesh and the gang, and compiles.

        Args:
          host_specs: one a host.
          device_spec: (host number, the host's answer, gang coordinator) → spec of its device process.

        Raises:
          WorkerFailure: a process failed or did not answer in time. Everything that was started is stopped.
        """
        group = WorkerGroup(backend, backend.launch(len(host_specs), on_poll), deadlines, on_poll, clock=clock)
        try:
            group.form(host_specs, device_spec)
        except BaseException:
            group.stop()
            raise
        return group

    def form(
        self,
        host_specs: Sequence[HostSpec],
        device_spec: Callable[[int, HostReady, str], DeviceSpec],
        *,
        kept: Collection[int] = (),
        base: Manifest | None = None,
    ) -> None:
        """Starts what was launched, joins the mesh and the gang, and compiles.

        Args:
          kept: hosts that live on from the generation before, with their rows.
          base: a commit that `restore` will ask for; hosts begin to fill their shards while devices compile, and each
            device when it has.

        Raises:
          WorkerFailure: a process failed or did not answer in time.
        """
        started, deadlines, stopwatch = self.clock.monotonic_s(), self.deadlines, Stopwatch(self.clock.monotonic_s)
        self._spec = host_specs[0]
        self.activity("host processes load their code, the index of the data and the tables")
        starts = [
            host.call(HostWorker.rejoin, spec) if rank in kept else host.call(HostWorker.start, spec)
            for rank, (host, spec) in enumerate(zip(self._hosts, host_specs, strict=True))
        ]
        ready = self.ready = self.gather(starts, deadlines.start_s)
        stopwatch.end("host processes")
        # The coordinator's port lies on the first host's machine, whose address is known only now.
        reserve = self._devices[0].call(DeviceProcess.reserve_coordinator, ready[0].mesh_address[0])
        (coordinator,) = self.gather([reserve], deadlines.start_s)
        stopwatch.end("coordinator")
        self.activity("hosts connect, device processes compile the model")
        addresses = [host.mesh_address for host in ready]
        calls: list[Call[Any]] = [host.call(HostWorker.connect, addresses, deadlines.start_s) for host in self._hosts]
        calls += [
            device.call(DeviceProcess.start, device_spec(rank, ready[rank], coordinator))
            for rank, device in enumerate(self._devices)
        ]
        # Behind the calls above in each worker's queue. So rows are read while devices compile.
        if base is not None:
            self._restoring = [host.call(HostWorker.restore, base.tables) for host in self._hosts]
            self._restoring += [device.call(DeviceProcess.restore, base.dense) for device in self._devices]
        answers = self.gather(calls, deadlines.start_s)
        self.refusals = [line for lines in answers[: self.num_hosts] for line in lines or ()]
        self.devices = answers[self.num_hosts :]
        self.start_s = stopwatch.seconds | _slowest([device.start_s for device in self.devices])
        self.spent_s["compile"] = max(device.compile_s for device in self.devices)
        self.spent_s["start"] = self.clock.monotonic_s() - started - self.spent_s["compile"]

    @property
    def _hosts(self) -> list[Calls[HostWorker]]:
        return [Calls(pair.host) for pair in self.handles]

    @property
    def _devices(self) -> list[Calls[DeviceProcess]]:
        return [Calls(pair.device) for pair in self.handles]

    @property
    def restore_totals(self) -> dict[str, Any]:
        """How the shards were restored, for the recovery report: seconds of the slowest host, and sums over all."""
        seconds = ("undo_s", "move_s", "read_s")
        counts = ("buckets_kept", "buckets_moved", "bytes_moved", "buckets_read", "bytes_read")
        return {name: max((getattr(one, name) for one in self.restored), default=0.0) for name in seconds} | {
            name: sum(getattr(one, name) for one in self.restored) for name in counts
        }

    def restore(self, manifest: Manifest | None) -> None:
        """Brings every shard and every dense replica to a commit, or to its first values."""
        started = self.clock.monotonic_s()
        calls, self._restoring = self._restoring, []
        self.activity(f"reading the rows of {manifest.name}" if manifest else "giving the tables their first values")
        if not calls:
            calls = [host.call(HostWorker.restore, manifest and manifest.tables) for host in self._hosts]
            calls += [device.call(DeviceProcess.restore, manifest and manifest.dense) for device in self._devices]
        answers = self.gather(calls, self.deadlines.start_s, counts_marks=True)
        self.restored = [answer for answer in answers if isinstance(answer, Restored)]
        self.is_proven = not any(one.buckets_to_compare for one in self.restored)
        self.spent_s["restore"] = self.clock.monotonic_s() - started

    def warm_start(self, beginning: Beginning) -> None:
        """Brings every shard and every dense replica to the state that a new run begins from."""
        started = self.clock.monotonic_s()
        location, plan = beginning.location, beginning.plan
        calls = [host.call(HostWorker.warm_start, location, plan.tables) for host in self._hosts]
        calls += [
            device.call(DeviceProcess.warm_start, location, plan.dense, plan.dense_parts) for device in self._devices
        ]
        self.gather(calls, self.deadlines.start_s, counts_marks=True)
        self.spent_s["restore"] = self.clock.monotonic_s() - started

    def prove(self) -> None:
        """Waits until the rows that hosts kept are known to be those of the commit, where that is still open. To be
        called before anything is made of them that lasts, or is judged by.

        Raises:
          WorkerFailure: a host has others.
        """
        if not self.is_proven:
            self.gather(
                [host.call(HostWorker.verify) for host in self._hosts], self.deadlines.start_s, counts_marks=True
            )
            self.is_proven = True

    def train(
        self,
        first_step: int,
        last_step: int,
        *,
        is_followed: bool = False,
        is_profiled: bool = False,
        is_sampled: bool = False,
    ) -> tuple[list[HostWindow], list[DeviceWindow]]:
        """Runs steps `first_step` to `last_step - 1` on all hosts; the rest as in `HostWorker.train`."""
        calls: list[Call[Any]] = [
            host.call(HostWorker.train, first_step, last_step, is_followed, is_profiled, is_sampled)
            for host in self._hosts
        ]
        calls += [device.call(DeviceProcess.serve_window) for device in self._devices]
        answers = self.gather(calls, self.deadlines.step_s, counts_marks=True)
        return answers[: self.num_hosts], answers[self.num_hosts :]

    def evaluate(self, first_batch: int = 0, last_batch: int | None = None) -> list[ScoredSamples] | None:
        """Scores batches `first_batch` to `last_batch - 1` of the evaluation data on all hosts, as
        `HostWorker.evaluate`. Returns each host's part when the last batch is scored; None before.

        Raises:
          WorkerFailure: a worker failed, or had wrong rows.
        """
        self.prove()
        calls: list[Call[Any]] = [host.call(HostWorker.evaluate, first_batch, last_batch) for host in self._hosts]
        calls += [device.call(DeviceProcess.serve_window) for device in self._devices]
        parts = self.gather(calls, self.deadlines.step_s, counts_marks=True)[: self.num_hosts]
        # All hosts have as many batches, so all are done at once.
        return None if parts[0] is None else parts

    def begin_save(self, attempt: str, *, is_delta: bool, before_failed: bool = False) -> Sequence[Call[Any]]:
        """Freezes the present moment on all workers and starts to write it below `data/<attempt>`; training may go on
        at once. Rows that hosts kept from before a fault are proven first.

        Args:
          is_delta: whether to write of the tables only the rows that changed since the last save that became a commit,
            or since the commit that was restored.
          before_failed: the save before this one did not become a commit.

        Returns:
          The calls under way, for `receipts` and `await_receipts`.

        Raises:
          WorkerFailure: a host had wrong rows.
        """
        self.prove()
        # A worker does these calls in order, and its writing thread waits for the first. The driver needs no answer
        # before the next step.
        begun = [host.call(HostWorker.begin_save, attempt, before_failed) for host in self._hosts]
        begun += [device.call(DeviceProcess.begin_save) for device in self._devices]
        writing: list[Call[Any]] = [host.background(HostWorker.write_save, attempt, is_delta) for host in self._hosts]
        writing += [
            device.background(DeviceProcess.write_save, attempt, rank == 0) for rank, device in enumerate(self._devices)
        ]
        return begun + writing

    def receipts(self, writing: Sequence[Call[Any]]) -> Receipts | None:
        """Receipts of a save, or None while it is still being written. Does not wait.

        A process that is gone makes this None for ever: the calls that work report it.

        Raises:
          WorkerFailure: a worker could not write. If that was the storage's fault, all workers have ended.
        """
        ended, running = self.backend.settled(writing, timeout_s=0.0)
        answers = {id(call): self.backend.result(call) for call in ended}
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        errors = [failure for failure in failures if failure.kind is FailureKind.ERROR]
        if errors and not (running and all(error.is_storage for error in errors)):
            raise WorkerFailure(errors)
        return None if running or failures else self._sides([answers[id(call)] for call in writing])

    def await_receipts(self, writing: Sequence[Call[Any]]) -> Receipts:
        """Waits for what a save wrote. Every device answers with the digest of its replica; one of them wrote it.

        Raises:
          WorkerFailure: a worker could not write, is gone, or has written nothing for too long. If it was the storage's
            fault alone, all workers have ended.
        """
        return self._sides(self.gather(writing, self.deadlines.start_s, counts_marks=True, bears_storage=True))

    def _sides(self, answers: Sequence[Any]) -> Receipts:
        """Answers to the calls of `begin_save`, of which the first half says nothing."""
        written = answers[2 * self.num_hosts :]
        return list(written[: self.num_hosts]), list(written[self.num_hosts :])

    def acknowledge(self, commit: str) -> None:
        """Tells the hosts that a commit stands, so that they forget the one before. Does not wait for answers."""
        for host in self._hosts:
            host.control(HostWorker.acknowledge, commit)

    def stand_by(self, job: AnyJob, table_buckets: tuple[int, ...]) -> None:
        """Starts processes that wait to take the place of lost ones, where the backend can."""
        if isinstance(self.backend, Rejoining):
            self.backend.stand_by(self.handles, job, table_buckets, self._spec)

    def salvage(self, reason: str) -> frozenset[int]:
        """Ends the generation, but for the host processes that can go on in another one. The group is stopped then.

        Each host has to give up what it does; one that answers within `salvage_s` has `settle_s` for it. All device
        processes are ended, since a gang of JAX processes cannot lose a member, and so is every other host: a frozen
        one must be gone before its memory is allocated again.

        Returns:
          The hosts that live. With none, nothing is left, as after `stop`.
        """
        if self.is_stopped or not isinstance(self.backend, Rejoining):
            self.stop()
            return frozenset()
        aborting = {rank: host.control(HostWorker.abort, reason) for rank, host in enumerate(self._hosts)}
        settling = {
            rank: (host.call(HostWorker.settle), host.background(HostWorker.settle))
            for rank, host in enumerate(self._hosts)
        }
        # The end of its device also frees a host that waits for it in the middle of a step.
        self.backend.end([h.device for h in self.handles])
        # A frozen process answers nothing. One that answers may still have a read or a write to end.
        awake = self._answered({rank: [call] for rank, call in aborting.items()}, SALVAGE_S)
        alive = self._answered({rank: settling[rank] for rank in awake}, SETTLE_S)
        if not alive:
            self.stop()
            return alive
        self.backend.end([h.host for rank, h in enumerate(self.handles) if rank not in alive])
        self.is_stopped = True
        return alive

    def _answered(self, calls: Mapping[int, Sequence[Call[Any]]], timeout_s: float) -> frozenset[int]:
        """The hosts of which all calls return within a time."""
        flat = [(rank, call) for rank, own in calls.items() for call in own]
        found = answers_within(self.backend, [call for _, call in flat], timeout_s=timeout_s, clock=self.clock)
        good = [flat[at][0] for at, answer in found.items() if not isinstance(answer, Failure)]
        return frozenset(rank for rank, own in calls.items() if good.count(rank) == len(own))

    def last_progress(self) -> list[Progress]:
        """The last status of each host; survivors of a fault are asked once more."""
        calls = [host.control(HostWorker.status) for host in self._hosts]
        found = answers_within(self.backend, calls, timeout_s=LAST_WORD_S, clock=self.clock)
        for at, answer in found.items():
            self.note(calls[at].worker, answer)
        return list(self.progress.values())

    def close(self) -> None:
        """Lets every worker leave in order: meshes say goodbye, the gang dissolves. For healthy groups; `stop`
        follows.
        """
        calls = [device.call(DeviceProcess.close) for device in self._devices] + [
            host.call(HostWorker.close) for host in self._hosts
        ]
        self.gather(calls, CLOSE_S)


def _slowest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The maximum of each part over all workers, in the order of the parts."""
    return {name: max(spent[name] for spent in parts if name in spent) for name in {n: None for p in parts for n in p}}
