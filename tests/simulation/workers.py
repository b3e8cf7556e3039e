"""Simulated hosts that hold real tables and write real checkpoint files, and their devices. How a driver reaches them
is `backend`'s.

What is real: `Table`, `Snapshot` and `BackgroundSave`, `Undo`, `Shard`, and the host's order of leaving one generation
for the next, the files of a shard and of the dense state, receipts, and how an exception becomes a
`Failure`. What is simulated: time, processes, links, input, exchange and device. A step is: wait for the frames of all
hosts, each the list of the lanes that its host read; let the device take its step; then add to the rows here what the
samples of those lanes add.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.embedding.table.table import Table
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.shard import ShardReceipt, read_dense, write_dense
from podembed.workers.device.process import DenseReceipt, DeviceReady, DeviceSpec, DeviceWindow
from podembed.workers.device.shared_memory import ChannelLayout, ChannelLost, ChannelTimeout, Invitation
from podembed.workers.host.generation import HostGeneration
from podembed.workers.host.host import HostWorker
from podembed.workers.host.shard import Shard, Survivor
from podembed.workers.host.spec import HostReady, HostSpec, HostWindow
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.host.survivors.verification import RowVerification
from podembed.workers.liveness.progress import Phase, Progress, Tracker
from podembed.workers.mesh.link import Receive
from podembed.workers.mesh.mesh_errors import MeshAborted, MeshError, PeerLost
from podembed.workers.storage.store import Store
from tests.simulation.model import Model, next_dense
from tests.simulation.world import FakeClock, Fiber, Process, World

if TYPE_CHECKING:
    from tests.simulation.backend import Lane

STEP_S = 0.4
# For all changes of this job.
ROOMY_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What the processes of all drivers share.

    Attributes:
      store_of: a process → its view of the storage.
      reached: told where a process is, so that faults may strike there.
      applied: told (generation, step) when a host has changed its rows for a step.
      violated: told (invariant, what was found).
      survived: told how a host's shard was restored.
      undo_bytes: of the way back to the last commit.
      buffer_bytes: of the pre-images; None as in a real host.
      lanes: of each process, for calls that work and for those in the background.
    """

    world: World
    model: Model
    noise: random.Random
    store_of: Callable[[Process, FakeClock], Store]
    reached: Callable[[Process, str], None]
    applied: Callable[[int, int], None]
    violated: Callable[[str, str], None]
    survived: Callable[[Restored], None]
    undo_bytes: int
    buffer_bytes: int | None = None
    lanes: dict[Process, tuple[Lane, Lane]] = field(default_factory=dict)


class SimulatedTracker(Tracker):
    """Says when a step was finished by the simulated clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def finish_step(self) -> None:
        self._marks += 1
        self._step_unix_s = self._clock.wall_s()


class SimulatedTurn:
    """In place of the condition of a save: fibers need no lock, and wait in simulated time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[Fiber] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout_s: float) -> None:
        fiber = self._world.current
        if fiber is not None:
            self._waiting.append(fiber)
            fiber.block(timeout_s)

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.wake()


