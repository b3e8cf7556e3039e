"""Looking up single rows of a commit, for people: the values and the optimizer's state of a few ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.text import printable
from podembed.orchestrator.run.reference import CommittedState
from podembed.serving.committed_rows import find_keys, read_rows
from podembed.tools.inspect.written_keys import WrittenKeys
from podembed.workers.checkpoint.checkpoint_files import TableFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedRows:
    """Rows of one table. `values`: array name → `[len(ids), width]`, rows first."""

    table: str
    commit: str
    ids: tuple[int, ...]
    values: Mapping[str, np.ndarray]


def extract(state: CommittedState, table: str, ids: Sequence[int | str], *, with_slots: bool = True) -> ExtractedRows:
    """Reads rows by number, or by key where keys come and go; only the buckets in which they lie.

    Args:
      ids: numbers; of a table whose keys come and go also texts, and `text:7` for the text of a number. One that its
        features read in several ways may give several rows.

    Raises:
      ConfigurationError: no such table, or an id that is no row of it.
      ChunkDamaged: a bucket is not what was committed.
    """
    files = state.table(table)
    written = WrittenKeys(state.store, files)
    meant = [written.of(one) for one in ids]
    numbers = [keys[0] for keys in meant] if not files.is_dynamic else _with_rows(state, files, meant)
    values = read_rows(state.store, files, numbers, with_slots=with_slots)
    # A key that waits stands at the row by chance.
    values = {name: value for name, value in values.items() if not (files.is_dynamic and name.startswith("waiting_"))}
    return ExtractedRows(table=files.name, commit=state.manifest.name, ids=tuple(numbers), values=values)


def _with_rows(state: CommittedState, table: TableFiles, meant: Sequence[tuple[int, ...]]) -> list[int]:
    """Those of the keys that have a row; the first one where none has, so that it is named."""
    flat = [key for keys in meant for key in keys]
    has_row = dict(zip(flat, find_keys(state.store, table, flat) >= 0, strict=True))
    return [key for keys in meant for key in [one for one in keys if has_row[one]] or keys[:1]]


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
