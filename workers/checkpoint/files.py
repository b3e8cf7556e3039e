"""The files of one checkpoint attempt: which there are, what a manifest says of each, and how a host writes and reads
its buckets.

An attempt's files lie below `data/<commit name>/`: `tables/<table>/<array>/` for rows and each slot, `dense/<key>/` for
each leaf of the dense state. A table of which only changed rows are written has those of
`workers.checkpoint.deltas`. The records here travel from hosts to the driver, which puts them into the manifest, and
back to the hosts that load. Which bucket lies where, when to save and what counts as committed is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.workers.checkpoint.arrays import DenseFile, read_dense, safe_segment, write_array
from podembed.workers.checkpoint.bucket_overlap import Cut, describe_rows
from podembed.workers.checkpoint.checkpoint_files import (
    ROWS,
    ArrayChunks,
    ArrayFiles,
    BucketReceipt,
    ChunkFile,
    ChunkFiles,
    TableFiles,
    TablePlan,
    WrittenBuckets,
)
from podembed.workers.checkpoint.chunks import ChunkDamaged, read_chunk, read_chunks, write_array_metadata, write_chunks
from podembed.workers.checkpoint.deltas import DeltaFiles, DeltaPart, read_changes
from podembed.workers.checkpoint.digest import DIGEST_BYTES, Digests, bucket_digest
from podembed.workers.checkpoint.zarr_metadata import dtype_name
from podembed.workers.storage.store import Store


def write_table_metadata(store: Store, plan: TablePlan) -> tuple[ArrayFiles, ...]:
    """Writes `zarr.json` of each array of a table. One host of a save does this."""
    described = []
    for array in plan.widths:
        metadata = plan.metadata(array)
        receipt = write_array_metadata(store, metadata)
        described.append(
            ArrayFiles(
                name=array,
                path=metadata.path,
                width=plan.widths[array],
                dtype=dtype_name(metadata.dtype),
                metadata_size_bytes=receipt.size_bytes,
                metadata_crc32c=receipt.crc32c,
            )
        )
    return tuple(described)


def write_buckets(store: Store, plan: TablePlan, bucket: int, values: Sequence[np.ndarray]) -> BucketReceipt:
    """Writes the buckets of one file from the given one on: a file for each array. Durable when it returns.

    Args:
      values: in the order of `plan.widths`, each `[buckets_per_file * rows_per_bucket, width]`; positions behind the
        table's last row are padding.
    """
    files = []
    for array, value in zip(plan.widths, values, strict=True):
        pieces = split_buckets(value, plan.rows_per_bucket)
        receipts = write_chunks(store, plan.metadata(array), (bucket, 0, 0), pieces)
        files.append(
            ChunkFile(
                array=array,
                bucket=bucket,
                name=receipts[0].name,
                size_bytes=receipts[0].size_bytes,
                crc32c=tuple(receipt.crc32c for receipt in receipts),
            )
        )
    return BucketReceipt(bucket=bucket, chunks=tuple(files), digests=digests_of(plan, bucket, values))


def split_buckets(values: np.ndarray, rows_per_bucket: int) -> list[np.ndarray]:
    """Views of each bucket of several that lie one behind the other."""
    return [values[start : start + rows_per_bucket] for start in range(0, len(values), rows_per_bucket)]


def assemble_table(plan: TablePlan, arrays: tuple[ArrayFiles, ...], written: Sequence[WrittenBuckets]) -> TableFiles:
    """Puts together what the hosts wrote of one table. Missing or double buckets are found later, by
    `checkpoint.commit`.
    """
    chunks: Sequence[ChunkFile] | None = _columns(plan, arrays, written)
    if chunks is None:
        # One by one, so that whoever checks can say which it is.
        order = {array: at for at, array in enumerate(plan.widths)}
        files = [file for one in written for file in one.files()]
        chunks = tuple(sorted(files, key=lambda chunk: (order.get(chunk.array, len(order)), chunk.bucket)))
    return TableFiles(
        name=plan.name,
        num_rows=plan.num_rows,
        dim=plan.widths[ROWS],
        num_buckets=plan.num_buckets,
        rows_per_bucket=plan.rows_per_bucket,
        buckets_per_file=plan.buckets_per_file,
        separator=plan.separator,
        arrays=arrays,
        chunks=chunks,
        digests=_digests(written, num_buckets=plan.num_buckets),
    )


def _columns(plan: TablePlan, arrays: Sequence[ArrayFiles], written: Sequence[WrittenBuckets]) -> ChunkFiles | None:
    """All files of a table; None if they are not all there, once, each where its array lies."""
    per_file, names = plan.buckets_per_file, tuple(plan.widths)
    order = _order(written, step=per_file, count=plan.num_buckets // per_file)
    # A host may own nothing of a table.
    written = [one for one in written if one.firsts]
    are_alike = len({(one.folder, one.separator, one.arrays, one.size_bytes) for one in written}) == 1
    if order is None or not are_alike or written[0].arrays != names:
        return None
    if (written[0].folder, written[0].separator) != (plan.folder, plan.separator):
        return None
    if [array.path for array in arrays] != [plan.metadata(name).path for name in names]:
        return None
    found = []
    for at, (array, size_bytes) in enumerate(zip(arrays, written[0].size_bytes, strict=True)):
        data = np.frombuffer(b"".join(one.crc32c[at] for one in written), "<u4")
        if len(data) != plan.num_buckets:
            return None
        crc32c = data.reshape(-1, per_file)[order].tobytes()
        found.append(ArrayChunks.of(array, size_bytes=size_bytes, crc32c=crc32c, separator=plan.separator))
    return ChunkFiles(buckets_per_file=per_file, arrays=tuple(found))


def _order(written: Sequence[WrittenBuckets], *, step: int, count: int) -> np.ndarray | None:
    """Positions of `count` files among those that were written; None unless each is there once."""
    firsts = np.frombuffer(b"".join(one.firsts for one in written), "<i4")
    order = np.argsort(firsts, kind="stable")
    return order if np.array_equal(firsts[order], np.arange(0, step * count, step)) else None


def _digests(written: Sequence[WrittenBuckets], *, num_buckets: int) -> Digests:
    """Digests of all buckets, in order; their number differs if not each is there once."""
    data = b"".join(one.digests.data for one in written)
    if len(data) != num_buckets * DIGEST_BYTES:
        return Digests(data)
    num_files = sum(len(one.firsts) for one in written) // np.dtype("<i4").itemsize
    order = _order(written, step=num_buckets // num_files, count=num_files)
    if order is None or num_buckets % num_files:
        return Digests(b"")
    return Digests(np.frombuffer(data, np.uint8).reshape(num_files, -1)[order].tobytes())


def assemble_delta(
    parent: TableFiles, attempt: str, parts: Sequence[DeltaPart], written: Sequence[WrittenBuckets]
) -> TableFiles:
    """The parent's table with the rows that the hosts wrote since; every bucket has a digest, changed or not."""
    delta = DeltaFiles(commit=attempt, parts=tuple(sorted(parts, key=lambda part: part.buckets[0])))
    digests = _digests(written, num_buckets=parent.num_buckets)
    return replace(parent, digests=digests, deltas=(*parent.deltas, delta))


