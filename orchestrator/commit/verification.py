"""Comparing a commit with the files on storage: sizes through listings, or every byte. Of tables whose keys come and go
also whether the keys are such as an index writes.

Used before publishing, before resuming, and offline. It reports all damage instead of stopping at the first, and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.hashing import mix64
from podembed.orchestrator.commit.manifest import MAX_MANIFEST_BYTES, Manifest, commit_file, delta_files, to_json
from podembed.workers.checkpoint.arrays import DenseFile, read_dense
from podembed.workers.checkpoint.bucket_overlap import Cut, describe_rows
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.chunks import ChunkDamaged, IndexDamaged, check_file_index, crc32c
from podembed.workers.checkpoint.files import check_with_changes, read_base_array
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not as committed.

    Attributes:
      spares_rows: rows and slots can be restored nevertheless; only other readers are misled.
    """

    name: str
    found: str
    expected: str
    spares_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`.

    Attributes:
      damages: everything that is missing or differs.
    """

    commit: str
    num_files: int
    num_bytes: int
    damages: tuple[Damage, ...]

    @property
    def is_intact(self) -> bool:
        return not self.damages


def verify(store: Store, manifest: Manifest) -> Verification:
    """Reads every file of a commit and compares it with the manifest: sizes, checksums, and the digest of each bucket.

    Memory: the largest bucket with its slots, or the largest dense leaf.
    """
    sizes = manifest.file_sizes()
    damages = (*_manifest_damages(store, manifest), *content_damages(store, manifest))
    return Verification(
        commit=manifest.name,
        num_files=len(sizes),
        num_bytes=sum(sizes.values()),
        damages=damages,
    )


def _manifest_damages(store: Store, manifest: Manifest) -> Iterator[Damage]:
    name = commit_file(manifest.name)
    try:
        stored = store.read(name, max_bytes=MAX_MANIFEST_BYTES)
    except StorageError as error:
        yield Damage(name=name, found=str(error), expected="the manifest")
        return
    if stored != to_json(manifest):
        yield Damage(name=name, found="other bytes", expected="the manifest given")


def size_damages(store: Store, manifest: Manifest) -> Iterator[Damage]:
    """Compares sizes through listings: one request per thousand files instead of one per file."""
    expected = manifest.file_sizes()
    folders = sorted({"/".join(name.split("/", 2)[:2]) for name in expected})
    found: dict[str, int] = {}
    for folder in folders:
        found |= store.sizes(folder)
    for name, size_bytes in expected.items():
        if name not in found:
            yield Damage(name=name, found="no file", expected=f"{size_bytes} bytes")
        elif found[name] != size_bytes:
            yield Damage(name=name, found=f"{found[name]} bytes", expected=f"{size_bytes} bytes")


def content_damages(store: Store, manifest: Manifest) -> Iterator[Damage]:
    """Damages in the content of the files that a commit names."""
    return file_damages(store, manifest.tables, manifest.dense, step=manifest.step)


def file_damages(
    store: Store,
    tables: Iterable[TableFiles],
    dense: Iterable[DenseFile],
    *,
    step: int | None = None,
    has_digests: bool = True,
) -> Iterator[Damage]:
    """Damages in the files of tables and dense arrays. Memory as `verify`.

    Args:
      step: steps after which they were written, if that is known.
      has_digests: whether the digests of buckets are of these arrays. Else each file is compared on its own.
    """
    for table in tables:
        for array in table.arrays:
            yield from _file_damages(store, f"{array.path}/zarr.json", array.metadata_size_bytes, array.metadata_crc32c)
        damaged = [damage for file in delta_files(table) for damage in _array_damages(store, file)]
        yield from damaged
        of_files = _file_as_a_whole_damages(store, table)
        yield from of_files.values()
        unreadable = {name for name, damage in of_files.items() if not damage.spares_rows}
        for bucket in range(table.num_buckets):
            is_joined = has_digests and not damaged
            yield from _bucket_damages(store, table, bucket, is_joined=is_joined, known=unreadable, step=step)
    for leaf in dense:
        yield from _array_damages(store, leaf)


def require_metadata(store: Store, table: TableFiles) -> None:
    """Compares the descriptions of a table's arrays with the manifest, by which they are read: a reader of the files
    alone must see the same.

    Raises:
      ChunkDamaged: one is missing or differs.
    """
    described = [
        (f"{array.path}/zarr.json", array.metadata_size_bytes, array.metadata_crc32c) for array in table.arrays
    ]
    described += [
        (f"{file.path}/zarr.json", file.metadata_size_bytes, file.metadata_crc32c) for file in delta_files(table)
    ]
    for damage in (
        damage for name, size, checksum in described for damage in _file_damages(store, name, size, checksum)
    ):
        raise ChunkDamaged(damage.name, damage.found, damage.expected, place=f"table '{table.name}', shape")


def _array_damages(store: Store, file: DenseFile) -> Iterator[Damage]:
    yield from _file_damages(store, f"{file.path}/zarr.json", file.metadata_size_bytes, file.metadata_crc32c)
    try:
        read_dense(store, file)
    except StorageError as error:
        yield _damage(file.chunk_file, error)


def _file_as_a_whole_damages(store: Store, table: TableFiles) -> dict[str, Damage]:
    """Damages of files with several buckets: they are missing, torn, or have a wrong index."""
    found = {}
    for array in table.arrays if table.buckets_per_file > 1 else ():
        for first in range(0, table.num_buckets, table.buckets_per_file):
            name = table.chunk(array, first).name
            try:
                check_file_index(store, table.metadata(array), name)
            except StorageError as error:
                found[name] = _damage(name, error)
    return found


def _bucket_damages(
    store: Store,
    table: TableFiles,
    bucket: int,
    *,
    is_joined: bool,
    known: Container[str],
    step: int | None,
) -> Iterator[Damage]:
    """Every chunk on its own; the digest joins them only where all are good, and the changed rows as well.

    Args:
      is_joined: whether the changed rows are good and the digest can be compared.
      known: files without readable rows, which have been reported.
    """
    values = []
    for array in table.arrays:
        name = table.chunk(array, bucket).name
        if name in known:
            continue
        try:
            values.append(read_base_array(store, table, array, bucket))
        except StorageError as error:
            damage = _damage(name, error)
            if table.buckets_per_file > 1:
                rows = describe_rows(Cut(table.num_buckets, bucket), num_rows=table.num_rows)
                damage = replace(damage, found=f"bucket {bucket} ({rows}) with {damage.found}")
            yield damage
    if len(values) < len(table.arrays) or not is_joined:
        return
    try:
        check_with_changes(store, table, bucket, values)
    except ChunkDamaged as error:
        yield _damage(error.name, error)
        return
    if table.is_dynamic:
        arrays = {array.name: value for array, value in zip(table.arrays, values, strict=True)}
        for name, found, expected in _key_damages(table, bucket, arrays, step):
            yield Damage(
                name=_newest_file(table, name, bucket), found=f"bucket {bucket} with {found}", expected=expected
            )


def _key_damages(
    table: TableFiles, bucket: int, arrays: Mapping[str, np.ndarray], step: int | None
) -> Iterator[tuple[str, str, str]]:
    """Keys that no index can have written: array, what was found, and what was expected. Bytes may be as committed all
    the same.

    Args:
      arrays: by name, those of the bucket with all deltas.
    """
    with_rows = np.empty(0, np.int64)
    for prefix, kind in (("", "keys"), ("waiting_", "waiting keys")):
        if f"{prefix}last" not in arrays:
            continue
        last = arrays[f"{prefix}last"][:, 0]
        keys = arrays[f"{prefix}key"][last != 0, 0]
        # A commit may hold what the step after it has decided.
        if step is not None and (late := last > step + 1).any():
            found = f"{_some(arrays[f'{prefix}key'][late, 0])} named by step {int(last.max()) - 1:,}"
            yield f"{prefix}last", found, f"none after step {step:,}, which the commit begins with"
        elsewhere = keys[table.layout.buckets_of(mix64(keys).view(np.int64)) != bucket]
        if len(elsewhere):
            yield f"{prefix}key", f"{_some(elsewhere)} of other buckets", f"{kind} whose hash says bucket {bucket}"
        distinct, times = np.unique(keys, return_counts=True)
        if len(distinct) < len(keys):
            yield f"{prefix}key", f"{_some(distinct[times > 1])} more than once", f"{kind} once each"
        if prefix and len(both := np.intersect1d(distinct, with_rows)):
            yield f"{prefix}key", f"{_some(both)} that wait and have a row", "keys that do either"
        with_rows = distinct


def _some(keys: np.ndarray) -> str:
    """The first of some keys, and how many they are."""
    return f"key {keys[0]}" + (f" and {len(keys) - 1:,} more" if len(keys) > 1 else "")


def _newest_file(table: TableFiles, array: str, bucket: int) -> str:
    """The file that an array of a bucket was written to last."""
    for delta in reversed(table.deltas):
        if (found := delta.find(bucket)) is not None:
            return next(file.chunk_file for file in found[0].files if file.key == array)
    return table.chunk(next(one for one in table.arrays if one.name == array), bucket).name


def _file_damages(store: Store, name: str, size_bytes: int, checksum: int) -> Iterator[Damage]:
    try:
        data = store.read(name, max_bytes=size_bytes)
    except StorageError as error:
        yield _damage(name, error)
        return
    if len(data) != size_bytes or crc32c(data) != checksum:
        found = f"{len(data)} bytes with CRC-32C {crc32c(data):08x}"
        yield Damage(name=name, found=found, expected=f"{size_bytes} bytes with {checksum:08x}")


def _damage(name: str, error: StorageError) -> Damage:
    if isinstance(error, ChunkDamaged):
        spares_rows = isinstance(error, IndexDamaged)
        return Damage(name=error.name, found=error.found, expected=error.expected, spares_rows=spares_rows)
    return Damage(name=name, found=str(error), expected="a file that can be read")
