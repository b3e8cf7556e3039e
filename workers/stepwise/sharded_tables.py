"""`ShardedTables`: the tables with `place="sharded"` of a `TPUEmbedding`, cut over the devices of this process.

Lookup and update are those of a `Trainer`'s steps (`workers.device.tables`), in two programs, since the model between
them is the caller's. The ids of a batch go to the devices once and stay there until its gradients come. Implements
`embedding.tf.engine.device_tables.DeviceTables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from podembed.embedding.ragged import Ragged
from podembed.embedding.shards import cut_for_parts, sharded_arrays
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec
from podembed.embedding.tf.tpu_config.learning_rate_tags import TaggedLearningRate
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.options import AXIS, DeviceOptions
from podembed.workers.device.shared_memory import BagArrays, Record, ids_of_room
from podembed.workers.device.tables.held import ABOUT_ROWS, HeldTables
from podembed.workers.device.tables.pooling import BagIds
from podembed.workers.device.tables.table_step import Asked, TableStep
from podembed.workers.host.id_rooms import IdRooms, write_bags
from podembed.workers.host.tables_on_devices import ROW_BYTES, DeviceRows
from podembed.workers.job.padding import ONE_ID, PaddingLevels
from podembed.workers.job.tables import DeviceTable
from podembed.workers.liveness.progress import Tracker


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the programs of a batch are compiled for.

    Attributes:
      num_bags: bags of each feature.
      levels: padding levels, one a feature and one an array of tables.
      is_weighted: whether the ids of each feature have weights.
    """

    num_bags: tuple[int, ...]
    levels: PaddingLevels
    is_weighted: tuple[bool, ...]


class AskedBatch(NamedTuple):
    """The ids of a batch on the devices: int32 `[num_parts, n]`."""

    shape: BatchShape
    words: jax.Array


class _Programs(NamedTuple):
    look_up: Any
    update: Any