class SimulatedSave(BackgroundSave):
    """The real one, but for what its two threads wait on."""

    def __init__(self, world: World, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rows.turn = SimulatedTurn(world)


class SimulatedVerification(RowVerification):
    """The real one, whose threads are fibers of its process. A bucket takes a while, so that training changes it."""

    def __init__(self, world: World, process: Process, noise: random.Random, *arguments: Any, **options: Any) -> None:
        self._world, self._process, self._noise = world, process, noise
        super().__init__(*arguments, **options)

    def _begin(self, count: int) -> None:
        for _ in range(count):
            self._world.fiber(self._process, self._work)

    def _let_go_on(self, num_bytes: int) -> None:
        if not self._is_urgent():
            self._world.sleep(self._noise.uniform(0.0, STEP_S))
            self._is_urgent()

    def _join(self) -> None:
        while self._running:
            self._world.sleep(0.01)


class Mesh:
    """Frames between the hosts of one group."""

    def __init__(self, world: World, num_hosts: int) -> None:
        self.heals_s = 0.0
        self._world = world
        self._num_hosts = num_hosts
        self._members: dict[int, Process] = {}
        self._frames: dict[tuple[str, int], dict[int, Any]] = {}
        self._waiting: list[Fiber] = []
        self._aborted: dict[int, str] = {}

    def join(self, rank: int, process: Process) -> None:
        self._members[rank] = process
        process.at_death(self._wake)

    def abort(self, rank: int, reason: str) -> None:
        """A host waits no longer."""
        self._aborted[rank] = reason
        self._wake()

    def exchange(self, step: int, rank: int, lanes: tuple[int, ...], *, timeout_s: float) -> tuple[int, ...]:
        """The lanes of all hosts, in host order.

        Raises:
          As `frames`.
        """
        frames = self.frames(("lanes", step), rank, lanes, timeout_s=timeout_s)
        return tuple(lane for at in range(self._num_hosts) for lane in frames[at])

    def frames(self, name: tuple[str, int], rank: int, frame: Any, *, timeout_s: float) -> dict[int, Any]:
        """What every host said under a name, when all have.

        Raises:
          PeerLost: a host is gone; MeshAborted: `abort`; MeshError: nothing came in time.
        """
        frames = self._frames.setdefault(name, {})
        frames[rank] = frame
        self._wake()
        fiber, deadline_s = self._world.current, self._world.now_s + timeout_s
        while len(frames) < self._num_hosts or self._world.now_s < self.heals_s:
            if rank in self._aborted:
                raise MeshAborted(self._aborted[rank])
            lost = [member for member, process in self._members.items() if not process.is_alive]
            if lost:
                raise PeerLost(lost[0], "its process is gone")
            if self._world.now_s >= deadline_s or fiber is None:
                raise MeshError(f"nothing from ranks {sorted(set(range(self._num_hosts)) - set(frames))} of {name}")
            self._waiting.append(fiber)
            fiber.block(min(deadline_s, max(self.heals_s, self._world.now_s + 1.0)) - self._world.now_s)
        return frames

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.wake()


@dataclass(frozen=True, slots=True, eq=False)
class MeshEnd:
    """The mesh as one host holds it. `moves` is told that buckets are about to go through it."""

    mesh: Mesh
    rank: int
    num_ranks: int
    moves: Callable[[], None]

    @property
    def identity(self) -> MeshEnd:
        """As `workers.mesh.mesh.Mesh.identity`, as far as hosts ask it for ranks."""
        return self

    def exchange(
        self, *, tag: int, step: int, send: Sequence[Sequence[np.ndarray]], receive: Receive, timeout_s: float
    ) -> None:
        """As `workers.mesh.mesh.Mesh.exchange`."""
        self.moves()
        parts = [b"".join(array.tobytes() for array in arrays) for arrays in send]
        frames = self.mesh.frames((f"tag {tag}", step), self.rank, parts, timeout_s=timeout_s)
        for rank in (rank for rank in range(self.num_ranks) if rank != self.rank):
            frame = frames[rank][self.rank]
            buffer = receive(rank, len(frame))
            if frame and isinstance(buffer, np.ndarray):
                buffer.view(np.uint8)[...] = np.frombuffer(frame, np.uint8)

    def abort(self, reason: str) -> None:
        self.mesh.abort(self.rank, reason)

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Shared:
    """What the two processes of a host share: the ends of their shared-memory channel."""

    windows: list[tuple[int, int]] = field(default_factory=list)
    waiting: Fiber | None = None


class SimulatedDevice:
    """A replica of the dense state."""

    def __init__(self, process: Process, clock: FakeClock, around: Surroundings, shared: Shared, host: Process) -> None:
        self.tracker = SimulatedTracker(clock)
        self.state = b""
        self._around = around
        self._process = process
        self._shared = shared
        self._host = host
        self._store = around.store_of(process, clock)
        self._frozen = b""

    def reserve_coordinator(self, address: str) -> str:
        return f"{address}:1"

    def start(self, spec: DeviceSpec) -> DeviceReady:
        self._process.generation = spec.invitation.generation
        self._around.reached(self._process, "device start")
        self._around.world.sleep(self._around.noise.uniform(0.2, 1.0))
        self.state = self._around.model.dense(0)
        return DeviceReady(process=1, platform="cpu", num_devices=1, compile_s=0.1)

    def restore(self, files: Sequence[DenseFile] | None) -> None:
        self._around.reached(self._process, "device restore")
        if files is not None:
            arrays = read_dense(self._store, files)
            self.state = arrays["params.chain"].tobytes()

    def serve_window(self) -> DeviceWindow:
        fiber = self._around.world.current
        while not self._shared.windows:
            if not self._host.is_alive or fiber is None:
                raise ChannelLost("the host process is gone")
            self._shared.waiting = fiber
            fiber.block(1.0)
        first, last = self._shared.windows.pop(0)
        return DeviceWindow(losses=(0.5,) * (last - first), num_steps=last - first, seconds=1.0)

    def begin_save(self) -> None:
        self._frozen = self.state

    def write_save(self, attempt: str, is_writer: bool) -> DenseReceipt:
        self._around.reached(self._process, "device write_save")
        values = {"params.chain": np.frombuffer(self._frozen, np.uint8)}
        files = write_dense(self._store, attempt, values) if is_writer else ()
        self.tracker.mark_saved()
        return DenseReceipt(digest=hashlib.sha256(self._frozen).hexdigest(), files=files)

    def status(self) -> Progress:
        return self.tracker.progress()

    def close(self) -> None: ...


class SimulatedGeneration(HostGeneration):
    """A generation with a real shard and a real undo log. Of mesh, device and saves it has what is simulated, and it
    reads no input.
    """

    def __init__(
        self,
        spec: HostSpec,
        *,
        shard: Shard,
        mesh: MeshEnd,
        store: Store,
    ) -> None:
        self.spec, self.shard, self.store = spec, shard, store
        self.mesh: Any = mesh
        self.on_same_machine = frozenset()
        # The simulated device has no tables.
        self.take_rows = _nothing

    @property
    def ready(self) -> HostReady:
        layout = ChannelLayout(
            num_dense=1, activations=ActivationLayout(num_samples=1, widths=(8,), owners=(0,)), num_buffers=1
        )
        return HostReady(
            mesh_address=("simulated", self.spec.host),
            invitation=Invitation(address="", secret=b"", generation=self.spec.generation, layout=layout),
            num_samples=1,
            process=1,
            hostname="simulated",
            shard_bytes=1,
            save_bytes=1,
        )

    def close(self, *, input_deadline_s: float = 0.0) -> None:
        self.mesh.close()


class SimulatedHost(HostWorker):
    """A shard of every table.

    `rejoin`, `restore`, `acknowledge`, `settle`, `abort` and what they keep in order are the real host's; what a
    generation consists of beside the rows is not there. Mutated: `slowness`, `spoils_row` by faults; `generation_of`,
    by the backend.

    Attributes:
      generation_of: the mesh, the channel and the device of the generation that it will be told of next.
      spoils_row: whether a row will have a wrong bit when it has gone back to a commit.
    """

    def __init__(self, process: Process, clock: FakeClock, around: Surroundings) -> None:
        super().__init__()
        self.tracker = self._tracker = SimulatedTracker(clock)
        self.slowness = 1.0
        self.spoils_row = False
        self.generation_of: tuple[Mesh, Shared, SimulatedDevice] | None = None
        self._around = around
        self._process = process
        self._store = around.store_of(process, clock)
        self._saved: set[str] = set()
        self._expected_kept: list[set[int]] | None = None
        self._is_filled = self._is_spoilt = False

    def rejoin(self, spec: HostSpec) -> HostReady:
        self._around.reached(self._process, "host rejoin")
        had, known_from = self._had(), self._known_from(spec.base)
        ready = super().rejoin(spec)
        self._expected_kept = had if known_from and had else None
        if self.spoils_row:
            self._spoil_row()
        return ready

    def _had(self) -> list[set[int]]:
        generation = self._generation
        return [] if generation is None else [{*map(int, table.buckets)} for table in generation.shard.tables]

    def _known_from(self, base: str | None) -> bool:
        """Whether the way back to a commit must be there: this host began with it, or was asked to save it; and its log
        had room for all.
        """
        parsed = parse_commit_name(base) if base else None
        if parsed is None or not self._is_filled or self._around.undo_bytes < ROOMY_BYTES:
            return False
        return base == self._present.spec.base or base in self._saved

    def _spoil_row(self) -> None:
        """What a faulty memory does, unknown to anybody."""
        for table, known in zip(self._present.shard.tables, self._present.shard.surviving.known, strict=True):
            for at in np.flatnonzero(known):
                if not self.spoils_row:
                    return
                table.bucket(int(table.buckets[at]))["rows"][0, 0] += 1.0
                self.spoils_row, self._is_spoilt, self._expected_kept = False, True, None

    def _new_generation(self, spec: HostSpec, survivor: Survivor | None) -> SimulatedGeneration:
        self._process.generation = spec.generation
        self._around.reached(self._process, "host start" if survivor is None else "host rejoined")
        self._around.world.sleep(self._around.noise.uniform(0.5, 2.0) if survivor is None else 0.05)
        if self.generation_of is None:
            raise RuntimeError("The host belongs to no generation.")
        self._frames, self._shared, self.device = self.generation_of
        self._is_filled, self._expected_kept, self._saved = False, None, set()
        mesh = MeshEnd(
            self._frames, spec.host, spec.num_hosts, moves=lambda: self._around.reached(self._process, "host move")
        )
        tables = [
            Table(table, np.flatnonzero(owners == spec.host))
            for table, owners in zip(self._around.model.specs, spec.placement, strict=True)
        ]
        shard = Shard(
            spec,
            survivor.tables if survivor else tables,
            surviving=survivor and survivor.surviving,
            tracker=self.tracker,
            check=self._raise_if_aborted,
            new_save=partial(SimulatedSave, self._around.world, buffer_bytes=self._around.buffer_bytes or 1 << 14),
            new_verification=partial(SimulatedVerification, self._around.world, self._process, self._around.noise),
        )
        return SimulatedGeneration(spec, shard=shard, mesh=mesh, store=self._store)

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> tuple[str, ...]:
        self._around.reached(self._process, "host connect")
        self._raise_if_aborted()
        self._frames.join(self._present.spec.host, self._process)
        self._around.world.sleep(0.05)
        return ()

    def restore(self, tables: Sequence[TableFiles] | None) -> Restored:
        self._around.reached(self._process, "host restore")
        restored = super().restore(tables)
        self._is_filled = tables is not None
        kept, base = self._expected_kept, self._present.spec.base
        if kept is not None:
            here = zip(self._present.shard.tables, kept, strict=True)
            wanted = sum(len({*map(int, table.buckets)} & had) for table, had in here)
            if restored.buckets_kept + restored.buckets_wrong < wanted:
                self._around.violated(
                    "I19",
                    f"{self._process} had {wanted} buckets on the way back to {base}, kept "
                    f"{restored.buckets_kept}, and "
                    f"{restored.buckets_wrong} were wrong",
                )
        if restored.buckets_wrong:
            if restored.buckets_to_compare:
                self._around.violated("I19", f"{self._process} trusts its other rows after wrong ones: {restored}")
            if not self._is_spoilt:
                self._around.violated(
                    "I19", f"{self._process} went back to {self._present.spec.base}, and was wrong: {restored}"
                )
            self._is_spoilt = False
        if restored.buckets_refused:
            self._around.violated("I19", f"{self._process} was sent buckets that are not those of {base}: {restored}")
        self._around.survived(restored)
        self._around.reached(self._process, "host restored")
        return restored

    def train(
        self,
        first_step: int,
        last_step: int,
        is_followed: bool = False,
        is_profiled: bool = False,
        is_sampled: bool = False,
    ) -> HostWindow:
        lanes = tuple(self._present.spec.lanes[self._present.spec.host])
        num_samples = 0
        for step in range(first_step, last_step):
            self.tracker.begin_step(step)
            self._around.reached(self._process, "host step")
            self._around.world.sleep(self._around.noise.uniform(0.8, 1.2) * STEP_S * self.slowness)
            self._raise_if_aborted()
            timeout_s = self._present.spec.step_timeout_s
            all_lanes = self._frames.exchange(step, self._present.spec.host, lanes, timeout_s=timeout_s)
            self._device_step(step, timeout_s)
            for at, table in enumerate(self._present.shard.tables):
                self._around.reached(self._process, "host update")
                self._update(step, all_lanes, at, table)
            num_samples += sum(len(self._around.model.samples(step, lane)) for lane in lanes)
            self._around.applied(self._present.spec.generation, step + 1)
            self.tracker.finish_step()
        self._shared.windows.append((first_step, last_step))
        if self._shared.waiting is not None:
            self._shared.waiting.wake()
        return HostWindow(
            num_samples=num_samples,
            phase_s={Phase.DEVICE: 0.1},
            bytes_sent=0,
        )

    def _device_step(self, step: int, timeout_s: float) -> None:
        device = self.device
        if device is None:
            raise RuntimeError("The host has no device.")
        deadline_s = self._around.world.now_s + timeout_s
        while device._process.is_frozen:
            if self._around.world.now_s > deadline_s:
                raise ChannelTimeout("the device process did not answer")
            self._raise_if_aborted()
            self._around.world.sleep(0.5)
        if not device._process.is_alive:
            raise ChannelLost("the device process is gone")
        device.state = next_dense(device.state, step)

    def _update(self, step: int, lanes: tuple[int, ...], at: int, table: Table) -> None:
        """As `Table.update` does: announce, then change."""
        change = self._around.model.change_here(step, lanes, at, table)
        if table.before_change is not None:
            table.before_change(change.rows)
        arrays = (table.rows, *table.slots.values())
        for array, values in zip(arrays, change.values, strict=True):
            array[change.rows] += values

    def begin_save(self, attempt: str = "", before_failed: bool = False) -> None:
        self._around.reached(self._process, "host begin_save")
        super().begin_save(attempt, before_failed)
        # All has been compared, so what was spoilt had been read anew.
        self._is_spoilt = False
        self._is_filled = True
        self._saved.add(attempt)

    def write_save(self, attempt: str, is_delta: bool) -> ShardReceipt:
        self._around.reached(self._process, "host write_save")
        return super().write_save(attempt, is_delta)

    def settle(self) -> None:
        self._around.reached(self._process, "host settle")

    def status(self) -> Progress:
        return self.tracker.progress()


def _nothing() -> None:
    """Done."""
