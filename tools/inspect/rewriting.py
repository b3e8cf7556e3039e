"""Writing the newest commit of a run once more, by hand, under a lease of its own: whole, or without some keys.

The new commit has the step of the one before it, which stays until the keep policy or `prune` removes it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
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

ChangeBucket = Callable[[int, Sequence[np.ndarray]], None]
"""Changes a bucket in place: its number, and its arrays in the order of the table's."""


def open_newest(url: str, *, single_writer: bool, purpose: str) -> tuple[Store, Manifest]:
    """The newest commit of a run at rest, whose files are all there.

    Looked at before any claim: a run whose commit cannot be written again should not lose a generation to the attempt.

    Args:
      single_writer: accept a storage that cannot keep a driver out while this goes on.
      purpose: what is to be done, as a verb.

    Raises:
      ConfigurationError: no run, or nothing committed in it.
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      NoLoadableCommit: the newest commit is damaged.
    """
    store = open_run_store(url)
    open_for_writing(url, single_writer=single_writer)
    lineage = read_lineage(store)
    if not lineage:
        raise ConfigurationError(f"Found no commit in {store.location}. Expected one to {purpose}. Train first.")
    _checked(store, lineage[0])
    return store, checkpoint.load(store, lineage[0])


def rewrite(
    store: Store,
    head: Manifest,
    change: Callable[[str, Callable[[], None]], Manifest],
    *,
    purpose: str,
    unix_s: Callable[[], float],
) -> Manifest:
    """Commits another form of the newest commit, under the same step.

    Claims the next generation, as `prune` does.

    Args:
      change: writes files of an attempt, given its name, and calls its second argument often. Returns what is to be
        committed, in which the commit's own marks are still those of `head`.
      purpose: what is done, as a verb.

    Raises:
      RunIsHeld: a driver is at work.
      ConfigurationError: somebody has committed meanwhile.
      ChunkDamaged: a file that had to be read is damaged; nothing has changed.
    """
    holder = Holder.current(f"{purpose}-{uuid.uuid4().hex[:12]}")
    lease = acquire(store, holder=holder, choose_base=lambda newest: _checked(store, newest), unix_s=unix_s)
    try:
        if lease.head != head.name:
            raise ConfigurationError(
                f"Found commit {lease.head} made while {head.name} was to be changed. Expected a run at rest. Try "
                "again."
            )
        attempt = commit_name(step=head.step, generation=lease.generation)
        manifest = replace(
            change(attempt, lambda: _beat(lease)),
            format_version=FORMAT_VERSION,
            generation=lease.generation,
            parent=head.name,
            created_unix_s=unix_s(),
        )
        checkpoint.commit(store, manifest, lease)
        return manifest
    finally:
        lease.release()


def _checked(store: Store, newest: str | None) -> str | None:
    return checkpoint.newest_loadable(store, newest, allow_ancestors=False, on_skip=lambda name, why: None)


def _beat(lease: Lease) -> None:
    """Says that somebody is at work. Advisory: a storage that is really away is noticed by the next write."""
    with contextlib.suppress(StorageError, OSError):
        lease.heartbeat()


def whole_table(
    store: Store,
    table: TableFiles,
    attempt: str,
    on_bucket: Callable[[], None],
    change: ChangeBucket = lambda bucket, values: None,
) -> TableFiles:
    """Writes all buckets of a table, without deltas. Memory: the buckets of one file with their slots.

    Args:
      on_bucket: called after each bucket.
      change: what becomes of a bucket before it is written.

    Raises:
      ChunkDamaged: a bucket is not what was committed.
    """
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
            change(first + at, out)
            on_bucket()
        receipts.append(write_buckets(store, plan, first, values))
    return assemble_table(plan, arrays, [WrittenBuckets.of(plan, receipts)])
