"""A manifest as sealed JSON, in today's form and in those of the versions before.

What there is of each bucket would be most of the text, and most of the time to read it. So it is one text a column:
the bytes of all buckets in a row, as base64. Versions 1 and 2 had lists instead, with the name of each file. Reading is
strict: a manifest that does not say exactly one consistent thing is refused before any file it names is opened.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from podembed.orchestrator.commit.manifest.problems import MAX_BUCKETS, columns_of, problems
from podembed.orchestrator.commit.manifest.value import READABLE_VERSIONS, Manifest, Owners, commit_file
from podembed.workers.checkpoint.checkpoint_files import (
    CHECKSUM_BYTES,
    ArrayChunks,
    ChunkFiles,
    TableFiles,
)
from podembed.workers.checkpoint.digest import DIGEST_BYTES, Digests
from podembed.workers.checkpoint.zarr_metadata import NESTED
from podembed.workers.storage.records import from_document, to_document
from podembed.workers.storage.strict_json import DocumentRefused, seal, unseal

MAX_MANIFEST_BYTES = 256 << 20
_WITHOUT_NAMES = 3
_WITH_SEPARATORS = 4
_COLUMNS = ("name", "size_bytes", "crc32c")
_PART_COLUMNS = ("buckets", "counts")
# The longest text is a column of digests, in base64.
_MAX_TEXT_BYTES = -(-MAX_BUCKETS * DIGEST_BYTES // 3) * 4
_EXPECTED = "a manifest that names every bucket once"


def to_json(manifest: Manifest) -> bytes:
    """The file's content.

    Raises:
      DocumentRefused: the manifest contradicts itself; see `problems`.
    """
    found = problems(manifest)
    if found:
        raise DocumentRefused(commit_file(manifest.name), found[0], _EXPECTED)
    bare = tuple(replace(table, chunks=(), digests=()) for table in manifest.tables)
    document = to_document(replace(manifest, tables=bare, placement={}))
    is_packed = manifest.format_version >= _WITHOUT_NAMES
    for entry, table in zip(document["tables"], manifest.tables, strict=True):
        entry["chunks"] = _packed_chunks(table) if is_packed else _named_files(table)
        entry["digests"] = _packed(Digests.of(table.digests).data) if is_packed else list(table.digests)
        for part in _parts(entry) if is_packed else ():
            part.update({name: _packed(np.array(part[name], "<i4").tobytes()) for name in _PART_COLUMNS})
        if manifest.format_version == 1:
            del entry["buckets_per_file"]
        if manifest.format_version < _WITH_SEPARATORS:
            del entry["separator"]
    document["placement"] = {
        name: _packed(Owners.of(owners).data) if is_packed else list(owners)
        for name, owners in manifest.placement.items()
    }
    return seal(document)


def from_json(name: str, data: bytes) -> Manifest:
    """Reads the manifest of the commit `name`.

    Raises:
      DocumentRefused: a changed byte, another format version, a missing or unknown member, a value out of range, or a
        manifest that contradicts itself or its name.
    """
    file = commit_file(name)
    document = unseal(file, data, max_bytes=MAX_MANIFEST_BYTES, max_text_bytes=_MAX_TEXT_BYTES)
    require_version(file, document.get("format_version"))
    is_packed = document["format_version"] >= _WITHOUT_NAMES
    if document["format_version"] < _WITH_SEPARATORS:
        _fill_in(file, document, "separator", NESTED)
    manifest = _read_packed(file, document) if is_packed else _read_named(file, document)
    found = problems(manifest)
    if found:
        raise DocumentRefused(file, found[0], _EXPECTED)
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


def _fill_in(file: str, document: dict[str, Any], member: str, value: Any) -> None:
    """What the tables of an older version do not say.

    Raises:
      DocumentRefused: one of them says it.
    """
    for table in document["tables"] if isinstance(document.get("tables"), list) else []:
        if isinstance(table, dict):
            if member in table:
                found = f"member '{member}' in version {document['format_version']}"
                raise DocumentRefused(file, found, "no such member")
            table[member] = value


# ---------------------------------------------------------------- from version 3 on: columns as base64


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unpacked(file: str, where: str, text: Any, *, item_bytes: int, most: int) -> bytes:
    """The bytes of a column.

    Args:
      most: items that it may have. A longer text is refused before it is decoded.

    Raises:
      DocumentRefused: it is no text in canonical base64, or no whole number of items, or of more than there may be.
    """
    expected = f"base64 of {item_bytes} bytes a bucket"
    if not isinstance(text, str):
        raise DocumentRefused(file, f"{type(text).__name__} as {where}", expected)
    most = max(0, min(most, MAX_BUCKETS))
    if len(text) > -(-most * item_bytes // 3) * 4:
        raise DocumentRefused(
            file, f"a text of {len(text):,} characters as {where}", f"{expected}, of at most {most:,}"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise DocumentRefused(file, f"{text[:40]!r} as {where}", expected) from None
    # The same bytes have several texts where the last digit has bits to spare; a manifest has one.
    if len(data) % item_bytes or _packed(data) != text:
        raise DocumentRefused(file, f"{len(data)} bytes as {where}", expected)
    return data


def _packed_chunks(table: TableFiles) -> dict[str, dict[str, Any]]:
    chunks = columns_of(table)
    arrays = () if chunks is None else chunks.arrays
    return {one.array: {"size_bytes": one.size_bytes, "crc32c": _packed(one.crc32c)} for one in arrays}


def _read_packed(file: str, document: dict[str, Any]) -> Manifest:
    """The columns are taken out, and what is left is read strictly."""
    entries = document.get("tables")
    entries = entries if isinstance(entries, list) else []
    packed = [_taken(entry, chunks=[], digests=[]) for entry in entries]
    for entry in entries:
        for part in _parts(entry):
            for name in _PART_COLUMNS:
                if isinstance(part, dict) and name in part:
                    where, most = f"{name} of a delta", _buckets_of(entry)
                    data = _unpacked(file, where, part[name], item_bytes=4, most=most)
                    part[name] = np.frombuffer(data, "<i4").tolist()
    owners = _taken(document, placement={}).get("placement")
    manifest = from_document(Manifest, file, document)
    if not isinstance(owners, dict):
        raise DocumentRefused(file, f"{type(owners).__name__} as placement", "an object")
    num_buckets = {table.name: table.num_buckets for table in manifest.tables}
    return replace(
        manifest,
        tables=tuple(_with_columns(file, table, own) for table, own in zip(manifest.tables, packed, strict=True)),
        placement={
            name: Owners(
                _unpacked(
                    file,
                    f"placement of {name[:60]!r}",
                    text,
                    item_bytes=Owners.ITEM_BYTES,
                    most=num_buckets.get(name, MAX_BUCKETS),
                )
            )
            for name, text in owners.items()
        },
    )


def _buckets_of(entry: Any) -> int:
    """Buckets of a table's entry that is not checked yet; 0 where it does not say."""
    found = entry.get("num_buckets") if isinstance(entry, dict) else None
    return found if type(found) is int else 0


