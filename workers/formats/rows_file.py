"""First values of a table from a file: `.npy`, or safetensors with one tensor or one called `rows`.

They are `[num_rows, dim]` of floating point, row r of the file being row r of the table.

A host reads a table once, in order, and only blocks with rows that it holds. Nothing is unpickled and no file is loaded
whole. Once a run has a commit, its hosts read that, and the file is not needed any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import ml_dtypes
import numpy as np

from podembed.workers.data.files import open_ranges
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats.npy import NpyHeader, read_header, read_rows
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly

_SAFETENSORS = ".safetensors"
_MAX_HEADER_BYTES = 1 << 20
_DTYPES: dict[Any, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class RowsOfFile:
    """An initializer, see `embedding.initializers`.

    Attributes:
      path: local, or a URL that fsspec opens.
      table: its name, for messages.
      reads_in_order: rows are cheap where they are taken one after another.
    """

    path: str
    table: str
    reads_in_order: bool = True

    def check(self, *, num_rows: int, dim: int) -> None:
        """Reads what the file says of itself.

        Raises:
          InputError: it is not there, or holds something else than so many rows.
        """
        with open_ranges(self.path) as file:
            header = self._header(file)
        if (header.num_rows, header.num_columns) != (num_rows, dim) or not _is_floating(header.dtype):
            raise InputError(
                f"Found initial_rows={self.path!r} of table {self.table!r} with shape "
                f"{[header.num_rows, header.num_columns]} of {header.dtype}. Expected {[num_rows, dim]} of floating "
                "point. Write the file with one row for each row of the table, or correct vocabulary_size and dim."
            )

    def __call__(self, rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        """float32 `[n, dim]`, for rising `rows`.

        Raises:
          InputError: the file cannot be read, or a value is not finite.
        """
        first, stop = int(rows[0]), int(rows[-1]) + 1
        with open_ranges(self.path) as file:
            read = read_rows(self._header(file), file, first, stop - first)
        # What float32 cannot hold is found below.
        with np.errstate(over="ignore"):
            values = read[rows - first].astype(np.float32)
        wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(wrong):
            raise InputError(
                f"Found a value that is not finite in row {int(rows[wrong[0]])} of initial_rows={self.path!r} of table "
                f"{self.table!r}. Expected numbers that float32 holds, since all later ones would be spoilt. Mend the "
                "file."
            )
        return values

    def _header(self, file: IO[bytes]) -> NpyHeader:
        if self.path.endswith(_SAFETENSORS):
            return _safetensors_header(self.path, file)
        return read_header("dense", self.path, file)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _safetensors_header(path: str, file: IO[bytes]) -> NpyHeader:
    """The header of a file's one tensor. A file has eight bytes with the length of a JSON text, the text, and the
    data.
    """
    size_bytes = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise _no_safetensors(path, f"a header of {length:,} bytes")
    try:
        members = parse_strictly(path, file.read(length))
    except DocumentRefused as error:
        raise _no_safetensors(path, error.found) from error
    members = members if isinstance(members, dict) else {}
    tensors = {name: one for name, one in members.items() if name != "__metadata__"}
    # `podembed export` writes a table with its slots.
    tensor = tensors.get("rows") if len(tensors) != 1 else next(iter(tensors.values()))
    if not isinstance(tensor, dict):
        raise _no_safetensors(path, f"the tensors {sorted(tensors)[:8]}")
    dtype = _DTYPES.get(tensor.get("dtype"))
    shape: Any = tensor.get("shape")
    data: Any = tensor.get("data_offsets")
    if dtype is None or not _are_counts(shape) or not _are_counts(data):
        raise _no_safetensors(path, f"a tensor of dtype {tensor.get('dtype')} and shape {shape}")
    header = NpyHeader(path=path, dtype=dtype, num_rows=shape[0], num_columns=shape[1], start=8 + length + data[0])
    expected = header.num_rows * header.row_bytes
    if data[1] - data[0] != expected or size_bytes < header.start + expected:
        raise _no_safetensors(path, f"{size_bytes:,} bytes for a tensor of shape {shape}")
    return header


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 2 and all(type(one) is int and one >= 0 for one in values)


def _no_safetensors(path: str, found: str) -> InputError:
    return InputError(
        f"Found {path} with {found}. Expected one tensor [rows, columns] of floating point in the form of "
        "safetensors, or one with the name 'rows'. Write it again, for example with "
        "safetensors.numpy.save_file({'rows': array}, path)."
    )