class ShardedTables:
    """Tables cut over the local devices. Mutable.

    Args:
      spec: description of the engine.
      tables: by position those that are sharded, as this host holds them.
      mesh: mesh of the devices, which need not be there for `lowered`; None for all of this process.
    """

    def __init__(self, spec: EngineSpec, tables: Mapping[int, Table], *, mesh: GangMesh | None = None) -> None:
        if mesh is None:
            own = jax.local_devices()
            mesh = GangMesh.over(own, own, DeviceOptions(), num_hosts=1)
        self._mesh = mesh
        self._tables = tables
        self._features = [feature for feature in spec.features if feature.table in tables]
        self._held_tables = tuple(
            DeviceTable(
                at=at,
                spec=table,
                quantization=spec.quantization[at],
                features=tuple(feature.name for feature in self._features if feature.table == at),
            )
            for at, table in _with_rates(spec, tables).items()
        )
        self._step = TableStep(self._held_tables, num_parts=self._mesh.num_all_parts, platform=self._mesh.platform)
        self._rooms = IdRooms(
            {feature.name: tables[feature.table].spec.num_rows for feature in self._features},
            [(one.spec, one.features) for one in self._held_tables],
            num_hosts=1,
        )
        numbers = {one.spec.name: one.at for one in self._held_tables}
        arrays = sharded_arrays([one.spec for one in self._held_tables], self._mesh.num_all_parts)
        # By array the numbers of its tables.
        self._of_array = [[numbers[name] for name in array.tables] for array in arrays]
        self._programs: dict[BatchShape, _Programs] = {}
        self._held = HeldTables(self._held_tables, self._mesh)
        self._rows: DeviceRows

    def give(self) -> None:
        # The rows of before are freed first.
        self._held = HeldTables(self._held_tables, self._mesh)
        room = max(ROW_BYTES, *(table.spec.bucket_bytes for table in self._tables.values()))
        end = _InProcess(self._held, np.empty(room // 4, np.float32))
        self._rows = DeviceRows(self._tables, end, timeout_s=0.0, check=lambda: None, tracker=Tracker())
        self._rows.give()

    def take(self) -> None:
        self._rows.take()

    def look_up(self, bags: Sequence[Ragged]) -> tuple[AskedBatch, list[jax.Array]]:
        by_name = {feature.name: own for feature, own in zip(self._features, bags, strict=True)}
        num_bags = tuple(own.num_samples for own in bags)
        padded = {name: self._padded(count) for name, count in zip(by_name, num_bags, strict=True)}
        levels = self._rooms.levels(by_name, padded, num_devices=self._mesh.num_parts)
        self._rooms.agreed(levels)
        shape = BatchShape(num_bags, levels, tuple(own.weights is not None for own in bags))
        asked = AskedBatch(shape, jax.device_put(self._packed(shape, bags), self._mesh.by_sample))
        return asked, self._programs_for(shape).look_up(self._held.arrays, asked.words)

    def update(self, asked: AskedBatch, gradients: Sequence[Any], learning_rates: Sequence[float]) -> None:
        self._require_equal_rates(learning_rates)
        rates = np.array([learning_rates[one.at] for one in self._held_tables], np.float32)
        # One call for all, since each has a cost.
        own = jax.device_put([*gradients], [self._sharding(count) for count in asked.shape.num_bags])
        update = self._programs_for(asked.shape).update
        self._held.arrays = update(self._held.arrays, asked.words, own, self._held.rates(rates))

    def placed(self, activations: np.ndarray) -> jax.Array:
        return jax.device_put(activations, self._sharding(len(activations)))

    def lowered(self, shape: BatchShape) -> tuple[Any, Any]:
        """Lookup and update of a batch, lowered. Touches no device."""
        programs, by_sample = self._programs_for(shape), self._mesh.by_sample
        num_words = sum(
            num_ids * (1 + (not has_one_each) + is_weighted)
            for (_, num_ids, has_one_each), is_weighted in zip(self._rooms_of(shape), shape.is_weighted, strict=True)
        )
        words = jax.ShapeDtypeStruct((self._mesh.num_parts, num_words), jnp.int32, sharding=by_sample)
        gradients = [
            jax.ShapeDtypeStruct(
                (count, self._tables[feature.table].spec.dim), jnp.float32, sharding=self._sharding(count)
            )
            for feature, count in zip(self._features, shape.num_bags, strict=True)
        ]
        rates = jax.ShapeDtypeStruct((len(self._held_tables),), jnp.float32, sharding=self._mesh.replicated)
        arrays = self._held.arrays
        return programs.look_up.lower(arrays, words), programs.update.lower(arrays, words, gradients, rates)

    def _require_equal_rates(self, learning_rates: Sequence[float]) -> None:
        """Raises ValueError if a table got another optimizer since the engine was started."""
        for first, *others in self._of_array:
            for other in others:
                if learning_rates[other] != learning_rates[first]:
                    names = " and ".join(f"'{self._tables[at].spec.name}'" for at in (first, other))
                    raise ValueError(
                        f"Found learning rates {learning_rates[first]} and {learning_rates[other]} of tables {names}. "
                        "Expected one, as when the embedding was built, since they lie in one array of the devices. "
                        "Use a callable as learning rate, one for each table."
                    )

    def _sharding(self, num_bags: int) -> Any:
        """Over the devices, if each has as many bags. JAX knows no other arrays."""
        return self._mesh.replicated if num_bags % self._mesh.num_parts else self._mesh.by_sample

    def _padded(self, num_bags: int) -> int:
        """The bags with so many empty ones that each device has as many, and one at least."""
        return max(1, -(-num_bags // self._mesh.num_parts)) * self._mesh.num_parts

    def _rooms_of(self, shape: BatchShape) -> list[tuple[int, int, bool]]:
        """By feature the bags of a device, the ids that it has room for, and whether there is one for each bag."""
        num_parts, found = self._mesh.num_parts, []
        for count, level in zip(shape.num_bags, shape.levels, strict=False):
            padded = self._padded(count)
            of_device, has_one_each = padded // num_parts, level == ONE_ID
            num_ids = of_device if has_one_each else ids_of_room(level, padded, num_devices=num_parts)
            found.append((of_device, num_ids, has_one_each))
        return found

    def _packed(self, shape: BatchShape, bags: Sequence[Ragged]) -> np.ndarray:
        """The ids of all features as int32 `[num_parts, n]`, since each array that goes to devices has a cost."""
        num_parts, words = self._mesh.num_parts, []
        for own, (of_device, num_ids, has_one_each), is_weighted in zip(
            bags, self._rooms_of(shape), shape.is_weighted, strict=True
        ):
            size = num_parts * num_ids
            arrays = BagArrays(
                np.empty(size, np.int32),
                None if has_one_each else np.empty(size, np.int32),
                np.empty(size, np.float32) if is_weighted else None,
            )
            write_bags(arrays, own, num_parts * of_device, num_parts)
            words += [array.view(np.int32).reshape(num_parts, -1) for array in arrays if array is not None]
        return np.concatenate(words, axis=1)

    def _asked(self, shape: BatchShape, words: jax.Array) -> Asked:
        """What one device asks of the tables, by its words `[n]`."""
        ids, at = {}, 0

        def taken(count: int) -> jax.Array:
            nonlocal at
            at += count
            return words[at - count : at]

        for feature, (of_device, num_ids, has_one_each), is_weighted in zip(
            self._features, self._rooms_of(shape), shape.is_weighted, strict=True
        ):
            ids[feature.name] = BagIds(
                taken(num_ids),
                None if has_one_each else taken(num_ids),
                jax.lax.bitcast_convert_type(taken(num_ids), jnp.float32) if is_weighted else None,
                combiner=feature.combiner,
                num_bags=of_device,
            )
        return self._step.asked(ids, shape.levels[len(self._features) :])

    def _programs_for(self, shape: BatchShape) -> _Programs:
        if shape not in self._programs:
            self._programs[shape] = self._compiled(shape)
        return self._programs[shape]

    def _compiled(self, shape: BatchShape) -> _Programs:
        names, arrays = [feature.name for feature in self._features], self._held.arrays
        lie = jax.tree.map(lambda leaf: leaf.sharding.spec, arrays)

        def vectors(tables: Any, words: jax.Array) -> list[jax.Array]:
            found, _ = self._step.looked_up(tables, self._asked(shape, words[0]))
            return [found[name] for name in names]

        def look_up(tables: Any, words: jax.Array) -> list[jax.Array]:
            found = self._on_devices(vectors, (lie, P(AXIS)), P(AXIS))(tables, words)
            return [own[:count] for own, count in zip(found, shape.num_bags, strict=True)]

        def updated(tables: Any, words: jax.Array, gradients: list[jax.Array], rates: jax.Array) -> Any:
            asked = self._asked(shape, words[0])
            return self._step.updated(tables, asked, dict(zip(names, gradients, strict=True)), rates=rates)

        def update(tables: Any, words: jax.Array, gradients: list[jax.Array], rates: jax.Array) -> Any:
            padded = [jnp.pad(own, ((0, self._padded(len(own)) - len(own)), (0, 0))) for own in gradients]
            step = self._on_devices(updated, (lie, P(AXIS), P(AXIS), P()), lie)
            return step(tables, words, padded, rates)

        return _Programs(
            jax.jit(look_up, out_shardings=[self._sharding(count) for count in shape.num_bags]),
            jax.jit(update, donate_argnums=0, out_shardings=jax.tree.map(lambda leaf: leaf.format, arrays)),
        )

    def _on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=self._mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def cut_for_devices(spec: EngineSpec) -> EngineSpec:
    """As of `embedding.tf.engine.device_tables`. Where rows lie is no property of what is saved."""
    num_parts = len(jax.local_devices())
    return replace(spec, tables=tuple(cut_for_parts(one, num_parts) if one.is_sharded else one for one in spec.tables))


class _InProcess:
    """The end of a `DeviceRows` whose devices are those of this process. Mutated: `_answer`."""

    def __init__(self, held: HeldTables, row_memory: np.ndarray) -> None:
        self._held, self.row_memory = held, row_memory
        self._answer: Record | None = None

    def send(self, record: Record) -> None:
        self._answer = self._held.answer(record, self.row_memory) if record.kind in ABOUT_ROWS else None

    def receive(self, *, timeout_s: float, keep_waiting: Callable[[], None] | None = None) -> Record:
        if self._answer is None:
            raise RuntimeError("Found no answer about rows. Expected a question before. Send one.")
        return self._answer


def _with_rates(spec: EngineSpec, tables: Mapping[int, Table]) -> dict[int, TableSpec]:
    """The tables with learning rates that are equal where they will be equal in each step. Only such tables may lie in
    one array.
    """
    rates = {tag: TaggedLearningRate(tag) for tag in spec.rate_tags if tag is not None}
    found = {}
    for at, table in tables.items():
        own, tag = table.spec.optimizer, spec.rate_tags[at]
        if own is not None:
            rate: Any = spec.learning_rates[at] if tag is None else rates[tag]
            own = replace(own, learning_rate=rate)  # pyright: ignore[reportArgumentType]
        found[at] = replace(table.spec, optimizer=own)
    return found
