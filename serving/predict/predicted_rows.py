"""The rows of data that is scored, in their order, and the file that has what was found of each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.ragged import Ragged
from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.new_files import new_file
from podembed.serving.predict.committed_model import CommittedModel
from podembed.serving.predict.trained_kinds import index_as_trained
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import InputData
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lanes import LanePlan
from podembed.workers.job.job import JobConfig

GROUP_ROWS = 65_536


def rows_in_order(model: CommittedModel, data: InputData, *, batch_size: int, out: str) -> tuple[InputIndex, LanePlan]:
    """One lane in file order: batch after batch, the rows as they lie.

    Raises:
      ConfigurationError: `out` is a file of the data.
      InputError: the files cannot be read, or a column has another kind of values than in training.
    """
    index = index_as_trained(model, data)
    if any(os.path.realpath(file.path) == os.path.realpath(out) for file in index.files):
        raise ConfigurationError(f"Found {out} at --out and in the data. Expected another file. Choose another --out.")
    plan = LanePlan(row_group_rows=index.row_group_rows, num_lanes=1, batch_size=batch_size, shuffle=False)
    return index, plan


def write_rows(out: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, force: bool) -> None:
    """A Parquet file that appears when it is complete.

    Raises:
      ConfigurationError: nothing can be written there.
    """
    with new_file(out, force=force) as file, pq.ParquetWriter(file, schema) as writer:
        group: list[pa.RecordBatch] = []
        for batch in batches:
            group.append(batch)
            if sum(part.num_rows for part in group) >= GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(group))
                group = []
        if group:
            writer.write_table(pa.Table.from_batches(group))


def unlabelled(
    data: InputData, paths: Sequence[str], *, features: Collection[str], columns: Collection[str] | None = None
) -> InputData:
    """Other files under the declaration of a job, of which only what a score depends on is read. Nothing is drawn
    beside their ids.

    Args:
      features: features that a score depends on.
      columns: the extra columns that a score depends on; None stands for all.
    """
    read = {name: replace(source, negatives=None) for name, source in data.id_columns.items() if name in features}
    without = replace(data, paths=tuple(paths), eval_paths=(), has_labels=False, features=read)
    extra = tuple(one for one in data.extra_columns if columns is None or one.name in columns)
    return replace(without, extra=extra, sample_weight=None, sample_id=None, order="files")


def with_all(batch: Batch, job: JobConfig) -> Batch:
    """The batch with all features of the job, those that were not read without ids."""
    none = Ragged(np.zeros(0, np.int64), np.zeros(batch.num_samples + 1, np.int64))
    return replace(batch, features={name: batch.features.get(name, none) for name in job.features})
