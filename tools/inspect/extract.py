"""Looking up single rows of a commit, for people: the values and the optimizer's state of a few ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.text import printable
from podembed.orchestrator.run.reference import CommittedState
from podembed.serving.committed_rows import read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedRows:
    """Rows of one table. `values`: array name → `[len(ids), width]`, rows first."""

    table: str
    commit: str
    ids: tuple[int, ...]
    values: Mapping[str, np.ndarray]


def extract(state: CommittedState, table: str, ids: Sequence[int], *, with_slots: bool = True) -> ExtractedRows:
    """Reads rows by number, only the buckets in which they lie.

    Raises:
      ConfigurationError: no such table, or an id that is no row of it.
      ChunkDamaged: a bucket is not what was committed.
    """
    files = state.table(table)
    values = read_rows(state.store, files, ids, with_slots=with_slots)
    return ExtractedRows(table=files.name, commit=state.manifest.name, ids=tuple(map(int, ids)), values=values)


def render(found: ExtractedRows) -> str:
    """A paragraph for each id: a line for the row and one for each slot. Numbers have the digits that give back the
    same bits.
    """
    width = max(map(len, found.values))
    paragraphs = []
    for at, row in enumerate(found.ids):
        lines = [f"  {name.ljust(width)}  {' '.join(map(str, values[at]))}" for name, values in found.values.items()]
        paragraphs.append("\n".join([f"{found.table}[{row}]", *lines]))
    return printable("\n".join(paragraphs))
