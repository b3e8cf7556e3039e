"""The `.npy` form of torchrec and MLPerf as a source: labels, dense numbers and sparse ids in three arrays side by
side.

Blocks are read by their range of bytes and never unpickled; no file is loaded whole. Ranges are read, not mapped: a
file that shrinks under a map kills the process without a word, and a store cannot be mapped.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from podembed.workers.columns.decode import Decoder, RawRows, check_schema, id_kinds
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.config import NpyData
from podembed.workers.data.files import file_version, one_line, open_ranges
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import FileLayout, InputFile, RowGroup
from podembed.workers.formats.source import Source

_ENDING = "labels.npy"
# What comes before the text of a header, and the longest text that numpy reads from a file of unknown origin.
_MAX_HEADER_BYTES = 12 + 10_000
# Every column gets a name. An array without rows may claim any number of them in a few bytes.
_MAX_COLUMNS = 1 << 16
# Kind of array to the column names of its last axis and the kinds of dtype that it may have.
_KINDS = {"labels": ("label", "biuf"), "dense": ("int_{}", "biuf"), "sparse": ("cat_{}", "iu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyHeader:
    """The header of one array `[num_rows, num_columns]`, row after row from byte `start` of its file."""

    path: str
    dtype: np.dtype[Any]
    num_rows: int
    num_columns: int
    start: int

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize


def npy_version(path: str) -> tuple[int, str]:
    """Size of the three files together, and their versions.

    Raises:
      FileNotFoundError, InputError: one is missing, or the path is no label file.
    """
    found = [file_version(sibling) for sibling in _siblings(path).values()]
    return sum(size for size, _ in found), " ".join(version for _, version in found)


def npy_layout(path: str, data: NpyData) -> FileLayout:
    """Reads the three headers and checks the columns.

    Raises:
      InputError: a file is missing, damaged, of another dtype or number of rows, or a declared column is not there.
    """
    opened = _open_all(path)
    try:
        headers = [header for header, _ in opened.values()]
        check_schema(_schema(headers), data, path=path)
        num_rows = headers[0].num_rows
    finally:
        for _, file in opened.values():
            file.close()
    full, rest = divmod(num_rows, data.rows_per_block)
    return FileLayout(row_group_rows=(data.rows_per_block,) * full + ((rest,) if rest else ()))


class OpenedNpy:
    """The three open files of one part; one thread at a time."""

    def __init__(self, file: InputFile, data: NpyData) -> None:
        """Raises:
        InputError: as `npy_layout`.
        """
        self._opened = _open_all(file.path)
        self._columns = set(data.columns)
        self._rows_per_block = data.rows_per_block

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows:
        """The declared columns of one block.

        Raises:
          InputError: a file is shorter than its header says.
        """
        first = group.group_in_file * self._rows_per_block
        columns: dict[str, pa.Array] = {}
        for kind, (header, file) in self._opened.items():
            names = _names(kind, header)
            if self._columns.isdisjoint(names):
                continue
            rows = read_rows(header, file, first, group.num_rows)
            for at, name in enumerate(names):
                if name in self._columns:
                    columns[name] = pa.array(np.ascontiguousarray(rows[:, at]))
        origin = Origin(path=group.file.path, group=group.group_in_file, first_row=group.first_row)
        return RawRows(columns=pa.table(columns), faults=decoder.faults_of(origin, group.num_rows))

    def close(self) -> None:
        for _, file in self._opened.values():
            file.close()


def _siblings(path: str) -> dict[str, str]:
    if not path.endswith(_ENDING):
        raise InputError(
            f"Found {path} as a path of NpyData. Expected label files, whose names end with {_ENDING}. Write "
            f"paths='folder/*{_ENDING}'."
        )
    stem = path.removesuffix(_ENDING)
    return {kind: f"{stem}{kind}.npy" for kind in _KINDS}


def _open_all(path: str) -> dict[str, tuple[NpyHeader, IO[bytes]]]:
    opened: dict[str, tuple[NpyHeader, IO[bytes]]] = {}
    try:
        for kind, sibling in _siblings(path).items():
            file = open_ranges(sibling)
            try:
                opened[kind] = read_header(kind, sibling, file), file
            except BaseException:
                file.close()
                raise
        counts = {header.path: header.num_rows for header, _ in opened.values()}
        if len(set(counts.values())) != 1:
            raise InputError(
                f"Found {counts} rows. Expected as many in each of the three files. Write them again together."
            )
    except BaseException:
        for _, file in opened.values():
            file.close()
        raise
    return opened


def read_header(kind: str, path: str, file: IO[bytes]) -> NpyHeader:
    """What a file of that kind (`labels`, `dense`, `sparse`) says of itself.

    Raises:
      InputError: it is no array of that kind, or not as long as it says.
    """
    size_bytes = file.seek(0, 2)
    file.seek(0)
    try:
        # numpy reads as many bytes as a header claims to have before it looks at the number. It therefore gets no more
        # bytes than the longest header that it takes.
        head = io.BytesIO(file.read(_MAX_HEADER_BYTES))
        version = np.lib.format.read_magic(head)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_fortran, dtype = readers[version](head)
    except Exception as error:  # numpy parses the header as Python text and lets many kinds of errors through
        raise InputError(
            f"Found {path}, which does not open as .npy ({type(error).__name__}: {one_line(error)[:200]}). "
            "Expected an array as numpy.save writes it. Write it again."
        ) from error
    expected = f"floats or integers of shape {'[n] or [n, 1]' if kind == 'labels' else '[n, columns]'} in C order"
    if kind == "sparse":
        expected = "integers of shape [n, columns] in C order"
    num_columns = shape[1] if len(shape) == 2 else 1
    is_shape = len(shape) == 2 or (kind == "labels" and len(shape) == 1)
    is_right = is_shape and not is_fortran and dtype.kind in _KINDS[kind][1] and dtype.itemsize <= 8
    remedy = "with np.save(path, np.ascontiguousarray(array))" if is_fortran else "in that form"
    if not is_right or min(shape) < 0 or num_columns < 1 or (kind == "labels" and num_columns != 1):
        raise InputError(
            f"Found {path} of dtype {dtype} and shape {list(shape)}{' in Fortran order' if is_fortran else ''}. "
            f"Expected {expected}. Save it again {remedy}."
        )
    if num_columns > _MAX_COLUMNS:
        raise InputError(
            f"Found {path} with {num_columns:,} columns. Expected at most {_MAX_COLUMNS:,}. Save it again as rows of "
            "columns."
        )
    header = NpyHeader(path=path, dtype=dtype, num_rows=shape[0], num_columns=num_columns, start=head.tell())
    if size_bytes != header.start + header.num_rows * header.row_bytes:
        raise InputError(
            f"Found {path} with {size_bytes:,} bytes. Expected {header.start + header.num_rows * header.row_bytes:,} "
            f"for its shape {list(shape)}. Copy it from its source again."
        )
    return header


def _schema(headers: list[NpyHeader]) -> pa.Schema:
    fields = []
    for kind, header in zip(_KINDS, headers, strict=True):
        fields += [(name, pa.from_numpy_dtype(header.dtype.newbyteorder("="))) for name in _names(kind, header)]
    return pa.schema(fields)


def _names(kind: str, header: NpyHeader) -> list[str]:
    return [_KINDS[kind][0].format(at) for at in range(header.num_columns)]


def read_rows(header: NpyHeader, file: IO[bytes], first: int, count: int) -> np.ndarray:
    """Rows `first` to `first + count - 1` in the byte order of this machine, `[count, columns]`, read-only.

    Raises:
      InputError: the file ends before.
    """
    file.seek(header.start + first * header.row_bytes)
    data = file.read(count * header.row_bytes)
    if len(data) != count * header.row_bytes:
        raise InputError(
            f"Found {header.path} ending within rows {first} to {first + count - 1}. Expected {header.num_rows:,} "
            "rows, as its header says. Copy it from its source again."
        )
    rows = np.frombuffer(data, header.dtype).reshape(count, header.num_columns)
    return rows.astype(header.dtype.newbyteorder("="), copy=False)


def npy_content(data: NpyData) -> str:
    """What the id columns hold: integers, but where they are cut into buckets."""
    return id_kinds(pa.schema([(name, pa.int64()) for name in data.columns]), data)


SOURCE = Source(declared=NpyData, layout=npy_layout, open=OpenedNpy, version=npy_version, content=npy_content)
