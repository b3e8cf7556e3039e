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
from itertools import compress
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podembed.embedding.kernels.crew import ONE_THREAD, Crew
from podembed.workers.device.dense_half import DenseStateError, initial
from podembed.workers.device.dense_leaves import by_key, numbers_of, replaced
from podembed.workers.device.gang_errors import GangError
from podembed.workers.device.programs import (
    AXIS,
    Inputs,
    own_parts,
    reads_in_place,
    to_host,
)
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.device.step_programs import StepPrograms
from podembed.workers.faults.inject import FaultPoints, spoil
from podembed.workers.job.job import DENSE_PARTS, JobConfig
from podembed.workers.job.sequence_rooms import NO_LEVELS, Levels
from podembed.workers.liveness.progress import Laps
from podembed.workers.model.context import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWindow:
    """What a device worker did in one window of steps.

    Attributes:
      seconds: inside the jitted step and its transfers.
      num_compiled: programs that were compiled since the worker's start, for sequences of other lengths.
      compiled_s: seconds that this took.
    """

    losses: tuple[float, ...]
    num_steps: int
    seconds: float
    num_compiled: int = 0
    compiled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Share:
    """A batch in the shared memory: what goes in, and where gradients (shaped as the activations) or scores go out.
    `levels` say how much room its sequences have.
    """

    inputs: Inputs
    gradients: tuple[np.ndarray, ...]
    scores: np.ndarray
    levels: Levels = NO_LEVELS


