"""Where the batches of a host come from: the reader that belongs to a job's data.

Declared data is read from files unless its declaration can open a reader of its own. That is how benchmarks and
generated data feed the same hosts from memory. Readers are used by one thread at a time, see
`workers.input.read_ahead`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.config import InputData
from podembed.workers.input.index import InputIndex, check_alike
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.read_ahead import StepReader
from podembed.workers.input.reader import InputReader, build_index, training_plan
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
    data: InputData, index: InputIndex, plan: LanePlan, lanes: range, *, bad_rows: BadRowLog | None = None
) -> StepReader:
    """The reader of some lanes of declared data, which tells `bad_rows` of malformed rows.

    Raises:
      InputError, OSError: the data cannot be read.
    """
    if isinstance(data, ReaderSource):
        return data.open_reader(plan, lanes)
    return InputReader(data, index, plan, lanes, bad_rows=bad_rows)


def indexes_of(job: JobConfig) -> tuple[InputIndex, InputIndex | None]:
    """Of the job's files for training, and of those for evaluation, if it has some."""
    data = job.resolved_data
    train, evaluation = build_index(data), build_index(data.for_evaluation()) if data.eval_paths else None
    if evaluation is not None:
        check_alike((*train.files, *evaluation.files))
    return train, evaluation
