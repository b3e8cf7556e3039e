"""`DeviceWorker`: the JAX process of a host. Dense parameters, the optax state and the jitted step.

It takes batches and pooled activations from its host through the shared-memory channel, and gives the activations'
gradients back there. Dense gradients are summed over all device processes by a JAX collective. It holds no table, reads
no input and touches no storage. When a JAX process of the gang dies, all of them may be aborted and started again
without losing a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podembed.embedding.kernels.threads import ONE_THREAD, Threads
from podembed.workers.device.dense_half import DenseStateError, initial
from podembed.workers.device.dense_leaves import by_key, numbers_of, replaced, specs_of
from podembed.workers.device.device_mesh import GangMesh, whole
from podembed.workers.device.measures.window import DeviceWindow, Measured, WindowMeasures
from podembed.workers.device.options import AXIS, DeviceOptions
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.device.step_programs import StepPrograms
from podembed.workers.device.tables.held import ABOUT_ROWS, HeldTables
from podembed.workers.device.transfers.ways import (
    HostArrays,
    HostBatches,
    Numbers,
    TransferWay,
    own_parts,
    to_host,
    transfer_way,
)
from podembed.workers.faults.inject import FaultPoints, spoil
from podembed.workers.job.job import DENSE_PARTS, JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS
from podembed.workers.job.tables import device_tables
from podembed.workers.liveness.memory import give_back_free
from podembed.workers.liveness.progress import WORK, Recorder, Stopwatch
from podembed.workers.model.context import Shares

_LOOK_S = 1e-4


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that the devices work on.

    Attributes:
      calls: wait for its results and write them for the host.
      thread_pool: makes these calls.
      last: of the results, on every device; of a training step the loss. Still being computed.
      measured: by a training step.
    """

    arrays: HostArrays
    calls: list[Callable[[], None]]
    thread_pool: Threads
    last: jax.Array
    measured: Measured | None = None

    @property
    def is_training(self) -> bool:
        """Whether it changes parameters."""
        return self.measured is not None

    def finish(self) -> None:
        """Returns when the host may read the results, and write the memory of the batch again."""
        self.thread_pool.run(self.calls, size=sum(block.size for block in self.arrays.gradients))
        # The calls wait for devices whose results are fetched: one of several that work on the same samples, and none
        # where all tables are frozen. The others still read this memory, or copy it.
        self.last.block_until_ready()


