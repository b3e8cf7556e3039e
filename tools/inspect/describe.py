"""Writing a table of a commit to a file for other programs: NumPy, Parquet or safetensors, rows in order.

Every format is written front to back from batches of rows, so memory does not depend on the table's size. The file
appears under its name when it is complete and durable, and every byte read was what had been committed. Before that,
and if anything fails, there is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Literal

from podembed.orchestrator.run.reference import CommittedState
from podembed.serving.artifact.row_formats import ExportSource, write_npy, write_parquet, write_safetensors
from podembed.serving.committed_rows import BATCH_BYTES
from podembed.serving.new_files import new_file
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, TableFiles
from podembed.workers.storage.store import place

Format = Literal["npy", "parquet", "safetensors"]
_WRITERS: dict[str, Callable[[BinaryIO, ExportSource], None]] = {
    "npy": write_npy,
    "parquet": write_parquet,
    "safetensors": write_safetensors,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTable:
    """A file that was written."""

    path: str
    table: str
    commit: str
    num_rows: int
    widths: dict[str, int]
    size_bytes: int


def export(
    state: CommittedState,
    table: str,
    *,
    format: Format,
    out: str,
    with_slots: bool = False,
    force: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> ExportedTable:
    """Writes one table.

    Args:
      format: `npy` holds `[num_rows, dim]`, or with slots one record per row with a field per array. `parquet` holds a
        column `id` and one list column per array, `safetensors` one tensor per array.
      out: a local path.
      with_slots: also the optimizer's state. Of a table whose keys come and go, `key`, `last` and `count` are always
        there; `last` is 0 in rows that no key has.
      force: replace a file that is there.
      batch_bytes: memory for rows.

    Raises:
      ConfigurationError: no such table, a file or no folder at `out`, or element types that the format does not have.
      ChunkDamaged: the commit is damaged; nothing was written.
    """
    files = state.table(table)
    source = ExportSource(
        store=state.store,
        table=files,
        arrays=_exported(files, with_slots=with_slots),
        information={
            "table": files.name,
            "run_id": state.manifest.run_id,
            "commit": state.manifest.name,
            "step": str(state.manifest.step),
        },
        batch_bytes=batch_bytes,
        with_slots=with_slots or files.is_dynamic,
    )
    path = place(out)
    with new_file(path, force=force) as file:
        _WRITERS[format](file, source)
    return ExportedTable(
        path=os.path.abspath(path),
        table=files.name,
        commit=state.manifest.name,
        num_rows=files.num_rows,
        widths={array.name: array.width for array in source.arrays},
        size_bytes=os.stat(path).st_size,
    )


def _exported(files: TableFiles, *, with_slots: bool) -> tuple[ArrayFiles, ...]:
    slots = files.slots if with_slots else ()
    own = tuple(array for array in files.arrays if array.name in ("key", "last", "count")) if files.is_dynamic else ()
    return (files.arrays[0], *slots, *own)
