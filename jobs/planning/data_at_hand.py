"""What is known of a job's training data before a run: its index, and what a batch asks of the tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.lookup.pooling_choice import ASSUMED_LENGTH
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.input.reader import training_plan
from podembed.workers.input.sources import ReaderSource, job_plan, open_reader
from podembed.workers.input.table_profile import HOT_ROWS, MAX_SAMPLES, TableProfile, profiles_of
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings


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


def even_profile(*, ids_per_sample: Sequence[float], num_rows: int, batch_size: int) -> TableProfile:
    """The profile of ids that are spread evenly over a table, where nothing is known of them."""
    ids = sum(ids_per_sample)
    counts = [batch_size / 2**power for power in range(12, -3, -1)]
    return TableProfile(
        ids_per_sample=tuple(ids_per_sample),
        distinct=tuple((count, -num_rows * math.expm1(-count * ids / num_rows)) for count in counts),
        hot_share=min(1.0, HOT_ROWS / num_rows),
    )


def index_at_hand(job: JobConfig) -> tuple[InputIndex | None, str | None]:
    """The index of files with footers on this machine, whose footers say how long bags are.

    Other data is not looked at: a store may be away, and a CSV file would have to be read.

    Returns:
      The index and None; or None, and what is wrong with the files if they were looked at.
    """
    data = job.resolved_data
    if not data.has_footers or isinstance(data, ReaderSource) or any("://" in path for path in data.paths):
        return None, None
    try:
        return build_index(data), None
    except InputError as error:
        return None, str(error)
