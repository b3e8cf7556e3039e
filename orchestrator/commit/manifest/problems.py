"""What makes a manifest consistent: each bucket of each array is there once, and all of it can be true at once."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np

from podembed.orchestrator.api.text import plural
from podembed.orchestrator.commit.manifest.value import READABLE_VERSIONS, Manifest, delta_files, parse_commit_name
from podembed.workers.checkpoint.arrays import DenseFile
from podembed.workers.checkpoint.checkpoint_files import ROWS, ChunkFiles, TableFiles
from podembed.workers.checkpoint.chunks import CRC_BYTES, file_bytes
from podembed.workers.checkpoint.deltas import problems_of
from podembed.workers.checkpoint.digest import Digests
from podembed.workers.checkpoint.zarr_metadata import DTYPES, FLAT, NESTED
from podembed.workers.storage.store import is_safe_name

MAX_BUCKETS = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_CHUNK_BYTES = 1 << 42
_MAX_TEXT = 4096


def problems(manifest: Manifest) -> list[str]:
    """The inconsistencies of a manifest, most general first; empty if there are none. Opens no file."""
    found = _header_problems(manifest)
    for table in manifest.tables:
        found += _table_problems(table) or _chunk_problems(table) or _delta_problems(table, manifest.name)
    for leaf in manifest.dense:
        found += _dense_problems(leaf)
    if not found:
        found += _placement_problems(manifest) + _name_problems(manifest) + _order_problems(manifest)
    return found


def _header_problems(manifest: Manifest) -> list[str]:
    found = []
    if manifest.format_version not in READABLE_VERSIONS:
        found.append(f"format version {manifest.format_version}")
    if manifest.format_version == 1:
        # It has no word for it, and a reader would take each file for one bucket.
        found += [
            f"table {table.name[:60]!r} with {table.buckets_per_file} buckets a file in version 1"
            for table in manifest.tables
            if table.buckets_per_file != 1
        ]
    if manifest.format_version < 4:
        found += [
            f"table {table.name[:60]!r} with separator {table.separator!r} in version {manifest.format_version}"
            for table in manifest.tables
            if table.separator != NESTED
        ]
    if not 0 <= manifest.step < 10**18 or not 1 <= manifest.generation < 10**12 or manifest.hosts < 1:
        found.append(f"step {manifest.step}, generation {manifest.generation}, {plural(manifest.hosts, 'host')}")
    if manifest.parent is not None:
        parent = parse_commit_name(manifest.parent)
        if (
            parent is None
            or parent[0] > manifest.step
            or parent[1] > manifest.generation
            or manifest.parent == manifest.name
        ):
            found.append(f"parent {manifest.parent[:60]!r} of {manifest.name}")
    names = [*manifest.counters, *manifest.cursor, *manifest.metrics]
    texts = [manifest.run_id, *manifest.versions, *manifest.versions.values(), *names]
    if not manifest.run_id or max(map(len, texts)) > _MAX_TEXT:
        found.append(f"an empty run id or a text of more than {_MAX_TEXT} characters")
    names = Counter(table.name for table in manifest.tables)
    keys = Counter(leaf.key for leaf in manifest.dense)
    twice = [name for name, count in [*names.items(), *keys.items()] if count > 1]
    return found + [f"table or dense key {name[:60]!r} twice" for name in twice[:1]]


def _table_problems(table: TableFiles) -> list[str]:
    where = f"table {table.name[:60]!r}"
    power_of_two = table.num_buckets > 0 and table.num_buckets & (table.num_buckets - 1) == 0
    if not 0 < len(table.name) <= _MAX_TEXT or not table.name.isprintable():
        return [f"{where}, a name that is empty, too long or not printable"]
    if not power_of_two or table.num_buckets > MAX_BUCKETS or table.num_rows < 1:
        return [f"{where} with {table.num_rows} rows in {table.num_buckets} buckets"]
    if table.buckets_per_file < 1 or table.num_buckets % table.buckets_per_file:
        return [f"{where} with {table.buckets_per_file} of {table.num_buckets} buckets a file"]
    if table.separator not in (FLAT, NESTED):
        return [f"{where} with separator {table.separator[:40]!r} in the names of its files"]
    if table.rows_per_bucket != table.layout.rows_per_bucket:
        return [f"{where} with {table.num_rows} rows, {table.rows_per_bucket} in each of {table.num_buckets} buckets"]
    names = [array.name for array in table.arrays]
    if names[:1] != [ROWS] or len(set(names)) != len(names) or table.arrays[0].width != table.dim:
        return [f"{where} with arrays {names[:10]} and width {table.dim}"]
    for array in table.arrays:
        if array.dtype not in DTYPES or array.width < 1 or not _is_data_name(array.path):
            return [
                f"{where} with array {array.name[:60]!r} of {array.width} {array.dtype[:40]!r} at {array.path[:80]!r}"
            ]
        if not _is_checksum(array.metadata_crc32c) or not 0 < array.metadata_size_bytes <= 1 << 16:
            return [f"{where} with {array.metadata_size_bytes} bytes of metadata of array {array.name[:60]!r}"]
    are_digests = isinstance(table.digests, Digests) or all(map(_DIGEST.fullmatch, table.digests))
    if len(table.digests) != table.num_buckets or not are_digests:
        return [f"{where} with {len(table.digests)} digests for {table.num_buckets} buckets, or one of another form"]
    return []


def _chunk_problems(table: TableFiles) -> list[str]:
    if isinstance(table.chunks, ChunkFiles):
        return _packed_problems(table, table.chunks)
    where = f"table {table.name[:60]!r}"
    # The count first: a hostile manifest may name few chunks of very many buckets.
    count = sum(len(chunk.crc32c) for chunk in table.chunks)
    if count != len(table.arrays) * table.num_buckets:
        return [f"{where} with {count} chunks for {len(table.arrays)} arrays in {table.num_buckets} buckets"]
    firsts = range(0, table.num_buckets, table.buckets_per_file)
    expected = [(array.name, bucket) for array in table.arrays for bucket in firsts]
    found = [(chunk.array, chunk.bucket) for chunk in table.chunks]
    if found != expected:
        counted, wanted = Counter(found), Counter(expected)
        missing, extra = [*(wanted - counted)], [*(counted - wanted)]
        return [f"{where} without {missing[:3]} and with {extra[:3]} more than once or unknown, or out of order"]
    bytes_of = {array.name: file_bytes(table.metadata(array)) for array in table.arrays}
    for chunk in table.chunks:
        if len(chunk.crc32c) != table.buckets_per_file:
            return [f"{where} with {len(chunk.crc32c)} chunks in file {chunk.name[:80]!r}"]
        if not _is_data_name(chunk.name) or not all(map(_is_checksum, chunk.crc32c)):
            return [f"{where} with chunk {chunk.name[:80]!r}, checksums {chunk.crc32c[:3]}"]
        if not CRC_BYTES <= chunk.size_bytes == bytes_of[chunk.array] <= _MAX_CHUNK_BYTES:
            return [f"{where} with chunk {chunk.name} of {chunk.size_bytes} bytes instead of {bytes_of[chunk.array]}"]
    return []


def _packed_problems(table: TableFiles, chunks: ChunkFiles) -> list[str]:
    where = f"table {table.name[:60]!r}"
    wrong = [one for one in chunks.arrays if one.num_chunks != table.num_buckets]
    if wrong:
        return [f"{where} with {wrong[0].num_chunks} chunks of array {wrong[0].array!r} in {table.num_buckets} buckets"]
    found = [(one.array, one.path, one.separator, one.size_bytes) for one in chunks.arrays]
    expected = [(array.name, array.path, table.separator, file_bytes(table.metadata(array))) for array in table.arrays]
    if found != expected or chunks.buckets_per_file != table.buckets_per_file:
        return [f"{where} with files {found[:3]} of {chunks.buckets_per_file} buckets instead of {expected[:3]}"]
    largest = max(size_bytes for *_, size_bytes in found)
    if largest > _MAX_CHUNK_BYTES:
        return [f"{where} with files of {largest} bytes"]
    return []


def _delta_problems(table: TableFiles, commit: str) -> list[str]:
    """Deltas apply in the order of their commits, the last one at most as new as the manifest's own."""
    where = f"table {table.name[:60]!r}"
    commits = [parse_commit_name(delta.commit) for delta in table.deltas]
    order = [*commits, parse_commit_name(commit)]
    if None in order or len({*commits}) != len(commits) or sorted(order) != order:  # type: ignore[type-var]
        return [f"{where} with deltas of {[delta.commit[:40] for delta in table.deltas[:5]]} before {commit}"]
    arrays = {array.name: (array.width, array.dtype) for array in table.arrays}
    for delta in table.deltas:
        found = problems_of(delta, num_buckets=table.num_buckets, rows_per_bucket=table.rows_per_bucket, arrays=arrays)
        found += [problem for part in delta.parts for file in part.files for problem in _dense_problems(file)]
        if found:
            return [f"{where}, delta {delta.commit}: {found[0]}"]
    return []


