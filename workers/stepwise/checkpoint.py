"""Checkpoints of the step-by-step mode: arrays of the model and the optimizer, and the tables of an embedding, under
one index.

A checkpoint is a folder of its own, `ckpt-<number>` in the folder that the user names. Arrays are Zarr arrays of one
chunk below `data/<attempt>/parts/`, tables lie beside them as in a saved embedding
(`workers.stepwise.saved_embedding`). `checkpoint.json`, created last and exclusively, names every file with its
checksum: a folder without it is what an interrupted save left, and nothing reads it. Implements
`embedding.table.table_storage.CheckpointStorage`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from podembed.embedding.table.table_storage import SavedCheckpoint, WrittenTables
from podembed.workers.checkpoint.arrays import DenseFile, read_dense, safe_segment, write_array
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.stepwise.saved_embedding import (
    CHECKPOINT_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    NothingSaved,
    new_attempt,
    read_document,
    require_free,
    sealed_index,
    taken,
    text,
    whole,
)
from podembed.workers.storage.errors import NameNotFound, NotAFolder
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

_CHECKPOINT = re.compile(r"ckpt-([1-9][0-9]{0,17})")


class _CheckpointFiles:
    """`CheckpointStorage` over one index and the files that it names."""

    def next_path(self, folder: str) -> str:
        # Behind those without an index, too: what an interrupted save left is never mixed with a new one.
        return _path(folder, 1 + max(_numbers(Store(folder)), default=0))

    def latest_path(self, folder: str) -> str | None:
        store = Store(folder)
        for number in sorted(_numbers(store), reverse=True):
            if store.exists(f"ckpt-{number}/{CHECKPOINT_FILE}"):
                return _path(folder, number)
        return None

    def require_free(self, path: str) -> None:
        require_free(path)

    def publish(
        self, path: str, *, parts: Sequence[str], arrays: Mapping[str, np.ndarray], tables: WrittenTables | None
    ) -> None:
        store, attempt = Store(path), new_attempt()
        files = [
            asdict(write_array(store, f"data/{attempt}/parts/{safe_segment(key)}", key, values))
            for key, values in arrays.items()
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "parts": list(parts),
            "arrays": [{**file, "shape": list(file["shape"])} for file in files],
            "embedding": None if tables is None else dict(tables),
        }
        require_free(path)
        if not store.create_exclusive(CHECKPOINT_FILE, sealed_index(CHECKPOINT_FILE, document)):
            raise taken(path)

    def describe(self, path: str) -> SavedCheckpoint:
        document, files = read_checkpoint(path)
        return SavedCheckpoint(
            parts=tuple(document["parts"]),
            arrays={key: (file.shape, DTYPES[file.dtype]) for key, file in files.items()},
            has_embedding=document["embedding"] is not None,
        )

    def read(self, path: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
        _, files = read_checkpoint(path)
        store = Store(path)
        return {key: read_dense(store, files[key]) for key in keys}


def saved_paths(path: str) -> list[str]:
    """Folders of what a program with a loop of its own saved: this one, or the `ckpt-<number>` below it, oldest first.

    Those without an index are of interrupted saves. Empty where nothing of this kind lies.
    """
    store = Store(path)
    try:
        if any(store.exists(name) for name in (CHECKPOINT_FILE, INDEX_FILE)):
            return [path]
        return [_path(path, number) for number in sorted(_numbers(store))]
    except NotAFolder:
        return []


def _numbers(store: Store) -> list[int]:
    return [int(found[1]) for name in store.children() if (found := _CHECKPOINT.fullmatch(name))]


def _path(folder: str, number: int) -> str:
    return f"{folder.rstrip('/') or '/'}/ckpt-{number}"


def read_checkpoint(path: str) -> tuple[dict[str, Any], dict[str, DenseFile]]:
    """The index, and its arrays by key.

    Raises:
      NothingSaved: there is no index.
      DocumentRefused: it is damaged or not ours.
    """
    store = Store(path)
    try:
        document = read_document(store, CHECKPOINT_FILE)
    except NameNotFound:
        if store.exists(INDEX_FILE):
            raise NothingSaved(
                f"Found a saved embedding in {store.location}. Expected a checkpoint. Pass the path to "
                "TPUEmbedding.restore."
            ) from None
        raise NothingSaved(
            f"Found no {CHECKPOINT_FILE} in {store.location}. Expected a folder written by Checkpoint.save. Check the "
            "path, or take that of "
            "latest_checkpoint; a save that was interrupted leaves none."
        ) from None
    try:
        files = {text(one["key"]): _file(one) for one in document["arrays"]}
        if len(files) != len(document["arrays"]):
            raise ValueError("an array twice")
        if not isinstance(document["parts"], list):
            raise TypeError("parts that are no list")
        document["parts"] = [text(part) for part in document["parts"]]
        if not isinstance(document["embedding"], dict | None):
            raise ValueError("an embedding that is no record")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentRefused(CHECKPOINT_FILE, f"{type(error).__name__}: {error}"[:200], "an index of arrays") from None
    return document, files


def _file(document: Mapping[str, Any]) -> DenseFile:
    """Raises ValueError, KeyError or TypeError for anything that is not an array's file."""
    if document["dtype"] not in DTYPES:
        raise ValueError(f"elements of {document['dtype']!r:.40}")
    file = DenseFile(
        key=text(document["key"]),
        path=text(document["path"]),
        shape=tuple(whole(axis) for axis in document["shape"]),
        dtype=document["dtype"],
        size_bytes=whole(document["size_bytes"]),
        crc32c=whole(document["crc32c"]),
        metadata_size_bytes=whole(document["metadata_size_bytes"]),
        metadata_crc32c=whole(document["metadata_crc32c"]),
    )
    # What the shape says is what is allocated, so it must be that of a file; reading compares its length with it.
    if (file.size_bytes == 0) != (0 in file.shape):
        raise ValueError(f"an array of shape {file.shape} in {file.size_bytes} bytes")
    file.metadata  # noqa: B018 - refuses a path or shape that no array has
    return file


CHECKPOINT_STORAGE = _CheckpointFiles()
