"""Looking up single rows of a commit, for people: the values and the optimizer's state of a few ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.text import printable
from podembed.orchestrator.run.reference import CommittedState
from podembed.serving.committed_rows import read_rows
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.columns.id_columns import key_of_text


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
      ids: numbers; of a table whose keys come and go also texts, and `text:7` for the text of a number.

    Raises:
      ConfigurationError: no such table, or an id that is no row of it.
      ChunkDamaged: a bucket is not what was committed.
    """
    files = state.table(table)
    ids = [_key(one, files) for one in ids]
    values = read_rows(state.store, files, ids, with_slots=with_slots)
    # A key that waits stands at the row by chance.
    values = {name: value for name, value in values.items() if not (files.is_dynamic and name.startswith("waiting_"))}
    return ExtractedRows(table=files.name, commit=state.manifest.name, ids=tuple(map(int, ids)), values=values)


def _key(id_or_text: int | str, table: TableFiles) -> int:
    text = str(id_or_text)
    if re.fullmatch(r"-?\d+", text):
        number = int(text)
        # Unsigned keys are those of the same bits.
        is_unsigned = table.is_dynamic and 1 << 63 <= number < 1 << 64
        return number - (1 << 64) if is_unsigned else number
    if not table.is_dynamic:
        raise ConfigurationError(
            f"Found {text!r} for table '{table.name}'. Expected numbers of rows, 0 to {table.num_rows - 1}. Pass "
            "numbers, after any hashing of raw ids."
        )
    return key_of_text(text.removeprefix("text:"))


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
