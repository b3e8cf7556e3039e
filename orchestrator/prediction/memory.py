"""What a host needs of memory for its tables: rows and slots, and what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.costs.work import TableTraffic, TableWay
from podembed.embedding.lookup.compiled import num_hash_slots
from podembed.workers.checkpoint.background_save import save_bytes
from podembed.workers.checkpoint.undo import log_bytes

_FLOAT_BYTES, _MARK_BYTES, _HASH_SLOT_BYTES = 4, 4, 16
PROCESS_BYTES = 480_000_000
"""Of a host process without rows, as `benchmarks/memory.py` found it: libraries, compiled kernels, input under way.
Between 420 and 540 MB, more with more features.
"""
_BITS_A_ROW = 4  # of the undo log: changed and lost, for two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of the fullest host.

    Attributes:
      table_bytes: rows and slots.
      mark_bytes: a number for each row, which grouping needs.
      hash_slot_bytes: where distinct ids of a batch are found, for tables whose rows travel.
      undo_bytes: the undo log when it is full.
      save_bytes: rows that a save keeps while they change, and its staging buffers.
      batch_bytes: activations and their gradients of the batches in flight, and rows that travel.
      process_bytes: of the process without tables.
    """

    table_bytes: int
    mark_bytes: int
    hash_slot_bytes: int
    undo_bytes: int
    save_bytes: int
    batch_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        beside = self.mark_bytes + self.hash_slot_bytes + self.undo_bytes + self.save_bytes + self.batch_bytes
        return self.table_bytes + beside + self.process_bytes


def host_memory(
    traffic: Sequence[TableTraffic], *, shard_bytes: int, num_hosts: int, undo_share: float, num_buffers: int
) -> HostMemory:
    """Of the host that holds most.

    Args:
      shard_bytes: its rows and slots.
      undo_share: of them, as the run's settings say.
      num_buffers: batches in flight.
    """
    all_bytes = sum(_FLOAT_BYTES * table.num_rows * (table.dim + table.slot_floats) for table in traffic)
    all_rows = sum(table.num_rows for table in traffic)
    rows = all_rows * shard_bytes / all_bytes if all_bytes else 0.0
    vectors = sum(table.bags * table.dim for table in traffic)
    partial = sum(table.bags * table.dim for table in traffic if table.way is TableWay.PARTIAL)
    travelling = sum(2 * table.host_rows * table.dim for table in traffic if table.way is TableWay.ROWS)
    most_ids = max((int(table.ids) for table in traffic if table.way is TableWay.ROWS), default=0)
    floats = num_buffers * (2 * vectors + num_hosts * partial) + num_buffers * travelling
    return HostMemory(
        table_bytes=shard_bytes,
        mark_bytes=int(_MARK_BYTES * rows),
        hash_slot_bytes=_HASH_SLOT_BYTES * num_hash_slots(most_ids),
        undo_bytes=log_bytes(shard_bytes, share=undo_share) + int(_BITS_A_ROW * rows / 8),
        save_bytes=save_bytes(shard_bytes),
        batch_bytes=int(_FLOAT_BYTES * floats),
    )
