"""`Interactions`: which ids the training files have together, and how often each occurs.

Negatives are drawn by it. It is read once when a host starts, from all training files, through the decoder that
training uses. It takes 8 bytes for each row of the table. For positives of a user it takes 8 bytes a row of the user's
table and 4 or 8 bytes for each pair. While it is made, 24 bytes for each pair are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import InputData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import InputIndex
from podembed.workers.input.reader import InputReader, evaluation_plan

# Rows that are decoded at once.
_ROWS = 32_768


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Interactions:
    """Positive samples of the training files: those whose label is above 0.

    Attributes:
      counts: int64 `[rows of the table]`, how often each id occurs.
      splits: int64 `[rows of the owners' table + 1]`: owner `u` has `ids[splits[u]:splits[u + 1]]`. Empty without
        owners.
      ids: int32 or int64, rising for each owner, each once.
      owner: the column of the owners, which says what row an id of one has; None where ids are rows.
    """

    counts: np.ndarray
    splits: np.ndarray
    ids: np.ndarray
    owner: IdColumn | None = None

    def owner_rows(self, ids: np.ndarray) -> np.ndarray:
        """int64: the row of each owner; -1 of one that its table drops, and that therefore has nothing here."""
        return ids if self.owner is None else self.owner.rows_of(ids)

    def spans(self, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Begin and end of each owner's ids in `ids`, int64.

        Args:
          owners: owners as `owner_rows` returns them.
        """
        is_known, rows = owners >= 0, np.maximum(owners, 0)
        return np.where(is_known, self.splits[rows], 0), np.where(is_known, self.splits[rows + 1], 0)

    @property
    def size_bytes(self) -> int:
        return self.counts.nbytes + self.splits.nbytes + self.ids.nbytes


def read_interactions(data: InputData, index: InputIndex, *, feature: str, owner: str | None = None) -> Interactions:
    """Reads the files of an index once.

    Args:
      data: resolved, as the index was built from.
      feature: feature whose ids are counted.
      owner: a feature with one id a sample.

    Raises:
      InputError: the data cannot be read, or a sample has none or several ids of the owner.
    """
    names = [feature] if owner is None else [feature, owner]
    columns = data.id_columns
    # What a list shows a model may be cut; what its user has is all of it.
    features = {name: replace(columns[name], negatives=None, last=None) for name in names}
    wanted = replace(data, labels=(), extra=(), dense=(), sample_weight=None, features=features)
    sizes = {name: columns[name].vocabulary_size for name in names}
    num_ids = sizes[feature] or 0
    plan = evaluation_plan(index, num_lanes=1, batch_size=_ROWS)
    reader = InputReader(wanted, index, plan, [0])
    counts, found = np.zeros(num_ids, np.int64), [np.zeros(0, np.int64)]
    try:
        for step in range(plan.steps_per_epoch):
            batch = reader.read(step)
            bags = batch.features[feature]
            sample = np.repeat(np.arange(batch.num_samples), np.diff(bags.row_splits))
            rows = columns[feature].rows_of(bags.values)
            kept = (batch.labels[sample] > 0) & (rows >= 0)
            ids, sample = rows[kept], sample[kept]
            counts += np.bincount(ids, minlength=num_ids)
            if owner is not None:
                owners = columns[owner].rows_of(batch.only_ids(owner, sample))
                found.append(owners[owners >= 0] * num_ids + ids[owners >= 0])
    finally:
        reader.close()
    if not counts.any():
        raise InputError(
            f"Found no id of feature {feature!r} in a training sample whose label is above 0. Expected some, since "
            "negatives are drawn by them. Correct the labels, or draw negatives evenly."
        )
    pairs = np.unique(np.concatenate(found))
    del found
    owners, ids = np.divmod(pairs, max(1, num_ids))
    splits = np.zeros(0 if owner is None else (sizes[owner] or 0) + 1, np.int64)
    if owner is not None:
        splits = np.searchsorted(owners, np.arange(len(splits)))
    return Interactions(
        counts=counts,
        splits=splits,
        ids=ids.astype(np.int32 if num_ids < 1 << 31 else np.int64),
        owner=None if owner is None else columns[owner],
    )
