"""A copy for servers: the versions of a run in another store, such as one of another region.

It holds what servers read and nothing else: rows and keys without slots, parameters, manifests, versions, pointers.
Files have the names that they have in the run, so deltas are copied, and what is there already is not.

The order is what makes it safe. First the copy holds the commit, so that no other publisher deletes what this one has
found. Then come files, manifest, version, pointer. Killed anywhere, the newest pointer names a whole version. What
lies there without a manifest was left by such an end, and is compared byte by byte before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import format_bytes, plural
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_commit_names
from podembed.orchestrator.commit.manifest import Manifest, commit_file, delta_files, parse_commit_name
from podembed.orchestrator.commit.published import (
    COPY_FILE,
    CopyRecord,
    is_copy,
    is_held,
    is_quiet,
    newest_number,
    published_commits,
    read_copy,
)
from podembed.orchestrator.run.reference import is_run
from podembed.serving.publish.rewriting import RowError
from podembed.serving.served_files import served_files
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import ChunkFile, TableFiles
from podembed.workers.checkpoint.chunks import CRC_BYTES, ChunkDamaged, chunk_bytes, crc32c, file_index
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.storage.records import encode
from podembed.workers.storage.storage_errors import NameNotFound, StorageError, WrongSize
from podembed.workers.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What was copied of a commit; what was there already does not count.

    Attributes:
      error: how far the rows that were written in another form are from those of the run; None for float32.
      figures: name of a figure of the evaluation → its value of the run's rows, and of those in the copy.
      unmeasured: why there are none, where rows have another form.
    """

    num_files: int = 0
    num_bytes: int = 0
    error: RowError | None = None
    figures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unmeasured: str = ""


def described(copied: Copied, to: str) -> list[str]:
    """Lines for people."""
    lines = [f"copied {plural(copied.num_files, 'file')}, {format_bytes(copied.num_bytes)}, to {to}"]
    error = copied.error
    if error is None:
        return lines
    if error.num_rows:
        lines.append(
            f"largest error of a row: {error.largest:.3%} of its length, in table '{error.table}', of "
            f"{error.num_rows:,} rows written"
        )
    if error.num_left_out:
        lines.append(f"{error.num_left_out:,} of these rows are of keys that were not seen often enough")
    lines += [
        f"{name} {after:.6f} of the copy, {before:.6f} of the run ({after - before:+.6f})"
        for name, (before, after) in copied.figures.items()
    ]
    return lines if copied.figures else [*lines, f"the change of AUC was not measured: {copied.unmeasured}"]


def open_copy(url: str, record: CopyRecord) -> Store:
    """The store of a copy, which is begun if there is none.

    Raises:
      ConfigurationError: something else lies there, or a copy of another run or form.
      StoreCannotCreateExclusively: the storage cannot keep two publishers apart.
      DocumentRefused: the record of the copy is damaged.
    """
    store = Store(url)
    if not is_copy(store):
        if is_run(store):
            raise ConfigurationError(
                f"Found a run in {store.location}. Expected a copy for servers, or nothing. Choose another --to."
            )
        store.probe()
        store.create_exclusive(COPY_FILE, encode(record))
    found = read_copy(store)
    if found.run_id != record.run_id:
        raise ConfigurationError(
            f"Found a copy of run {found.run_id[:60]} of {found.source[:200]} in {store.location}. Expected run "
            f"{record.run_id[:60]}. Choose another --to."
        )
    if (found.rows, found.min_count) != (record.rows, record.min_count):
        raise ConfigurationError(
            f"Found a copy with {_form(found)} in {store.location}. Expected {_form(record)}, since all versions of a "
            "copy have one form. Choose another --to."
        )
    return store


