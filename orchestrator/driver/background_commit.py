"""`BackgroundCommits`: the commits of one generation, made while the workers train on; at most one is under way.

A commit begins at a step: the workers freeze that moment, which takes them no time, and write it beside their steps.
The first one after a fault waits until the rows that hosts kept have been compared with the commit before.
When all have said what they wrote, it is verified and published, then acknowledged. What a commit means stays the same:
before its manifest exists, there is no commit. A fault before that leaves files that no manifest names.

Where the storage fails a save, that save is lost, not the run. Its files are removed, and the commit before it stays
the head. The next save is another try, of all that changed since that head. `Patience` says how many may fail in a row
before training has to wait for one that does not, and for how long it waits. `conclude` is the end of a run: it does
not return without a commit of the last step.

Threads: the driver's thread calls everything here, `poll` whenever it waits for workers. What needs storage is done by
the publishing thread (`publication`), which answers with values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.run_errors import WorkerFailure, cause
from podembed.orchestrator.commit.lease import PublicationUnsettled
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.commit.patience import Patience, SavesFailed
from podembed.orchestrator.driver.publication import (
    Answer,
    Publication,
    Published,
    Publisher,
    PublishingThread,
    SaveLost,
    Unsettled,
    in_words,
)
from podembed.orchestrator.events.commits import CommitUnsettled, LastCommitTried, PublicationAbandoned, SaveFailed
from podembed.orchestrator.events.event import Emit
from podembed.orchestrator.group.worker_group import Call, WorkerGroup
from podembed.workers.storage.storage_errors import StorageFull

_LOOK_S = 0.05
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A commit that may stand or not, and when the storage is asked again. `since_s`: of the first time."""

    unsettled: Unsettled
    since_s: float
    at_s: float
    wait_s: float


@dataclass(slots=True, eq=False)
class _Save:
    """A save that has begun. At any time the workers write it, the publishing thread has it, or a question waits.

    Mutated: `answer`, while the publishing thread has it; `question`, while that is to be asked.
    """

    step: int
    publication: Publication
    writing: Sequence[Call]
    begun_s: float
    answer: Future[Answer] | None = None
    question: _Question | None = None


