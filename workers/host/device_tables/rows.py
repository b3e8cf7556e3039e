"""`DeviceRows`: the rows of tables that live on devices, between this host's buckets and its device process.

Before the first step of a generation the host gives what it owns. For a commit it takes these buckets back. Rows that
came back with other bits count as changed, so deltas and the undo log hold no others. Norms between commits ask for
single rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from podembed.embedding.table.table import Table
from podembed.workers.device.shared_memory import ChannelEnd, Record, RecordKind
from podembed.workers.liveness.progress import Phase, Tracker


class DeviceRows:
    """The buckets of one host in one generation. Mutated: the tables, and the shared memory.

    Args:
      tables: by number those that live on devices, as this host holds them.
      device: the end of the memory that is shared with the device process.
      timeout_s: longest wait for the device.
      check: called in each wait; raises to end it.
      tracker: sees each bucket pass.
    """

    def __init__(
        self,
        tables: Mapping[int, Table],
        device: ChannelEnd,
        *,
        timeout_s: float,
        check: Callable[[], None],
        tracker: Tracker,
    ) -> None:
        self.tables, self._device, self._timeout_s = tables, device, timeout_s
        self._check, self._tracker = check, tracker
        self._is_given = False

    def give(self) -> None:
        """Gives the device process its rows before the first step; later calls do nothing.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        if self._is_given or not self.tables:
            return
        with self._tracker.phase(Phase.DEVICE):
            for number, table in self.tables.items():
                for bucket in map(int, table.buckets):
                    for values, memory in self._parts(table, bucket):
                        memory[...] = values
                    self._ask(RecordKind.GIVE_BUCKET, number, bucket, table)
            self._ask(RecordKind.JOIN_BUCKETS)
        self._is_given = True

    def take(self) -> None:
        """Takes the buckets of this host back, as they are after the last step.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        if not self.tables:
            return
        # Before the first step devices have what hosts have.
        given = self.tables if self._is_given else {}
        with self._tracker.phase(Phase.DEVICE):
            for number, table in given.items():
                # A table that is not trained never changes.
                for bucket in map(int, table.buckets if table.spec.optimizer is not None else ()):
                    self._ask(RecordKind.TAKE_BUCKET, number, bucket, table)
                    self._replace(table, bucket)
        self._device.send(Record(kind=RecordKind.END, step=0))

    def values(self, number: int, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Some rows and their slots as the devices have them now, between two steps: float32 `[n, width]` by name.

        Args:
          number: number of the table.
          ids: int64 `[n]`, of any rows.

        Raises:
          ChannelError: the device process is gone or silent.
        """
        widths = self.tables[number].spec.widths
        found = {name: np.empty((len(ids), width), np.float32) for name, width in widths.items()}
        room = len(self._device.bucket) // sum(widths.values())
        with self._tracker.phase(Phase.DEVICE):
            for first in range(0, len(ids), room):
                part = ids[first : first + room]
                self._device.bucket[: len(part)].view(np.int32)[:] = part
                self._ask(RecordKind.TAKE_ROWS, number, len(part))
                at = 0
                for name, width in widths.items():
                    memory = self._device.bucket[at : at + len(part) * width]
                    found[name][first : first + len(part)] = memory.reshape(-1, width)
                    at += memory.size
        return found

    def _replace(self, table: Table, bucket: int) -> None:
        parts = self._parts(table, bucket)
        changed = np.zeros(len(parts[0][0]), bool)
        for values, memory in parts:
            changed |= (values.view(np.uint32) != memory.view(np.uint32)).any(axis=1)
        rows = table.first_row(bucket) + np.flatnonzero(changed)
        if len(rows):
            table.announce(rows)
            names = table.spec.widths
            table.store.write(rows, {name: memory[changed] for name, (_, memory) in zip(names, parts, strict=True)})

    def _parts(self, table: Table, bucket: int) -> Sequence[tuple[np.ndarray, np.ndarray]]:
        """The rows of a bucket and each slot: here, and in the shared memory. Padding rows stay here."""
        found, at, count = [], 0, table.spec.layout.num_rows_of(bucket)
        for array in table.bucket(bucket).values():
            memory = self._device.bucket[at : at + count * array.shape[1]].reshape(count, array.shape[1])
            found.append((array[:count], memory))
            at += memory.size
        return found

    def _ask(self, kind: RecordKind, number: int = 0, buffer: int = 0, table: Table | None = None) -> None:
        levels = () if table is None else (table.spec.layout.num_buckets, 0)
        self._device.send(Record(kind=kind, step=number, buffer=buffer, levels=levels))
        answer = self._device.receive(timeout_s=self._timeout_s, keep_waiting=self._check)
        if answer.kind is not RecordKind.DONE or answer.step != number:
            raise RuntimeError(
                f"The device process answered {answer.kind.name} for table {answer.step}. Expected DONE for table "
                f"{number}."
            )
        self._tracker.mark()
