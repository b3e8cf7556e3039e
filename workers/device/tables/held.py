"""`HeldTables`: rows and slots on the devices, and their way from and to the buckets of hosts.

Before the first step each host sends its buckets to its device process, and all processes join them on the devices.
Integers are joined, so that no bit of a number changes. For a commit each process gives its host the rows that changed.
All copies are the same, so a host keeps those of its own buckets. Between two steps it gives single rows, to be looked
at.

A host owns the buckets of a sharded table that its own devices have. So these go to its devices and back, and no other
process has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from podembed.embedding.shards import sharded_arrays
from podembed.embedding.table_spec import TableSpec
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.device.tables.lines import as_rows, rows_at, shape_in_lines
from podembed.workers.device.tables.sparse_cores import with_cores
from podembed.workers.device.tables.updates import CHANGED, layout_of
from podembed.workers.device.transfers.ways import own_shards
from podembed.workers.job.tables import DeviceTable

ABOUT_ROWS = (RecordKind.GIVE_BUCKETS, RecordKind.JOIN_BUCKETS, RecordKind.TAKE_CHANGED, RecordKind.TAKE_ROWS)


_Here = list[np.ndarray]
"""An array of a table in this process: the parts of a sharded one, or one that is whole."""


class HeldTables:
    """The tables of one gang. Mutated: `arrays`, which programs take and give back.

    Attributes:
      tables: tables in the job's order.
      arrays: by replicated table its rows and slots, whole on every device: `num_rows` rows, in lines. By array of
        sharded tables the same of all its tables, cut over the parts of the samples: `rows_per_part` rows of each part,
        in lines. Before `serve` has joined what hosts sent, only their shapes.
    """

    def __init__(self, tables: Sequence[DeviceTable], mesh: GangMesh) -> None:
        self._mesh, self.tables = mesh, tuple(tables)
        self._specs = {table.at: table.spec for table in tables}
        sharded = sharded_arrays([table.spec for table in tables], mesh.num_all_parts)
        sharded = with_cores(sharded, tables, num_cores=mesh.num_cores)
        self._sharded = {name: array for array in sharded for name in array.tables}
        # Tables of one array are as wide and have the same slots, so any will do.
        self._first = {self._array_of(spec): spec for spec in reversed(self._specs.values())}
        # Until rows come, programs are traced by their shapes.
        self.arrays: Any = {name: self._shapes(spec) for name, spec in self._first.items()}
        self._coming: dict[str, dict[str, _Here]] = {}
        self._rates: tuple[bytes, jax.Array] | None = None
        # By table, those that its host has not taken yet.
        self._changed: dict[int, np.ndarray] = {}

    def _array_of(self, spec: TableSpec) -> str:
        """The name of the array that a table is in."""
        return self._sharded[spec.name].name if spec.is_sharded else spec.name

    def _shapes(self, spec: TableSpec) -> dict[str, Any]:
        num_parts, sharding = 1, self._mesh.replicated
        if spec.is_sharded:
            num_parts, sharding = self._sharded[spec.name].num_parts, self._mesh.by_sample
        found = {}
        for name, width in spec.widths.items():
            count, columns = self._shape(spec, width)
            at = Format(layout_of(columns), sharding)
            found[name] = jax.ShapeDtypeStruct((num_parts * count, columns), jnp.float32, sharding=at)
        if _knows_changed(spec):
            num_rows = num_parts * self._num_rows(spec)
            found[CHANGED] = jax.ShapeDtypeStruct((num_rows,), jnp.bool_, sharding=Format(None, sharding))
        return found

    def _num_rows(self, spec: TableSpec) -> int:
        """Of a device."""
        return self._sharded[spec.name].rows_per_part if spec.is_sharded else spec.num_rows

    def _shape(self, spec: TableSpec, width: int) -> tuple[int, int]:
        """Of an array on a device. Where a rule computes all rows, each has a line of its own."""
        if spec.optimizer is not None and not _knows_changed(spec):
            return self._num_rows(spec), width
        return shape_in_lines(self._num_rows(spec), width)

    def _none_changed(self, spec: TableSpec) -> jax.Array:
        if spec.is_sharded:
            return self._mesh.split([np.zeros(self._sharded[spec.name].rows_per_part, bool)] * self._mesh.num_parts)
        return self._mesh.place(np.zeros(spec.num_rows, bool))

    def rates(self, rates: np.ndarray) -> jax.Array:
        """Learning rates on all devices. Those of the step before are there already."""
        if self._rates is None or self._rates[0] != rates.tobytes():
            self._rates = rates.tobytes(), self._mesh.place(rates.copy())
        return self._rates[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of tables on each device."""
        specs = self._first.values()
        return sum(self._num_rows(spec) * (spec.row_bytes + _knows_changed(spec)) for spec in specs)

    def serve(self, end: ChannelEnd, record: Record, *, receive: Callable[[], Record]) -> Record:
        """Answers the records about rows, from `record` on. Returns the first one that is about something else."""
        self._changed = {}
        while record.kind in ABOUT_ROWS:
            end.send(self.answer(record, end.row_memory))
            record = receive()
        return record

    def answer(self, record: Record, memory: np.ndarray) -> Record:
        """Does what a record about rows asks for, by the memory that this process has in common with the host."""
        answer = Record(kind=RecordKind.DONE, step=record.step)
        if record.kind is RecordKind.JOIN_BUCKETS:
            self._join()
        elif record.kind is RecordKind.TAKE_ROWS:
            self._write_rows(memory, record.step, memory[: record.buffer].view(np.int32).copy(), at=0)
        elif record.kind is RecordKind.GIVE_BUCKETS:
            self._read_buckets(memory, record)
        else:
            if not record.buffer:
                self._changed |= {} if record.step in self._changed else self._take_changed(record.step)
            spec, left = self._specs[record.step], self._changed[record.step][record.buffer :]
            rows = left[: len(memory) // (1 + sum(spec.widths.values()))]
            memory[: len(rows)].view(np.int32)[:] = rows
            self._write_rows(memory, record.step, rows, at=len(rows))
            if len(rows) == len(left):
                del self._changed[record.step]
            answer = replace(answer, buffer=len(rows), levels=(len(left) - len(rows), 0))
        return answer

    def _take_changed(self, at: int) -> dict[int, np.ndarray]:
        """The rows that changed, int32 in no order that matters, of all tables in the array of a table. None are
        changed from now on.
        """
        name = self._array_of(self._specs[at])
        arrays, first = self.arrays[name], self._first[name]
        parts = [np.ones(self._num_rows(first), bool)]
        if CHANGED in arrays:
            # Copies, since the memory of a CPU device is used again.
            parts = [np.array(part) for part in self._parts_of(first, arrays[CHANGED])]
            arrays[CHANGED] = self._none_changed(first)
        elif first.is_sharded:
            parts *= self._mesh.num_parts
        found = {}
        for number, spec in self._specs.items():
            if self._array_of(spec) != name:
                continue
            rows = [
                self._sharded[name].rows_at(spec.name, self._mesh.first_part + part, is_changed)
                if spec.is_sharded
                else np.flatnonzero(is_changed)
                for part, is_changed in enumerate(parts)
            ]
            found[number] = np.concatenate(rows).astype(np.int32)
        return found

    def _parts_of(self, spec: TableSpec, array: jax.Array) -> list[Any]:
        """The parts of an array in this process. Of a replicated table there is one, and all devices have the same."""
        return own_shards(array) if spec.is_sharded else [array.addressable_data(0)]

    def _coming_of(self, name: str) -> dict[str, _Here]:
        """What hosts have sent of an array."""
        if name not in self._coming:
            spec = self._first[name]
            count = self._mesh.num_parts if spec.is_sharded else 1
            self._coming[name] = {
                kind: [np.zeros(self._shape(spec, width), np.float32) for _ in range(count)]
                for kind, width in spec.widths.items()
            }
        return self._coming[name]

    def _read_buckets(self, memory: np.ndarray, record: Record) -> None:
        """Takes buckets that follow each other from the memory that is shared with the host."""
        spec, at = self._specs[record.step], 0
        coming, layout = self._coming_of(self._array_of(spec)), spec.layout
        for bucket in range(record.buffer, record.buffer + record.levels[0]):
            part, rows = 0, slice(bucket, spec.num_rows, layout.num_buckets)
            if spec.is_sharded:
                array = self._sharded[spec.name]
                part = array.tables[spec.name].part_of(bucket) - self._mesh.first_part
                rows = array.rows_of_bucket(spec.name, bucket)
            # As the host has them: compiled programs give a table's arrays back in alphabetical order.
            count = layout.num_rows_of(bucket)
            for name, width in spec.widths.items():
                size = count * width
                as_rows(coming[name][part], width)[rows] = memory[at : at + size].reshape(count, width)
                at += size

    def _write_rows(self, memory: np.ndarray, number: int, rows: np.ndarray, *, at: int) -> None:
        """Some rows of a table, int32, and their slots, into the memory from `at` on."""
        spec = self._specs[number]
        parts = np.zeros(len(rows), np.int64)
        if spec.is_sharded:
            array = self._sharded[spec.name]
            parts, rows = np.divmod(array.slots_of(spec.name, rows), array.rows_per_part)
            parts = parts - self._mesh.first_part
        out, shards, arrays = {}, {}, self.arrays[self._array_of(spec)]
        for name, width in spec.widths.items():
            out[name] = memory[at : at + len(rows) * width].reshape(len(rows), width)
            shards[name] = self._parts_of(spec, arrays[name])
            at += len(rows) * width
        for part in np.unique(parts):
            wanted, own = parts == part, {name: of_part[part] for name, of_part in shards.items()}
            find = rows_here if self._mesh.platform == "cpu" else rows_there
            found = find(own, rows[wanted], tuple(spec.widths[name] for name in own))
            for name, values in found.items():
                out[name][wanted] = values

    def _join(self) -> None:
        """Brings what came onto all devices. Every process of the gang has the same part in it."""
        for name in self._first:
            self._coming_of(name)
        coming, self._coming = self._coming, {}
        self.arrays = {
            name: {kind: _laid_out(self._joined(parts, name)) for kind, parts in coming[name].items()}
            for name in self._first
        }
        for name, spec in self._first.items():
            if _knows_changed(spec):
                self.arrays[name][CHANGED] = self._none_changed(spec)

    def _joined(self, parts: _Here, name: str) -> jax.Array:
        if name in self._sharded:
            return self._mesh.split(parts)
        values = parts[0]
        if self._mesh.num_hosts == 1:
            return self._mesh.place(values)
        # Zeros of the others change nothing, and each bucket comes from one host.
        none = np.zeros((1, *values.shape), np.uint32)
        words = [values.view(np.uint32)[None], *([none] * (self._mesh.num_parts - 1))]
        return _sum_of_words(self._mesh, self._mesh.split(words))


def _knows_changed(spec: TableSpec) -> bool:
    """Whether there is an array of the rows that changed. Otherwise none does, or all do."""
    return spec.optimizer is not None and not spec.optimizer.touches_all_rows


def _laid_out(array: Any) -> jax.Array:
    """The same array as programs expect it. On CPUs and GPUs it lies so already."""
    layout = layout_of(array.shape[1])
    if layout is None or array.format.layout.major_to_minor == layout.major_to_minor:
        return array
    return jax.jit(_unchanged, donate_argnums=0, out_shardings=Format(layout, array.sharding))(array)


def _unchanged(values: jax.Array) -> jax.Array:
    """One function for all tables, since JAX compiles once for each."""
    return values


def rows_here(arrays: Mapping[str, jax.Array], rows: np.ndarray, widths: tuple[int, ...]) -> Mapping[str, np.ndarray]:
    """Some rows of each array of one CPU device. Nothing is compiled, and nothing else is copied.

    Args:
      widths: columns of a row, by array.
    """
    named = zip(arrays.items(), widths, strict=True)
    return {name: as_rows(np.asarray(array), width)[rows] for (name, array), width in named}


def rows_there(arrays: Mapping[str, jax.Array], rows: np.ndarray, widths: tuple[int, ...]) -> Mapping[str, np.ndarray]:
    """The same of any device. Their number is padded to a power of two, so that few programs are compiled."""
    room = 1 << max(0, len(rows) - 1).bit_length()
    padded = np.pad(rows, (0, room - len(rows)))
    found = jax.device_get(_gathered([*arrays.values()], padded, widths))
    return {name: values[: len(rows)] for name, values in zip(arrays, found, strict=True)}


@partial(jax.jit, static_argnums=2)
def _gathered(arrays: Sequence[jax.Array], rows: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    return [rows_at(array, rows, width, fill=0) for array, width in zip(arrays, widths, strict=True)]


def _sum_of_words(mesh: GangMesh, words: Any) -> jax.Array:
    def joined(words: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(words.sum(axis=0, dtype=jnp.uint32), jnp.float32)

    return jax.jit(joined, out_shardings=mesh.replicated)(words)
