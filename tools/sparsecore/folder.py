"""The folder that an export fills and an import reads: names of files, and what the package's message does not say.

* `embedding_spec.pb`: which table lies where, an `EmbeddingSpecProto`.
* `export.json`: run and commit, slots in their order, element types. It is sealed JSON.
* `<stack>/table.npy`: float32 `[rows of the stack, columns]`, core after core.
* `<stack>/slots/<slot>.npy`: the same for each slot of the optimizer.

A folder without `export.json` is fine for an import. So a program of jax-tpu-embedding can write one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.sparsecore.layout import Stack
from podembed.tools.sparsecore.specification import (
    MAX_SPECIFICATION_BYTES,
    SPECIFICATION_FILE,
    from_bytes,
)
from podembed.workers.checkpoint.arrays import safe_segment
from podembed.workers.checkpoint.checkpoint_files import ROWS
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.records import decode

RECORD_FILE = "export.json"
SLOTS_FOLDER = "slots"
FORMAT_VERSION = 1
MAX_RECORD_BYTES = 16 << 20
# The package trains float32 alone, and float32 holds each number of these.
WIDENED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedArray:
    """An array of a table in its commit: `rows`, or a slot, and its element type there."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """Where an export comes from.

    Attributes:
      tables: name → arrays, rows first; without slots the rows alone.
    """

    format_version: int = FORMAT_VERSION
    run_id: str
    commit: str
    step: int
    tables: Mapping[str, tuple[ExportedArray, ...]]

    def dtype(self, table: str, array: str) -> np.dtype:
        """The element type of an array in its commit; float32 if nothing is said of it."""
        named = {one.name: one.dtype for one in self.tables.get(table, ())}
        return DTYPES[named.get(array, "float32")]


_NOTHING_SAID = ExportRecord(run_id="", commit="", step=0, tables={})


def array_file(stack: Stack, array: str) -> str:
    """The file of the rows or of a slot, below the folder."""
    folder = safe_segment(stack.name)
    return f"{folder}/table.npy" if array == ROWS else f"{folder}/{SLOTS_FOLDER}/{safe_segment(array)}.npy"


def read_specification(path: str) -> tuple[Stack, ...]:
    """The stacks of a file.

    Raises:
      ConfigurationError: it cannot be read, or is no specification.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SPECIFICATION_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"Found no way to read {path} ({error.strerror}). Expected the layout that `podembed export --layout "
            "sparsecore` or create_proto_from_feature_specs writes. Put it there."
        ) from error
    if len(data) > MAX_SPECIFICATION_BYTES:
        raise ConfigurationError(
            f"Found more than {MAX_SPECIFICATION_BYTES} bytes in {path}. Expected an EmbeddingSpecProto. Choose "
            "another file."
        )
    return from_bytes(data, path)


def stored_arrays(folder: str) -> tuple[ExportRecord, list[tuple[Stack, dict[str, np.ndarray]]]]:
    """What a folder holds: its record, and each stack with its arrays, `rows` first, then slots.

    Slots come in the order of the record. Others that the folder has follow by name. Values are read when they are
    used.

    Raises:
      ConfigurationError: a file is missing, or is no array of its stack's shape.
      DocumentRefused: the record is damaged.
    """
    if not os.path.isdir(folder):
        raise ConfigurationError(
            f"Found no folder {folder}. Expected one that `podembed export --layout sparsecore` or a program wrote. "
            "Pass its path."
        )
    stacks, record = read_specification(os.path.join(folder, SPECIFICATION_FILE)), _read_record(folder)
    found = []
    for stack in stacks:
        names = [array.name for array in record.tables.get(stack.tables[0].name, ())] or [ROWS]
        slots = os.path.dirname(os.path.join(folder, array_file(stack, "slot")))
        others = sorted(os.listdir(slots)) if os.path.isdir(slots) else []
        names += [name[:-4] for name in others if name.endswith(".npy") and name[:-4] not in map(safe_segment, names)]
        found.append((stack, {name: _open_array(folder, stack, name) for name in names}))
    return record, found


def _open_array(folder: str, stack: Stack, array: str) -> np.ndarray:
    path = os.path.join(folder, array_file(stack, array))
    shape = (stack.num_rows, stack.dim)
    expected = f"float32 [{stack.num_rows}, {stack.dim}], as {SPECIFICATION_FILE} says. Save it with numpy.save"
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"Found no array in {path} ({reason}). Expected {expected}.") from error
    if not isinstance(values, np.ndarray):
        raise ConfigurationError(f"Found an archive in {path}. Expected {expected}.")
    if values.shape != shape or values.dtype != np.float32:
        raise ConfigurationError(f"Found {values.dtype} {[*values.shape]} in {path}. Expected {expected}.")
    return values


def _read_record(folder: str) -> ExportRecord:
    path = os.path.join(folder, RECORD_FILE)
    if not os.path.lexists(path):
        return _NOTHING_SAID
    with open(path, "rb") as file:
        record = decode(ExportRecord, path, file.read(MAX_RECORD_BYTES + 1), max_bytes=MAX_RECORD_BYTES)
    types = {array.dtype for arrays in record.tables.values() for array in arrays}
    if record.format_version != FORMAT_VERSION or not types <= set(WIDENED) or record.step < 0:
        raise ConfigurationError(
            f"Found format {record.format_version} with elements of {', '.join(sorted(types))} in {path}. Expected "
            f"{FORMAT_VERSION} with {', '.join(WIDENED)}. Read it with the version of podembed that wrote it."
        )
    return record
