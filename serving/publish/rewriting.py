"""Rows of a commit in another form, as files of a copy.

Each row becomes another one alone, whatever lies beside it. So changed rows of a delta are rewritten as they are, and
what another commit of the copy has rewritten already is used again. Files have the names that they have in the run.
Digests in the manifest remain those of the run: they name the state that was rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import FORMAT_VERSION, Manifest, delta_files
from podembed.serving.row_form import RowForm, decoded
from podembed.serving.served_files import served_files
from podembed.workers.checkpoint.arrays import ArrayFiles, DenseFile, read_dense, write_array
from podembed.workers.checkpoint.checkpoint_files import ROWS, ArrayChunks, ChunkFiles, TableFiles
from podembed.workers.checkpoint.chunks import read_chunks, write_array_metadata, write_chunks
from podembed.workers.checkpoint.deltas import IDS, DeltaFiles, DeltaPart
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.files import split_buckets
from podembed.workers.checkpoint.zarr_metadata import DTYPES, ArrayMetadata, dtype_name
from podembed.workers.storage.storage_errors import NameTaken, StorageError
from podembed.workers.storage.store import Files, Store
from podembed.workers.storage.transfer import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """How far rows are from what is served of them.

    Attributes:
      largest: of all rows the largest distance, as a share of the row's length.
      table: where that row is; empty if there was none.
      num_rows: rows that were compared, those of zeros aside.
      num_left_out: keys that were not seen often enough.
    """

    largest: float = 0.0
    table: str = ""
    num_rows: int = 0
    num_left_out: int = 0

    def with_rows(self, table: str, largest: float, num_rows: int, num_left_out: int) -> RowError:
        """The same with further rows."""
        is_larger = largest > self.largest or not self.table
        return RowError(
            largest=max(largest, self.largest),
            table=table if is_larger else self.table,
            num_rows=self.num_rows + num_rows,
            num_left_out=self.num_left_out + num_left_out,
        )


class _Rewritten:
    """Files that may be there already: with these bytes they stay, with others they were left by a killed publisher."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def write_new(self, name: str, buffers: Sequence[Buffer]) -> None:
        try:
            self._files.write_new(name, buffers)
        except NameTaken:
            data = b"".join(buffers)
            if self._files.size(name) == len(data) and self._files.read(name, start=0, length=len(data)) == data:
                return
            self._files.delete(name)
            self._files.write_new(name, buffers)


@dataclass(slots=True, eq=False)
class _Rewriting:
    """A commit on its way. Mutated: what is known of rows, and of bytes written."""

    source: Store
    target: Store
    form: RowForm
    threads: FileThreads
    error: RowError = RowError()
    num_files: int = 0
    num_bytes: int = 0

    def count(self, num_files: int, num_bytes: int) -> None:
        self.num_files += num_files
        self.num_bytes += num_bytes


def rewrite_tables(
    source: Store, target: Store, manifest: Manifest, form: RowForm
) -> tuple[Manifest, RowError, int, int]:
    """Writes the tables of a commit in another form, as far as they are not there. Durable when it returns.

    Returns:
      The manifest of the copy, what the rewriting cost in accuracy, and files and bytes that were written.

    Raises:
      ChunkDamaged: a file is not what was committed.
      ConfigurationError: a number of a row is not finite.
    """
    known = _known_tables(target)
    target = target.through(_Rewritten)  # pyright: ignore[reportArgumentType]
    with FileThreads(target) as threads:
        work = _Rewriting(source, target, form, threads)
        tables = tuple(_rewrite(work, table, known.get(table.arrays[0].path)) for table in manifest.tables)
        threads.finish()
    served = served_files(manifest)
    made = replace(manifest, format_version=FORMAT_VERSION, tables=tables, dense=served.dense)
    return made, work.error, work.num_files, work.num_bytes


def _known_tables(target: Store) -> dict[str, TableFiles]:
    """Path of rows → what was rewritten of them, with the most deltas that are whole."""
    found: dict[str, TableFiles] = {}
    for name in read_commit_names(target):
        try:
            tables = checkpoint.load(target, name).tables
        except StorageError:
            continue  # Damaged, or deleted meanwhile.
        for table in tables:
            path = table.arrays[0].path
            if path not in found or len(table.deltas) > len(found[path].deltas):
                found[path] = table
    return {path: table for path, table in found.items() if _is_whole(target, table)}


