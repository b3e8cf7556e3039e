"""`served_files`: what servers read of a commit, which is all that a copy for servers holds of it."""

from __future__ import annotations

from dataclasses import replace

from podembed.orchestrator.commit.manifest import Manifest
from podembed.workers.checkpoint.checkpoint_files import ROWS, ChunkFiles, TableFiles
from podembed.workers.checkpoint.deltas import IDS, DeltaFiles

SCORED_PARTS = ("params", "state")
"""Of the dense state; the others are the optimizer's."""
SCALE = "scale"
"""Array beside rows of int8: by what each row is multiplied."""


def served_files(manifest: Manifest) -> Manifest:
    """The same commit without slots, counts of keys, and the dense optimizer. Digests of buckets cover slots, so those
    of the result can be compared with nothing.
    """
    return replace(
        manifest,
        tables=tuple(map(served_table, manifest.tables)),
        dense=tuple(file for file in manifest.dense if file.key.split("/", 1)[0] in SCORED_PARTS),
    )


def served_table(table: TableFiles) -> TableFiles:
    """One table of `served_files`: its rows and, where keys come and go, whose they are."""
    names = {ROWS}
    if table.arrays[0].dtype == "int8":
        names.add(SCALE)
    if table.is_dynamic:
        names |= {"key", "last"}
    chunks = table.chunks
    if isinstance(chunks, ChunkFiles):
        chunks = replace(chunks, arrays=tuple(one for one in chunks.arrays if one.array in names))
    else:
        chunks = tuple(chunk for chunk in chunks if chunk.array in names)
    return replace(
        table,
        arrays=tuple(array for array in table.arrays if array.name in names),
        chunks=chunks,
        deltas=tuple(_served_delta(delta, names | {IDS}) for delta in table.deltas),
    )


def _served_delta(delta: DeltaFiles, names: set[str]) -> DeltaFiles:
    parts = (replace(part, files=tuple(file for file in part.files if file.key in names)) for part in delta.parts)
    return replace(delta, parts=tuple(parts))