def read_bucket(
    store: Store, table: TableFiles, bucket: int, *, out: Sequence[np.ndarray | None] | None = None
) -> list[np.ndarray]:
    """Reads and verifies one bucket of all arrays, in the order of `table.arrays`.

    Args:
      out: per array the buffer to fill, `[rows_per_bucket, width]`, or None for a new array.

    Raises:
      ChunkDamaged: a chunk is missing or differs from the manifest, or the chunks together do not have the bucket's
        digest.
    """
    values = read_base_bucket(store, table, bucket, out=out)
    check_with_changes(store, table, bucket, values)
    return values


def check_with_changes(store: Store, table: TableFiles, bucket: int, values: Sequence[np.ndarray]) -> None:
    """Brings a bucket that `read_base_bucket` read up to date with its deltas, and compares it with its digest.

    Raises:
      ChunkDamaged: a file is missing, or rows and slots are not the committed ones.
    """
    changed = [(delta, *found) for delta in table.deltas if (found := delta.find(bucket))]
    for delta, part, place in changed:
        with naming_changes(table, delta, part):
            positions, changes = read_changes(
                store, part, place, bucket, num_buckets=table.num_buckets, num_positions=table.rows_per_bucket
            )
        for value, change in zip(values, changes, strict=True):
            value[positions] = change
    try:
        check_digest(table, bucket, values)
    except ChunkDamaged:
        # Of a delta only the bucket's rows were read; its files' own checksums tell which of them it is, if it is one.
        for delta, part, _ in changed:
            with naming_changes(table, delta, part):
                for file in part.files:
                    read_dense(store, file)
        raise


