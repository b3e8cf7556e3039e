"""`Manifest`: the last-written index of a checkpoint, whose creation under `commit/` is the commit itself.

It names every file with its size and checksum, so that a reader trusts no listing. It carries the step, which is the
position in the data, so that model and input cannot part. Reading is strict: a manifest that does not say exactly one
consistent thing is refused before any file it names is opened. `docs/checkpoint-format.md` describes the JSON.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podembed.orchestrator.api.text import plural
from podembed.workers.checkpoint.chunks import CRC_BYTES, file_bytes
from podembed.workers.checkpoint.deltas import problems_of
from podembed.workers.checkpoint.files import DenseFile
from podembed.workers.checkpoint.records import ROWS, ArrayFiles, ChunkFile, TableFiles
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.records import from_document, to_document
from podembed.workers.storage.store import is_safe_name
from podembed.workers.storage.strict_json import DocumentRefused, seal, unseal

FORMAT_VERSION = 2
# Version 1 had one bucket in each file.
READABLE_VERSIONS = (1, 2)
MAX_MANIFEST_BYTES = 256 << 20
_COMMIT_NAME = re.compile(r"s(\d{9,18})-g(\d{8,12})")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_BUCKETS = 1 << 20
_MAX_CHUNK_BYTES = 1 << 42
_MAX_TEXT = 4096
_CHUNK_COLUMNS = ("name", "size_bytes", "crc32c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed state of a run.

    Attributes:
      run_id: of the run's record; a driver does not start from a manifest of another run.
      format_version: of the writer.
      step: steps applied; training goes on with this step number, whose batch is a function of it.
      generation: of the driver that committed.
      parent: the commit before this one in the lineage; None for the first.
      created_unix_s: wall clock of the driver, for people.
      hosts: number of hosts that wrote it.
      cursor: further positions in the data by name, such as `epoch`; the step alone determines them.
      tables, dense: the files.
      placement: per table, the owner of each bucket when it was written.
      counters: totals since the run began, such as rows with invalid ids.
      metrics: of an evaluation of exactly this state, by name, such as `auc`; empty where there was none.
      versions: of the packages that wrote it.
    """

    run_id: str
    format_version: int = FORMAT_VERSION
    step: int
    generation: int
    parent: str | None
    created_unix_s: float
    hosts: int
    cursor: Mapping[str, int]
    tables: tuple[TableFiles, ...]
    dense: tuple[DenseFile, ...]
    placement: Mapping[str, tuple[int, ...]]
    counters: Mapping[str, int]
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        return commit_name(step=self.step, generation=self.generation)

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunk files that a reader needs, those of older attempts included."""
        return sum(table.size_bytes for table in self.tables) + sum(leaf.size_bytes for leaf in self.dense)

    def file_sizes(self) -> dict[str, int]:
        """Name → size of every file that this commit consists of, its own manifest left out."""
        sizes = {
            f"{array.path}/zarr.json": array.metadata_size_bytes for table in self.tables for array in table.arrays
        }
        sizes |= {chunk.name: chunk.size_bytes for table in self.tables for chunk in table.chunks}
        for file in (*self.dense, *(file for table in self.tables for file in delta_files(table))):
            sizes |= file.file_sizes()
        return sizes

    @property
    def num_deltas(self) -> int:
        """Incremental commits since the last full one, this one included; 0 for a full one."""
        return max((len(table.deltas) for table in self.tables), default=0)

    @property
    def written_bytes(self) -> int:
        """Bytes of the chunk files that this commit itself wrote."""
        own = f"data/{self.name}/"
        return sum(
            size for name, size in self.file_sizes().items() if name.startswith(own) and not name.endswith("/zarr.json")
        )


def delta_files(table: TableFiles) -> list[DenseFile]:
    """All files with changed rows of a table, in the order in which they apply."""
    return [file for delta in table.deltas for part in delta.parts for file in part.files]


def commit_name(*, step: int, generation: int) -> str:
    """`s000001200-g00000007`: sorts by step, then by generation, as long as both stay within their digits."""
    return f"s{step:09d}-g{generation:08d}"


def parse_commit_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a commit's name, or None for any other text."""
    match = _COMMIT_NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match.group(1)), int(match.group(2))
    return (step, generation) if commit_name(step=step, generation=generation) == name else None


def commit_file(name: str) -> str:
    return f"commit/{name}.json"


def to_json(manifest: Manifest) -> bytes:
    """The file's content.

    Raises:
      DocumentRefused: the manifest contradicts itself; see `problems`.
    """
    found = problems(manifest)
    if found:
        raise DocumentRefused(commit_file(manifest.name), found[0], "a manifest that names every bucket once")
    document = to_document(manifest)
    for table in document["tables"]:
        table["chunks"] = _pack(table["chunks"], [array["name"] for array in table["arrays"]])
        if manifest.format_version == 1:
            del table["buckets_per_file"]
    return seal(document)


def from_json(name: str, data: bytes) -> Manifest:
    """Reads the manifest of the commit `name`.

    Raises:
      DocumentRefused: a changed byte, another format version, a missing or unknown member, a value out of range, or a
        manifest that contradicts itself or its name.
    """
    file = commit_file(name)
    document = unseal(file, data, max_bytes=MAX_MANIFEST_BYTES)
    require_version(file, document.get("format_version"))
    for table in document["tables"] if isinstance(document.get("tables"), list) else []:
        if isinstance(table, dict):
            if document["format_version"] == 1:
                if "buckets_per_file" in table:
                    raise DocumentRefused(file, "member 'buckets_per_file' in version 1", "no such member")
                table["buckets_per_file"] = 1
            table["chunks"] = _unpack(file, table)
    manifest = from_document(Manifest, file, document)
    found = problems(manifest)
    if found:
        raise DocumentRefused(file, found[0], "a manifest that names every bucket once")
    if manifest.name != name:
        raise DocumentRefused(file, f"the manifest of {manifest.name}", "the commit that the file is named after")
    return manifest


