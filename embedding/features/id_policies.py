"""Ids outside a table's vocabulary: refused, dropped, clipped or hashed into it, as the table declares.

Arrays of JAX and numpy wrap, clamp or drop such ids without a word, and the wrong row is read and trained. The host
therefore compares every id with the vocabulary before anything is looked up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.hashing import mix64
from podembed.embedding.ragged import Ragged


def shown_path(path: str) -> str:
    """A path for messages, where that of a single leaf would be invisible."""
    return path or "(the only feature)"


def fit_ids(path: str, bags: Ragged, table: TableConfig) -> tuple[Ragged, int]:
    """The same bags with every id inside the vocabulary, and how many ids were not.

    Raises:
      ValueError: an id is outside and the policy of the table is "error".
    """
    if table.dynamic_keys is not None:
        return bags, 0
    ids, size = bags.values, table.vocabulary_size
    # One comparison for both ends: a negative id is huge as an unsigned number.
    if not len(ids) or int(ids.view(np.uint64).max()) < size:
        return bags, 0
    outside = (ids < 0) | (ids >= size)
    count = int(outside.sum())
    if table.invalid_ids == "error":
        raise _refusal(path, table, bags, outside, count)
    if table.invalid_ids == "drop":
        return _without(bags, outside), count
    fitted = ids.copy()
    if table.invalid_ids == "clip":
        np.clip(ids, 0, size - 1, out=fitted)
    else:
        fitted[outside] = hashed(ids[outside], size)
    return replace(bags, values=fitted), count


def rows_of(ids: np.ndarray, table: TableConfig) -> np.ndarray:
    """The row of each id, int64, as `fit_ids` has it: -1 of one that is dropped. Ids of a table that refuses stay."""
    return rows_in(ids, table.vocabulary_size, table.invalid_ids)


def rows_in(ids: np.ndarray, size: int, invalid_ids: str) -> np.ndarray:
    """As `rows_of`, of a table with so many rows and that rule."""
    if invalid_ids == "error":
        return ids
    outside = (ids < 0) | (ids >= size)
    if not outside.any():
        return ids
    if invalid_ids == "drop":
        return np.where(outside, -1, ids)
    if invalid_ids == "clip":
        return np.clip(ids, 0, size - 1)
    fitted = ids.copy()
    fitted[outside] = hashed(ids[outside], size)
    return fitted


def hashed(ids: np.ndarray, size: int) -> np.ndarray:
    """Any int64 to `0..size - 1`, the same on every machine: `mix64` modulo `size`."""
    return (mix64(ids) % np.uint64(size)).astype(np.int64)


def without(bags: Ragged, dropped: np.ndarray) -> Ragged:
    """The bags without the ids for which `dropped` (bool `[num_ids]`) is set."""
    return _without(bags, dropped)


def _without(bags: Ragged, dropped: np.ndarray) -> Ragged:
    kept = ~dropped
    kept_before = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(kept, out=kept_before[1:])
    weights = None if bags.weights is None else bags.weights[kept]
    return Ragged(bags.values[kept], kept_before[bags.row_splits], weights)


def _refusal(path: str, table: TableConfig, bags: Ragged, outside: np.ndarray, count: int) -> ValueError:
    at = int(np.argmax(outside))
    sample = int(np.searchsorted(bags.row_splits, at, side="right")) - 1
    others = f" and {count - 1} more like it" if count > 1 else ""
    return ValueError(
        f"Found id {bags.values[at]} in feature {shown_path(path)}, sample {sample}{others}. Expected 0 to "
        f"{table.vocabulary_size - 1}, the vocabulary of table '{table.name}'. Correct the input, or declare "
        "TableConfig(invalid_ids='drop', 'clip' or 'hash')."
    )
