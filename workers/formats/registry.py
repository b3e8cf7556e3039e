"""Which code reads which kind of declared data: the only place that tells the kinds apart.

Every kind gives the same things, so lanes, shuffling and decoding know none of them. One is the layout: the rows of
each row group, found when the run starts. The other is the declared columns of one row group of an opened file. A new
kind is a file here and a line in the table below.
"""

from __future__ import annotations

from typing import Any

from podembed.workers.data.columns import DataConfigError
from podembed.workers.data.config import InputData
from podembed.workers.data.input_files import FileLayout, InputFile
from podembed.workers.formats import csv, npy, parquet
from podembed.workers.formats.source import OpenedFile, Source

SOURCES: tuple[Source, ...] = (
    parquet.SOURCE,
    csv.SOURCE,
    npy.SOURCE,
)


def declared_kinds() -> str:
    """The classes with which users declare data, for messages."""
    *names, last = (source.declared.__name__ for source in SOURCES)
    return f"{', '.join(names)} or {last}"


def is_readable(data: Any) -> bool:
    """Whether this is data of one of the kinds."""
    return any(source.fits(data) for source in SOURCES)


def open_file(file: InputFile, data: InputData) -> OpenedFile:
    """Opens a file for reading its row groups.

    Raises:
      InputError: it is missing, damaged, or lacks a declared column.
      StoreUnavailable: the store did not answer.
    """
    return _source_of(data).open(file, data)


def read_layout(path: str, data: InputData) -> FileLayout:
    """What is to be known of a file before it is read.

    Raises:
      As `open_file`.
    """
    return _source_of(data).layout(path, data)


def version_of(path: str, data: InputData) -> tuple[int, str]:
    """Size in bytes and version (`files.file_version`) of a file and of those that belong to it.

    Raises:
      FileNotFoundError: one is missing.
      StoreUnavailable: the store did not answer.
    """
    return _source_of(data).version(path)


def declared_content(data: InputData) -> str:
    """What the id columns of data hold, as `InputFile.content` says it; empty where files decide that, and not the
    declaration.
    """
    return next((source.content(data) for source in SOURCES if source.fits(data)), "")


def _source_of(data: InputData) -> Source:
    for source in SOURCES:
        if source.fits(data):
            return source
    raise DataConfigError(
        f"Found data declared as {type(data).__name__}, which nothing reads. Expected {declared_kinds()}. Declare one "
        "of these."
    )