def _dense_problems(leaf: DenseFile) -> list[str]:
    where = f"dense key {leaf.key[:60]!r}"
    if leaf.dtype not in DTYPES or len(leaf.shape) > 16 or min(leaf.shape, default=0) < 0 or len(leaf.key) > _MAX_TEXT:
        return [f"{where} of {leaf.dtype[:40]!r} {leaf.shape[:20]}"]
    num_bytes = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
    if leaf.size_bytes != (num_bytes + CRC_BYTES if num_bytes else 0) or leaf.size_bytes > _MAX_CHUNK_BYTES:
        return [f"{where} of {leaf.dtype} {leaf.shape} in {leaf.size_bytes} bytes"]
    if not _is_data_name(leaf.path) or not _is_data_name(leaf.chunk_file):
        return [f"{where} at {leaf.path[:80]!r}"]
    checksums_ok = _is_checksum(leaf.crc32c) and _is_checksum(leaf.metadata_crc32c)
    if not checksums_ok or not 0 < leaf.metadata_size_bytes <= 1 << 16:
        return [f"{where} at {leaf.path[:80]!r} with {leaf.metadata_size_bytes} bytes of metadata"]
    return []


def _placement_problems(manifest: Manifest) -> list[str]:
    buckets = {table.name: table.num_buckets for table in manifest.tables}
    if {name: len(owners) for name, owners in manifest.placement.items()} != buckets:
        return ["a placement that does not list each bucket of each table"]
    numbers = [np.asarray(owners, np.int64) for owners in manifest.placement.values()]
    if any(len(owners) and not 0 <= owners.min() <= owners.max() < manifest.hosts for owners in numbers):
        return [f"a placement on hosts outside 0..{manifest.hosts - 1}"]
    return []


