"""Which code reads which kind of declared data: the only place that tells the kinds apart.

Every kind gives the same two things, so lanes, shuffling and decoding know none of them: a layout (the rows of each row
group, found when the run starts) and, of an opened file, the declared columns of one row group.
"""

from __future__ import annotations

from typing import Any, Protocol

from podembed.workers.columns.decode import Decoder, RawRows
from podembed.workers.data.config import CsvData, InputData, NpyData
from podembed.workers.data.files import file_version
from podembed.workers.data.input_files import FileLayout, InputFile, RowGroup
from podembed.workers.formats.csv import OpenedCsv, csv_layout
from podembed.workers.formats.npy import OpenedNpy, npy_layout, npy_version
from podembed.workers.formats.parquet import OpenedParquet, parquet_layout


class OpenedFile(Protocol):
    """An open data file; one thread at a time."""

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows: ...

    def close(self) -> None: ...


def open_file(file: InputFile, data: InputData, *, storage_options: dict[str, Any] | None = None) -> OpenedFile:
    """Opens a file for reading its row groups.

    Raises:
      InputError: it is missing, damaged, or lacks a declared column.
      StoreUnavailable: the store did not answer.
    """
    if isinstance(data, CsvData):
        return OpenedCsv(file, data, storage_options=storage_options)
    if isinstance(data, NpyData):
        return OpenedNpy(file, data, storage_options=storage_options)
    return OpenedParquet(file, data.columns, storage_options=storage_options)


def read_layout(path: str, data: InputData, *, storage_options: dict[str, Any] | None = None) -> FileLayout:
    """What is to be known of a file before it is read.

    Raises:
      As `open_file`.
    """
    if isinstance(data, CsvData):
        return csv_layout(path, data, storage_options=storage_options)
    if isinstance(data, NpyData):
        return npy_layout(path, data, storage_options=storage_options)
    return parquet_layout(path, data, storage_options=storage_options)


def version_of(path: str, data: InputData, *, storage_options: dict[str, Any] | None = None) -> tuple[int, str]:
    """Size in bytes and version (`files.file_version`) of a file and of those that belong to it.

    Raises:
      FileNotFoundError: one is missing.
      StoreUnavailable: the store did not answer.
    """
    if isinstance(data, NpyData):
        return npy_version(path, storage_options=storage_options)
    return file_version(path, storage_options=storage_options)
