"""Making a full commit of a run whose newest one is a chain of deltas, by hand, under a lease of its own.

The state does not change: it is written once more, whole, under the same step, and becomes the newest commit. Commits before it stay until
the keep policy or `prune` removes them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from orchestrator import checkpoint
from orchestrator.config import ConfigurationError
from orchestrator.lease import Holder, acquire, read_lineage
from orchestrator.manifest import Manifest, commit_name
from orchestrator.run_reference import open_run_store
from workers.checkpoint_files import (
    TableFiles,
    TablePlan,
    assemble_table,
    read_bucket,
    write_bucket,
    write_table_metadata,
)
from workers.storage import Store
from workers.zarr_metadata import DTYPES


def compact(url: str, *, unix_s: Callable[[], float] = time.time) -> Manifest:
    """Writes the newest commit of a run whole. Memory: one bucket with its slots.

    Claims the next generation, as `prune` does.

    Returns:
      The new commit, or the newest one if that is full already.

    Raises:
      ConfigurationError: no run, or nothing committed in it.
      RunIsHeld: a driver is at work.
      NoLoadableCommit, ChunkDamaged: the newest commit is damaged; nothing has changed.
    """
    store = open_run_store(url)
    lineage = read_lineage(store)
    if not lineage:
        raise ConfigurationError(f"Found no commit in {store.location}. Expected one to compact. Train first.")

    def check(newest: str | None) -> str | None:
        return checkpoint.newest_loadable(store, newest, allow_ancestors=False, on_skip=lambda name, why: None)

    # Before the claim too: a run that cannot be compacted should not lose a generation to the attempt.
    check(lineage[0])
    head = checkpoint.load(store, lineage[0])
    if not head.num_deltas:
        return head
    holder = Holder.current(f"compact-{uuid.uuid4().hex[:12]}")
    lease = acquire(store, holder=holder, choose_base=check, unix_s=unix_s)
    try:
        if lease.head != head.name:
            raise ConfigurationError(
                f"Found commit {lease.head} made while {head.name} was to be compacted. Expected a run at rest. Try again."
            )
        attempt = commit_name(step=head.step, generation=lease.generation)
        tables = tuple(_whole_table(store, table, attempt, lease.heartbeat) for table in head.tables)
        manifest = replace(head, generation=lease.generation, parent=head.name, created_unix_s=unix_s(), tables=tables)
        checkpoint.commit(store, manifest, lease)
        return manifest
    finally:
        lease.release()


def _whole_table(store: Store, table: TableFiles, attempt: str, on_bucket: Callable[[], None]) -> TableFiles:
    if not table.deltas:
        return table
    plan = TablePlan(
        attempt=attempt,
        name=table.name,
        num_rows=table.num_rows,
        num_buckets=table.num_buckets,
        widths={array.name: array.width for array in table.arrays},
        dtypes={array.name: DTYPES[array.dtype] for array in table.arrays},
    )
    arrays = write_table_metadata(store, plan)
    receipts = []
    for bucket in range(table.num_buckets):
        receipts.append(write_bucket(store, plan, bucket, read_bucket(store, table, bucket)))
        on_bucket()
    return assemble_table(plan, arrays, receipts)
