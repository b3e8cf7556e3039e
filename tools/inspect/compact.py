"""Making a full commit of a run whose newest one is a chain of deltas, by hand, under a lease of its own.

The state does not change: it is written once more, whole, under the same step, and becomes the newest commit. Commits
before it stay until the keep policy or `prune` removes them.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import FORMAT_VERSION, Manifest, commit_name
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.run.reference import open_run_store
from podembed.workers.checkpoint.checkpoint_files import TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.files import assemble_table, read_bucket, write_buckets, write_table_metadata
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


def compact(url: str, *, single_writer: bool = False, unix_s: Callable[[], float] = time.time) -> Manifest:
    """Writes the newest commit of a run whole. Memory: the buckets of one file with their slots.

    Claims the next generation, as `prune` does.

    Args:
      single_writer: accept a storage that cannot keep a driver out while this goes on.
      unix_s: the wall clock, for heartbeats and the record of when it was done.

    Returns:
      The new commit, or the newest one if that is full already.

    Raises:
      ConfigurationError: no run, or nothing committed in it.
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      RunIsHeld: a driver is at work.
      NoLoadableCommit, ChunkDamaged: the newest commit is damaged; nothing has changed.
    """
    store = open_run_store(url)
    open_for_writing(url, single_writer=single_writer)
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
                f"Found commit {lease.head} made while {head.name} was to be compacted. Expected a run at rest. Try "
                "again."
            )
        attempt = commit_name(step=head.step, generation=lease.generation)
        tables = tuple(_whole_table(store, table, attempt, lambda: _beat(lease)) for table in head.tables)
        manifest = replace(
            head,
            format_version=FORMAT_VERSION,
            generation=lease.generation,
            parent=head.name,
            created_unix_s=unix_s(),
            tables=tables,
        )
        checkpoint.commit(store, manifest, lease)
        return manifest
    finally:
        lease.release()


def _beat(lease: Lease) -> None:
    """Says that somebody is at work. Advisory: a storage that is really away is noticed by the next write."""
    with contextlib.suppress(StorageError, OSError):
        lease.heartbeat()


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
        buckets_per_file=table.buckets_per_file,
    )
    arrays = write_table_metadata(store, plan)
    receipts = []
    length = plan.rows_per_bucket
    values = [np.empty((plan.buckets_per_file * length, a.width), DTYPES[a.dtype]) for a in table.arrays]
    for first in range(0, table.num_buckets, plan.buckets_per_file):
        for at in range(plan.buckets_per_file):
            out = [value[at * length : (at + 1) * length] for value in values]
            read_bucket(store, table, first + at, out=out)
            on_bucket()
        receipts.append(write_buckets(store, plan, first, values))
    return assemble_table(plan, arrays, [WrittenBuckets.of(plan, receipts)])
