"""Writing tables of a commit in the layout of `jax-tpu-embedding`, with the slots of their optimizers.

Rows are read in order, a batch at a time, and each batch goes to its places on all cores. So memory does not depend on
the size of a table. The folder appears when it is complete and every byte that was read was what had been committed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.run.reference import CommittedState
from podembed.serving.committed_rows import BATCH_BYTES, row_batches
from podembed.serving.new_files import new_folder
from podembed.tools.sparsecore.folder import (
    RECORD_FILE,
    WIDENED,
    ExportedArray,
    ExportRecord,
    array_file,
    read_specification,
)
from podembed.tools.sparsecore.layout import PlacedTable, Stack, plan_stacks
from podembed.tools.sparsecore.specification import SPECIFICATION_FILE, to_bytes
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, TableFiles
from podembed.workers.storage.records import encode
from podembed.workers.storage.store import place

# A row that is no row gets no gradient. Its weight must stay a number all the same where an optimizer divides by the
# root of this slot.
_PADDING = {"accumulator": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCoreExport:
    """What was written.

    Attributes:
      arrays: names of the arrays of each stack, in the order of `stacks`.
    """

    folder: str
    commit: str
    stacks: tuple[Stack, ...]
    arrays: tuple[tuple[str, ...], ...]
    size_bytes: int


def stacks_for(
    state: CommittedState,
    *,
    spec: str | None = None,
    table: str | None = None,
    chips: int | None = None,
    cores: int | None = None,
    together: Sequence[Sequence[str]] = (),
) -> tuple[Stack, ...]:
    """The layout that somebody asks for: that of a file, or the one for so many chips and cores.

    Args:
      spec: file with an `EmbeddingSpecProto`; the others are left out then.
      table: the only one; None for all.
      together: as `plan_stacks`.

    Raises:
      ConfigurationError: numbers are missing or there are too many, or there is no such table.
    """
    if spec is not None and not (chips or cores or together or table):
        return read_specification(spec)
    if spec is None and chips is not None and cores is not None:
        chosen = state.manifest.tables if table is None else (state.table(table),)
        sizes = {one.name: (one.num_rows, one.dim) for one in chosen}
        return plan_stacks(sizes, chips=chips, cores=cores, together=together)
    raise ConfigurationError(
        "Found --layout sparsecore without --chips and --cores, or with --spec beside other flags. Expected the number "
        "of chips and of SparseCores a chip, or a model's specification alone. Pass --chips 16 --cores 2, or --spec "
        "FILE."
    )


def export_sparsecore(
    state: CommittedState,
    stacks: Sequence[Stack],
    *,
    out: str,
    with_slots: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> SparseCoreExport:
    """Writes the tables of some stacks.

    Args:
      out: a local path that is free.
      with_slots: also the state of the optimizers.
      batch_bytes: memory for rows.

    Raises:
      ConfigurationError: the commit has no such table, or another of this name; or slots or element types that the
        package does not have. Or nothing can be written there.
      ChunkDamaged: the commit is damaged; nothing was written.
    """
    if "://" in out:
        raise ConfigurationError(f"Found the URL {out} for --out. Expected a local path. Write here and copy.")
    held = [[_table(state, table) for table in stack.tables] for stack in stacks]
    arrays = tuple(_arrays(stack, tables, with_slots) for stack, tables in zip(stacks, held, strict=True))
    size_bytes = 0
    with new_folder(out) as folder:
        for stack, tables, names in zip(stacks, held, arrays, strict=True):
            for at, array in enumerate(names):
                path = os.path.join(folder, array_file(stack, array))
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    writer = _StackWriter(file, stack, padding=_PADDING.get(array, 0.0) if at else 0.0)
                    for placed, files in zip(stack.tables, tables, strict=True):
                        writer.write(state, placed, files, files.arrays[at], batch_bytes=batch_bytes)
                    size_bytes += _finish(file)
        record = ExportRecord(
            run_id=state.manifest.run_id,
            commit=state.manifest.name,
            step=state.manifest.step,
            tables={
                files.name: tuple(ExportedArray(name=one.name, dtype=one.dtype) for one in files.arrays[: len(names)])
                for tables, names in zip(held, arrays, strict=True)
                for files in tables
            },
        )
        for name, data in ((SPECIFICATION_FILE, to_bytes(stacks)), (RECORD_FILE, encode(record))):
            with open(os.path.join(folder, name), "xb") as file:
                file.write(data)
                _finish(file)
    return SparseCoreExport(
        folder=os.path.abspath(place(out)),
        commit=state.manifest.name,
        stacks=tuple(stacks),
        arrays=arrays,
        size_bytes=size_bytes,
    )


class _StackWriter:
    """One array of a stack as an `.npy` file, whose parts are written in any order."""

    def __init__(self, file: BinaryIO, stack: Stack, *, padding: float) -> None:
        self._file, self._stack, self._padding = file, stack, np.float32(padding)
        described = {"descr": "<f4", "fortran_order": False, "shape": (stack.num_rows, stack.dim)}
        np.lib.format.write_array_header_1_0(file, described)
        self._start = file.tell()
        # Positions between tables, if a specification leaves some, are zero.
        file.truncate(self._start + stack.num_rows * stack.dim * 4)

    def write(
        self, state: CommittedState, placed: PlacedTable, files: TableFiles, array: ArrayFiles, *, batch_bytes: int
    ) -> None:
        """Writes all rows of one table, and its padding."""
        first_row = 0
        for batch in row_batches(state.store, files, array, batch_bytes=batch_bytes):
            for piece in self._stack.pieces(placed, first_row, len(batch)):
                values = np.full((piece.count, self._stack.dim), self._padding, "<f4")
                values[:, : array.width] = batch[piece.rows]
                self._put(piece.core, piece.position, values)
            first_row += len(batch)
        for piece in self._stack.padding(placed):
            self._put(piece.core, piece.position, np.full((piece.count, self._stack.dim), self._padding, "<f4"))

    def _put(self, core: int, position: int, values: np.ndarray) -> None:
        row = core * self._stack.rows_per_core + position
        self._file.seek(self._start + row * self._stack.dim * 4)
        self._file.write(values.data)


def _finish(file: BinaryIO) -> int:
    """Makes a file durable. Returns its size in bytes."""
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


def _table(state: CommittedState, placed: PlacedTable) -> TableFiles:
    files = state.table(placed.name)
    if (files.num_rows, files.dim) != (placed.num_rows, placed.dim):
        raise ConfigurationError(
            f"Found table '{placed.name}' of [{placed.num_rows}, {placed.dim}] in the specification. Expected "
            f"[{files.num_rows}, {files.dim}], as in {state.location}. Declare it so in the model."
        )
    return files


def _arrays(stack: Stack, tables: Sequence[TableFiles], with_slots: bool) -> tuple[str, ...]:
    """Names of the arrays that a stack gets, the same of all its tables."""
    for files in tables:
        taken = files.arrays if with_slots else files.arrays[:1]
        for array in taken:
            if array.width != files.dim:
                raise ConfigurationError(
                    f"Found slot '{array.name}' of width {array.width} in table '{files.name}' of dimension "
                    f"{files.dim}. Expected slots as wide as rows, since jax-tpu-embedding has no others. Leave "
                    "--slots out."
                )
            if array.dtype not in WIDENED:
                raise ConfigurationError(
                    f"Found elements of {array.dtype} in '{array.name}' of table '{files.name}'. Expected one of "
                    f"{', '.join(WIDENED)}, since jax-tpu-embedding trains float32. Leave the table out."
                )
    names = {tuple(array.name for array in (files.arrays if with_slots else files.arrays[:1])) for files in tables}
    if len(names) > 1:
        told = "; ".join(f"{files.name}: {', '.join(one.name for one in files.slots) or 'none'}" for files in tables)
        raise ConfigurationError(
            f"Found tables with different slots in stack '{stack.name}' ({told}). Expected one optimizer a stack. "
            "Stack tables of one optimizer, or leave --slots out."
        )
    return names.pop()
