"""Where the batches of a host come from: the reader that belongs to a job's data, with the negatives that it declares.

Declared data is read from files unless its declaration can open a reader of its own. That is how benchmarks and
generated data feed the same hosts from memory. Readers are used by one thread at a time, see
`workers.input.read_ahead`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.config import InputData
from podembed.workers.input.all_candidates import AllCandidates
from podembed.workers.input.candidates import (
    InParts,
    Known,
    NegativeSampler,
    WithNegatives,
    WithZeros,
    interactions_of,
    samplers_of,
)
from podembed.workers.input.index import InputIndex, build_index, check_alike
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.read_ahead import StepReader
from podembed.workers.input.reader import InputReader, evaluation_plan, training_plan
from podembed.workers.job.job import JobConfig


@runtime_checkable
class ReaderSource(Protocol):
    """Declared data that opens its own reader."""

    def open_reader(self, plan: LanePlan, lanes: range) -> StepReader:
        """A reader of the given lanes, `plan.rows_per_lane_step` samples of each at every step."""
        ...


def job_plan(job: JobConfig, index: InputIndex) -> LanePlan:
    """Which rows of the job's training data each step takes; the driver and all hosts make the same one."""
    return training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed, order=job.data.order)


def open_reader(
    data: InputData,
    index: InputIndex,
    plan: LanePlan,
    lanes: range,
    *,
    bad_rows: BadRowLog | None = None,
    known: Known | None = None,
    rooms: Mapping[str, tuple[int, ...]] | None = None,
) -> StepReader:
    """The reader of some lanes of data for training, which tells `bad_rows` of malformed rows.

    Args:
      known, rooms: known ids and rooms as those of `samplers_of`.

    Raises:
      InputError, OSError: the data cannot be read.
    """
    samplers = samplers_of(data, index, seed=plan.seed, known=known, rooms=rooms)
    return _with_negatives(_bare_reader(data, index, plan, lanes, bad_rows), plan, samplers)


def open_evaluation(
    job: JobConfig,
    training: InputIndex | None,
    evaluation: InputIndex,
    lanes: range,
    *,
    data: InputData | None = None,
    bad_rows: BadRowLog | None = None,
    known: Known | None = None,
) -> tuple[StepReader, int]:
    """The reader of some lanes of the data for evaluation, and how many steps it has. Each sample comes once, or
    `job.evaluation_parts` times after each other with other candidates.

    Args:
      training: index of the training files, by which negatives are drawn; None looks at them if that is needed.
      data: resolved, what is evaluated in the place of the job's evaluation data.
      known: known ids as that of `samplers_of`.

    Raises:
      InputError, OSError: the data cannot be read.
    """
    plan = evaluation_plan(evaluation, num_lanes=job.num_lanes, batch_size=job.batch_size)
    known = {} if known is None else known
    samplers = samplers_of(job.resolved_data, training, seed=job.seed, is_evaluation=True, known=known)
    bare = _bare_reader(data or job.resolved_data.for_evaluation(), evaluation, plan, lanes, bad_rows)
    reader, num_parts = _with_negatives(bare, plan, samplers), job.evaluation_parts
    if job.candidates is not None:
        width, alike = job.num_candidates, job.candidate_features
        if job.ranks_all:
            source = job.resolved_data.id_columns[job.candidates]
            found = interactions_of(job.resolved_data, training, job.candidates, known=known)
            table = job.features[job.candidates].table
            reader = AllCandidates(
                reader, features=alike, source=source, table=table, known=found, width=width, num_parts=num_parts
            )
        else:
            reader = InParts(reader, features=alike, width=width, num_parts=num_parts)
    more = {name: shape for name, shape in job.column_shapes.items() if name not in job.data.column_shapes}
    return (WithZeros(reader, more) if more else reader), plan.steps_per_epoch * num_parts


def _bare_reader(
    data: InputData, index: InputIndex, plan: LanePlan, lanes: range, bad_rows: BadRowLog | None
) -> StepReader:
    if isinstance(data, ReaderSource):
        return data.open_reader(plan, lanes)
    return InputReader(data, index, plan, lanes, bad_rows=bad_rows)


def _with_negatives(reader: StepReader, plan: LanePlan, samplers: Mapping[str, NegativeSampler]) -> StepReader:
    return WithNegatives(reader, plan, samplers) if samplers else reader


def indexes_of(job: JobConfig) -> tuple[InputIndex, InputIndex | None]:
    """Indexes of the job's files for training, and of those for evaluation, if it has some."""
    data = job.resolved_data
    train, evaluation = build_index(data), build_index(data.for_evaluation()) if data.eval_paths else None
    if evaluation is not None:
        # Candidates that are given are lists, beside one positive id in each row of training.
        by_column: dict[str, list[bool]] = {}
        for source in data.id_columns.values():
            by_column.setdefault(source.column, []).append(bool(source.negatives and source.negatives.given))
        lists_apart = [column for column, are_given in by_column.items() if all(are_given)]
        check_alike((*train.files, *evaluation.files), lists_apart=lists_apart)
    return train, evaluation
