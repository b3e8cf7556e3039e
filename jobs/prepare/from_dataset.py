"""`prepare_dataset`: the rows of a data set of another library as Parquet files that training reads.

Of `ray.data.Dataset` and `datasets.Dataset` only methods are called, so neither library is imported here. Values stay
as they are: strings and large ids are hashed when they are read (`IdColumn(mode="hash")`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once, read_report
from podembed.jobs.prepare.settings import PrepareError
from podembed.jobs.prepare.work import row_groups
from podembed.workers.data.config import ROWS_PER_BLOCK

# A file of about a million rows.
GROUPS_PER_FILE = 32


def prepare_dataset(
    dataset: Any, folder: str | Path, *, rows_per_group: int = ROWS_PER_BLOCK, groups_per_file: int = GROUPS_PER_FILE
) -> str:
    """Writes the rows of a data set, in its own order, into a new folder of this machine.

    All rows pass through this process, a row group at a time. Row `i` of the data set becomes row `i` over all files in
    sorted order. So it does not depend on how many tasks Ray has, or which ends first. Tensors become lists, row-major.

    Args:
      dataset: a `ray.data.Dataset`, a `datasets.Dataset` or `IterableDataset` of Hugging Face, a table of pyarrow, a
        frame of pandas or polars, or anything that yields tables or record batches.
      folder: where there is none yet. It appears when it is complete.
      rows_per_group: rows that are shuffled, and held in memory for every lane, at once.

    Returns:
      The pattern of its files, as `ParquetData` takes it.

    Raises:
      PrepareError: there is a folder already, or no data set, no row, columns that differ among its parts, or several
        columns of one name.
    """
    folder = Path(folder)
    if rows_per_group < 1 or groups_per_file < 1:
        raise PrepareError(
            f"Found rows_per_group={rows_per_group} and groups_per_file={groups_per_file}. Expected at least 1. Leave "
            "them out."
        )
    if read_report(folder) is not None:
        raise PrepareError(
            f"Found a prepared data set in {folder}. Expected no folder there, since its rows may be others. Remove "
            "it, or choose another name."
        )
    tables = _tables_of(dataset, rows_per_group)
    create_once(folder, lambda unfinished: _write(unfinished, tables, rows_per_group, groups_per_file))
    return str(folder / "part-*.parquet")


def _write(folder: Path, tables: Iterable[pa.Table], rows_per_group: int, groups_per_file: int) -> dict[str, Any]:
    num_rows, writer = 0, None
    try:
        for number, group in enumerate(row_groups(_with_one_schema(tables), rows_per_group)):
            if number % groups_per_file == 0:
                if writer is not None:
                    writer.close()
                writer = pq.ParquetWriter(folder / f"part-{number // groups_per_file:05d}.parquet", group.schema)
            assert writer is not None
            writer.write_table(group.combine_chunks(), row_group_size=rows_per_group)
            num_rows += group.num_rows
    finally:
        if writer is not None:
            writer.close()
    if not num_rows:
        raise PrepareError("Found no rows in the data set. Expected at least one. Pass one that has some.")
    return {"num_rows": num_rows, "rows_per_group": rows_per_group}


def _with_one_schema(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Those that have rows, with the columns of the first."""
    schema: pa.Schema | None = None
    for given in tables:
        if given.num_rows:
            table = _plain(given)
            schema = table.schema if schema is None else schema
            yield _alike(table, schema)


def _plain(table: pa.Table) -> pa.Table:
    """Columns of extension types, such as tensors, as what they are stored as.

    Raises:
      PrepareError: several columns have one name.
    """
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PrepareError(
            f"Found {names.count(twice[0])} columns named {twice[0]!r} in the data set. Expected each name once, since "
            "a job says by their names which columns it reads. Rename them, or leave out those that are not needed."
        )
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        while isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        columns[name] = column
    return pa.table(columns)


def _alike(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a part as the first one has them. A column without any value fits all types."""
    if set(table.column_names) != set(schema.names):
        raise PrepareError(
            f"Found columns {table.column_names} in a part of the data set. Expected {schema.names}, as in its first "
            "part. Select the columns before."
        )
    table = table.select(schema.names)
    for found, expected in zip(table.schema, schema, strict=True):
        if found.type != expected.type and not pa.types.is_null(found.type):
            raise PrepareError(
                f"Found column {found.name!r} of type {found.type} in a part of the data set. Expected "
                f"{expected.type}, as in its first part, since equal values would become other rows. Cast the column "
                "before."
            )
    return table.cast(schema)


def _tables_of(dataset: Any, rows: int) -> Iterator[pa.Table]:
    """The rows of whatever was given, as tables in their order."""
    if isinstance(dataset, pa.Table):
        return iter([dataset])
    if isinstance(dataset, str | os.PathLike):
        raise PrepareError(
            f"Found the path {os.fspath(dataset)!r}. Expected a data set in memory. Files are read as they are: "
            "ParquetData(paths, ...), CsvData(paths, ...)."
        )
    if callable(getattr(dataset, "itertuples", None)):
        # A frame of pandas; its index is no column.
        return iter([pa.Table.from_pandas(dataset, preserve_index=False)])
    if callable(getattr(dataset, "__arrow_c_stream__", None)):
        return map(_table, pa.RecordBatchReader.from_stream(dataset))
    if callable(getattr(dataset, "iter_batches", None)) and hasattr(dataset, "context"):
        return _of_ray(dataset, rows)
    if callable(getattr(dataset, "with_format", None)) and callable(getattr(dataset, "iter", None)):
        return iter(dataset.with_format("arrow").iter(batch_size=rows))
    if isinstance(dataset, dict) or not isinstance(dataset, Iterable):
        raise PrepareError(
            f"Found a {type(dataset).__name__}. Expected a ray.data.Dataset, a datasets.Dataset, a frame, or "
            "tables of pyarrow. Pass one split, such as splits['train']."
        )
    return map(_table, dataset)


def _table(given: Any) -> pa.Table:
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if not isinstance(given, pa.Table):
        raise PrepareError(
            f"Found a {type(given).__name__} among the tables of a data set. Expected tables or record batches of "
            "pyarrow. Write pyarrow.Table.from_pylist(rows)."
        )
    return given


def _of_ray(dataset: Any, rows: int) -> Iterator[pa.Table]:
    options = dataset.context.execution_options
    before = options.preserve_order
    # Otherwise blocks come as their tasks end.
    options.preserve_order = True
    try:
        yield from dataset.iter_batches(batch_size=rows, batch_format="pyarrow")
    finally:
        options.preserve_order = before
