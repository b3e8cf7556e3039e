"""`predict`: the scores of a commit for all rows of some data, in the order of the rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.batches import log_of, looked_up, read_batches
from podembed.serving.predict.committed_model import KEPT_BYTES, CommittedModel, CommittedRows, with_commit
from podembed.serving.predict.kept_columns import KeptColumns
from podembed.serving.predict.pooled_rows import PooledRows
from podembed.serving.predict.portable_forward import PortableForward
from podembed.serving.predict.predicted_rows import rows_in_order, unlabelled, with_all, write_rows
from podembed.serving.predict.trained_forward import SCORED_PARTS
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.declared_types import several
from podembed.workers.device.dense_half import DenseStateError
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A file of scores.

    Attributes:
      path: path of the file.
      commit: commit whose scores they are.
      num_rows: number of rows of the data, and of the file.
      columns: columns of the file.
      bad_rows: malformed rows, whose outputs are null.
    """

    path: str
    commit: str
    num_rows: int
    columns: tuple[str, ...]
    bad_rows: tuple[BadRow, ...]


def predict(
    run: str | os.PathLike[str],
    *,
    data: str | Sequence[str],
    out: str | os.PathLike[str],
    columns: str | Sequence[str] = (),
    outputs: str | Sequence[str] = (),
    commit: str | None = None,
    job: JobConfig | None = None,
    folder: str = "",
    force: bool = False,
    kept_bytes: int = KEPT_BYTES,
) -> Predicted:
    """Writes the outputs of the model for each row of the data to a Parquet file, which appears when it is complete.

    The data needs no labels. Rows stay in their order, files in sorted order. Memory is `kept_bytes`, and the rows of a
    window of batches.

    Args:
      run: folder or URL of a run, for its newest commit, or `RUN@COMMIT`.
      data: paths or globs with the columns of the job.
      out: the Parquet file, a local path.
      columns: columns of the data, to be kept beside the outputs.
      outputs: names of those to write, by default all. Features that none of them depends on need no columns, so one
        tower of two is computed from its own data.
      commit: name of the commit, or its step.
      job: job of a run that was started with a job as a value.
      folder: where the job's module may lie if it is not installed.
      force: replace a file that is there.
      kept_bytes: bytes of tables, in memory.

    Raises:
      ConfigurationError: no run, no commit, no job, no such column, or nothing can be written there.
      InputError: the data cannot be read, or a column has another kind of values than in training.
      ChunkDamaged: the commit is damaged; nothing was written.
    """

    def write(model: CommittedModel) -> Predicted:
        return _write(
            model,
            data=tuple(map(place, several(data))),
            out=place(out),
            columns=several(columns),
            wanted=several(outputs),
            force=force,
            kept_bytes=kept_bytes,
        )

    return with_commit(run, write, commit=commit, job=job, folder=folder)


def _write(
    model: CommittedModel,
    *,
    data: Sequence[str],
    out: str,
    columns: Sequence[str],
    wanted: Sequence[str],
    force: bool,
    kept_bytes: int,
) -> Predicted:
    job = model.job
    try:
        forward = PortableForward(job, model.dense(SCORED_PARTS), step=model.state.manifest.step, wanted=wanted)
    except DenseStateError as error:
        raise ConfigurationError(f"{error} It is the model of {model.state.location}.") from error
    # Data is read by features, so all are where no score depends on any.
    declared = unlabelled(
        job.resolved_data, data, features=forward.features or tuple(job.features), columns=forward.columns
    )
    index, plan = rows_in_order(model, declared, batch_size=job.batch_size, out=out)
    log = log_of(declared)
    kept = KeptColumns(declared, index, columns, taken=list(forward.shapes))
    dtypes = {name: _dtype(name, dtype) for name, dtype in forward.dtypes.items()}
    outputs = [pa.field(name, _kind(shape, dtypes[name])) for name, shape in forward.shapes.items()]
    schema = pa.schema([*kept.schema, *outputs])
    rows = PooledRows(job, CommittedRows(model, kept_bytes=kept_bytes), is_padded=True)
    left = index.num_rows

    def scored() -> Iterator[pa.RecordBatch]:
        nonlocal left
        batches = (with_all(batch, job) for batch in read_batches(declared, index, plan, bad_rows=log))
        for found in looked_up(batches, rows):
            count = min(left, job.batch_size)
            left -= count
            values = forward.outputs(found, tuple(job.features), count)
            is_bad = found.batch.is_padding[:count]
            arrays = [
                _column(values[name].astype(dtypes[name]), shape, is_bad) for name, shape in forward.shapes.items()
            ]
            yield pa.record_batch([*kept.take(count), *arrays], schema=schema)

    write_rows(out, schema, scored(), force=force)
    return Predicted(
        path=out,
        commit=model.state.manifest.name,
        num_rows=index.num_rows,
        columns=tuple(schema.names),
        bad_rows=log.take(),
    )


def _dtype(name: str, dtype: np.dtype) -> np.dtype:
    """The type in which an output is written: its own, or a wider one where Arrow has none that holds its numbers.

    Raises:
      ConfigurationError: no such type holds them.
    """
    if dtype.kind in "biu" or dtype in (np.float32, np.float64):
        return dtype
    for wider in (np.float32, np.int8, np.uint8):
        if np.can_cast(dtype, wider):
            return np.dtype(wider)
    raise ConfigurationError(
        f"Found output {name!r} of type {dtype}. Expected floating point, integers or truth values. Choose other "
        "outputs (--outputs), or let apply return real numbers."
    )


def _kind(shape: tuple[int, ...], dtype: np.dtype) -> pa.DataType:
    """Single numbers, or lists of as many as the output has for a sample."""
    kind = pa.from_numpy_dtype(dtype)
    return pa.list_(kind, int(np.prod(shape))) if shape else kind


def _column(values: np.ndarray, shape: tuple[int, ...], is_bad: np.ndarray) -> pa.Array:
    """The outputs of some rows, null for malformed ones."""
    if not shape:
        return pa.array(values, mask=is_bad)
    flat = pa.array(values.reshape(-1))
    mask = pa.array(is_bad)
    return pa.FixedSizeListArray.from_arrays(flat, type=_kind(shape, values.dtype), mask=mask if is_bad.any() else None)
