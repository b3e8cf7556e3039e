"""Making a run of tables that `jax-tpu-embedding` trained: one commit, from which other runs begin.

The folder is one that an export wrote, with the same arrays or with newer ones, or one that a program of the package
wrote. The commit has tables with their slots and no dense model, so it is for a warm start. It cannot be resumed.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import podembed
from podembed.embedding.buckets import bucket_layout, buckets_together
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.claiming import acquire
from podembed.orchestrator.commit.holder import Holder
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.commit.run_record import RunRecord, TableRecord, open_or_create
from podembed.orchestrator.commit.writable_store import open_for_writing
from podembed.orchestrator.run.reference import is_run
from podembed.tools.sparsecore.folder import stored_arrays
from podembed.tools.sparsecore.layout import PlacedTable, Stack
from podembed.workers.checkpoint.checkpoint_files import MIN_FILE_BYTES, TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.files import assemble_table, write_buckets, write_table_metadata
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One table of the folder.

    Attributes:
      arrays: name → float32 `[rows of the stack, columns]`, rows first; read as it is needed.
      dtypes: name → element type in the run.
    """

    placed: PlacedTable
    stack: Stack
    arrays: Mapping[str, np.ndarray]
    dtypes: Mapping[str, np.dtype]

    def plan(self, attempt: str) -> TablePlan:
        """The arrays of the commit. Files have about a mebibyte."""
        dim = self.placed.dim
        row_bytes = sum(dtype.itemsize for dtype in self.dtypes.values()) * dim
        layout = bucket_layout(num_rows=self.placed.num_rows, row_bytes=row_bytes)
        most = max(1, MIN_FILE_BYTES // (layout.rows_per_bucket * row_bytes))
        return TablePlan(
            attempt=attempt,
            name=self.placed.name,
            num_rows=self.placed.num_rows,
            num_buckets=layout.num_buckets,
            widths=dict.fromkeys(self.arrays, dim),
            dtypes=self.dtypes,
            buckets_per_file=buckets_together(np.zeros(layout.num_buckets, np.int32), most=most),
        )

    def bucket(self, array: str, ids: np.ndarray) -> np.ndarray:
        """Rows of given numbers, `[len(ids), dim]` in the element type of the run."""
        cores, placed = self.stack.num_cores, self.placed
        core = (ids % cores + placed.rotation) % cores
        places = core * self.stack.rows_per_core + placed.row_offset + ids // cores
        return self.arrays[array][places, : placed.dim].astype(self.dtypes[array], copy=False)


def import_sparsecore(
    folder: str, url: str, *, single_writer: bool = False, unix_s: Callable[[], float] = time.time
) -> Manifest:
    """Makes a run with one commit of the tables in a folder.

    Args:
      folder: folder as `tools.sparsecore.folder` describes it.
      url: of the run, where there is none yet.
      single_writer: accept a storage that cannot create files exclusively.
      unix_s: the wall clock, for records.

    Raises:
      ConfigurationError: the folder lacks a file, an array has another shape or type than the layout says, or there is
        a run.
      StorageError: the storage failed; there is no commit.
    """
    record, arrays = stored_arrays(folder)
    sources = [
        _Source(
            placed=placed,
            stack=stack,
            arrays=of_stack,
            dtypes={name: record.dtype(placed.name, name) for name in of_stack},
        )
        for stack, of_stack in arrays
        for placed in stack.tables
    ]
    store = open_for_writing(url, single_writer=single_writer)
    if is_run(store):
        raise ConfigurationError(
            f"Found a run in {store.location}. Expected none, since an import makes one. Choose another --out."
        )
    lease = acquire(store, holder=Holder.current(f"import-{uuid.uuid4().hex[:12]}"), unix_s=unix_s)
    try:
        attempt = commit_name(step=record.step, generation=lease.generation)
        plans = [source.plan(attempt) for source in sources]
        tables = [
            _write(store, source, plan, on_file=lease.heartbeat) for source, plan in zip(sources, plans, strict=True)
        ]
        run = open_or_create(store, _run_record(tables, unix_s()))
        manifest = Manifest(
            run_id=run.run_id,
            step=record.step,
            generation=lease.generation,
            parent=None,
            created_unix_s=unix_s(),
            hosts=1,
            cursor={"step": record.step},
            tables=tuple(tables),
            dense=(),
            placement={table.name: (0,) * table.num_buckets for table in tables},
            counters={},
            versions={"podembed": podembed.__version__},
        )
        checkpoint.commit(store, manifest, lease)
        return manifest
    finally:
        lease.release()


def _write(store: Store, source: _Source, plan: TablePlan, *, on_file: Callable[[], object]) -> TableFiles:
    described = write_table_metadata(store, plan)
    receipts = []
    for first in range(0, plan.num_buckets, plan.buckets_per_file):
        ids = [plan.layout.ids_of(bucket) for bucket in range(first, first + plan.buckets_per_file)]
        values = [_file_values(source, plan, array, ids) for array in plan.widths]
        receipts.append(write_buckets(store, plan, first, values))
        # Advisory, as in `compact`: a storage that is really away is noticed by the next write.
        with contextlib.suppress(StorageError, OSError):
            on_file()
    return assemble_table(plan, described, [WrittenBuckets.of(plan, receipts)])


def _file_values(source: _Source, plan: TablePlan, array: str, ids: Sequence[np.ndarray]) -> np.ndarray:
    """All buckets of one file, with zeros as padding."""
    length = plan.rows_per_bucket
    values = np.zeros((len(ids) * length, plan.widths[array]), plan.dtypes[array])
    for at, numbers in enumerate(ids):
        values[at * length : at * length + len(numbers)] = source.bucket(array, numbers)
    return values


def _run_record(tables: Sequence[TableFiles], created_unix_s: float) -> RunRecord:
    """The record of a run without a job and without data."""
    return RunRecord(
        run_id=uuid.uuid4().hex,
        created_unix_s=created_unix_s,
        seed=0,
        num_lanes=1,
        batch_size=1,
        tables=tuple(
            TableRecord(
                name=table.name,
                num_rows=table.num_rows,
                dim=table.dim,
                num_buckets=table.num_buckets,
                slots={slot.name: slot.width for slot in table.slots},
            )
            for table in tables
        ),
        job_function="",
        job_arguments="{}",
        num_samples=0,
        input_fingerprint="",
        staleness=0,
        wire_dtype="float32",
        overlap=True,
    )
