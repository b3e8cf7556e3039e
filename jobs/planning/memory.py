"""What a host needs of memory for its tables: rows and slots, and what stands beside them. Of tables whose keys come
and go also what a key takes, and whether there is room for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.kernels.ids import num_hash_slots
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.key_space import DEVIATIONS, DynamicKeys
from podembed.orchestrator.api.text import columns, format_bytes, printable
from podembed.orchestrator.decisions.table_plan import PlacementPlan
from podembed.orchestrator.planning.traffic import TableTraffic
from podembed.workers.checkpoint.background_save import save_bytes
from podembed.workers.checkpoint.undo import log_bytes
from podembed.workers.job.job import JobConfig

_FLOAT_BYTES, _MARK_BYTES, _HASH_SLOT_BYTES = 4, 4, 16
PROCESS_BYTES = 480_000_000
"""Memory of a host process without rows, as `benchmarks/memory.py` found it: libraries, compiled kernels, input under
way. Between 420 and 540 MB, more with more features.
"""
_BITS_A_ROW = 4  # of the undo log: changed and lost, for two moments
_REMEMBERED_BYTES = 1 << 20  # of keys that lost their row, by each table whose keys come and go, whatever its size


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of the fullest host.

    Attributes:
      table_bytes: rows, slots, and what is kept of each key.
      mark_bytes: a number for each row, which grouping needs.
      map_bytes: where the rows of keys are found, for tables whose keys come and go.
      hash_slot_bytes: where distinct ids of a batch are found, for tables whose rows travel.
      undo_bytes: the undo log when it is full.
      save_bytes: rows that a save keeps while they change, and its staging buffers.
      batch_bytes: activations and their gradients of the batches in flight, and rows that travel.
      process_bytes: bytes of the process without tables.
    """

    table_bytes: int
    mark_bytes: int
    hash_slot_bytes: int
    undo_bytes: int
    save_bytes: int
    batch_bytes: int
    process_bytes: int = PROCESS_BYTES
    map_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        beside = self.mark_bytes + self.hash_slot_bytes + self.undo_bytes + self.save_bytes + self.batch_bytes
        return self.table_bytes + self.map_bytes + beside + self.process_bytes


def host_memory(
    job: JobConfig, plan: PlacementPlan, traffic: Sequence[TableTraffic], *, undo_share: float
) -> HostMemory:
    """Memory of the host that holds most.

    Args:
      traffic: traffic of all tables, as the plan places them.
      undo_share: share of rows and slots that the undo log may have, as the run's settings say.
    """
    shard_bytes = max(host.shard_bytes for host in plan.hosts)
    specs = [table.spec for table in plan.tables]
    all_bytes = sum(_FLOAT_BYTES * spec.num_rows * sum(spec.widths.values()) for spec in specs)
    share = shard_bytes / all_bytes if all_bytes else 0.0
    rows = sum(spec.num_rows for spec in specs) * share
    maps = [_map_bytes(spec) for spec in specs if isinstance(spec.keys, DynamicKeys)]
    travelling = [one for one in traffic if not one.table.is_pooled]
    # Activations and their gradients; partial sums from all hosts; rows that travel and their gradients.
    floats = sum(2 * one.vector_floats for one in traffic)
    floats += len(plan.hosts) * sum(
        one.vector_floats for one in traffic if one.table.is_pooled and not one.table.is_whole
    )
    floats += sum(2 * one.host_rows * one.table.spec.dim for one in travelling)
    num_batches = 2 if job.overlap is not False or job.staleness else 1
    return HostMemory(
        table_bytes=shard_bytes,
        mark_bytes=int(_MARK_BYTES * rows),
        hash_slot_bytes=_HASH_SLOT_BYTES * num_hash_slots(max((int(one.ids) for one in travelling), default=0)),
        undo_bytes=log_bytes(shard_bytes, share=undo_share) + int(_BITS_A_ROW * rows / 8),
        save_bytes=save_bytes(shard_bytes),
        batch_bytes=int(_FLOAT_BYTES * num_batches * floats),
        map_bytes=int(sum(maps) * share) + _REMEMBERED_BYTES * len(maps),
    )


def render_memory(found: HostMemory) -> str:
    """The memory of the fullest host, part by part."""
    parts = [
        ("rows and slots", found.table_bytes),
        ("marks of rows", found.mark_bytes),
        ("maps of keys", found.map_bytes),
        ("hash slots", found.hash_slot_bytes),
        ("undo log, when full", found.undo_bytes),
        ("saves beside training", found.save_bytes),
        ("batches in flight", found.batch_bytes),
        ("the process without tables", found.process_bytes),
        ("all", found.total_bytes),
    ]
    rows = [("memory of the fullest host", ""), *((name, format_bytes(size)) for name, size in parts if size)]
    return printable(columns(rows))


def _map_bytes(spec: TableSpec) -> int:
    return spec.keys.map_bytes(spec.layout) if isinstance(spec.keys, DynamicKeys) else 0


def key_bytes(spec: TableSpec) -> float:
    """Bytes of memory that a key takes of the host that has its row: row, slots, columns, maps and marks."""
    return spec.row_bytes + _MARK_BYTES + _map_bytes(spec) / spec.num_rows


def render_keys(specs: Sequence[TableSpec]) -> str:
    """Of tables whose keys come and go, the memory of a key, and whether there is room for all; empty without any."""
    lines = []
    for spec in specs:
        keys, layout = spec.keys, spec.layout
        if not isinstance(keys, DynamicKeys):
            continue
        own = sum(dtype.itemsize for dtype in keys.columns.values())
        of_map = key_bytes(spec) - spec.row_bytes
        lines.append(
            f"{spec.name}: a key takes {key_bytes(spec):.0f} bytes: {spec.row_bytes - own} of row and slots, {own} of "
            f"columns, {of_map:.0f} of maps and marks"
        )
        if layout.num_buckets == 1:
            lines.append(f"  {keys.capacity:,} keys have room, in one bucket")
            continue
        room = layout.rows_per_bucket - keys.num_reserved
        mean = -(-keys.capacity // layout.num_buckets)
        lines.append(
            f"  keys fall by chance into {layout.num_buckets:,} buckets of {room:,} rows, {DEVIATIONS} standard "
            f"deviations more than the mean of {mean:,}: {layout.num_rows:,} rows for {keys.capacity:,} keys"
        )
        chance = keys.chance_of_refusal(layout)
        lines.append(f"  a table with {keys.capacity:,} keys refuses one with a probability of {chance:.2g}")
    return printable("\n".join(lines))