@contextmanager
def naming_changes(table: TableFiles, delta: DeltaFiles, part: DeltaPart) -> Iterator[None]:
    """Adds to an error about a part's files what they hold.

    Raises:
      ChunkDamaged: the one that was raised inside, with its place.
    """
    try:
        yield
    except ChunkDamaged as error:
        place = describe_changes(table, delta, part, error.name)
        raise ChunkDamaged(error.name, error.found, error.expected, place=place) from error


def read_base_bucket(
    store: Store, table: TableFiles, bucket: int, *, out: Sequence[np.ndarray | None] | None = None
) -> list[np.ndarray]:
    """As `read_bucket`, without the deltas and the check of the digest, which the deltas must precede."""
    buffers = out if out is not None else [None] * len(table.arrays)
    return [
        read_base_array(store, table, array, bucket, out=buffer)
        for array, buffer in zip(table.arrays, buffers, strict=True)
    ]


def read_bucket_array(store: Store, table: TableFiles, array: ArrayFiles, bucket: int) -> np.ndarray:
    """Reads one bucket of one array, `[rows_per_bucket, width]`, verified by its own chunk's checksum.

    Where rows were written after the chunk, all arrays are read, since only the bucket's digest tells whether the rows
    are right.

    Raises:
      ChunkDamaged: it is missing or differs from the manifest; with the table and the rows.
    """
    if table.deltas:
        return read_bucket(store, table, bucket)[table.arrays.index(array)]
    return read_base_array(store, table, array, bucket)


def read_base_array(
    store: Store, table: TableFiles, array: ArrayFiles, bucket: int, *, out: np.ndarray | None = None
) -> np.ndarray:
    """One array of `read_base_bucket`."""
    receipt = table.chunk(array, bucket).receipt(bucket)
    try:
        chunk = read_chunk(store, table.metadata(array), (bucket, 0, 0), receipt, out=out)
    except ChunkDamaged as error:
        raise ChunkDamaged(
            error.name, error.found, error.expected, place=describe_bucket(table, array.name, bucket)
        ) from error
    return chunk if out is not None else chunk[0]


def read_file_buckets(store: Store, table: TableFiles, bucket: int, *, out: Sequence[np.ndarray]) -> None:
    """Reads one bucket, or all buckets of a file at once. Digests are compared unless deltas must precede that.

    Args:
      bucket: the one, or the first of the file.
      out: per array the buffer to fill, `[count * rows_per_bucket, width]`.

    Raises:
      ChunkDamaged: as `read_bucket`.
    """
    if len(out[0]) == table.rows_per_bucket:
        read_base_bucket(store, table, bucket, out=out)
    else:
        _read_whole_files(store, table, bucket, out)
    if not table.deltas:
        pieces = zip(*(split_buckets(values, table.rows_per_bucket) for values in out), strict=True)
        for at, piece in enumerate(pieces):
            check_digest(table, bucket + at, piece)


def _read_whole_files(store: Store, table: TableFiles, bucket: int, out: Sequence[np.ndarray]) -> None:
    for array, values in zip(table.arrays, out, strict=True):
        file = table.chunk(array, bucket)
        pieces = split_buckets(values, table.rows_per_bucket)
        receipts = [file.receipt(one) for one in file.buckets]
        try:
            read_chunks(store, table.metadata(array), file.name, out=pieces, receipts=receipts)
        except ChunkDamaged as error:
            place = describe_file(table, file) if error.at is None else ""
            place = place or describe_bucket(table, array.name, bucket + (error.at or 0))
            raise ChunkDamaged(error.name, error.found, error.expected, place=place) from error


