"""Which items a full ranking leaves out for a sample, and which there are in a user's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from podembed.embedding.features.id_policies import rows_of
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.batches import read_batches
from podembed.serving.predict.committed_model import CommittedModel
from podembed.serving.predict.trained_kinds import index_as_trained
from podembed.workers.data.batch import Batch
from podembed.workers.input.all_candidates import Exclusions
from podembed.workers.input.interactions import Interactions, read_interactions
from podembed.workers.input.lanes import LanePlan

_ROWS = 32_768


class LeftOut:
    """What a sample's owner has in the training files, or what the sample itself has of another feature.

    Attributes:
      owners: the features of owners, in the order of their names.
    """

    def __init__(self, model: CommittedModel, names: Sequence[str], *, feature: str) -> None:
        """Args:
        names: of features. One of the items' table names items of the sample, and any other one an owner.
        feature: of the items.

        Raises:
          ConfigurationError: a name is no other feature of the job.
          InputError: the training files cannot be read, or have another kind of values by now.
        """
        job = model.job
        unknown = [name for name in names if name not in job.features or name == feature]
        if unknown:
            raise ConfigurationError(
                f"Found --without {unknown[0]}. Expected another feature of the job, one of "
                f"{[name for name in job.features if name != feature]}. Name the user's feature, or one that has items "
                "of the sample."
            )
        self._names = tuple(names)
        self._table = job.features[feature].table
        self.owners = tuple(name for name in names if job.features[name].table is not self._table)
        keyed = [name for name in (*self.owners, feature) if job.features[name].table.dynamic_keys is not None]
        if self.owners and keyed:
            raise ConfigurationError(
                f"Found --without {self.owners[0]} and feature {keyed[0]!r}, whose table has a capacity. Expected row "
                "numbers, by which items of a user are found in the training files. Leave it out, or name a feature "
                f"of the table of {feature!r} that has the items of the sample."
            )
        self._known = {name: positives_of(model, feature, owner=name) for name in self.owners}

    def of(self, batch: Batch) -> list[Exclusions]:
        """One for each feature. No sample has an id of its own in them.

        Raises:
          InputError: a sample has none or several ids of an owner.
        """
        return [self._of(batch, name) for name in self._names]

    def _of(self, batch: Batch, name: str) -> Exclusions:
        nobody = np.zeros(batch.num_samples, np.int64)
        none = np.zeros(batch.num_samples, bool)
        bags = batch.features[name]
        if name not in self._known:
            sample = np.repeat(np.arange(batch.num_samples), np.diff(bags.row_splits))
            rows = rows_of(bags.values, self._table)
            ids = rows[np.lexsort((rows, sample))]
            begins, ends = bags.row_splits[:-1], bags.row_splits[1:]
            return Exclusions(given=nobody, own=nobody, has_own=none, begins=begins, ends=ends, ids=ids)
        known, real = self._known[name], np.flatnonzero(~batch.is_padding)
        begins, ends = np.zeros_like(nobody), np.zeros_like(nobody)
        begins[real], ends[real] = known.spans(known.owner_rows(batch.only_ids(name, real)))
        return Exclusions(given=nobody, own=nobody, has_own=none, begins=begins, ends=ends, ids=known.ids)


def positives_of(model: CommittedModel, feature: str, *, owner: str | None = None) -> Interactions:
    """What the training files say of a feature."""
    data = model.job.resolved_data
    return read_interactions(data, index_as_trained(model, data), feature=feature, owner=owner)


def ids_in(model: CommittedModel, paths: Sequence[str], feature: str) -> np.ndarray:
    """The distinct rows of a feature's ids in some files, which need no other column. Rising."""
    data = model.job.resolved_data
    wanted = replace(
        data,
        paths=tuple(paths),
        eval_paths=(),
        has_labels=False,
        labels=(),
        extra=(),
        dense=(),
        sample_weight=None,
        sample_id=None,
        order="files",
        features={feature: replace(data.id_columns[feature], negatives=None, last=None)},
    )
    index = index_as_trained(model, wanted)
    plan = LanePlan(row_group_rows=index.row_group_rows, num_lanes=1, batch_size=_ROWS, shuffle=False)
    found = [np.zeros(0, np.int64)]
    found += [np.unique(batch.features[feature].values) for batch in read_batches(wanted, index, plan)]
    table = model.job.features[feature].table
    rows = np.unique(rows_of(np.concatenate(found), table))
    return rows if table.dynamic_keys is not None else rows[rows >= 0]
