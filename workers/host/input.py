"""`HostInput`: the batches of one host's lanes in one generation, for training and for evaluation."""

from __future__ import annotations

from collections import deque

from podembed.workers.data.bad_rows import BadRow, BadRowLog
from podembed.workers.data.unknown_values import UnknownColumn
from podembed.workers.host.spec import HostSpec
from podembed.workers.input.candidates import Known
from podembed.workers.input.data_sample import MOST_HOSTS, Sampler
from podembed.workers.input.read_ahead import ReadAhead, StepReader
from podembed.workers.input.sources import job_plan, open_evaluation, open_reader
from podembed.workers.job.job import JobConfig
from podembed.workers.tracing.recorder import Recorder

READ_AHEAD_BATCHES = 4


class HostInput:
    """Reads ahead for training from the first window on; each evaluation has a reader of its own.

    Args:
      trace: recorder that takes what is read while a trace is on.

    Attributes:
      num_samples: rows of every array that goes to the device. It is the same on all hosts: the largest share of a
        batch, up to a multiple of the devices that share it. Smaller ones are padded with weight 0.
      sampler: sampler that takes samples of batches of training; None where other hosts do.
    """

    def __init__(self, spec: HostSpec, job: JobConfig, *, trace: Recorder) -> None:
        """Raises:
        InputError, OSError: the data cannot be read.
        """
        self._spec, self._job, self._trace = spec, job, trace
        self.sampler = Sampler(job, num_hosts=spec.num_hosts) if spec.host < MOST_HOSTS else None
        # Appended to by reading threads, and taken by the working one.
        self._unknown: deque[UnknownColumn] = deque()
        self._bad_rows = BadRowLog(job.data.max_bad_rows, tell=self._unknown.append)
        plan = job_plan(job, spec.train_index)
        largest = max(len(lanes) for lanes in spec.lanes) * plan.rows_per_lane_step
        self.num_samples = -(-largest // spec.sample_multiple) * spec.sample_multiple
        lanes = spec.lanes[spec.host]
        # Evaluations draw negatives by it too.
        self._known: Known = {}
        data = job.resolved_data
        rooms = {name: shape[:-1] for name, shape in job.activation_shapes.items()}
        self._reader = open_reader(
            data, spec.train_index, plan, lanes, bad_rows=self._bad_rows, known=self._known, rooms=rooms
        )
        self._read_ahead: ReadAhead | None = None
        self._is_closed = False

    def training(self, first_step: int) -> ReadAhead:
        """The batches of training; the first call begins to read them, at `first_step`."""
        if self._read_ahead is None:
            self._read_ahead = self._ahead(self._reader, first_step).start()
        return self._read_ahead

    def evaluation(self) -> tuple[ReadAhead, int]:
        """The batches of the evaluation data, each sample once for each part of its candidates, and how many batches
        there are.

        They are read ahead from now on. The caller closes the reader.

        Raises:
          InputError, OSError: the data cannot be read.
        """
        spec, job = self._spec, self._job
        if spec.eval_index is None:
            raise RuntimeError("No evaluation data is declared. Expected eval_paths in the job's data.")
        lanes = spec.lanes[spec.host]
        reader, num_batches = open_evaluation(
            job, spec.train_index, spec.eval_index, lanes, bad_rows=self._bad_rows, known=self._known
        )
        return self._ahead(reader, 0).start(), num_batches

    def _ahead(self, reader: StepReader, first_step: int) -> ReadAhead:
        return ReadAhead(reader, first_step=first_step, depth=READ_AHEAD_BATCHES, trace=self._trace)

    def take_bad_rows(self) -> tuple[BadRow, ...]:
        """Malformed rows that were met for the first time since the last call, also by reading ahead."""
        return self._bad_rows.take()

    def take_unknown(self) -> tuple[UnknownColumn, ...]:
        """Columns of which no value is in their vocabulary, as far as was read; once a column and reader."""
        return tuple(self._unknown.popleft() for _ in range(len(self._unknown)))

    def close(self, *, deadline_s: float) -> None:
        """Ends the reading thread and closes the files. Safe to call twice.

        Raises:
          ReadAheadError: the storage holds up a read for longer than `deadline_s`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._read_ahead is not None:
            self._read_ahead.close(deadline_s=deadline_s)
        else:
            self._reader.close()