def has_digest(table: TableFiles, bucket: int, values: Sequence[np.ndarray]) -> bool:
    """Whether rows and slots of a bucket are those that were committed; arguments as for `check_digest`."""
    try:
        check_digest(table, bucket, values)
    except ChunkDamaged:
        return False
    return True


def check_digest(table: TableFiles, bucket: int, values: Sequence[np.ndarray]) -> None:
    """Compares rows and slots of a bucket, wherever they come from, with what was committed.

    Args:
      values: in the order of `table.arrays`, each `[rows_per_bucket, width]`.

    Raises:
      ChunkDamaged: they are not the committed ones.
    """
    digest = _digest(values, bucket, num_rows=table.num_rows, num_buckets=table.num_buckets)
    if digest != table.digests[bucket]:
        name = table.chunk(table.arrays[0], bucket).name
        found = f"bucket {bucket} with digest {digest}"
        if table.deltas:
            found += f" after the changed rows of {', '.join(delta.commit for delta in table.deltas)}"
        place = describe_bucket(table, "rows and slots", bucket)
        raise ChunkDamaged(name, found, f"{table.digests[bucket]} as committed", place=place)


def describe_bucket(table: TableFiles, array: str, bucket: int) -> str:
    """The content of a bucket, for people: `table 'users', rows, bucket 3 (9 rows: 3, 7, 11 ... 35)`."""
    rows = describe_rows(Cut(table.num_buckets, bucket), num_rows=table.num_rows)
    return f"table '{table.name}', {array}, bucket {bucket} ({rows})"


def describe_file(table: TableFiles, file: ChunkFile) -> str:
    """The content of a file of an array, for people: as `describe_bucket`, or `table 'users', rows, buckets 0 to 7`."""
    if len(file.buckets) == 1:
        return describe_bucket(table, file.array, file.bucket)
    return f"table '{table.name}', {file.array}, buckets {file.buckets[0]} to {file.buckets[-1]}"


def describe_changes(table: TableFiles, delta: DeltaFiles, part: DeltaPart, name: str) -> str:
    """The content of a file of a delta: `table 'users', rows, 17 rows of buckets 0 to 3, changed by
    s000000020-g00000001`.
    """
    keys = {file.chunk_file: file.key for file in part.files}
    keys |= {f"{file.path}/zarr.json": f"shape of {file.key}" for file in part.files}
    first, last = part.buckets[0], part.buckets[-1]
    buckets = f"bucket {first}" if first == last else f"buckets {first} to {last}"
    rows = f"{part.num_rows} row{'s' if part.num_rows > 1 else ''} of {buckets}"
    return f"table '{table.name}', {keys.get(name, 'changed rows')}, {rows}, changed by {delta.commit}"


def write_dense(store: Store, attempt: str, key: str, values: np.ndarray) -> DenseFile:
    """Writes one leaf of the dense state. Durable when it returns."""
    return write_array(store, f"data/{attempt}/dense/{safe_segment(key)}", key, values)


def digest_of(plan: TablePlan, bucket: int, values: Sequence[np.ndarray]) -> str:
    """The digest of a bucket of rows and slots, in the order of `plan.widths`."""
    return _digest(values, bucket, num_rows=plan.num_rows, num_buckets=plan.num_buckets)


def digests_of(plan: TablePlan, bucket: int, values: Sequence[np.ndarray]) -> tuple[str, ...]:
    """The digests of several buckets that lie one behind the other in `values`, from the given one on."""
    pieces = zip(*(split_buckets(value, plan.rows_per_bucket) for value in values), strict=True)
    return tuple(digest_of(plan, bucket + at, piece) for at, piece in enumerate(pieces))


def _digest(values: Sequence[np.ndarray], bucket: int, *, num_rows: int, num_buckets: int) -> str:
    in_bucket = BucketLayout(num_rows=num_rows, num_buckets=num_buckets).num_rows_of(bucket)
    return bucket_digest(values, first_row=bucket, row_stride=num_buckets, num_rows=in_bucket)