def _is_whole(target: Store, table: TableFiles) -> bool:
    """Whether all files of a table are there with their sizes."""
    wanted = dict(table.chunk_sizes())
    for file in delta_files(table):
        wanted |= file.file_sizes()
    wanted |= {f"{array.path}/zarr.json": array.metadata_size_bytes for array in table.arrays}
    found: dict[str, int] = {}
    for folder in sorted({"/".join(name.split("/", 4)[:4]) for name in wanted}):
        found |= target.sizes(folder)
    return all(found.get(name) == size_bytes for name, size_bytes in wanted.items())


def _rewrite(work: _Rewriting, table: TableFiles, known: TableFiles | None) -> TableFiles:
    arrays = _read_arrays(table, work.form)
    if known is None:
        written, chunks = _rewrite_chunks(work, table, arrays)
    else:
        written, chunks = known.arrays, known.chunks
    deltas = []
    for at, delta in enumerate(table.deltas):
        has_it = known is not None and at < len(known.deltas) and known.deltas[at].commit == delta.commit
        deltas.append(known.deltas[at] if known is not None and has_it else _rewrite_delta(work, table, arrays, delta))
    return replace(table, arrays=written, chunks=chunks, deltas=tuple(deltas))


def _read_arrays(table: TableFiles, form: RowForm) -> tuple[ArrayFiles, ...]:
    names = {ROWS} | ({"key", "last"} if table.is_dynamic else set())
    if table.is_dynamic and form.min_count:
        names.add("count")
    return tuple(array for array in table.arrays if array.name in names)


def _rewrite_chunks(
    work: _Rewriting, table: TableFiles, arrays: Sequence[ArrayFiles]
) -> tuple[tuple[ArrayFiles, ...], ChunkFiles]:
    metadata = _described(table, arrays, work.form)
    written = []
    for name, described in metadata.items():
        receipt = write_array_metadata(work.target, described)
        work.count(1, receipt.size_bytes)
        written.append(
            ArrayFiles(
                name=name,
                path=described.path,
                width=described.shape[2],
                dtype=dtype_name(described.dtype),
                metadata_size_bytes=receipt.size_bytes,
                metadata_crc32c=receipt.crc32c,
            )
        )
    firsts = range(0, table.num_buckets, table.buckets_per_file)
    results: list[Future[tuple[dict[str, tuple[int, list[int]]], RowError]]] = [
        work.threads.submit(lambda first=first: _rewrite_file(work, table, arrays, metadata, first)) for first in firsts
    ]
    columns = []
    files = [result.result() for result in results]
    for _, error in files:
        work.error = work.error.with_rows(table.name, error.largest, error.num_rows, error.num_left_out)
    for array in written:
        size_bytes = files[0][0][array.name][0]
        checksums = [checksum for of_file, _ in files for checksum in of_file[array.name][1]]
        work.count(len(files), size_bytes * len(files))
        crc32c = np.array(checksums, "<u4").tobytes()
        columns.append(ArrayChunks.of(array, size_bytes=size_bytes, crc32c=crc32c, separator=table.separator))
    return tuple(written), ChunkFiles(buckets_per_file=table.buckets_per_file, arrays=tuple(columns))


def _described(table: TableFiles, arrays: Sequence[ArrayFiles], form: RowForm) -> dict[str, ArrayMetadata]:
    """The arrays that are written, in their order."""
    made = form.encoded(np.zeros((1, table.dim), np.float32))
    folder = arrays[0].path.rpartition("/")[0]
    paths = {array.name: array.path for array in arrays}
    shapes = {name: (values.dtype, values.shape[1]) for name, values in made.items()}
    shapes |= {array.name: (DTYPES[array.dtype], array.width) for array in arrays if array.name in ("key", "last")}
    return {
        name: ArrayMetadata(
            path=paths.get(name, f"{folder}/{name}"),
            shape=(table.num_buckets, table.rows_per_bucket, width),
            chunk_shape=(1, table.rows_per_bucket, width),
            dtype=dtype,
            attributes={"table": table.name, "array": name, "num_rows": table.num_rows},
            chunks_per_file=table.buckets_per_file,
            separator=table.separator,
        )
        for name, (dtype, width) in shapes.items()
    }


