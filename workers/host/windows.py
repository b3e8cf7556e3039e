"""`Windows`: a window of training steps, and an evaluation, as a host runs them: which part of which step comes next.

The driver names steps, not data: reading, exchange and what the device gets follow from the step's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from podembed.workers.data.batch import Batch
from podembed.workers.device.shared_memory import RecordKind
from podembed.workers.host.input import HostInput
from podembed.workers.host.row_norms import RowNorms
from podembed.workers.host.spec import HostWindow, ScoredSamples
from podembed.workers.host.step import Step, Steps
from podembed.workers.input.read_ahead import CLOSE_DEADLINE_S, ReadAhead
from podembed.workers.input.table_profile import profiles_of
from podembed.workers.job.candidates import RankCounts, Ranks
from podembed.workers.job.job import JobConfig, Loss
from podembed.workers.job.quality import cross_entropies
from podembed.workers.job.tasks import total_losses
from podembed.workers.liveness.process_statistics import own_usage
from podembed.workers.liveness.progress import Tracker
from podembed.workers.mesh.mesh import Mesh

MOST_PROFILED = 8
"""Of so many hosts the batches are looked at. Those of the others are like them."""


class Windows:
    """The windows of one host in one generation. Mutated: which step is looked up ahead of its window, and the
    evaluation that has begun.

    Args:
      give_rows: brings the rows of tables on devices there, the first time that it is called.
      norms: of samples of rows.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        batches: HostInput,
        steps: Steps,
        mesh: Mesh,
        tracker: Tracker,
        host: int,
        give_rows: Callable[[], None],
        norms: RowNorms,
    ) -> None:
        self._give_rows, self._norms = give_rows, norms
        self._job, self._input, self.steps, self._mesh, self._tracker = job, batches, steps, mesh, tracker
        self._host = host
        self._looked_up: Step | None = None
        self._evaluation: _Evaluation | None = None

    def train(
        self, first_step: int, last_step: int, *, is_followed: bool, is_profiled: bool = False, is_sampled: bool = False
    ) -> HostWindow:
        """As `HostWorker.train`."""
        reader = self._input.training(first_step)
        steps, staleness = self.steps, self._job.staleness
        sent_before = self._mesh.statistics.bytes_sent
        num_samples = 0
        sampler = self._input.sampler if is_sampled else None
        has_norms = is_sampled and self._norms.is_due()
        steps.take_rows_asked()
        # What a survivor counted in the steps that were taken back.
        steps.take_vocabularies()
        self._tracker.take_phase_s()
        self._tracker.take_phase_cpu_s()
        looks_ahead = is_followed and staleness > 0
        self._give_rows()
        upcoming = self._first_lookup(reader, first_step)
        steps.announce(upcoming, RecordKind.TRAIN)
        for number in range(first_step, last_step):
            step, is_last = upcoming, number + 1 == last_step
            self._tracker.begin_step(number)
            if not is_last or looks_ahead:
                # Ids of the next step need no updated row, so they travel while the device works.
                upcoming = steps.prepare(reader, number + 1)
                self._look_up_ahead(upcoming, step)
                if staleness and not is_last:
                    steps.announce(upcoming, RecordKind.TRAIN)
            steps.await_device(step)
            steps.backward(step)
            if not staleness and not is_last:
                steps.forward(upcoming)
                steps.announce(upcoming, RecordKind.TRAIN)
            num_samples += int(np.count_nonzero(~step.batch.is_padding))
            if sampler is not None:
                sampler.take(step.batch)
            self._tracker.finish_step()
        self._looked_up = upcoming if looks_ahead else None
        # Before the device hears that the window ends: it answers for rows until then.
        norms = self._norms.take() if has_norms else ()
        steps.end_window(last_step)
        self._tracker.point("step.end_of_window")
        is_profiled = is_profiled and self._host < MOST_PROFILED
        return HostWindow(
            num_samples=num_samples,
            phase_s=self._tracker.take_phase_s(),
            phase_cpu_s=self._tracker.take_phase_cpu_s(),
            bytes_sent=self._mesh.statistics.bytes_sent - sent_before,
            rows_asked=steps.take_rows_asked(),
            altered_ids=steps.take_altered_ids(),
            bad_rows=self._input.take_bad_rows(),
            unknown=self._input.take_unknown(),
            profiles=tuple(profiles_of(self._job, step.batch)) if is_profiled else (),
            usage=own_usage(),
            data=None if sampler is None else sampler.finish(),
            rates=steps.rates(step),
            row_norms=norms,
            vocabularies=steps.take_vocabularies(),
        )

    def _first_lookup(self, reader: ReadAhead, number: int) -> Step:
        """The first step of a window: looked up by the window before, or now, with every update in the tables."""
        step, self._looked_up = self._looked_up, None
        if step is None:
            step = self.steps.prepare(reader, number)
            self.steps.forward(step)
        elif step.number != number:
            raise RuntimeError(
                f"Found step {number} requested after step {step.number} was looked up. Expected that one."
            )
        return step

    def _look_up_ahead(self, step: Step, previous: Step) -> None:
        """What may be looked up before the update of `previous`: with staleness everything, else what that update will
        not change.
        """
        if self._job.staleness:
            self.steps.forward(step)
        elif self._job.overlap is not False:
            self.steps.prefetch(step, previous)

    def evaluate(self, first_batch: int = 0, last_batch: int | None = None) -> ScoredSamples | None:
        """As `HostWorker.evaluate`."""
        if first_batch == 0:
            self.close()
            parts = ScoredParts(self._job)
            reader, num_batches = self._input.evaluation()
            self._evaluation = _Evaluation(reader=reader, num_batches=num_batches, parts=parts)
        begun = self._evaluation
        if begun is None or begun.next_batch != first_batch:
            raise RuntimeError(
                f"Found batch {first_batch} of an evaluation requested. Expected "
                f"{'0' if begun is None else f'0 or {begun.next_batch}'}, since batches are scored in their order."
            )
        # The memory of a training step that is already looked up is not touched.
        buffer = 1 - self._looked_up.buffer if self._looked_up else 0
        self._give_rows()
        num_parts, candidates = self._job.evaluation_parts, self._job.candidate_features
        end = begun.num_batches if last_batch is None else min(last_batch, begun.num_batches)
        for number in range(first_batch, end):
            # Only candidates are others in the next part of a batch.
            counted = candidates if number % num_parts else None
            step = self.steps.prepare(begun.reader, number, buffer=buffer, counted=counted)
            self.steps.forward(step)
            self.steps.announce(step, RecordKind.EVALUATE)
            # All devices of a gang have the room of the host with most lanes.
            begun.parts.add(step.batch, self.steps.await_device(step)["scores"], number=number)
            self._tracker.mark()
        self.steps.end_window(0)
        begun.next_batch = end
        if end < begun.num_batches:
            return None
        self.close()
        joined = begun.parts.joined()
        return replace(
            joined,
            bad_rows=self._input.take_bad_rows(),
            unknown=self._input.take_unknown(),
            altered_ids=self.steps.take_altered_ids(),
        )

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Closes the files of an evaluation that was left before its end. Safe to call twice.

        Raises:
          ReadAheadError: the storage holds up a read for longer than `deadline_s`.
        """
        begun, self._evaluation = self._evaluation, None
        if begun is not None:
            begun.reader.close(deadline_s=deadline_s)


@dataclass(slots=True, kw_only=True, eq=False)
class _Evaluation:
    """An evaluation that has begun. Mutated: `parts`, and the number of the next batch."""

    reader: ReadAhead
    num_batches: int
    parts: ScoredParts
    next_batch: int = 0


class ScoredParts:
    """The scored samples of one process, without padding. Each candidate is one where a job has some. Mutated by
    `add`.
    """

    def __init__(self, job: JobConfig) -> None:
        self._groups = job.group_features
        self._losses_of = total_losses(job.tasks) if job.tasks else sample_losses(job.loss)
        # Of each task one column, by what a batch calls it; None is the main label.
        self._labels = [None if task.label == job.data.label else task.label for task in job.tasks]
        self._candidates, self._num_parts = job.candidates, job.evaluation_parts
        self._source = None if job.candidates is None else job.resolved_data.id_columns[job.candidates]
        self._counts = RankCounts() if job.ranks_all else None
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._ranks: list[Ranks] = []

    def add(self, batch: Batch, scores: np.ndarray, *, number: int = 0) -> None:
        """Takes the scores of a batch, with those of more padding behind them or none.

        Args:
          scores: `[num_samples]`, or `[num_samples, c]` of candidates, or of the scores of all tasks.
          number: of the batch in its evaluation, which says what part of the candidates it has.
        """
        rows = np.flatnonzero(~batch.is_padding)
        if self._counts is not None and self._candidates is not None:
            part, is_candidate = number % self._num_parts, self._are_candidates(batch, scores.shape[1])
            self._counts.add(scores[: batch.num_samples], is_candidate, is_first=part == 0)
            if part < self._num_parts - 1:
                return
            rows = rows[self._counts.has_positive[rows]]
            found, ranks = self._counts.result(rows)
            labels = batch.labels[rows]
            self._ranks.append(ranks)
        elif self._labels:
            columns = [batch.labels if name is None else batch.columns[name] for name in self._labels]
            found, labels = scores[rows], np.stack(columns, axis=1)[rows]
        elif self._candidates is None:
            found, labels = scores[rows], batch.labels[rows]
        else:
            rows, places = np.nonzero(self._are_candidates(batch, scores.shape[1]))
            is_first = (places == 0) & (number % self._num_parts == 0)
            # Where the label of a sample is missing, none of its candidates counts.
            own = np.where(is_first | np.isnan(batch.labels[rows]), batch.labels[rows], np.float32(0))
            found, labels = scores[rows, places], own
        groups = [batch.only_ids(n, rows) if n in batch.features else batch.sample_ids[rows] for n in self._groups]
        self._parts.append((found, labels, batch.weights[rows], self._losses_of(found, labels), *groups))

    def _are_candidates(self, batch: Batch, width: int) -> np.ndarray:
        """bool `[num_samples, width]`: which places have a candidate. One that its table drops is none."""
        bags = batch.features[self._candidates or ""]
        found = np.arange(width) < np.diff(bags.row_splits)[:, None]
        if self._source is not None and self._source.outside == "drop":
            found[found] = self._source.rows_of(bags.values) >= 0
        return found

    def joined(self) -> ScoredSamples:
        """All samples in the order in which they came."""
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        scores, labels, weights, losses, *groups = columns
        return ScoredSamples(
            scores=scores,
            labels=labels,
            weights=weights,
            losses=losses,
            groups=dict(zip(self._groups, groups, strict=True)),
            ranks=Ranks.concatenate(self._ranks) if self._ranks else None,
        )


def sample_losses(loss: Loss | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of float32 scores and labels, each `[n]`, that returns the losses `[n]`; `None` is the default loss,
    as in `JobConfig`.
    """
    if loss is None:
        return cross_entropies
    # A device answers an evaluation with scores alone. A host therefore loads JAX only where the job declares a loss of
    # its own.
    import jax

    compiled = jax.jit(loss)
    return lambda scores, labels: np.asarray(compiled(scores, labels))
