"""Measures what a job's training data asks of its tables, on two batches that are read for it, or assumes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.costs.profile import HOT_ROWS, TableProfile, even_profile
from podembed.embedding.lookup.pooling_choice import ASSUMED_LENGTH
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.errors import InputError
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.input.reader import training_plan
from podembed.workers.input.sources import ReaderSource, job_plan, open_reader
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings

MAX_SAMPLES = 1 << 15
"""Of a batch, more are not looked at; what more of them name follows from the curve."""
_HALVINGS = 7
_MOST_S, _MOST_STEPS = 1.0, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesAtHand:
    """What is known of the data of each table.

    Attributes:
      read_sample_s: seconds of a thread that reads and decodes one sample; None where nothing was read.
      why_assumed: what kept the files from being read, with their names; None where they were read, and where there are
        none.
    """

    tables: tuple[TableProfile, ...]
    read_sample_s: float | None = None
    why_assumed: str | None = None


def measure_profile(job: JobConfig, index: InputIndex) -> list[TableProfile]:
    """The tables of `measure_input`."""
    return measure_input(job, index, most_s=0.0)[0]


def measure_input(job: JobConfig, index: InputIndex, *, most_s: float = _MOST_S) -> tuple[list[TableProfile], float]:
    """Per table of the job what two batches that follow each other ask of it. And what reading a sample takes.

    Reads as few row groups as it can. Rows of one row group that belong together, as in time, look more alike than
    those of a shuffled epoch.

    Args:
      index: of the files for training.
      most_s: so long it goes on reading to measure that, after the two batches. More epochs follow if need be.

    Returns:
      One profile a table, and processor seconds a sample.

    Raises:
      InputError, OSError: the data cannot be read.
    """
    data = job.resolved_data
    if isinstance(data, ReaderSource):
        plan, lanes = job_plan(job, index), range(job.num_lanes)
    else:
        size = min(job.batch_size, MAX_SAMPLES, max(1, sum(index.row_group_rows) // 2))
        plan, lanes = training_plan(index, num_lanes=1, batch_size=size, seed=job.seed, order=job.data.order), range(1)
    reader = open_reader(data, index, plan, lanes)
    try:
        # The first batch compiles what decodes it, and opens files.
        batches = [reader.read(0)]
        began, steps = time.process_time(), 0
        while not steps or (time.process_time() - began < most_s and steps < _MOST_STEPS):
            steps += 1
            batch = reader.read(steps)
            if steps == 1:
                batches.append(batch)
        spent_s = time.process_time() - began
    finally:
        reader.close()
    samples = steps * batches[0].num_samples
    return profiles_of(job, batches), spent_s / samples


def profiles_at_hand(job: JobConfig, index: InputIndex | None, *, most_s: float = _MOST_S) -> ProfilesAtHand:
    """Per table of the job, measured where the files can be read here, else assumed from lengths. `most_s` as in
    `measure_input`.
    """
    why = None
    if index is not None:
        try:
            found, read_sample_s = measure_input(job, index, most_s=most_s)
            return ProfilesAtHand(tables=tuple(found), read_sample_s=read_sample_s)
        except (InputError, OSError) as error:
            # A plan of the tables needs no data, so it goes on and says what is missing.
            why = str(error)
    return ProfilesAtHand(tables=tuple(assumed_profiles(job, bag_lengths(job, index))), why_assumed=why)


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


def profiles_of(job: JobConfig, batches: Sequence[Batch]) -> list[TableProfile]:
    """The same from two batches that are there already, or from one alone. Then the batch before is taken to name as
    many other rows, spread evenly.
    """
    bindings = feature_bindings(job)
    found = []
    for at, table in enumerate(job.tables):
        names = [feature.name for feature in bindings if feature.table == at]
        of_table = [[batch.features[name] for name in names] for batch in batches]
        found.append(_profile(of_table, num_rows=table.vocabulary_size))
    return found


def _profile(batches: Sequence[Sequence[Ragged]], *, num_rows: int) -> TableProfile:
    """Of one table: per batch its features."""
    bags = [_first(ragged, MAX_SAMPLES) for ragged in batches[-1]]
    count = bags[0].num_samples if bags else 0
    ids = np.concatenate([ragged.values for ragged in bags]) if bags else np.zeros(0, np.int64)
    names, times = np.unique(ids, return_counts=True)
    hot = np.sort(times)[-HOT_ROWS:].sum()
    sizes = sorted({max(1, count >> halving) for halving in range(_HALVINGS)})
    curve = tuple(
        (float(size), float(len(np.unique(np.concatenate([_first(ragged, size).values for ragged in bags])))))
        for size in (sizes if bags else ())
    )
    if len(batches) > 1:
        previous = np.unique(np.concatenate([_first(ragged, MAX_SAMPLES).values for ragged in batches[0]]))
        free_bags = float(np.mean([_free_bags(ragged, previous) for ragged in bags])) if bags else 1.0
        free_rows = float(np.mean(~np.isin(names, previous))) if len(names) else 1.0
    else:
        free_rows = max(0.0, 1 - len(names) / num_rows)
        free_bags = free_rows ** (len(ids) / max(1, count * len(bags)))
    return TableProfile(
        ids_per_sample=tuple(ragged.num_ids / max(1, count) for ragged in bags),
        distinct=curve,
        hot_share=float(hot / len(ids)) if len(ids) else 0.0,
        free_bags=free_bags,
        free_rows=free_rows,
    )


def _first(ragged: Ragged, samples: int) -> Ragged:
    """The bags of the first samples."""
    splits = ragged.row_splits[: min(samples, ragged.num_samples) + 1]
    return Ragged(ragged.values[: splits[-1]], splits)


def _free_bags(ragged: Ragged, previous: np.ndarray) -> float:
    """Share of bags without any of these ids; an empty bag has none."""
    if not ragged.num_samples:
        return 1.0
    touched = np.concatenate([[0], np.cumsum(np.isin(ragged.values, previous))])
    return float(np.mean(touched[ragged.row_splits[1:]] == touched[ragged.row_splits[:-1]]))