def require_version(file: str, version: Any) -> None:
    """Raises DocumentRefused unless the format of a run's file is one that this program reads."""
    # True is 1 for Python, and 1.0 too.
    if type(version) is not int or version not in READABLE_VERSIONS:
        raise DocumentRefused(
            file,
            f"format version {str(version)[:40]}",
            f"{' or '.join(map(str, READABLE_VERSIONS))}, which this program reads; use a matching version of podembed",
        )


def problems(manifest: Manifest) -> list[str]:
    """What is inconsistent in a manifest, most general first; empty if nothing is. Opens no file."""
    found = _header_problems(manifest)
    for table in manifest.tables:
        found += _table_problems(table) or _chunk_problems(table) or _delta_problems(table, manifest.name)
    for leaf in manifest.dense:
        found += _dense_problems(leaf)
    if not found:
        found += _placement_problems(manifest) + _name_problems(manifest)
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
    if not power_of_two or table.num_buckets > _MAX_BUCKETS or table.num_rows < 1:
        return [f"{where} with {table.num_rows} rows in {table.num_buckets} buckets"]
    if table.buckets_per_file < 1 or table.num_buckets % table.buckets_per_file:
        return [f"{where} with {table.buckets_per_file} of {table.num_buckets} buckets a file"]
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
    if len(table.digests) != table.num_buckets or not all(map(_DIGEST.fullmatch, table.digests)):
        return [f"{where} with {len(table.digests)} digests for {table.num_buckets} buckets, or one of another form"]
    return []


def _chunk_problems(table: TableFiles) -> list[str]:
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
    if any(not 0 <= owner < manifest.hosts for owners in manifest.placement.values() for owner in owners):
        return [f"a placement on hosts outside 0..{manifest.hosts - 1}"]
    return []


def _name_problems(manifest: Manifest) -> list[str]:
    """One file under two entries would let one damage pass for another, and a delete take too much."""
    names = Counter(chunk.name for table in manifest.tables for chunk in table.chunks)
    names.update(f"{array.path}/zarr.json" for table in manifest.tables for array in table.arrays)
    for leaf in (*manifest.dense, *(file for table in manifest.tables for file in delta_files(table))):
        names.update((f"{leaf.path}/zarr.json", leaf.chunk_file))
    return [f"file {name} under several entries" for name, count in names.items() if count > 1][:1]


def _is_data_name(name: str) -> bool:
    """Whether a name lies in an attempt's folder: `data/<commit name>/...`."""
    parts = name.split("/", 2)
    return is_safe_name(name) and len(parts) == 3 and parts[0] == "data" and parse_commit_name(parts[1]) is not None


def _is_checksum(value: int) -> bool:
    return 0 <= value < 1 << 32


def _pack(chunks: list[dict[str, Any]], arrays: list[str]) -> dict[str, dict[str, list[Any]]]:
    """One list a column, in bucket order: a third of the size of one object a file."""
    packed = {array: {column: [] for column in _CHUNK_COLUMNS} for array in arrays}
    for chunk in chunks:
        columns = packed[chunk["array"]]
        columns["name"].append(chunk["name"])
        columns["size_bytes"].append(chunk["size_bytes"])
        columns["crc32c"] += chunk["crc32c"]
    return packed


def _unpack(file: str, table: dict[str, Any]) -> list[dict[str, Any]]:
    """One object a file, in the order of the arrays."""
    packed, arrays, per_file = table.get("chunks"), table.get("arrays"), table.get("buckets_per_file")
    if type(per_file) is not int or not 0 < per_file <= _MAX_BUCKETS:
        raise DocumentRefused(file, f"{str(per_file)[:40]} buckets a file", f"1 to {_MAX_BUCKETS}")
    listed = arrays if isinstance(arrays, list) else []
    names = [array["name"] for array in listed if isinstance(array, dict) and isinstance(array.get("name"), str)]
    if not isinstance(packed, dict) or packed.keys() != set(names):
        raise DocumentRefused(
            file, "chunks that do not match the table's arrays", "one member of 'chunks' for each array"
        )
    chunks = []
    for array in names:
        columns = packed[array]
        if not isinstance(columns, dict) or columns.keys() != set(_CHUNK_COLUMNS):
            raise DocumentRefused(
                file, f"chunks of array {array[:60]!r} without its columns", ", ".join(_CHUNK_COLUMNS)
            )
        names_of, sizes, checksums = lists = [columns[column] for column in _CHUNK_COLUMNS]
        if not all(isinstance(values, list) for values in lists) or not (
            len(names_of) * per_file == len(sizes) * per_file == len(checksums)
        ):
            raise DocumentRefused(
                file,
                f"columns of unequal length for array {array[:60]!r}",
                "a name and a size for each file, and a checksum for each bucket",
            )
        for at, (name, size_bytes) in enumerate(zip(names_of, sizes, strict=True)):
            first = at * per_file
            crc32c = checksums[first : first + per_file]
            chunks.append({"array": array, "bucket": first, "name": name, "size_bytes": size_bytes, "crc32c": crc32c})
    return chunks


__all__ = [
    "FORMAT_VERSION",
    "READABLE_VERSIONS",
    "ArrayFiles",
    "ChunkFile",
    "DenseFile",
    "Manifest",
    "TableFiles",
    "commit_file",
    "commit_name",
    "delta_files",
    "from_json",
    "parse_commit_name",
    "problems",
    "require_version",
    "to_json",
]
