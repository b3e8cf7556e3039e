"""`StepPrograms`: the compiled steps of a job, for each room that the sequences of a step may have.

A job without sequences has two programs, compiled at the start. With sequences, a program is compiled when a step or an
evaluation first needs it. All devices of a gang need it in the same step. The last levels bound how many there can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.measures.step_measures import Measured
from podembed.workers.device.options import AXIS
from podembed.workers.device.programs import Inputs, scores_of_batch, training_step
from podembed.workers.device.shared_memory import ids_of_room
from podembed.workers.device.tables.pooling import BagIds
from podembed.workers.device.tables.table_step import Tables, TableStep
from podembed.workers.device.transfers.side_by_side import side_by_side
from podembed.workers.device.transfers.ways import TransferWay
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import ONE_ID, PaddingLevels, SequencePadding, smallest_levels
from podembed.workers.job.tables import DeviceTable, weighted_features
from podembed.workers.model.context import Shares


class Pair(NamedTuple):
    """Both steps, lowered or compiled."""

    forward: Any
    train: Any


class StepPrograms:
    """The steps of one gang. Mutated: the compiled ones.

    Args:
      mesh: mesh of all devices.
      way: way of what goes to the devices and comes back.
      shares: rows of every host that are samples.
      values: parameters, optimizer state and state, or their shapes; each says how it lies on the devices.
      tables: arrays of the tables on the devices, or their shapes.
      on_devices: these tables, in the job's order.
      compiling: entered while a step is compiled that was not at the start.

    Attributes:
      padding: sizes of the job's sequences on a device.
      num_late: programs that were not compiled at the start.
    """

    def __init__(
        self,
        job: JobConfig,
        optimizer: optax.GradientTransformation,
        *,
        mesh: GangMesh,
        way: TransferWay,
        shares: Shares,
        values: tuple[Any, Any, Any],
        tables: Tables,
        on_devices: Sequence[DeviceTable] = (),
        compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._job, self._optimizer, self._mesh, self._way, self._shares = job, optimizer, mesh, way, shares
        self._values = jax.tree.map(_shape_of, values)
        self._tables = tables
        self._table_step = TableStep(
            on_devices, num_parts=mesh.num_all_parts, platform=mesh.platform, num_cores=mesh.num_cores
        )
        self._weighted = weighted_features(job)
        self._cut = tuple(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(self._values[0]))
        self._compiling = compiling
        self._rows = shares.num_samples * mesh.num_hosts
        self.padding = SequencePadding(job.sequences, self._rows // mesh.num_all_parts)
        self._forward: dict[PaddingLevels, Any] = {}
        self._train: dict[PaddingLevels, Any] = {}
        self.num_late = 0

    @property
    def is_single(self) -> bool:
        """Whether every step runs the same programs."""
        return not any(self.padding.most_levels) and not self._tables

    def sent(self, levels: PaddingLevels) -> tuple[Any, ...]:
        """Shapes of what goes to the devices in a step, over all hosts, and how it lies there."""
        return self._way.shapes(self._inputs(levels))

    def forward(self, levels: PaddingLevels) -> Any:
        """The compiled forward pass for a room."""
        return self._at(levels, self._forward, self.lower_forward)

    def train(self, levels: PaddingLevels) -> Any:
        """The compiled training step for a room."""
        return self._at(levels, self._train, self.lower_train)

    def _at(
        self, levels: PaddingLevels, compiled: dict[PaddingLevels, Any], lower: Callable[[PaddingLevels], Any]
    ) -> Any:
        if levels not in compiled:
            with self._compiling():
                compiled[levels] = lower(levels).compile()
            self.num_late += 1
        return compiled[levels]

    def compile(self, levels: PaddingLevels, lowered: Pair) -> None:
        """Compiles what `lower` returned."""
        self._forward[levels], self._train[levels] = lowered.forward.compile(), lowered.train.compile()

    def lower(self, levels: PaddingLevels, *, platform: str | None = None) -> Pair:
        """Traces both steps, which checks what model and loss return. Touches no device.

        Args:
          platform: to lower for, such as `tpu`; None is that of the devices.
        """
        platforms = None if platform is None else (platform,)
        # The forward pass first, since what it refuses is said of the scores.
        forward = self._traced_forward(levels).lower(lowering_platforms=platforms)
        return Pair(forward, self._traced_train(levels).lower(lowering_platforms=platforms))

    def lower_forward(self, levels: PaddingLevels) -> Any:
        """The forward pass for a room, lowered."""
        return self._traced_forward(levels).lower()

    def lower_train(self, levels: PaddingLevels) -> Any:
        """The training step for a room, lowered."""
        return self._traced_train(levels).lower()

    def _traced_forward(self, levels: PaddingLevels) -> Any:
        job, way, shares, longest = self._job, self._way, self._shares, self._longest(levels)
        inputs = self._inputs(levels)

        def forward(params: Any, state: Any, tables: Tables, *arguments: Any) -> jax.Array:
            own, step, _ = way.unpacked(inputs, arguments)
            asked = on_tables.asked(self._bags(own, levels), self._room_levels(levels))
            full = self._with_vectors(own, on_tables.looked_up(tables, asked)[0])
            return scores_of_batch(job, shares, longest, params, state, full, step)

        on_tables = self._table_step
        params, _, state = self._values
        arguments = self.sent(levels)
        on_devices = self._on_devices(
            forward, states=(P(), P(), self._table_specs), arguments=arguments, out_specs=P(AXIS)
        )
        return jax.jit(on_devices, out_shardings=self._mesh.by_sample).trace(params, state, self._tables, *arguments)

    def _traced_train(self, levels: PaddingLevels) -> Any:
        """The step. Where it has gradients side by side, it returns the arrays that they are columns of."""
        apart = self._train_of(levels, self._train_step(levels))
        if self._way.is_packed:
            return apart
        first = len(jax.tree.leaves((*self._values, self._tables)))
        num_gradients = sum(feature.table.trainable for feature in self._job.host_features.values())
        found = side_by_side(apart.jaxpr, range(first, first + num_gradients))
        if found.step is None:
            return apart
        results, run, together = jax.tree.structure(apart.out_info), found.step, found.together

        def train(*arguments: Any) -> Any:
            leaves = run(*jax.tree.leaves(arguments))
            of_step, wholes = leaves[: results.num_leaves], leaves[results.num_leaves :]
            *states, gradients, loss, measured = jax.tree.unflatten(results, of_step)
            return *states, gradients.within(tuple(wholes), together), loss, measured

        return self._train_of(levels, train)

    def _train_step(self, levels: PaddingLevels) -> Callable[..., Any]:
        """The step as one device sees it."""
        job, way, shares, longest = self._job, self._way, self._shares, self._longest(levels)
        inputs, cut, on_tables = self._inputs(levels), self._cut if any(self._cut) else (), self._table_step
        trained = [name for name, is_trained in zip(job.features, job.trained_features, strict=True) if is_trained]

        def train(params: Any, optimizer_state: Any, state: Any, tables: Tables, rates: Any, *arguments: Any) -> Any:
            own, step, scale = way.unpacked(inputs, arguments)
            asked = on_tables.asked(self._bags(own, levels), self._room_levels(levels))
            found, rounds = on_tables.looked_up(tables, asked)
            full = self._with_vectors(own, found)
            *states, gradients, loss, measured = training_step(
                job, self._optimizer, shares, longest, params, optimizer_state, state, full, step, scale, cut=cut
            )
            of_features = dict(zip(trained, gradients, strict=True))
            scaled = {name: of_features[name] * scale for name in trained if name not in job.host_features}
            after = on_tables.updated(tables, asked, scaled, rates=rates)
            of_hosts = tuple(of_features[name] for name in trained if name in job.host_features)
            return *states, after, way.packed(of_hosts), loss, measured._replace(rounds=rounds)

        return train

    def _with_vectors(self, inputs: Inputs, vectors: Mapping[str, jax.Array]) -> Inputs:
        """The inputs with the activations of all features in the job's order.

        Args:
          vectors: vectors of the features whose tables lie on devices.
        """
        job = self._job
        found = dict(zip(job.host_features, inputs.activations, strict=True))
        for name, own in vectors.items():
            inner = () if name in job.sequences else job.activation_shapes[name][:-1]
            found[name] = own.reshape(own.shape[0] // math.prod(inner), *inner, own.shape[1])
        return replace(inputs, activations=tuple(found[name] for name in job.features))

    def _train_of(self, levels: PaddingLevels, train: Callable[..., Any]) -> Any:
        """A step, traced over all devices."""
        arguments = self.sent(levels)
        specs = (P(), P(), P(), self._table_specs)
        out_specs = (*specs, P(AXIS), P(), Measured.lying(P(AXIS), P()))
        on_devices = self._on_devices(train, states=(*specs, P()), arguments=arguments, out_specs=out_specs)
        # Each state stays where it is, so that it is given away for the next.
        given = (*self._values, self._tables)
        states = [jax.tree.map(lambda leaf: leaf.sharding, value) for value in self._values]
        states.append(jax.tree.map(lambda leaf: leaf.format, self._tables))
        by_sample, replicated = self._mesh.by_sample, self._mesh.replicated
        out_shardings = (*states, by_sample, replicated, Measured.lying(by_sample, replicated))
        step = jax.jit(on_devices, donate_argnums=(0, 1, 2, 3), out_shardings=out_shardings)
        return step.trace(*given, self._rates, *arguments)

    @property
    def _table_specs(self) -> Any:
        """How the arrays of the tables lie: each sharded one is cut over the parts of the samples."""
        return jax.tree.map(lambda leaf: leaf.sharding.spec, self._tables)

    @property
    def _rates(self) -> Any:
        """Shape of the learning rates of the tables on devices; None without any, which costs nothing."""
        if not self._tables:
            return None
        return jax.ShapeDtypeStruct((len(self._table_step.tables),), jnp.float32, sharding=self._mesh.replicated)

    def _room_levels(self, levels: PaddingLevels) -> PaddingLevels:
        return levels[2 + len(self._job.device_features) :]

    def _bags(self, inputs: Inputs, levels: PaddingLevels) -> dict[str, BagIds]:
        """The ids of the features whose tables lie on devices, on one device."""
        num_parts, of_bags = self._mesh.num_all_parts, self._bags_at(levels)
        return {
            name: BagIds(
                rows,
                inputs.row_bags.get(name),
                inputs.row_weights.get(name),
                combiner=self._job.features[name].combiner,
                num_bags=of_bags[name].num // num_parts,
            )
            for name, rows in inputs.rows.items()
        }

    def _on_devices(self, step: Callable[..., Any], *, states: tuple[Any, ...], arguments: Any, out_specs: Any) -> Any:
        """A step as each part of the samples has it. Over the axes within a part, the compiler spreads the work as the
        parameters lie.
        """
        by_argument = jax.tree.map(lambda leaf: leaf.sharding.spec, tuple(arguments))
        in_specs = (*states, *by_argument)
        if self._mesh.has_replicas and self._mesh.num_all_parts == 1:
            return _of_one_part(step, in_specs)
        return jax.shard_map(
            step,
            mesh=self._mesh.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={AXIS} if self._mesh.has_replicas else {*self._mesh.mesh.axis_names},
            check_vma=False,
        )

    def _longest(self, levels: PaddingLevels) -> dict[str, int]:
        return {name: self.padding.longest(name, levels) for name in self._job.sequences}

    def _inputs(self, levels: PaddingLevels) -> Inputs:
        """Shapes of a batch over all hosts."""

        def rows_of(*shape: int, dtype: Any = jnp.float32, rows: int = self._rows) -> Any:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=self._mesh.by_sample)

        job = self._job
        vectors = {name: self._mesh.num_all_parts * self.padding.vectors(name, levels) for name in job.sequences}
        of_bags = self._bags_at(levels)
        return Inputs(
            dense=rows_of(job.data.num_dense),
            activations=tuple(
                rows_of(shape[-1], rows=vectors[name]) if name in vectors else rows_of(*shape)
                for name, shape in job.activation_shapes.items()
                if name in job.host_features
            ),
            labels=rows_of(),
            weights=rows_of(),
            lengths={name: rows_of(dtype=jnp.int32) for name in job.sequences},
            columns={
                name: rows_of(*shape.inner, dtype=np.dtype(shape.dtype)) for name, shape in job.column_shapes.items()
            },
            rows={name: rows_of(dtype=jnp.int32, rows=bags.num_ids) for name, bags in of_bags.items()},
            row_bags={
                name: rows_of(dtype=jnp.int32, rows=bags.num_ids)
                for name, bags in of_bags.items()
                if not bags.has_one_each
            },
            row_weights={name: rows_of(rows=bags.num_ids) for name, bags in of_bags.items() if name in self._weighted},
        )

    def _bags_at(self, levels: PaddingLevels) -> dict[str, _Bags]:
        """The bags of each feature of a table on devices, over all devices."""
        found = {}
        own = levels[2 : 2 + len(self._job.device_features)] or smallest_levels(len(self._job.device_features))
        for name, level in zip(self._job.device_features, own, strict=True):
            num = num_ids = self._rows * math.prod(self._job.activation_shapes[name][:-1])
            if name in self._job.sequences:
                num = num_ids = self._mesh.num_all_parts * self.padding.vectors(name, levels)
            elif level != ONE_ID:
                room = ids_of_room(level, num // self._mesh.num_hosts, num_devices=self._mesh.num_parts)
                num_ids = self._mesh.num_all_parts * room
            found[name] = _Bags(num, num_ids, has_one_each=level == ONE_ID)
        return found


class _Bags(NamedTuple):
    """The bags of a feature over all devices, and the ids that they have room for."""

    num: int
    num_ids: int
    has_one_each: bool


def _of_one_part(step: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
    """A step whose axis of the samples has one part, as a map over that. XLA refuses sums over an axis of one device
    where others are not manual.
    """
    in_axes = jax.tree.map(lambda spec: 0 if spec == P(AXIS) else None, in_specs)
    mapped = jax.vmap(step, in_axes=in_axes, axis_name=AXIS, axis_size=1)

    def alone(*arguments: Any) -> Any:
        parts = jax.tree.map(lambda spec, below: below[None] if spec == P(AXIS) else below, in_specs, arguments)
        return jax.tree.map(lambda leaf: leaf[0], mapped(*parts))

    return alone


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    # Random keys do not know of weak types.
    is_weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=is_weak)
