"""Small complete checkpoints for tests: real files, real manifests."""

from __future__ import annotations

import numpy as np

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.commit.run_record import RunRecord, TableRecord
from podembed.workers.checkpoint.checkpoint_files import TablePlan, WrittenBuckets
from podembed.workers.checkpoint.files import assemble_table, write_buckets, write_dense, write_table_metadata
from podembed.workers.storage.store import Store

TABLES = {"users": (37, 4, {"rows": 3, "accumulator": 1}), "items": (5, 1, {"rows": 2, "m": 2, "v": 2})}
RECORD = RunRecord(
    run_id="run-1",
    created_unix_s=1_700_000_000.25,
    seed=3,
    num_lanes=16,
    batch_size=1024,
    tables=(TableRecord(name="users", num_rows=37, dim=3, num_buckets=4, slots={"accumulator": 3}),),
    job_function="jobs.small:job",
    job_arguments='{"rate": 0.1}',
    num_samples=4_000,
    input_fingerprint="sha256:1234",
    staleness=0,
    wire_dtype="float32",
    overlap=True,
)
VERSIONS = {"podembed": "0.1.0", "numpy": np.__version__}


def holder(submission: str = "test") -> Holder:
    return Holder.current(submission)


def take(store: Store, submission: str = "test", **options) -> Lease:
    return acquire(store, holder=holder(submission), take_over=True, **options)


def values_of(step: int, table: str, array: str) -> np.ndarray:
    """What a table holds after a step, `[V, rows per bucket, width]`; any two steps differ."""
    num_rows, num_buckets, widths = TABLES[table]
    rng = np.random.default_rng([step, num_rows, [*widths].index(array)])
    return rng.random((num_buckets, -(-num_rows // num_buckets), widths[array]), np.float32)


def write_attempt(
    store: Store, *, step: int, generation: int, parent: str | None, hosts: int = 2, buckets_per_file: int = 1
) -> Manifest:
    """Writes all files of a checkpoint and returns its manifest, not yet committed."""
    attempt = commit_name(step=step, generation=generation)
    tables, placement = [], {}
    for name, (num_rows, num_buckets, widths) in TABLES.items():
        plan = TablePlan(
            attempt=attempt,
            name=name,
            num_rows=num_rows,
            num_buckets=num_buckets,
            widths=widths,
            dtypes={},
            buckets_per_file=min(num_buckets, buckets_per_file),
        )
        arrays = write_table_metadata(store, plan)
        values = {array: values_of(step, name, array) for array in widths}
        count = plan.buckets_per_file
        receipts = [
            write_buckets(
                store, plan, first, [np.concatenate(values[array][first : first + count]) for array in widths]
            )
            for first in range(0, num_buckets, count)
        ]
        tables.append(assemble_table(plan, arrays, [WrittenBuckets.of(plan, receipts)]))
        placement[name] = tuple(bucket % hosts for bucket in range(num_buckets))
    dense = tuple(
        write_dense(store, attempt, key, values)
        for key, values in {"w": np.full((2, 3), step, np.float32), "count": np.int32(step)}.items()
    )
    return Manifest(
        run_id="run-1",
        step=step,
        generation=generation,
        parent=parent,
        created_unix_s=1_700_000_000.5 + step,
        hosts=hosts,
        cursor={"epoch": 0},
        tables=tuple(tables),
        dense=dense,
        placement=placement,
        counters={"samples": 8 * step},
        versions=VERSIONS,
    )


def write_next(store: Store, lease: Lease, step: int, *, buckets_per_file: int = 1) -> Manifest:
    return write_attempt(
        store, step=step, generation=lease.generation, parent=lease.head, buckets_per_file=buckets_per_file
    )


def commit_steps(store: Store, lease: Lease, *steps: int) -> list[Manifest]:
    """Writes and commits one checkpoint a step."""
    manifests = []
    for step in steps:
        manifests.append(write_next(store, lease, step))
        checkpoint.commit(store, manifests[-1], lease)
    return manifests
