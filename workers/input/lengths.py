"""How many ids a sample of each feature has, as far as that is known before anything is read."""

from __future__ import annotations

from podembed.workers.columns.decode import kinds_of
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import InputData
from podembed.workers.input.index import InputIndex
from podembed.workers.input.sources import ReaderSource
from podembed.workers.job.job import JobConfig


def bag_lengths(job: JobConfig, index: InputIndex | None) -> tuple[float | None, ...]:
    """Per feature the mean number of ids of a sample; None where neither the declaration nor the files say.

    A function of the job and its files, so all hosts find the same, after every restart.

    Args:
      index: index of the files for training; None where they were not looked at.
    """
    data = job.resolved_data
    return tuple(_length(data, data.id_columns[name], index) for name in job.features)


def _length(data: InputData, source: IdColumn, index: InputIndex | None) -> float | None:
    length = 1.0
    for part in source.parts:
        of_part = _length_of_column(data, part.column, index)
        if of_part is None:
            return None
        length *= of_part
    return length if source.negatives is None else length * source.negatives.width(is_evaluation=False)


def _length_of_column(data: InputData, column: str, index: InputIndex | None) -> float | None:
    if isinstance(data, ReaderSource):
        return None
    has_lists = data.has_lists(column)
    if has_lists is False:
        return 1.0
    if has_lists or index is None:
        return None
    kinds = [kinds_of(file.content).get(column, "lists of") for file in index.files]
    if not any(kind.startswith("lists of") for kind in kinds):
        return 1.0
    found = [(file.num_rows, dict(file.lengths).get(column)) for file in index.files]
    rows = sum(count for count, length in found if length is not None)
    return sum(count * length for count, length in found if length is not None) / rows if rows else None
