"""Runs whose tables are given as plain arrays in row order, cut into any number of buckets: real files, real manifests,
real leases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from podembed.embedding.hashing import mix64
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease import Lease
from podembed.orchestrator.commit.manifest import FORMAT_VERSION, Manifest, commit_name
from podembed.orchestrator.commit.run_record import TableRecord, open_or_create
from podembed.workers.checkpoint.checkpoint_files import TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.deltas import PartWriter
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.checkpoint.files import (
    assemble_delta,
    assemble_table,
    digest_of,
    write_buckets,
    write_dense,
    write_table_metadata,
)
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import RECORD, VERSIONS, take

# Array name → values in row order, `[num_rows, width]`.
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    num_buckets: int
    arrays: Arrays


def random_table(seed: int, *, num_rows: int, num_buckets: int, widths: Mapping[str, int]) -> SampleTable:
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal((num_rows, width), np.float32) for name, width in widths.items()}
    return SampleTable(num_buckets=num_buckets, arrays=arrays)


def two_tables(seed: int = 0) -> dict[str, SampleTable]:
    return {
        "users": random_table(seed, num_rows=37, num_buckets=4, widths={"rows": 3, "accumulator": 1}),
        "items": random_table(seed + 1, num_rows=5, num_buckets=8, widths={"rows": 2, "m": 2, "v": 2}),
    }


def keyed_table(values: Mapping[int, float], *, num_buckets: int, seed: int, last: int = 7) -> SampleTable:
    """A table of 64 rows whose keys come and go. Which row of its bucket a key has is drawn.

    Args:
      values: key to what stands in its row.
      last: of all keys.
    """
    places = np.random.default_rng(seed).permutation(64 // num_buckets)
    taken = [0] * num_buckets
    rows, keys = np.zeros((64, 2), np.float32), np.zeros((64, 1), np.int64)
    numbers = np.zeros((64, 1), np.int32)
    for key, value in values.items():
        bucket = int(mix64(np.array([key], np.int64))[0]) % num_buckets
        at = bucket + int(places[taken[bucket]]) * num_buckets
        taken[bucket] += 1
        rows[at], keys[at], numbers[at] = value, key, last
    arrays = {"rows": rows, "key": keys, "last": numbers, "count": numbers.view(np.uint32)}
    return SampleTable(num_buckets=num_buckets, arrays=arrays)


def create_run(path: Path, tables: Mapping[str, SampleTable], *, run_id: str = "run-1") -> tuple[Store, Lease]:
    """A run's record, and the lease of its first driver."""
    store = Store(path)
    records = tuple(
        TableRecord(
            name=name,
            num_rows=len(table.arrays["rows"]),
            dim=table.arrays["rows"].shape[1],
            num_buckets=table.num_buckets,
            slots={array: values.shape[1] for array, values in table.arrays.items() if array != "rows"},
        )
        for name, table in tables.items()
    )
    open_or_create(store, dataclasses.replace(RECORD, run_id=run_id, tables=records))
    return store, take(store)


def commit_tables(
    store: Store,
    lease: Lease,
    step: int,
    tables: Mapping[str, SampleTable],
    *,
    dense: Mapping[str, np.ndarray] | None = None,
    run_id: str = "run-1",
    publish: bool = True,
) -> Manifest:
    """Writes a checkpoint and, unless told not to, commits it."""
    attempt = commit_name(step=step, generation=lease.generation)
    dense = {"w": np.full((2, 3), step, np.float32), "count": np.array(step, np.int32)} if dense is None else dense
    manifest = Manifest(
        run_id=run_id,
        step=step,
        generation=lease.generation,
        parent=lease.head,
        created_unix_s=1_700_000_000.5 + step,
        hosts=1,
        cursor={"step": step},
        tables=tuple(_write_table(store, attempt, name, table) for name, table in tables.items()),
        dense=tuple(write_dense(store, attempt, key, values) for key, values in dense.items()),
        placement={name: (0,) * table.num_buckets for name, table in tables.items()},
        counters={"samples": 8 * step},
        versions=VERSIONS,
    )
    if publish:
        checkpoint.commit(store, manifest, lease)
    return manifest


def commit_changes(
    store: Store,
    lease: Lease,
    parent: Manifest,
    step: int,
    changes: Mapping[str, tuple[Sequence[int], Arrays]],
) -> Manifest:
    """Commits a delta to `parent`: table → the rows that changed, and all its arrays as they are now."""
    attempt = commit_name(step=step, generation=lease.generation)
    tables = []
    for table in parent.tables:
        ids, arrays = changes.get(table.name, ((), None))
        plan = _plan(attempt, table.name, table.num_buckets, arrays) if arrays else None
        writer = PartWriter(store, f"data/{attempt}/tables/{table.name}", [array.name for array in table.arrays])
        digests = []
        for bucket in range(table.num_buckets):
            mine = np.array(sorted(row for row in ids if row % table.num_buckets == bucket), np.int64)
            digest = table.digests[bucket]
            if plan and arrays:
                digest = digest_of(plan, bucket, [values[bucket :: table.num_buckets] for values in arrays.values()])
            if len(mine) and arrays:
                writer.add(bucket, mine, [values[mine] for values in arrays.values()])
            digests.append(digest)
        firsts = np.arange(table.num_buckets, dtype="<i4").tobytes()
        written = WrittenBuckets(folder="", firsts=firsts, digests=Digests.of(digests))
        tables.append(assemble_delta(table, attempt, writer.finish(), [written]))
    manifest = dataclasses.replace(
        parent,
        format_version=FORMAT_VERSION,
        step=step,
        generation=lease.generation,
        parent=parent.name,
        tables=tuple(tables),
    )
    checkpoint.commit(store, manifest, lease)
    return manifest


def run_with(
    path: Path, tables: Mapping[str, SampleTable], *steps: int, run_id: str = "run-1"
) -> tuple[Store, list[Manifest]]:
    """A run that committed the same tables at each of these steps, and whose driver has ended."""
    store, lease = create_run(path, tables, run_id=run_id)
    manifests = [commit_tables(store, lease, step, tables, run_id=run_id) for step in steps]
    lease.release()
    return store, manifests


def flip_byte(path: Path | str, at: int = 5) -> None:
    """Changes one bit of a file behind everybody's back."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def _write_table(store: Store, attempt: str, name: str, table: SampleTable) -> TableFiles:
    plan = _plan(attempt, name, table.num_buckets, table.arrays)
    described = write_table_metadata(store, plan)
    receipts = []
    for bucket in range(table.num_buckets):
        pieces = []
        for values in table.arrays.values():
            # Padding may hold anything: something that no test may ever see.
            piece = np.full((plan.rows_per_bucket, values.shape[1]), 99, values.dtype)
            mine = values[bucket :: table.num_buckets]
            piece[: len(mine)] = mine
            pieces.append(piece)
        receipts.append(write_buckets(store, plan, bucket, pieces))
    return assemble_table(plan, described, [WrittenBuckets.of(plan, receipts)])


def _plan(attempt: str, name: str, num_buckets: int, arrays: Arrays) -> TablePlan:
    return TablePlan(
        attempt=attempt,
        name=name,
        num_rows=len(arrays["rows"]),
        num_buckets=num_buckets,
        widths={array: values.shape[1] for array, values in arrays.items()},
        dtypes={array: values.dtype for array, values in arrays.items()},
    )