def _name_problems(manifest: Manifest) -> list[str]:
    """One file under two entries would let one damage pass for another, and a delete take too much."""
    # Files of a `ChunkFiles` are named after the folder of their array, and arrays of two folders share no file.
    listed = [table for table in manifest.tables if not isinstance(table.chunks, ChunkFiles)]
    names = Counter(chunk.name for table in listed for chunk in table.chunks)
    names.update(f"{array.path}/zarr.json" for table in manifest.tables for array in table.arrays)
    for leaf in (*manifest.dense, *(file for table in manifest.tables for file in delta_files(table))):
        names.update((f"{leaf.path}/zarr.json", leaf.chunk_file))
    return [f"file {name} under several entries" for name, count in names.items() if count > 1][:1]


def _order_problems(manifest: Manifest) -> list[str]:
    """Tables whose files have other names than their arrays imply, from version 3 on."""
    if manifest.format_version < 3:
        return []
    for table in manifest.tables:
        if columns_of(table) is None:
            return [f"table {table.name[:60]!r} with files that do not lie where their arrays do"]
    return []


def columns_of(table: TableFiles) -> ChunkFiles | None:
    """The files of a table as columns; None if they do not lie where their arrays do."""
    return ChunkFiles.of(
        table.chunks,
        table.arrays,
        num_buckets=table.num_buckets,
        buckets_per_file=table.buckets_per_file,
        separator=table.separator,
    )


def _is_data_name(name: str) -> bool:
    """Whether a name lies in an attempt's folder: `data/<commit name>/...`."""
    parts = name.split("/", 2)
    return is_safe_name(name) and len(parts) == 3 and parts[0] == "data" and parse_commit_name(parts[1]) is not None


def _is_checksum(value: int) -> bool:
    return 0 <= value < 1 << 32