def _form(record: CopyRecord) -> str:
    return f"--rows {record.rows} --min-count {record.min_count}"


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file of a commit. `is_good` tells whether bytes of its size are those that were committed."""

    name: str
    size_bytes: int
    is_good: Callable[[bytes], bool]


def copy_files(source: Store, target: Store, manifest: Manifest) -> Copied:
    """Copies what servers read of a commit, its manifest aside. Durable when it returns.

    Raises:
      ChunkDamaged: a file is missing or is not what was committed.
    """
    trusted = _named_files(target)
    files = [*_files_of(served_files(manifest))]
    sizes: dict[str, int] = {}
    for folder in sorted({"/".join(file.name.split("/", 2)[:2]) for file in files}):
        sizes |= target.sizes(folder)
    copied = []

    def copy(file: _File) -> None:
        if _is_there(target, file, sizes, trusted):
            return
        data = _read(source, file)
        with threads.writes():
            target.write_new(file.name, [data])
        copied.append(file.size_bytes)

    with FileThreads(target) as threads:
        for file in files:
            threads.submit(partial(copy, file))
        threads.finish()
    return Copied(num_files=len(copied), num_bytes=sum(copied))


def put(store: Store, name: str, data: bytes) -> None:
    """Creates a small file that always has these bytes. A damaged one is written anew."""
    if store.create_exclusive(name, data):
        return
    try:
        if store.read(name, max_bytes=len(data)) == data:
            return
    except (NameNotFound, WrongSize):
        pass
    store.delete(name)
    store.create_exclusive(name, data)


def _named_files(target: Store) -> set[str]:
    """The files of all commits that are in a copy. They were written before their manifests."""
    found: set[str] = set()
    for name in read_commit_names(target):
        try:
            found |= served_files(checkpoint.load(target, name)).file_sizes().keys()
        except StorageError:
            continue  # Damaged, or deleted meanwhile: its files are read before they are used.
    return found


def _is_there(target: Store, file: _File, sizes: dict[str, int], trusted: Collection[str]) -> bool:
    found = sizes.get(file.name)
    if found is None:
        return False
    if found == file.size_bytes:
        if file.name in trusted:
            return True
        try:
            _read(target, file)
            return True
        except ChunkDamaged:
            pass
    target.delete(file.name)
    return False


def _read(store: Store, file: _File) -> bytes:
    try:
        data = store.read(file.name, max_bytes=file.size_bytes)
    except (NameNotFound, WrongSize) as error:
        raise ChunkDamaged(file.name, error.found, f"{file.size_bytes} bytes as written") from error
    if len(data) != file.size_bytes:
        raise ChunkDamaged(file.name, f"{len(data)} bytes", f"{file.size_bytes} bytes as written")
    if not file.is_good(data):
        raise ChunkDamaged(file.name, "bytes with another checksum", "those that were written")
    return data


def _files_of(manifest: Manifest) -> Iterator[_File]:
    for table in manifest.tables:
        for array in table.arrays:
            yield _metadata_file(array.path, array.metadata_size_bytes, array.metadata_crc32c)
        for chunk in table.chunks:
            yield _File(chunk.name, chunk.size_bytes, partial(_are_chunks, table, chunk))
        for file in delta_files(table):
            yield from _files_of_array(file)
    for file in manifest.dense:
        yield from _files_of_array(file)


def _files_of_array(file: DenseFile) -> Iterator[_File]:
    yield _metadata_file(file.path, file.metadata_size_bytes, file.metadata_crc32c)
    if file.size_bytes:
        yield _File(file.chunk_file, file.size_bytes, partial(_is_chunk, checksum=file.crc32c))


def _metadata_file(path: str, size_bytes: int, checksum: int) -> _File:
    return _File(f"{path}/zarr.json", size_bytes, lambda data: crc32c(data) == checksum)


def _is_chunk(data: bytes, *, checksum: int) -> bool:
    return crc32c(data[:-CRC_BYTES]) == checksum and data[-CRC_BYTES:] == struct.pack("<I", checksum)


def _are_chunks(table: TableFiles, file: ChunkFile, data: bytes) -> bool:
    metadata = table.metadata(next(array for array in table.arrays if array.name == file.array))
    length = chunk_bytes(metadata)
    end = length * len(file.crc32c)
    return data[end:] == file_index(metadata) and all(
        _is_chunk(data[at * length : (at + 1) * length], checksum=checksum) for at, checksum in enumerate(file.crc32c)
    )


def clean_copy(store: Store, *, now_unix_s: float) -> None:
    """Deletes the commits that no kept version and no pin needs, and files that no commit needs. Does nothing while a
    publisher or a rollback is at work there: it may be about to name what looks unneeded.

    Raises:
      StorageError: a kept commit cannot be read, so what it needs is unknown; nothing is deleted.
    """
    if is_held(store, now_unix_s=now_unix_s):
        return
    since, names = newest_number(store), read_commit_names(store)
    # Of others nothing here is ours. Listed first: what comes later is not deleted.
    attempts = [name for name in store.children("data") if parse_commit_name(name) is not None]
    files = [file for attempt in attempts for file in store.sizes(f"data/{attempt}")]
    kept = published_commits(store, now_unix_s=now_unix_s).intersection(names)
    needed = {file for name in kept for file in served_files(checkpoint.load(store, name)).file_sizes()}
    unneeded = [commit_file(name) for name in sorted(set(names) - kept)]
    unneeded += [file for file in files if file not in needed]
    for file in unneeded:
        # Who began meanwhile may need what lay here before.
        if not is_quiet(store, since=since, now_unix_s=now_unix_s):
            return
        store.delete(file)
    for attempt in attempts:
        store.remove_empty_folders(f"data/{attempt}")
