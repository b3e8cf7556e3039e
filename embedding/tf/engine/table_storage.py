"""Where tables and checkpoints are saved to: the ports through which this package, which does no I/O, reaches storage.

The package one floor up implements them (`workers.stepwise.saved_embedding`, `workers.stepwise.checkpoint`). They are
looked up by name when they are first needed, so that `TPUEmbedding.restore` works in a program that imports nothing
else. This module therefore imports nothing from above.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from podembed.embedding.table.table import Table

_TABLES = "podembed.workers.stepwise.saved_embedding"
_CHECKPOINTS = "podembed.workers.stepwise.checkpoint"

WrittenTables = Mapping[str, Any]
"""The record of tables whose files are written and which no index names yet, as the storage that wrote them understands
it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTable:
    """One table of a saved embedding. `widths` maps "rows" and each slot to its columns."""

    name: str
    num_rows: int
    widths: dict[str, int]


class TableStorage(Protocol):
    """Saves and restores tables below a folder or URL."""

    def save(self, path: str, tables: Sequence[Table], *, num_steps: int) -> None:
        """Writes tables that are held here whole. The folder must not hold a saved embedding yet."""
        ...

    def write(self, path: str, tables: Sequence[Table], *, num_steps: int) -> WrittenTables:
        """The files of `save`, without the index that makes them a saved embedding."""
        ...

    def restore(self, path: str, tables: Sequence[Table]) -> int:
        """Fills the buckets that are held here; returns the number of steps. Slots that a table lacks are left out."""
        ...

    def describe(self, path: str) -> tuple[SavedTable, ...]:
        """What a folder holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What a checkpoint holds.

    Attributes:
      parts: names of what was saved, also of those that have no array.
      arrays: key → shape and dtype of each array; a key is `<part>/<place in it>`, or the part alone.
      has_embedding: whether tables are part of it.
    """

    parts: tuple[str, ...]
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]]
    has_embedding: bool


class CheckpointStorage(Protocol):
    """Saves and restores checkpoints of several parts, each in a folder or below a URL of its own."""

    def next_path(self, folder: str) -> AbstractContextManager[str]:
        """A new place for a checkpoint, behind all that the folder has, finished or not. Other threads of the program
        get theirs when the block ends.
        """
        ...

    def latest_path(self, folder: str) -> str | None:
        """The last finished checkpoint of a folder; None if it has none."""
        ...

    def require_free(self, path: str) -> None:
        """Raises StorageError if something was saved there."""
        ...

    def publish(
        self, path: str, *, parts: Sequence[str], arrays: Mapping[str, np.ndarray], tables: WrittenTables | None
    ) -> None:
        """Writes the arrays, and then the index: from that moment on all is a checkpoint, before that nothing."""
        ...

    def describe(self, path: str) -> SavedCheckpoint:
        """What a checkpoint holds."""
        ...

    def read(self, path: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays by their keys, each compared with its checksum."""
        ...


def storage() -> TableStorage:
    """The storage of tables of this installation."""
    return importlib.import_module(_TABLES).TABLE_STORAGE


def checkpoint_storage() -> CheckpointStorage:
    """The storage of checkpoints of this installation."""
    return importlib.import_module(_CHECKPOINTS).CHECKPOINT_STORAGE