@dataclass(slots=True)
class DeviceWorker:
    """The dense half of a host. Mutated: `params`, `optimizer_state`, `state`, and what `tables` has.

    Attributes:
      job: the declared job.
      num_samples: rows of this host's share of a batch, with padding; the same on every host.
      shares: rows of every host that are samples; left out, all of them.
      options: which devices, and how arrays get there.
      table_buckets: table buckets as recorded with the run; empty for those of a new one.
      gang: mesh of devices that need not be there; None for those of this process's JAX.
      tables: tables that live on the devices.
      programs: its steps, from `build` on.
      faults: injected ones.
      thread_pool: copies results to the host.
      compiling: entered while a step is compiled that was not at the start.
      build_s: seconds of the parts of `build`.
      trace: recorder that takes steps while a trace is on.
    """

    job: JobConfig
    num_samples: int
    params: Any = None
    optimizer_state: Any = None
    state: Any = None
    shares: tuple[int, ...] = ()
    options: DeviceOptions = DeviceOptions()  # noqa: RUF009  # frozen
    table_buckets: tuple[int, ...] = ()
    gang: GangMesh | None = None
    mesh: GangMesh = field(init=False)
    tables: HeldTables = field(init=False)
    programs: StepPrograms = field(init=False)
    _way: TransferWay = field(init=False)
    _optimizer: optax.GradientTransformation = field(init=False)
    faults: FaultPoints | None = None
    thread_pool: Threads = ONE_THREAD
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    build_s: dict[str, float] = field(default_factory=dict)
    trace: Recorder = field(default_factory=Recorder)
    _batches: HostBatches = field(init=False)
    _compiled_s: float = 0.0
    _compiled_before_s: float = -1.0
    _measures: WindowMeasures = field(init=False)

    def build(self, *, is_restored_later: bool = False, is_rehearsal: bool = False) -> float:
        """Initialises parameters and compiles both steps. Returns the seconds that compiling took.

        Args:
          is_restored_later: `load_dense_arrays` follows with all of them, so that first values need not be computed.
          is_rehearsal: nothing is compiled in the end; the worker is of no use afterwards.

        Raises:
          DenseStateError: the share cannot be cut evenly over the devices, model or loss do not return one number a
          sample, or two parameters share a key.
        """
        stopwatch = Stopwatch()
        self.mesh = self.gang or GangMesh.of(self.options)
        if self.num_samples % self.mesh.num_parts:
            raise DenseStateError(
                f"Found {self.num_samples} samples a host for {self.mesh.num_parts} local devices. Expected a "
                f"multiple. Say how many devices there are (--devices-per-host {self.mesh.num_local}), so that shares "
                "are padded up to that."
            )
        self.tables = HeldTables(device_tables(self.job, self.table_buckets), self.mesh)
        self._way = transfer_way(
            self.options, self.mesh, asks_for_step=self.job.asks_for_step, thread_pool=self.thread_pool
        )
        self._optimizer = self.job.dense_optimizer or optax.adam(1e-3)

        def first_values() -> dict[str, Any]:
            params, state = initial(self.job, jax.random.key(self.job.seed))
            return {"params": params, "optimizer": self._optimizer.init(params), "state": state}

        shapes = self._on_devices(jax.eval_shape(first_values))
        by_key(shapes)
        if is_restored_later:
            first = shapes
        else:
            first = jax.jit(first_values, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
        self._take(first)
        stopwatch.end("first values")
        self.programs = StepPrograms(
            self.job,
            self._optimizer,
            mesh=self.mesh,
            way=self._way,
            shares=Shares(num_samples=self.num_samples, real=self.shares or (self.num_samples,) * self.mesh.num_hosts),
            values=(self.params, self.optimizer_state, self.state),
            tables=self.tables.arrays,
            on_devices=self.tables.tables,
            compiling=self._counted,
        )
        self._measures = WindowMeasures(self.job, self.mesh)
        self._batches = HostBatches(self.job, self.programs.padding, num_parts=self.mesh.num_parts)
        compile_s = self._compile(stopwatch, is_rehearsal=is_rehearsal)
        self.build_s = stopwatch.seconds
        return compile_s

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.perf_counter()
        with self.compiling():
            yield
        self._compiled_s += time.perf_counter() - started

    def _on_devices(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """The shapes of the dense state, with how each leaf lies on the devices."""
        axes = {name: size for name, size in self.options.mesh if name != AXIS}
        specs = specs_of(self.job.model, shapes, axes)
        leaves, structure = jax.tree.flatten(shapes)
        placed = [
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(self.mesh.mesh, specs.get(key, P())),
                weak_type=leaf.weak_type,
            )
            for key, leaf in zip(by_key(shapes), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def _take(self, state: Mapping[str, Any]) -> None:
        self.params, self.optimizer_state, self.state = (state[part] for part in ("params", "optimizer", "state"))

    def _compile(self, stopwatch: Stopwatch, *, is_rehearsal: bool) -> float:
        """Traces both steps, which checks what model and loss return, and compiles them if all steps use the same."""
        started = time.perf_counter()
        try:
            lowered = self.programs.lower(LARGEST_LEVELS)
        except Exception as error:
            num_samples = self.num_samples // self.mesh.num_parts
            error.add_note(f"model.apply got {_shapes_text(self.job, num_samples=num_samples)}.")
            raise
        stopwatch.end("trace")
        if self.programs.is_single and not is_rehearsal:
            self.programs.compile(LARGEST_LEVELS, lowered)
            stopwatch.end("compile")
        return time.perf_counter() - started

    def serve_window(
        self, end: ChannelEnd, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None
    ) -> DeviceWindow:
        """Answers the host's records until the window ends.

        Raises:
          ChannelLost, ChannelTimeout: the host is gone or silent.
        """
        losses, num_steps, seconds = [], 0, 0.0
        wait = partial(end.receive, timeout_s=timeout_s, keep_waiting=keep_waiting)
        record, begun = self._after_rows(end, wait(), wait), None
        while record.kind is not RecordKind.END:
            started = time.perf_counter()
            begun = begun or self._begin(end, record)
            following = wait() if self._comes_meanwhile(end, begun) else None
            # Of a job with staleness: its batch is on its way while the devices work on this one.
            ahead = self._begin(end, following) if following and following.kind is not RecordKind.END else None
            begun.finish()
            if begun.measured is not None:
                losses.append(begun.last)
                self._measures.add(begun.measured, np.asarray(begun.arrays.inputs.weights))
            if self.faults is not None:
                spoil(self.faults, "device.gradients", step=record.step, arrays=begun.arrays.gradients)
            num_steps += 1
            ended = time.perf_counter()
            seconds += ended - started
            if self.trace.is_on:
                self.trace.add(WORK, f"device step {record.step}", started, ended)
            end.send(Record(kind=RecordKind.DONE, step=record.step, buffer=record.buffer))
            # Hosts may look at rows of tables between two steps.
            record, begun = self._after_rows(end, following or wait(), wait), ahead
        if self._compiled_before_s < self._compiled_s:
            # What the compiler took is free now, and it comes rarely: after the first window, and later new programs.
            self._compiled_before_s = self._compiled_s
            give_back_free()
        return self._measures.window(
            losses=tuple(float(loss) for loss in jax.device_get(losses)),
            num_steps=num_steps,
            seconds=seconds,
            num_compiled=self.programs.num_late,
            compiled_s=self._compiled_s,
        )

    def _after_rows(self, end: ChannelEnd, record: Record, receive: Callable[[], Record]) -> Record:
        """The first record, from `record` on, that is not about rows of tables on devices; those are answered."""
        return self.tables.serve(end, record, receive=receive) if record.kind in ABOUT_ROWS else record

    def give_tables(self, end: ChannelEnd, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None) -> None:
        """Gives the host the buckets of tables on devices that it asks for, until it has all. Nothing without such
        tables.

        Raises:
          As `serve_window`.
        """
        if self.tables.arrays:
            wait = partial(end.receive, timeout_s=timeout_s, keep_waiting=keep_waiting)
            self.tables.serve(end, wait(), receive=wait)

    def _begin(self, end: ChannelEnd, record: Record) -> Begun:
        if self.faults is not None:
            spoil(self.faults, "device.step", step=record.step, arrays=[end.buffers[record.buffer]["activations"]])
        memory, ids = end.buffers[record.buffer], end.layout.on_devices
        arrays = self._batches.of(end, record.buffer, (*record.levels, *ids.levels_in(memory)))
        if record.kind is RecordKind.TRAIN:
            return self.begin_training(
                arrays, step=record.step, weight_sum=record.weight_sum, rates=ids.rates_in(memory)
            )
        return self.begin_evaluation(arrays, step=record.step)

    def _comes_meanwhile(self, end: ChannelEnd, begun: Begun) -> bool:
        """Whether another record comes before the devices are done. Without staleness none does.

        Not asked where one CPU device computes in the memory of the host. There is nothing to send ahead, and looking
        cost A 1 to 9 % of its samples per CPU second in three pairs.
        """
        # Not every kind of array in JAX's declarations has `is_ready`.
        last: Any = begun.last
        if not self.job.staleness or not begun.is_training or self.mesh.is_one_cpu:
            return False
        while not last.is_ready():
            if end.has_record():
                return True
            time.sleep(_LOOK_S)
        return end.has_record()

    def begin_training(
        self, arrays: HostArrays, *, weight_sum: float, step: int = 0, rates: np.ndarray | None = None
    ) -> Begun:
        """One step on this host's share. Changes parameters and optimizer state; `finish` writes gradients.

        Args:
          weight_sum: weight of the global batch, over all hosts.
          step: from which the random keys of the model are made.
          rates: float32, the learning rate of each table on devices.

        Returns:
          The step, with the global mean loss.
        """
        scale = np.float32(1.0 / weight_sum if weight_sum else 0.0)
        held, sent = self.tables, self._way.send(arrays, Numbers(step, scale))
        states = self.params, self.optimizer_state, self.state, held.arrays
        on_devices = held.rates(rates) if held.arrays and rates is not None else None
        *states, gradients, loss, measured = self.programs.train(arrays.levels)(*states, on_devices, *sent)
        self.params, self.optimizer_state, self.state, held.arrays = states
        return Begun(arrays, self._way.fetch(gradients, arrays, scale), self.thread_pool, loss, measured)

    def begin_evaluation(self, arrays: HostArrays, *, step: int = 0) -> Begun:
        """Forward pass on this host's share; `finish` writes its scores."""
        program, sent = self.programs.forward(arrays.levels), self._way.send(arrays, Numbers(step))
        scores = program(self.params, self.state, self.tables.arrays, *sent)
        return Begun(arrays, [partial(to_host, own_parts(self.mesh, scores), arrays.scores)], self.thread_pool, scores)

    def dense_arrays(self) -> dict[str, np.ndarray]:
        """Parameters, state and optimizer state, one numpy array a leaf, keyed by its path such as `params/top/0/w`."""
        return {key: whole(numbers_of(leaf)) for key, leaf in by_key(self._dense_state).items()}

    @property
    def _dense_state(self) -> dict[str, Any]:
        return {"params": self.params, "optimizer": self.optimizer_state, "state": self.state}

    def load_dense_arrays(self, arrays: Mapping[str, np.ndarray], *, parts: Collection[str] = DENSE_PARTS) -> None:
        """Replaces parameters and optimizer state. Keys, shapes and dtypes must be those of `dense_arrays`.

        Args:
          parts: what is replaced; the rest stays as it is.

        Raises:
          DenseStateError: an array is missing, unknown, or has another shape or dtype.
        """
        self._take(replaced(self._dense_state, arrays, parts=parts, put=self._put))

    def _put(self, values: np.ndarray, leaf: Any) -> jax.Array:
        # Random keys come as their numbers, of another shape, and are never cut.
        return self.mesh.place(values, leaf.sharding if leaf.shape == values.shape else None)


def _shapes_text(job: JobConfig, *, num_samples: int) -> str:
    """The shapes of a model's arguments, for the note of an error that it raises."""
    shapes = {"dense": (job.data.num_dense,)}
    shapes |= {f"activations[{name!r}]": shape for name, shape in job.activation_shapes.items()}
    return ", ".join(f"{name} of shape {(num_samples, *shape)}" for name, shape in shapes.items())
