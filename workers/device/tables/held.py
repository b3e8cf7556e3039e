"""`HeldTables`: rows and slots on the devices, and their way from and to the buckets of hosts.

Before the first step each host sends its buckets to its device process, and all processes join them on the devices.
Integers are joined, so that no bit of a number changes. For a commit each process gives its host the buckets that it
owns. All copies are the same, so together these are the table. Between two steps it gives single rows, to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podembed.workers.device.device_mesh import GangMesh, whole
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import device_tables

ABOUT_ROWS = (RecordKind.GIVE_BUCKET, RecordKind.TAKE_BUCKET, RecordKind.JOIN_BUCKETS, RecordKind.TAKE_ROWS)


class HeldTables:
    """The tables of one gang. Mutated: `arrays`, which programs take and give back.

    Attributes:
      arrays: by table its rows and slots, `[num_rows, width]` each, whole on every device. Before `serve` has joined
        what hosts sent, only their shapes.
    """

    def __init__(self, job: JobConfig, mesh: GangMesh) -> None:
        self._mesh = mesh
        self._specs = {table.at: table.spec for table in device_tables(job)}
        # Until rows come, programs are traced by their shapes.
        self.arrays: Any = {
            spec.name: {
                name: jax.ShapeDtypeStruct((spec.num_rows, width), jnp.float32, sharding=mesh.replicated)
                for name, width in spec.widths.items()
            }
            for spec in self._specs.values()
        }
        self._coming: dict[str, dict[str, np.ndarray]] = {}
        self._rates: tuple[bytes, jax.Array] | None = None

    def rates(self, rates: np.ndarray) -> jax.Array:
        """Learning rates on all devices. Those of the step before are there already."""
        if self._rates is None or self._rates[0] != rates.tobytes():
            self._rates = rates.tobytes(), self._mesh.place(rates.copy())
        return self._rates[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of tables on each device."""
        return sum(spec.num_rows * spec.row_bytes for spec in self._specs.values())

    def serve(self, end: ChannelEnd, record: Record, *, receive: Callable[[], Record]) -> Record:
        """Answers the records about rows, from `record` on. Returns the first one that is about something else."""
        taken: dict[int, Mapping[str, np.ndarray]] = {}
        while record.kind in ABOUT_ROWS:
            if record.kind is RecordKind.JOIN_BUCKETS:
                self._join()
            elif record.kind is RecordKind.TAKE_ROWS:
                self._write_rows(end, record)
            elif record.kind is RecordKind.GIVE_BUCKET:
                values = self._coming_of(record.step)
                for name, part in self._parts(end, record, values):
                    values[name][record.buffer :: record.levels[0]] = part
            else:
                if record.step not in taken:
                    # Hosts ask for one table after another, and the memory has room for the copy of one.
                    taken.clear()
                    arrays = self.arrays[self._specs[record.step].name]
                    taken[record.step] = {name: whole(array) for name, array in arrays.items()}
                values = taken[record.step]
                for name, part in self._parts(end, record, values):
                    part[...] = values[name][record.buffer :: record.levels[0]]
            end.send(Record(kind=RecordKind.DONE, step=record.step))
            record = receive()
        return record

    def _coming_of(self, at: int) -> dict[str, np.ndarray]:
        spec = self._specs[at]
        if spec.name not in self._coming:
            self._coming[spec.name] = {
                name: np.zeros((spec.num_rows, width), np.float32) for name, width in spec.widths.items()
            }
        return self._coming[spec.name]

    def _parts(self, end: ChannelEnd, record: Record, values: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """The rows of a bucket, by name, in the memory that is shared with the host."""
        found, at = [], 0
        # As the host has them: compiled programs give a table's arrays back in alphabetical order.
        for name in self._specs[record.step].widths:
            array = values[name]
            count = len(range(record.buffer, len(array), record.levels[0]))
            found.append((name, end.bucket[at : at + count * array.shape[1]].reshape(count, array.shape[1])))
            at += count * array.shape[1]
        return found

    def _write_rows(self, end: ChannelEnd, record: Record) -> None:
        """The rows that the memory names, and their slots, into that memory."""
        rows = end.bucket[: record.buffer].view(np.int32).copy()
        spec, at = self._specs[record.step], 0
        # All devices have the same.
        own = {name: array.addressable_data(0) for name, array in self.arrays[spec.name].items()}
        values = rows_here(own, rows) if self._mesh.platform == "cpu" else rows_there(own, rows)
        for name, width in spec.widths.items():
            end.bucket[at : at + len(rows) * width].reshape(len(rows), width)[...] = values[name]
            at += len(rows) * width

    def _join(self) -> None:
        """Brings what came onto all devices. Every process of the gang has the same part in it."""
        for at in self._specs:
            self._coming_of(at)
        coming, self._coming = self._coming, {}
        self.arrays = jax.tree.map(self._joined, {spec.name: coming[spec.name] for spec in self._specs.values()})

    def _joined(self, values: np.ndarray) -> jax.Array:
        if self._mesh.num_hosts == 1:
            return self._mesh.place(values)
        # Zeros of the others change nothing, and each bucket comes from one host.
        none = np.zeros((1, *values.shape), np.uint32)
        parts = [values.view(np.uint32)[None], *([none] * (self._mesh.num_parts - 1))]
        return _sum_of_words(self._mesh, self._mesh.split(parts))


def rows_here(arrays: Mapping[str, jax.Array], rows: np.ndarray) -> Mapping[str, np.ndarray]:
    """Some rows of each array of one CPU device. Nothing is compiled, and nothing else is copied."""
    return {name: np.asarray(array)[rows] for name, array in arrays.items()}


def rows_there(arrays: Mapping[str, jax.Array], rows: np.ndarray) -> Mapping[str, np.ndarray]:
    """The same of any device. Their number is padded to a power of two, so that few programs are compiled."""
    room = 1 << max(0, len(rows) - 1).bit_length()
    found = jax.device_get(_gathered(arrays, np.pad(rows, (0, room - len(rows)))))
    return {name: values[: len(rows)] for name, values in found.items()}


@jax.jit
def _gathered(arrays: Mapping[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
    return {name: array[rows] for name, array in arrays.items()}


def _sum_of_words(mesh: GangMesh, words: Any) -> jax.Array:
    def joined(words: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(words.sum(axis=0, dtype=jnp.uint32), jnp.float32)

    return jax.jit(joined, out_shardings=mesh.replicated)(words)