class BackgroundCommits:
    """See the module.

    Args:
      group: the workers.
      generation: generation of the lease.
      head: the commit that the generation started from.
      needs_all: whether the first commit must hold all rows.
      full_every: every so many commits hold all rows, the others only those that changed since the commit before.
      acknowledge: told each published commit and the seconds since it began.
      failed: told each save that failed.
      emit: callback that is told when it is unknown whether a commit stands.
      patience: how many storage failures to tolerate, and how long.
      publisher: by default a thread of its own.
      is_stopping: whether somebody has asked the run to end and waits for it.

    Attributes:
      head: the last acknowledged commit.
      begun_step: step of the last commit that began; that of the head at first.
      failed_in_a_row: saves that failed since the last commit.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        generation: int,
        head: Manifest | None,
        needs_all: bool = False,
        full_every: int,
        acknowledge: Callable[[Manifest, float], None],
        failed: Callable[[SaveFailed], None] = lambda save: None,
        emit: Emit = lambda event: None,
        patience: Patience | None = None,
        clock: Clock = SYSTEM_CLOCK,
        publisher: Publisher | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.head = head
        self.begun_step = self.committed_step
        self.failed_in_a_row = 0
        self._needs_all = needs_all
        self._group = group
        self._generation = generation
        self._full_every = full_every
        self._acknowledge = acknowledge
        self._failed = failed
        self._emit = emit
        self._patience = patience or Patience()
        self._clock = clock
        self._is_stopping = is_stopping
        self._under_way: _Save | None = None
        self._last_failure: SaveFailed | None = None
        self._is_insisting = False
        self._is_leaving = False
        self._publisher = publisher or PublishingThread()

    @property
    def committed_step(self) -> int:
        """Step of the last acknowledged commit, 0 before the first."""
        return self.head.step if self.head else 0

    def begin(self, step: int, publication: Publication) -> None:
        """Begins to commit the present state, which is that after `step` steps. Waits for the commit before, if it is
        under way; and for this one, if more saves have failed in a row than are tolerated.

        Raises:
          SavesFailed: it was waited for, in vain.
          WorkerFailure: a worker could not write for another reason than the storage, or is gone.
          Exception: as `poll`.
        """
        self.finish()
        self._start(step, publication)
        if self.failed_in_a_row and self.failed_in_a_row >= self._patience.max_failed_saves:
            self._insist(step, publication)

    def conclude(self, step: int, publication: Publication) -> None:
        """Waits until there is a commit of `step`, after which no step was done; saves again if the one that began
        failed.

        Raises:
          As `begin`.
        """
        self._insist(step, publication)

    def poll(self) -> None:
        """Takes the commit under way as far as it can go without waiting.

        Raises:
          WorkerFailure: a worker could not write, and it was not the storage's fault.
          PublicationUnsettled: the storage did not say within the patience whether the commit stands.
          Exception: whatever the publication raised.
        """
        save = self._under_way
        if save is not None and save.answer is None:
            save.answer = self._asked(save)
        if save is not None and save.answer is not None and save.answer.done():
            # Whatever comes of it, it is over; but for a question that is asked again.
            self._under_way = None
            self._take(save, save.answer.result())

    def finish(self) -> None:
        """Waits until the commit under way is acknowledged or has failed.

        Raises:
          As `poll`; WorkerFailure also where a worker is gone.
        """
        while (save := self._under_way) is not None:
            if save.answer is not None:
                self._publisher.wait(save.answer, timeout_s=_LOOK_S)
                self._group.on_poll()
            elif save.question is not None:
                self._clock.sleep(_LOOK_S)
                self._group.on_poll()
            else:
                try:
                    self._group.await_receipts(save.writing)
                except WorkerFailure as failure:
                    if _is_of_workers(failure):
                        raise
            self.poll()

    def leave(self, *, can_finish: bool) -> None:
        """Ends with the generation, after a fault or an error: a commit that all workers have written is still
        published.

        Args:
          can_finish: the workers live, so that they may finish writing.

        Raises:
          Exception: whatever the publication raised.
        """
        # Where the storage did not say whether a manifest is there, the next generation finds out.
        self._is_leaving = True
        # What made the generation end is reported by its own exception.
        with contextlib.suppress(WorkerFailure, PublicationUnsettled):
            if can_finish:
                self.finish()
            self.poll()
        with contextlib.suppress(PublicationUnsettled):
            while self._under_way is not None and self._under_way.answer is not None:
                self._publisher.wait(self._under_way.answer, timeout_s=_LOOK_S)
                with contextlib.suppress(WorkerFailure):
                    self._group.on_poll()
                self.poll()
        self._under_way = None

    def close(self, *, timeout_s: float | None = None) -> None:
        """Ends the publishing thread, after what it is doing.

        Args:
          timeout_s: how long it is waited for; then it is left behind, and what it does may come about or not.
        """
        if not self._publisher.close(timeout_s=timeout_s):
            self._emit(PublicationAbandoned(waited_s=timeout_s or 0.0))

    def _start(self, step: int, publication: Publication) -> None:
        begun_s = self._clock.monotonic_s()
        may_be_delta = self.head is not None and self.head.num_deltas + 1 < self._full_every
        is_delta = may_be_delta and not self._needs_all
        attempt = commit_name(step=step, generation=self._generation)
        writing = self._group.begin_save(attempt, is_delta=is_delta, before_failed=self.failed_in_a_row > 0)
        self._under_way = _Save(step=step, publication=publication, writing=writing, begun_s=begun_s)
        self.begun_step = step

    # ------------------------------------------------------------------ one save

    def _asked(self, save: _Save) -> Future[Answer] | None:
        """What the publishing thread is to do next for a save; None while there is nothing."""
        if (question := save.question) is not None:
            if self._is_leaving:
                self._under_way = None
                raise question.unsettled.error
            if self._clock.monotonic_s() < question.at_s:
                return None
            return self._publisher.submit(partial(save.publication.settle, question.unsettled))
        try:
            receipts = self._group.receipts(save.writing)
        except WorkerFailure as failure:
            if _is_of_workers(failure):
                raise
            return self._publisher.submit(partial(save.publication.clear, _lost(failure)))
        if receipts is None:
            return None
        publish = partial(save.publication.publish, self.head, receipts, failed_saves=self.failed_in_a_row)
        return self._publisher.submit(publish)

    def _take(self, save: _Save, answer: Answer) -> None:
        match answer:
            case Published(manifest=manifest):
                self.head, self.failed_in_a_row, self._needs_all = manifest, 0, False
                self._acknowledge(manifest, self._clock.monotonic_s() - save.begun_s)
            case SaveLost():
                self._count(save.step, answer)
            case Unsettled():
                save.question, save.answer = self._question(save, answer), None
                self._under_way = save

    def _question(self, save: _Save, unsettled: Unsettled) -> _Question:
        """When to ask again whether a commit stands. Until that is known no other may follow.

        Raises:
          PublicationUnsettled: the storage has not said so within the patience.
        """
        now_s, before = self._clock.monotonic_s(), save.question
        since_s = before.since_s if before else now_s
        wait_s = min(2 * before.wait_s, LONGEST_WAIT_S) if before else FIRST_WAIT_S
        if self._is_leaving or now_s + wait_s > since_s + self._patience.timeout_s:
            raise unsettled.error
        if before is None:
            self._emit(
                CommitUnsettled(
                    step=save.step,
                    timeout_s=self._patience.timeout_s,
                    reason=in_words(unsettled.error.__cause__ or unsettled.error),
                )
            )
        return _Question(unsettled=unsettled, since_s=since_s, at_s=now_s + wait_s, wait_s=wait_s)

    def _count(self, step: int, lost: SaveLost) -> None:
        self.failed_in_a_row += 1
        self._needs_all = self._needs_all or lost.needs_all
        self._last_failure = SaveFailed(
            step=step,
            reason=lost.reason,
            in_a_row=self.failed_in_a_row,
            is_awaited=self._is_insisting or self.failed_in_a_row >= self._patience.max_failed_saves,
            head_step=self.committed_step,
            left=lost.left,
            needs_all=self._needs_all,
            is_full=lost.is_full,
        )
        self._failed(self._last_failure)
        if self._patience.max_failed_saves == 0:
            raise self._give_up("and none may fail")

    # ------------------------------------------------------------------ until it succeeds

    def _insist(self, step: int, publication: Publication) -> None:
        """Saves the present state again and again until it is committed, or until the time is over."""
        started_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
        self._is_insisting = True
        self.finish()
        stop_s: float | None = None
        while self.committed_step != step:
            if stop_s is None and self._is_stopping():
                stop_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
                self._tell_stop(self._patience.until_s(started_s, stop_s, self._last_failure) - stop_s)
            until_s = self._patience.until_s(started_s, stop_s, self._last_failure)
            if self._clock.monotonic_s() + wait_s > until_s:
                raise self._give_up(f"and none that succeeded within {until_s - started_s:.0f} s")
            if self._rest(wait_s, is_cut=stop_s is None):
                continue
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            # The same step has the same names, so nothing of the failed attempt may be left.
            if self._is_clear(step, publication):
                self._start(step, publication)
                self.finish()
        self._is_insisting = False

    def _tell_stop(self, seconds: float) -> None:
        reason = self._last_failure.reason if self._last_failure else "it has not answered yet."
        self._emit(LastCommitTried(committed_step=self.committed_step, timeout_s=max(0.0, seconds), reason=reason))

    def _give_up(self, found: str) -> SavesFailed:
        head_step = self.committed_step if self.head else None
        return SavesFailed(found, in_a_row=self.failed_in_a_row, last=self._last_failure, head_step=head_step)

    def _rest(self, seconds: float, *, is_cut: bool) -> bool:
        """Waits. `is_cut`: ends early, and says so, when the run is asked to end."""
        until_s = self._clock.monotonic_s() + seconds
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if is_cut and self._is_stopping():
                return True
            self._group.on_poll()
            self._clock.sleep(min(_LOOK_S, left_s))
        return False

    def _is_clear(self, step: int, publication: Publication) -> bool:
        """Whether nothing is left of a failed attempt to save this step; tries once more to remove it."""
        failure = self._last_failure
        if failure is None or failure.step != step or failure.left is None:
            return True
        lost = SaveLost(reason=failure.reason, is_full=failure.is_full)
        removing = self._publisher.submit(partial(publication.clear, lost))
        self._under_way = _Save(step=step, publication=publication, writing=(), begun_s=0.0, answer=removing)
        self.finish()
        return self._last_failure is not None and self._last_failure.left is None


def _is_of_workers(failure: WorkerFailure) -> bool:
    """Whether another save would fail, too: it was not the storage alone."""
    return not all(one.is_storage for one in failure.failures)


def _lost(failure: WorkerFailure) -> SaveLost:
    """A save whose files a worker could not write."""
    is_full = any(StorageFull.__name__ in one.message for one in failure.failures)
    return SaveLost(reason=f"{cause(failure.failures).rstrip('.')}.", is_full=is_full)