def _parts(entry: Any) -> Iterator[Any]:
    """The parts with changed rows of a table's entry, as far as it has that form."""
    deltas = entry.get("deltas") if isinstance(entry, dict) else None
    for delta in deltas if isinstance(deltas, list) else ():
        parts = delta.get("parts") if isinstance(delta, dict) else None
        yield from parts if isinstance(parts, list) else ()


def _taken(document: Any, **empty: Any) -> dict[str, Any]:
    """Some members of an object, which are empty in it from then on. One that is missing stays missing."""
    if not isinstance(document, dict):
        return {}
    taken = {name: document[name] for name in empty if name in document}
    document.update({name: empty[name] for name in taken})
    return taken


def _with_columns(file: str, table: TableFiles, packed: dict[str, Any]) -> TableFiles:
    where = f"table {table.name[:60]!r}"
    chunks = packed["chunks"]
    names = [array.name for array in table.arrays]
    # An array twice is found with the other problems of a table.
    if not isinstance(chunks, dict) or chunks.keys() != {*names}:
        raise DocumentRefused(file, f"chunks of {where} that do not match its arrays", "one member for each array")
    if not 0 < table.buckets_per_file <= MAX_BUCKETS:
        raise DocumentRefused(file, f"{table.buckets_per_file} buckets a file", f"1 to {MAX_BUCKETS}")
    columns = []
    for array in table.arrays:
        of_array = chunks[array.name]
        is_whole = isinstance(of_array, dict) and of_array.keys() == {"size_bytes", "crc32c"}
        if not is_whole or type(of_array["size_bytes"]) is not int:
            raise DocumentRefused(file, f"chunks of array {array.name[:60]!r} of {where}", "size_bytes and crc32c")
        data = _unpacked(
            file, f"checksums of {where}", of_array["crc32c"], item_bytes=CHECKSUM_BYTES, most=table.num_buckets
        )
        size_bytes = of_array["size_bytes"]
        columns.append(ArrayChunks.of(array, size_bytes=size_bytes, crc32c=data, separator=table.separator))
    digests = _unpacked(file, f"digests of {where}", packed["digests"], item_bytes=DIGEST_BYTES, most=table.num_buckets)
    files = ChunkFiles(buckets_per_file=table.buckets_per_file, arrays=tuple(columns))
    return replace(table, chunks=files, digests=Digests(digests))


# ---------------------------------------------------------------- versions 1 and 2: lists


def _read_named(file: str, document: dict[str, Any]) -> Manifest:
    if document["format_version"] == 1:
        _fill_in(file, document, "buckets_per_file", 1)
    for table in document["tables"] if isinstance(document.get("tables"), list) else []:
        if isinstance(table, dict):
            table["chunks"] = _chunks_of_named(file, table)
    return from_document(Manifest, file, document)


def _named_files(table: TableFiles) -> dict[str, dict[str, list[Any]]]:
    """One list a column, in bucket order: a third of the size of one object a file."""
    packed = {array.name: {column: [] for column in _COLUMNS} for array in table.arrays}
    for chunk in table.chunks:
        columns = packed[chunk.array]
        columns["name"].append(chunk.name)
        columns["size_bytes"].append(chunk.size_bytes)
        columns["crc32c"] += chunk.crc32c
    return packed


def _chunks_of_named(file: str, table: dict[str, Any]) -> list[dict[str, Any]]:
    """One object a file, in the order of the arrays."""
    packed, arrays, per_file = table.get("chunks"), table.get("arrays"), table.get("buckets_per_file")
    if type(per_file) is not int or not 0 < per_file <= MAX_BUCKETS:
        raise DocumentRefused(file, f"{str(per_file)[:40]} buckets a file", f"1 to {MAX_BUCKETS}")
    listed = arrays if isinstance(arrays, list) else []
    names = [array["name"] for array in listed if isinstance(array, dict) and isinstance(array.get("name"), str)]
    if not isinstance(packed, dict) or packed.keys() != set(names):
        raise DocumentRefused(
            file, "chunks that do not match the table's arrays", "one member of 'chunks' for each array"
        )
    chunks = []
    for array in names:
        columns = packed[array]
        if not isinstance(columns, dict) or columns.keys() != set(_COLUMNS):
            raise DocumentRefused(file, f"chunks of array {array[:60]!r} without its columns", ", ".join(_COLUMNS))
        names_of, sizes, checksums = lists = [columns[column] for column in _COLUMNS]
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
