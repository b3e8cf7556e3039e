"""`StepPrograms`: the compiled steps of a job, for each room that the sequences of a step may have.

A job without sequences has two programs, compiled at the start. With sequences, a program is compiled when a step or an
evaluation first needs it. All devices of a gang need it in the same step. The last levels bound how many there can be.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from podembed.workers.device.programs import AXIS, Inputs, scores_of_batch, training_step
from podembed.workers.job.job import JobConfig
from podembed.workers.job.sequence_rooms import Levels, SequenceRooms
from podembed.workers.model.context import Shares


class Pair(NamedTuple):
    """Both steps, lowered or compiled."""

    forward: Any
    train: Any


class StepPrograms:
    """The steps of one gang. Mutated: the compiled ones.

    Args:
      mesh: of all devices.
      shares: rows of every host that are samples.
      values: parameters, optimizer state and state, or their shapes.
      compiling: entered while a step is compiled that was not at the start.

    Attributes:
      rooms: of the sequences of a device.
      num_late: programs that were not compiled at the start.
    """

    def __init__(
        self,
        job: JobConfig,
        optimizer: optax.GradientTransformation,
        *,
        mesh: DeviceMesh,
        shares: Shares,
        values: tuple[Any, Any, Any],
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._job, self._optimizer, self._mesh, self._shares = job, optimizer, mesh, shares
        self._by_sample, self._replicated = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
        self._values = jax.tree.map(self._shape_of, values)
        self._compiling = compiling
        self._rows = shares.num_samples * jax.process_count()
        self.rooms = SequenceRooms(job.sequences, self._rows // mesh.size)
        self._forward: dict[Levels, Any] = {}
        self._train: dict[Levels, Any] = {}
        self.num_late = 0

    @property
    def is_single(self) -> bool:
        """Whether every step runs the same programs."""
        return not any(self.rooms.most_levels)

    def forward(self, levels: Levels) -> Any:
        """The compiled forward pass for a room."""
        return self._at(levels, self._forward, self._lower_forward)

    def train(self, levels: Levels) -> Any:
        """The compiled training step for a room."""
        return self._at(levels, self._train, self._lower_train)

    def _at(self, levels: Levels, compiled: dict[Levels, Any], lower: Callable[[Levels], Any]) -> Any:
        if levels not in compiled:
            with self._compiling():
                compiled[levels] = lower(levels).compile()
            self.num_late += 1
        return compiled[levels]

    def compile(self, levels: Levels, lowered: Pair) -> None:
        """Compiles what `lower` returned."""
        self._forward[levels], self._train[levels] = lowered.forward.compile(), lowered.train.compile()

    def lower(self, levels: Levels, *, platform: str | None = None) -> Pair:
        """Traces both steps, which checks what model and loss return. Touches no device.

        Args:
          platform: to lower for, such as `tpu`; None is that of the devices.
        """
        platforms = None if platform is None else (platform,)
        # The forward pass first, since what it refuses is said of the scores.
        forward = self._traced_forward(levels).lower(lowering_platforms=platforms)
        return Pair(forward, self._traced_train(levels).lower(lowering_platforms=platforms))

    def _lower_forward(self, levels: Levels) -> Any:
        return self._traced_forward(levels).lower()

    def _lower_train(self, levels: Levels) -> Any:
        return self._traced_train(levels).lower()

    def _traced_forward(self, levels: Levels) -> Any:
        step = jax.jit(
            jax.shard_map(
                partial(scores_of_batch, self._job, self._shares, self._longest(levels)),
                mesh=self._mesh,
                in_specs=(P(), P(), P(AXIS), P()),
                out_specs=P(AXIS),
                check_vma=False,
            )
        )
        params, _, state = self._values
        return step.trace(params, state, self._inputs(levels), self._number(jnp.uint32))

    def _traced_train(self, levels: Levels) -> Any:
        step = jax.jit(
            jax.shard_map(
                partial(training_step, self._job, self._optimizer, self._shares, self._longest(levels)),
                mesh=self._mesh,
                in_specs=(P(), P(), P(), P(AXIS), P(), P()),
                out_specs=(P(), P(), P(), P(AXIS), P()),
                check_vma=False,
            ),
            donate_argnums=(0, 1, 2),
        )
        return step.trace(*self._values, self._inputs(levels), self._number(jnp.uint32), self._number(jnp.float32))

    def _longest(self, levels: Levels) -> dict[str, int]:
        return {name: self.rooms.longest(name, levels) for name in self._job.sequences}

    def _number(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), dtype, sharding=self._replicated)

    def _inputs(self, levels: Levels) -> Inputs:
        def rows_of(*shape: int, dtype: Any = jnp.float32, rows: int = self._rows) -> Any:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=self._by_sample)

        job = self._job
        vectors = {name: self._mesh.size * self.rooms.vectors(name, levels) for name in job.sequences}
        return Inputs(
            dense=rows_of(job.data.num_dense),
            activations=tuple(
                rows_of(shape[-1], rows=vectors[name]) if name in vectors else rows_of(*shape)
                for name, shape in job.activation_shapes.items()
            ),
            labels=rows_of(),
            weights=rows_of(),
            lengths={name: rows_of(dtype=jnp.int32) for name in job.sequences},
            columns={
                name: rows_of(*shape.inner, dtype=np.dtype(shape.dtype)) for name, shape in job.column_shapes.items()
            },
        )

    def _shape_of(self, leaf: Any) -> jax.ShapeDtypeStruct:
        # Random keys do not know of weak types.
        is_weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated, weak_type=is_weak)
