"""The three file formats of `export`, each written front to back from batches of rows.

Sources: the NEP 1 `.npy` format; Parquet through pyarrow; the safetensors format, which is simple enough to be written
here. That is a length (eight bytes, little-endian), a JSON header, and the tensors without gaps. The header has type,
shape and byte range of each tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.committed_rows import row_batches
from podembed.workers.checkpoint.checkpoint_files import ArrayFiles, TableFiles
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.store import Store

ID_COLUMN = "id"
_SAFETENSORS = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_SAFETENSORS |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """What is written.

    Attributes:
      arrays: arrays of the table, rows first.
      information: texts that the formats that can keep next to the values.
      batch_bytes: memory for rows of all arrays together.
      with_slots: slots were requested, whether the table has any or not.
    """

    store: Store
    table: TableFiles
    arrays: tuple[ArrayFiles, ...]
    information: Mapping[str, str]
    batch_bytes: int
    with_slots: bool = False

    def batches(self, array: ArrayFiles) -> Iterator[np.ndarray]:
        """All rows of one array, in batches as large as memory allows."""
        return row_batches(self.store, self.table, array, batch_bytes=self.batch_bytes)

    def joint_batches(self) -> Iterator[list[np.ndarray]]:
        """All rows of all arrays side by side: each batch has the same rows of each, in the order of `arrays`."""
        widest = max(array.width * DTYPES[array.dtype].itemsize for array in self.arrays)
        # The same number of positions per batch for every array, whatever its width.
        positions = max(1, self.batch_bytes // (len(self.arrays) * widest * self.table.num_buckets))
        iterators = [
            row_batches(
                self.store,
                self.table,
                array,
                batch_bytes=positions * array.width * DTYPES[array.dtype].itemsize * self.table.num_buckets,
            )
            for array in self.arrays
        ]
        for batch in zip(*iterators, strict=True):
            yield list(batch)


def write_npy(file: BinaryIO, source: ExportSource) -> None:
    """`[num_rows, dim]`; with slots, `[num_rows]` records with a field `[width]` for each array, also of a table whose
    optimizer has none.

    Raises:
      ConfigurationError: an element type that NumPy alone cannot read.
    """
    _refuse_bfloat16(source, "npy")
    if not source.with_slots:
        array = source.arrays[0]
        _write_npy_header(file, DTYPES[array.dtype].newbyteorder("<"), (source.table.num_rows, array.width))
        for batch in source.batches(array):
            file.write(_bytes_of(batch))
        return
    fields = [(array.name, DTYPES[array.dtype].newbyteorder("<"), (array.width,)) for array in source.arrays]
    dtype = np.dtype(fields)
    _write_npy_header(file, dtype, (source.table.num_rows,))
    for batch in source.joint_batches():
        records = np.empty(len(batch[0]), dtype)
        for array, values in zip(source.arrays, batch, strict=True):
            records[array.name] = values
        file.write(_bytes_of(records))


def write_parquet(file: BinaryIO, source: ExportSource) -> None:
    """A column `id` with the row number, and for each array a column of lists of fixed length; one row group a batch.

    Raises:
      ConfigurationError: a slot is called `id`, or an element type that Parquet does not have.
    """
    _refuse_bfloat16(source, "parquet")
    if any(array.name == ID_COLUMN for array in source.arrays):
        raise ConfigurationError(
            f"Found a slot '{ID_COLUMN}' in table '{source.table.name}'. Expected another name, since the column of "
            "row numbers has it. Use --format safetensors."
        )
    lists = [
        pa.field(array.name, pa.list_(pa.from_numpy_dtype(DTYPES[array.dtype]), array.width), nullable=False)
        for array in source.arrays
    ]
    schema = pa.schema([pa.field(ID_COLUMN, pa.int64(), nullable=False), *lists], metadata=dict(source.information))
    # Trained weights hardly compress, and a dictionary of them would only cost memory.
    with ExitStack() as stack:
        writer = stack.enter_context(pq.ParquetWriter(file, schema, use_dictionary=False, compression="none"))
        first_row = 0
        for batch in source.joint_batches():
            num_rows = len(batch[0])
            columns: list[pa.Array] = [pa.array(np.arange(first_row, first_row + num_rows, dtype=np.int64))]
            for field, values in zip(lists, batch, strict=True):
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=field.type))
            writer.write_batch(pa.record_batch(columns, schema=schema), row_group_size=num_rows)
            first_row += num_rows


def write_safetensors(file: BinaryIO, source: ExportSource) -> None:
    """One tensor `[num_rows, width]` for each array, named as the array, and the information as text."""
    tensors = {one.name: (DTYPES[one.dtype], (source.table.num_rows, one.width)) for one in source.arrays}
    write_safetensors_header(file, tensors, __metadata__=dict(source.information))
    for array in source.arrays:
        for batch in source.batches(array):
            file.write(_bytes_of(batch))


def write_safetensors_header(
    file: BinaryIO, tensors: Mapping[str, tuple[np.dtype, Sequence[int]]], **header: object
) -> None:
    """What comes before the values of the tensors, in this order, each with its type and shape."""
    offset = 0
    for name, (dtype, shape) in tensors.items():
        span = [offset, offset + math.prod(shape) * dtype.itemsize]
        header[name] = {"dtype": _SAFETENSORS[dtype.name], "shape": list(shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces at the end keep the tensors aligned, so that readers can map them.
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)


def _write_npy_header(file: BinaryIO, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)


def _bytes_of(values: np.ndarray) -> memoryview:
    """The bytes of the values in C order, little-endian."""
    little = values if values.dtype.fields else np.asarray(values, values.dtype.newbyteorder("<"))
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _refuse_bfloat16(source: ExportSource, format: str) -> None:
    for array in source.arrays:
        if array.dtype == "bfloat16":
            raise ConfigurationError(
                f"Found bfloat16 in array '{array.name}' of table '{source.table.name}'. Expected an element type that "
                f"{format} has. Use --format safetensors."
            )