def _rewrite_file(
    work: _Rewriting,
    table: TableFiles,
    arrays: Sequence[ArrayFiles],
    metadata: Mapping[str, ArrayMetadata],
    first: int,
) -> tuple[dict[str, tuple[int, list[int]]], RowError]:
    """Size and checksums of each array's file from a bucket on."""
    buckets = range(first, first + table.buckets_per_file)
    values: dict[str, np.ndarray] = {}
    for array in arrays:
        file = table.chunk(array, first)
        values[array.name] = np.empty((len(buckets) * table.rows_per_bucket, array.width), DTYPES[array.dtype])
        pieces = split_buckets(values[array.name], table.rows_per_bucket)
        receipts = [file.receipt(bucket) for bucket in buckets]
        read_chunks(work.source, table.metadata(array), file.name, out=pieces, receipts=receipts)
    layout = BucketLayout(num_rows=table.num_rows, num_buckets=table.num_buckets)
    for at, bucket in enumerate(buckets):
        # What only pads a bucket may be anything.
        start = at * table.rows_per_bucket
        values[ROWS][start + layout.num_rows_of(bucket) : start + table.rows_per_bucket] = 0
    made, error = _changed(table, work.form, values)
    found = {}
    for name, described in metadata.items():
        pieces = split_buckets(made[name], table.rows_per_bucket)
        with work.threads.writes():
            receipts = write_chunks(work.target, described, (first, 0, 0), pieces)
        found[name] = (receipts[0].size_bytes, [receipt.crc32c for receipt in receipts])
    return found, error


def _rewrite_delta(work: _Rewriting, table: TableFiles, arrays: Sequence[ArrayFiles], delta: DeltaFiles) -> DeltaFiles:
    parts = []
    for part in delta.parts:
        of_part = {file.key: file for file in part.files}
        values = {array.name: read_dense(work.source, of_part[array.name]) for array in arrays}
        made, error = _changed(table, work.form, values)
        work.error = work.error.with_rows(table.name, error.largest, error.num_rows, error.num_left_out)
        files = [_write_array(work, of_part[IDS].path, IDS, read_dense(work.source, of_part[IDS]))]
        folder = of_part[ROWS].path.rpartition("/")[0]
        for name in _described(table, arrays, work.form):
            path = of_part[name].path if name in of_part else f"{folder}/{name}"
            files.append(_write_array(work, path, name, made[name]))
        parts.append(DeltaPart(buckets=part.buckets, counts=part.counts, files=tuple(files)))
    return DeltaFiles(commit=delta.commit, parts=tuple(parts))


def _write_array(work: _Rewriting, path: str, key: str, values: np.ndarray) -> DenseFile:
    file = write_array(work.target, path, key, values)
    sizes = file.file_sizes()
    work.count(len(sizes), sum(sizes.values()))
    return file


def _changed(
    table: TableFiles, form: RowForm, values: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], RowError]:
    """The arrays that are written, and what became of the rows.

    Raises:
      ConfigurationError: a number is not finite.
    """
    rows = values[ROWS]
    if not np.isfinite(rows).all():
        raise ConfigurationError(
            f"Found numbers that are not finite in table '{table.name}'. Expected finite ones, since others have no "
            f"{form.rows}. Publish an older commit; `podembed fsck --values` looks for such numbers."
        )
    made = form.encoded(rows)
    num_left_out = 0
    if table.is_dynamic:
        made |= {"key": values["key"], "last": values["last"]}
        if form.min_count:
            goes = (values["count"] < form.min_count) & (values["last"] != 0)
            made |= {name: np.where(goes, values[name].dtype.type(0), values[name]) for name in ("key", "last")}
            num_left_out = int(np.count_nonzero(goes))
    lengths = np.linalg.norm(rows, axis=1)
    distances = np.linalg.norm(rows - decoded(made), axis=1)
    shares = np.divide(distances, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return made, RowError(
        largest=float(shares.max(initial=0.0)),
        table=table.name,
        num_rows=int(np.count_nonzero(lengths)),
        num_left_out=num_left_out,
    )
