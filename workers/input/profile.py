"""Measures what a job's training data asks of its tables, on a batch that is read for it, or assumes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.lookup.pooling_choice import ASSUMED_LENGTH
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.input.reader import training_plan
from podembed.workers.input.sources import ReaderSource, job_plan, open_reader
from podembed.workers.input.table_profile import HOT_ROWS, TableProfile, even_profile
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings

MAX_SAMPLES = 1 << 15
"""Most samples of a batch that are read. The number of rows that more of them name follows from the curve."""
_HALVINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesAtHand:
    """What is known of the data of each table.

    Attributes:
      tables: one a table.
      is_measured: a batch was read; otherwise ids are taken to be spread evenly.
      why_assumed: what kept the files from being read, with their names; None where they were read, and where there are
        none.
    """

    tables: tuple[TableProfile, ...]
    is_measured: bool
    why_assumed: str | None = None


def measure_profile(job: JobConfig, index: InputIndex) -> list[TableProfile]:
    """Per table of the job what its first batch asks of it.

    Reads as few row groups as it can. Rows of one row group that belong together, as in time, look more alike than
    those of a shuffled epoch.

    Args:
      index: index of the files for training.

    Raises:
      InputError, OSError: the data cannot be read.
    """
    data = job.resolved_data
    if isinstance(data, ReaderSource):
        plan, lanes = job_plan(job, index), range(job.num_lanes)
    else:
        size = min(job.batch_size, MAX_SAMPLES, max(1, sum(index.row_group_rows)))
        plan, lanes = training_plan(index, num_lanes=1, batch_size=size, seed=job.seed, order=job.data.order), range(1)
    reader = open_reader(data, index, plan, lanes)
    try:
        return profiles_of(job, reader.read(0))
    finally:
        reader.close()


def profiles_at_hand(job: JobConfig, index: InputIndex | None) -> ProfilesAtHand:
    """Per table of the job, measured where the files can be read here, else assumed from lengths."""
    why = None
    if index is not None:
        try:
            return ProfilesAtHand(tables=tuple(measure_profile(job, index)), is_measured=True)
        except (InputError, OSError) as error:
            # A plan of the tables needs no data, so it goes on and says what is missing.
            why = str(error)
    assumed = assumed_profiles(job, bag_lengths(job, index))
    return ProfilesAtHand(tables=tuple(assumed), is_measured=False, why_assumed=why)


def assumed_profiles(job: JobConfig, lengths: Sequence[float | None]) -> list[TableProfile]:
    """One a table, for data that was not looked at: even ids, in bags of such lengths.

    Args:
      lengths: per feature, as `workers.input.lengths.bag_lengths` finds them.
    """
    bound = [feature.table for feature in feature_bindings(job)]
    known = [ASSUMED_LENGTH if length is None else length for length in lengths]
    return [
        even_profile(
            ids_per_sample=[length for table, length in zip(bound, known, strict=True) if table == at],
            num_rows=config.vocabulary_size,
            batch_size=job.batch_size,
        )
        for at, config in enumerate(job.tables)
    ]


def profiles_of(job: JobConfig, batch: Batch) -> list[TableProfile]:
    """Per table of the job, from a batch that is there already."""
    bindings = feature_bindings(job)
    return [
        _profile([batch.features[feature.name] for feature in bindings if feature.table == at])
        for at in range(len(job.tables))
    ]


def _profile(features: Sequence[Ragged]) -> TableProfile:
    """The profile of the features of one table."""
    bags = [_first(ragged, MAX_SAMPLES) for ragged in features]
    count = bags[0].num_samples if bags else 0
    ids = np.concatenate([ragged.values for ragged in bags]) if bags else np.zeros(0, np.int64)
    _, times = np.unique(ids, return_counts=True)
    hot = np.sort(times)[-HOT_ROWS:].sum()
    sizes = sorted({max(1, count >> halving) for halving in range(_HALVINGS)})
    curve = tuple(
        (float(size), float(len(np.unique(np.concatenate([_first(ragged, size).values for ragged in bags])))))
        for size in (sizes if bags else ())
    )
    return TableProfile(
        ids_per_sample=tuple(ragged.num_ids / max(1, count) for ragged in bags),
        distinct=curve,
        hot_share=float(hot / len(ids)) if len(ids) else 0.0,
    )


def _first(ragged: Ragged, samples: int) -> Ragged:
    """The bags of the first samples."""
    splits = ragged.row_splits[: min(samples, ragged.num_samples) + 1]
    return Ragged(ragged.values[: splits[-1]], splits)
