"""Columns of the data that go beside its scores as they are, in the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.data.config import InputData
from podembed.workers.data.files import open_ranges
from podembed.workers.formats.parquet import arrow_file
from podembed.workers.input.index import InputIndex


class KeptColumns:
    """Columns of Parquet files, read row group by row group. Mutated: where the next rows begin."""

    def __init__(self, data: InputData, index: InputIndex, names: Sequence[str], *, taken: Sequence[str]) -> None:
        """Raises:
        ConfigurationError: a column is not there, is there several times, has the name of an output, or the files are
          not Parquet.
        """
        if names and not data.has_footers:
            raise ConfigurationError(
                f"Found --columns {' '.join(names)} for {type(data).__name__}. Expected Parquet for kept columns. "
                "Leave the flag out: scores have the order of the rows."
            )
        both = sorted({*names} & {*taken})
        if both or len(set(names)) != len(names):
            raise ConfigurationError(
                f"Found --columns {' '.join(names)} beside the outputs {', '.join(taken)}. Expected each name once. "
                "Leave the repetition out."
            )
        self._names, self._groups = list(names), iter(index.row_groups())
        self._rest: Any = None
        self._first = ""
        self.schema = pa.schema([])
        if names:
            with open_ranges(index.files[0].path) as file:
                found = arrow_file(file).schema_arrow
            missing = [name for name in names if name not in found.names]
            if missing:
                raise ConfigurationError(
                    f"Found no column {missing[0]!r} in {index.files[0].path}. Expected one of {found.names}. Correct "
                    "--columns."
                )
            _require_once(names, found.names, index.files[0].path)
            self._first = index.files[0].path
            self.schema = pa.schema([found.field(name) for name in names]).remove_metadata()

    def take(self, num_rows: int) -> list[pa.Array]:
        """The next rows, one array a column."""
        if not self._names:
            return []
        parts, left = [], num_rows
        while left:
            if self._rest is None or not self._rest.num_rows:
                group = next(self._groups)
                with open_ranges(group.file.path) as file:
                    rows = arrow_file(file).read_row_group(group.group_in_file, columns=self._names)
                self._rest = self._as_first(rows, group.file.path)
            part = self._rest.slice(0, left)
            self._rest = self._rest.slice(part.num_rows)
            parts.append(part)
            left -= part.num_rows
        joined = pa.concat_tables(parts).combine_chunks()
        return [joined.column(name).combine_chunks() for name in self._names]

    def _as_first(self, rows: pa.Table, path: str) -> pa.Table:
        """Rows of a file in the types of the first one.

        Raises:
          ConfigurationError: a column is not there, is there several times, or has values that this type does not
            hold.
        """
        _require_once(self._names, rows.column_names, path)
        columns = []
        for field in self.schema:
            if field.name not in rows.column_names:
                raise ConfigurationError(
                    f"Found no column {field.name!r} in {path}. Expected it there, as in the first file {self._first}. "
                    "Leave it out of --columns, or write it into all files."
                )
            column = rows.column(field.name)
            try:
                columns.append(column.cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ConfigurationError(
                    f"Found column {field.name!r} of type {column.type} in {path}, with values that {field.type} does "
                    f"not hold. Expected {field.type}, as in the first file {self._first}. Write all files with one "
                    "type, or leave the column out of --columns."
                ) from error
        return pa.table(columns, schema=self.schema)


def _require_once(names: Sequence[str], found: Sequence[str], path: str) -> None:
    """Raises `ConfigurationError` if a file has several columns of one of these names."""
    twice = next((name for name in names if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"Found {found.count(twice)} columns named {twice!r} in {path}. Expected one, since it is not known which "
            "is meant. Leave it out of --columns, or write the file with distinct names."
        )
