"""Checkpoints of the step-by-step mode: arrays of the model and the optimizer, and the tables of an embedding, under
one index.

A checkpoint is a folder `ckpt-<number>` in the folder that the user names. Each array is a Zarr array of one chunk
below `data/<attempt>/parts/`. Tables lie beside them as in a saved embedding (`workers.stepwise.saved_embedding`). A
save creates `checkpoint.json` last and exclusively, with the name and checksum of every file. Nothing reads a folder
without it, which an interrupted save left. Implements `embedding.tf.engine.table_storage.CheckpointStorage`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from podembed.embedding.tf.engine.table_storage import SavedCheckpoint, WrittenTables
from podembed.workers.checkpoint.arrays import DenseFile, read_dense, safe_segment, write_array
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.stepwise.saved_embedding import new_attempt
from podembed.workers.stepwise.saved_index import (
    CHECKPOINT_FILE,
    FORMAT_VERSION,
    INDEX_FILE,
    CheckpointRecord,
    NothingSaved,
    read_checkpoint_record,
    require_free,
    sealed_index,
    taken,
)
from podembed.workers.storage.records import to_document
from podembed.workers.storage.storage_errors import NameNotFound, NotAFolder, NotAPlainFile
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

_SAVING = threading.Lock()
_CHECKPOINT = re.compile(r"ckpt-([1-9][0-9]{0,17})")


class _CheckpointFiles:
    """`CheckpointStorage` over one index and the files that it names."""

    @contextlib.contextmanager
    def next_path(self, folder: str) -> Iterator[str]:
        # Until the save has made its folder, a second one would choose the same number.
        with _SAVING:
            # Folders without an index count, too, so that no save goes where an interrupted one has left files.
            yield _path(folder, 1 + max(_numbers(Store(folder)), default=0))

    def latest_path(self, folder: str) -> str | None:
        store = Store(folder)
        for number in sorted(_numbers(store), reverse=True):
            with contextlib.suppress(NotAPlainFile):  # somebody's own file of such a name
                if store.exists(f"ckpt-{number}/{CHECKPOINT_FILE}"):
                    return _path(folder, number)
        return None

    def require_free(self, path: str) -> None:
        require_free(path)

    def publish(
        self, path: str, *, parts: Sequence[str], arrays: Mapping[str, np.ndarray], tables: WrittenTables | None
    ) -> None:
        store, attempt = Store(path), new_attempt()
        record = CheckpointRecord(
            format_version=FORMAT_VERSION,
            parts=tuple(parts),
            arrays=tuple(
                write_array(store, f"data/{attempt}/parts/{safe_segment(key)}", key, values)
                for key, values in arrays.items()
            ),
            embedding=None,
        )
        document = {**to_document(record), "embedding": None if tables is None else dict(tables)}
        require_free(path)
        if not store.create_exclusive(CHECKPOINT_FILE, sealed_index(CHECKPOINT_FILE, document)):
            raise taken(path)

    def describe(self, path: str) -> SavedCheckpoint:
        record, files = read_checkpoint(path)
        return SavedCheckpoint(
            parts=record.parts,
            arrays={key: (file.shape, DTYPES[file.dtype]) for key, file in files.items()},
            has_embedding=record.embedding is not None,
        )

    def read(self, path: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
        _, files = read_checkpoint(path)
        store = Store(path)
        return {key: read_dense(store, files[key]) for key in keys}


def saved_paths(path: str) -> list[str]:
    """Folders that a program with a loop of its own saved: this one, or each `ckpt-<number>` below it, oldest first.

    An interrupted save leaves a folder without an index, which is listed, too. Empty if nothing was saved there.
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


def read_checkpoint(path: str) -> tuple[CheckpointRecord, dict[str, DenseFile]]:
    """The index, and its arrays by key.

    Raises:
      NothingSaved: there is no index.
      DocumentRefused: it is damaged or not ours.
    """
    store = Store(path)
    try:
        record = read_checkpoint_record(store)
    except NameNotFound:
        if store.exists(INDEX_FILE):
            raise NothingSaved(
                f"Found a saved embedding in {store.location}. Expected a checkpoint. Pass the path to "
                "TPUEmbedding.restore."
            ) from None
        raise NothingSaved(
            f"Found no {CHECKPOINT_FILE} in {store.location}. Expected a folder written by Checkpoint.save. Check the "
            "path, or take that of latest_checkpoint; a save that was interrupted leaves none."
        ) from None
    files = {file.key: file for file in record.arrays}
    problems = [problem for file in record.arrays if (problem := _problem(file))]
    if len(files) != len(record.arrays):
        problems.append("an array twice")
    if problems:
        raise DocumentRefused(CHECKPOINT_FILE, problems[0][:200], "an index of arrays")
    return record, files


def _problem(file: DenseFile) -> str | None:
    """Why the array cannot have such a file; None if it can."""
    if file.dtype not in DTYPES:
        return f"elements of {file.dtype!r:.40}"
    if min(*file.shape, 0, file.size_bytes, file.crc32c, file.metadata_size_bytes, file.metadata_crc32c) < 0:
        return "a negative number"
    # A reader allocates what the shape says, and then compares that with the length of the file.
    if (file.size_bytes == 0) != (0 in file.shape):
        return f"an array of shape {file.shape} in {file.size_bytes} bytes"
    try:
        file.metadata  # noqa: B018 - refuses a path or shape that no array has
    except ValueError as error:
        return str(error)
    return None


CHECKPOINT_STORAGE = _CheckpointFiles()