@dataclass(slots=True)
class DeviceWorker:
    """The dense half of a host. Mutated: `params`, `optimizer_state`, `state`.

    Attributes:
      job: the declared job.
      num_samples: rows of this host's share of a batch, with padding; the same on every host.
      shares: rows of every host that are samples; left out, all of them.
      faults: injected ones.
      crew: copies results to the host.
      compiling: entered while a step is compiled that was not at the start.
      build_s: seconds of the parts of `build`.
    """

    job: JobConfig
    num_samples: int
    params: Any = None
    optimizer_state: Any = None
    state: Any = None
    shares: tuple[int, ...] = ()
    _programs: StepPrograms = field(init=False)
    _sharding: NamedSharding = field(init=False)
    _replicated: NamedSharding = field(init=False)
    _devices: tuple[Any, ...] = field(init=False)
    _optimizer: optax.GradientTransformation = field(init=False)
    faults: FaultPoints | None = None
    crew: Crew = ONE_THREAD
    compiling: Callable[[], AbstractContextManager[None]] = nullcontext
    build_s: dict[str, float] = field(default_factory=dict)
    _inputs_in_place: dict[tuple[int, Levels], Inputs] = field(default_factory=dict)
    _knows_step: bool = True
    _compiled_s: float = 0.0
    _step: tuple[int, jax.Array] | None = None

    def build(self, *, is_restored_later: bool = False, is_rehearsal: bool = False) -> float:
        """Initialises parameters and compiles both steps. Returns the seconds that compiling took.

        Args:
          is_restored_later: `load_dense_arrays` follows with all of them, so that first values need not be computed.
          is_rehearsal: nothing is compiled in the end; the worker is of no use afterwards.

        Raises:
          DenseStateError: the share cannot be cut evenly over the devices, model or loss do not return one number a
          sample, or two parameters share a key.
        """
        laps = Laps()
        num_local = jax.local_device_count()
        if self.num_samples % num_local:
            raise DenseStateError(
                f"Found {self.num_samples} samples a host for {num_local} local devices. Expected a multiple. "
                f"Choose batch_size and num_lanes so that batch_size / num_lanes is a multiple of {num_local}."
            )
        devices, mine = jax.devices(), set(jax.local_devices())
        # In the order of the mesh: JAX promises no order of its own, and rows come back in that of the mesh.
        self._devices = tuple(device for device in devices if device in mine)
        if len(devices) != len(self._devices) * jax.process_count():
            raise GangError(
                f"Found {len(self._devices)} devices here and {len(devices)} in all {jax.process_count()} JAX "
                "processes. Expected as many in each, "
                "since every host has an equal share of a batch. Reserve the same for every host (--resources, "
                "resources_per_host)."
            )
        mesh = DeviceMesh(np.asarray(devices), (AXIS,))
        self._sharding = NamedSharding(mesh, P(AXIS))
        self._replicated = NamedSharding(mesh, P())
        self._optimizer = self.job.dense_optimizer or optax.adam(1e-3)
        self._knows_step = self.job.asks_for_step

        def first_values() -> tuple[Any, Any, Any]:
            params, state = initial(self.job, jax.random.key(self.job.seed))
            return params, self._optimizer.init(params), state

        if is_restored_later:
            first = jax.tree_util.tree_map(self._shape_of, jax.eval_shape(first_values))
        else:
            first = jax.jit(first_values, out_shardings=self._replicated)()
        self.params, self.optimizer_state, self.state = first
        by_key(self._dense_state)
        laps.end("first values")
        self._programs = StepPrograms(
            self.job,
            self._optimizer,
            mesh=mesh,
            shares=Shares(num_samples=self.num_samples, real=self.shares or (self.num_samples,) * jax.process_count()),
            values=first,
            compiling=self._counted,
        )
        compile_s = self._compile(laps, is_rehearsal=is_rehearsal)
        self.build_s = laps.seconds
        return compile_s

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.perf_counter()
        with self.compiling():
            yield
        self._compiled_s += time.perf_counter() - started

    def _shape_of(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated, weak_type=leaf.weak_type)

    def _compile(self, laps: Laps, *, is_rehearsal: bool) -> float:
        """Traces both steps, which checks what model and loss return, and compiles them if all steps use the same."""
        started = time.perf_counter()
        try:
            lowered = self._programs.lower(NO_LEVELS)
        except Exception as error:
            num_local = self.num_samples // len(self._devices)
            error.add_note(f"model.apply got {_shapes_text(self.job, num_samples=num_local)}.")
            raise
        laps.end("trace")
        if self._programs.is_single and not is_rehearsal:
            self._programs.compile(NO_LEVELS, lowered)
            laps.end("compile")
        return time.perf_counter() - started

    def serve_window(
        self, end: ChannelEnd, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None
    ) -> DeviceWindow:
        """Answers the host's records until the window ends.

        Raises:
          ChannelLost, ChannelTimeout: the host is gone or silent.
        """
        losses, num_steps, seconds = [], 0, 0.0
        while True:
            record = end.receive(timeout_s=timeout_s, keep_waiting=keep_waiting)
            if record.kind is RecordKind.END:
                return DeviceWindow(
                    losses=tuple(float(x) for x in losses),
                    num_steps=num_steps,
                    seconds=seconds,
                    num_compiled=self._programs.num_late,
                    compiled_s=self._compiled_s,
                )
            started = time.perf_counter()
            if self.faults is not None:
                spoil(self.faults, "device.step", step=record.step, arrays=[end.buffers[record.buffer]["activations"]])
            share = self._share_of(end, record.buffer, record.levels)
            if record.kind is RecordKind.TRAIN:
                losses.append(self.train(share, step=record.step, weight_sum=record.weight_sum))
            else:
                self.evaluate(share, step=record.step)
            if self.faults is not None:
                spoil(self.faults, "device.gradients", step=record.step, arrays=share.gradients)
            num_steps += 1
            seconds += time.perf_counter() - started
            end.send(Record(kind=RecordKind.DONE, step=record.step, buffer=record.buffer))

    def _share_of(self, end: ChannelEnd, buffer: int, levels: Levels) -> _Share:
        arrays = end.buffers[buffer]
        inputs = None
        if reads_in_place():
            # The arrays are the shared memory itself: built once, they show each batch in turn.
            inputs = self._inputs_in_place.get((buffer, levels))
        if inputs is None:
            tensors = self._tensors(end, arrays["activations"], levels)
            blocks = tuple(self._to_device(tensor) for tensor in tensors)
            parts = {name: self._to_device(arrays[name]) for name in ("dense", "labels", "weights")}
            named = {"lengths": end.layout.lengths_in(arrays), "columns": end.layout.columns_in(arrays)}
            inputs = Inputs(**parts, activations=blocks, **jax.tree.map(self._to_device, named))
        if reads_in_place():
            self._inputs_in_place[buffer, levels] = inputs
        return _Share(inputs, self._tensors(end, arrays["gradients"], levels), arrays["scores"], levels)

    def _tensors(self, end: ChannelEnd, memory: np.ndarray, levels: Levels) -> tuple[np.ndarray, ...]:
        """By feature `[n, *inner, width]`; of a sequence the rows that the step has room for."""
        layout, rooms = end.layout.activations, self._programs.rooms
        return tuple(
            block[: len(self._devices) * rooms.vectors(name, levels)] if name in rooms.sequences else tensor
            for name, block, tensor in zip(
                self.job.features, layout.blocks(memory), layout.tensors(memory), strict=True
            )
        )

    def train(self, share: _Share, *, weight_sum: float, step: int = 0) -> jax.Array:
        """One step on this host's share. Writes its gradients, changes parameters and optimizer state.

        Args:
          weight_sum: weight of the global batch, over all hosts.
          step: from which the random keys of the model are made.

        Returns:
          The global mean loss, still being computed.
        """
        scale = np.float32(1.0 / weight_sum if weight_sum else 0.0)
        self.params, self.optimizer_state, self.state, gradients, loss = self._programs.train(share.levels)(
            self.params,
            self.optimizer_state,
            self.state,
            share.inputs,
            self._number(step),
            self._everywhere(scale),
        )
        found = [own_parts(gradient) for gradient in gradients]
        blocks = list(compress(share.gradients, self.job.trained_features))
        calls = [partial(to_host, parts, block, scale) for parts, block in zip(found, blocks, strict=True)]
        self.crew.run(calls, size=sum(block.size for block in blocks))
        return loss

    def evaluate(self, share: _Share, *, step: int = 0) -> None:
        """Forward pass on this host's share. Writes its scores."""
        scores = self._programs.forward(share.levels)(self.params, self.state, share.inputs, self._number(step))
        to_host(own_parts(scores), share.scores)

    def _to_device(self, array: np.ndarray) -> jax.Array:
        """This host's rows as its part of the global array. On one CPU device the memory is used in place.

        Elsewhere the copy may still be under way when this returns. What is computed from it is waited for before the
        step is answered, and the host writes the memory again only after that.
        """
        shape = (array.shape[0] * jax.process_count(), *array.shape[1:])
        if reads_in_place():
            parts = [jax.dlpack.from_dlpack(array)]
        else:
            parts = [
                jax.device_put(part, device)
                for part, device in zip(np.split(array, len(self._devices)), self._devices, strict=True)
            ]
        return jax.make_array_from_single_device_arrays(shape, self._sharding, parts)

    def _everywhere(self, values: np.ndarray | np.float32 | np.uint32) -> jax.Array:
        """What all processes have alike, on every device. Given all devices at once, JAX would gather and compare it
        over the gang first.
        """
        parts = [jax.device_put(values, device) for device in self._devices]
        return jax.make_array_from_single_device_arrays(np.shape(values), self._replicated, parts)

    def _number(self, step: int) -> jax.Array:
        """Of a step, on every device; 0 in programs that do not ask for it."""
        if not self._knows_step:
            step = 0
        if self._step is None or self._step[0] != step:
            self._step = step, self._everywhere(np.uint32(step))
        return self._step[1]

    def dense_arrays(self) -> dict[str, np.ndarray]:
        """Parameters, state and optimizer state, one numpy array a leaf, keyed by its path such as `params/top/0/w`."""
        return {key: np.asarray(numbers_of(leaf)) for key, leaf in by_key(self._dense_state).items()}

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
        restored = replaced(self._dense_state, arrays, parts=parts, put=self._everywhere)
        self.params, self.optimizer_state, self.state = (restored[key] for key in ("params", "optimizer", "state"))


def _shapes_text(job: JobConfig, *, num_samples: int) -> str:
    """What a model is called with, for the note of an error that it raises."""
    shapes = {"dense": (job.data.num_dense,)}
    shapes |= {f"activations[{name!r}]": shape for name, shape in job.activation_shapes.items()}
    return ", ".join(f"{name} of shape {(num_samples, *shape)}" for name, shape in shapes.items())
