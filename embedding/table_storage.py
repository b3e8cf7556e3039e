"""Where tables are saved to: the port through which this package, which does no I/O, reaches storage.

The package one floor up implements it (`workers.embedding_files`). It is looked up by name when it is first needed, so that
`TPUEmbedding.restore` works in a program that imports nothing else, and so that nothing here is imported upwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from embedding.table import Table

_IMPLEMENTATION = "workers.embedding_files"


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

    def restore(self, path: str, tables: Sequence[Table]) -> int:
        """Fills the buckets that are held here; returns the number of steps. Slots that a table lacks are left out."""
        ...

    def describe(self, path: str) -> tuple[SavedTable, ...]:
        """What a folder holds."""
        ...


def storage() -> TableStorage:
    """The storage of this installation."""
    return importlib.import_module(_IMPLEMENTATION).TABLE_STORAGE
