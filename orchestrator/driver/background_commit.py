"""`BackgroundCommits`: the commits of one generation, made while the workers train on; at most one is under way.

A commit begins at a step: the workers freeze that moment, which takes them no time, and write it beside their steps.
When all have said what they wrote, it is verified and published, then acknowledged. What a commit means does not change
by this: before its manifest exists there is nothing, and a fault before that leaves files that nobody refers to.

A save that the storage fails is lost, not the run: its files are removed, the commit before it stays the head, and the
next save is another try, of all that changed since that head. `Patience` says how many may fail in a row before
training has to wait for one that does not, and for how long it waits. `conclude` is the end of a run: it does not
return without a commit of the last step.

Threads: the driver's thread calls everything here, `poll` whenever it waits for workers. Verifying and publishing need
storage, which may be slow, and so does removing what a failed save left; a thread of its own does that, one thing at a
time; it gets values and answers with the manifest or an exception. Of the lease it uses `check` and `publish`, the
driver's thread meanwhile only the heartbeat and names. The thread ends with `close`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from podembed.orchestrator.api.clock import SYSTEM_CLOCK, Clock
from podembed.orchestrator.api.errors import WorkerFailure, cause
from podembed.orchestrator.commit.checkpoint import FilesLost
from podembed.orchestrator.commit.lease import PublicationUnsettled
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.group.worker_group import Call, Receipts, WorkerGroup
from podembed.workers.storage.errors import StorageError, StorageFull, may_pass

# (commit before it, what the workers wrote) → the published manifest; called from the publishing thread.
Publish = Callable[[Manifest | None, Receipts], Manifest]
_LOOK_S = 0.05
FIRST_WAIT_S = 1.0
# A disk that is full does not become empty by itself, and somebody waits for the end of the run.
FULL_AT_STOP_S = 10.0
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a run bears of its storage.

    Attributes:
      max_failed_saves: after so many failures in a row training waits for the next save; 0 ends the run with the first.
      timeout_s: how long it then tries again, and how long the commit of the last step is tried; 0 ends the run where
        it would have to wait.
    """

    max_failed_saves: int = 3
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSave:
    """A save that did not become a commit.

    Attributes:
      in_a_row: how many have failed since the last commit, with this one.
      is_awaited: training waits until one succeeds.
      head_step: the step to which a fault would lead back now.
      left: why files that it wrote are still there; None if they are gone.
      needs_all: files of earlier commits are lost, so that the next save writes all rows.
      is_full: the storage has no room, which does not pass by itself.
    """

    step: int
    reason: str
    in_a_row: int
    is_awaited: bool
    head_step: int
    left: str | None
    needs_all: bool = False
    is_full: bool = False

    def __str__(self) -> str:
        follows = (
            "Training waits and tries again"
            if self.is_awaited
            else "Training goes on, the next save is another try, and a fault would lead back to step "
            + str(self.head_step)
        )
        left = f" Its files are still there and go with a later commit: {self.left}." if self.left else ""
        whole = " The next save writes all rows, since it cannot rely on earlier commits." if self.needs_all else ""
        return (
            f"SAVE FAILED at step {self.step} (number {self.in_a_row} in a row): {self.reason} {follows}.{whole}{left}"
        )


class SavesFailed(StorageError):
    """No save succeeded for longer than the run bears."""


class _Lost(Exception):
    """How the publishing thread says that a save is lost. The other attributes as in `FailedSave`."""

    def __init__(self, reason: str, left: str | None, *, needs_all: bool = False, is_full: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.left, self.needs_all, self.is_full = reason, left, needs_all, is_full


class Publisher(Protocol):
    """Where commits are verified and published beside the driver's thread, one at a time."""

    def submit(self, publish: Publish, head: Manifest | None, receipts: Receipts) -> Future[Manifest]: ...

    def wait(self, publication: Future[Manifest], *, timeout_s: float | None = None) -> None:
        """Returns when it is done, or after the time."""
        ...

    def close(self, *, timeout_s: float | None = None) -> bool:
        """Ends, after what is being done; False if that is not over after the time."""
        ...


class PublishingThread:
    """See the module. The program ends without it where it is not waited for: a storage may hang in the middle of a
    request.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Manifest], Callable[[], Manifest]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            publication, publish = item
            try:
                publication.set_result(publish())
            except BaseException as error:
                publication.set_exception(error)

    def submit(self, publish: Publish, head: Manifest | None, receipts: Receipts) -> Future[Manifest]:
        publication: Future[Manifest] = Future()
        self._work.put((publication, partial(publish, head, receipts)))
        return publication

    def wait(self, publication: Future[Manifest], *, timeout_s: float | None = None) -> None:
        wait([publication], timeout=timeout_s)

    def close(self, *, timeout_s: float | None = None) -> bool:
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A commit that has begun. Mutated: `publication`, when all workers have written, or when what they wrote is to be
    removed.
    """

    step: int
    attempt: str
    publish: Publish
    writing: Sequence[Call]
    begun_s: float
    publication: Future[Manifest] | None = None


class BackgroundCommits:
    """See the module.

    Args:
      group: the workers.
      generation: of the lease.
      head: the commit that the generation started from.
      full_every: every so many commits hold all rows, the others only those that changed since the commit before.
      acknowledge: told each published commit and the seconds since it began; called from the driver's thread.
      failed: told each save that failed; called from the driver's thread.
      notice: told when nobody knows whether a commit stands; called from the driver's thread.
      remove: deletes the files of an attempt, by its name; called from the publishing thread.
      patience: what is borne of the storage.
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
        full_every: int,
        acknowledge: Callable[[Manifest, float], None],
        failed: Callable[[FailedSave], None] = lambda save: None,
        notice: Callable[[str], None] = lambda text: None,
        remove: Callable[[str], None] = lambda attempt: None,
        patience: Patience | None = None,
        clock: Clock = SYSTEM_CLOCK,
        publisher: Publisher | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.head = head
        self.begun_step = self.committed_step
        self.failed_in_a_row = 0
        self._needs_all = False
        self._group = group
        self._generation = generation
        self._full_every = full_every
        self._acknowledge = acknowledge
        self._failed = failed
        self._notice = notice
        self._remove = remove
        self._patience = patience or Patience()
        self._clock = clock
        self._is_stopping = is_stopping
        self._under_way: _UnderWay | None = None
        self._last_failure: FailedSave | None = None
        self._is_insisting = False
        # Written by the publishing thread, taken by the driver's.
        self._unsettled: PublicationUnsettled | None = None
        self._is_closing = threading.Event()
        self._publisher = publisher or PublishingThread()

    @property
    def committed_step(self) -> int:
        """Step of the last acknowledged commit, 0 before the first."""
        return self.head.step if self.head else 0

    def begin(self, step: int, publish: Publish) -> None:
        """Begins to commit the present state, which is that after `step` steps. Waits for the commit before, if it is
        under way; and for this one, if more saves have failed in a row than are borne.

        Args:
          publish: makes the commit when all is written; what it says of the run is fixed now.

        Raises:
          SavesFailed: it was waited for, in vain.
          WorkerFailure: a worker could not write for another reason than the storage, or is gone.
          Exception: whatever else `publish` raised.
        """
        self.finish()
        self._start(step, publish)
        if self.failed_in_a_row and self.failed_in_a_row >= self._patience.max_failed_saves:
            self._insist(step, publish)

    def conclude(self, step: int, publish: Publish) -> None:
        """Waits until there is a commit of `step`, after which no step was done; saves again if the one that began
        failed.

        Raises:
          As `begin`.
        """
        self._insist(step, publish)

    def poll(self) -> None:
        """Takes the commit under way as far as it can go without waiting.

        Raises:
          WorkerFailure: a worker could not write, and it was not the storage's fault.
          Exception: whatever `publish` raised, unless the storage may be well again for the next save.
        """
        under_way = self._under_way
        if under_way is None:
            return
        if under_way.publication is None:
            try:
                receipts = self._group.receipts(under_way.writing)
            except WorkerFailure as failure:
                if not all(one.is_storage for one in failure.failures):
                    raise
                under_way.publication = self._publisher.submit(self._clearing(under_way, failure), self.head, ([], []))
                return
            if receipts is None:
                return
            under_way.publication = self._publisher.submit(self._concluding(under_way), self.head, receipts)
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            self._notice(
                f"step {under_way.step}: the storage failed while the commit was published, and nobody knows whether "
                "it stands; it is asked again "
                f"for up to {self._patience.timeout_s:.0f} s. {_sentence(unsettled.__cause__ or unsettled)}"
            )
        if under_way.publication.done():
            # Whatever comes of it, it is over.
            self._under_way = None
            try:
                self.head = under_way.publication.result()
            except _Lost as lost:
                self._count(under_way.step, lost)
                return
            self.failed_in_a_row, self._needs_all = 0, False
            self._acknowledge(self.head, self._clock.monotonic_s() - under_way.begun_s)

    def finish(self) -> None:
        """Waits until the commit under way is acknowledged or has failed.

        Raises:
          As `poll`; WorkerFailure also where a worker is gone.
        """
        while (under_way := self._under_way) is not None:
            if under_way.publication is None:
                try:
                    self._group.await_receipts(under_way.writing)
                except WorkerFailure as failure:
                    if not all(one.is_storage for one in failure.failures):
                        raise
            else:
                self._publisher.wait(under_way.publication, timeout_s=_LOOK_S)
                self._group.on_poll()
            self.poll()

    def leave(self, *, can_finish: bool) -> None:
        """Ends with the generation, after a fault or an error: a commit that all workers have written is still
        published.

        Args:
          can_finish: the workers live, so that they may finish writing.

        Raises:
          Exception: whatever `publish` raised.
        """
        # Whether a manifest that nobody answered for is there, is found out by the next generation.
        self._is_closing.set()
        # What made the generation end is reported by its own exception.
        with contextlib.suppress(WorkerFailure, PublicationUnsettled):
            if can_finish:
                self.finish()
            self.poll()
        with contextlib.suppress(PublicationUnsettled):
            while self._under_way is not None and self._under_way.publication is not None:
                self._publisher.wait(self._under_way.publication, timeout_s=_LOOK_S)
                with contextlib.suppress(WorkerFailure):
                    self._group.on_poll()
                self.poll()
        self._under_way = None

    def close(self, *, timeout_s: float | None = None) -> None:
        """Ends the publishing thread, after what it is doing.

        Args:
          timeout_s: how long it is waited for; then it is left behind, and what it does may come about or not.
        """
        self._is_closing.set()
        if not self._publisher.close(timeout_s=timeout_s):
            self._notice(
                f"left while the storage had not answered for {timeout_s:.0f} s. What was committed stands; whether "
                "the commit that was being "
                "published does, the next driver finds out"
            )

    def _start(self, step: int, publish: Publish) -> None:
        begun_s = self._clock.monotonic_s()
        may_be_delta = self.head is not None and self.head.num_deltas + 1 < self._full_every
        is_delta = may_be_delta and not self._needs_all
        attempt = commit_name(step=step, generation=self._generation)
        writing = self._group.begin_save(attempt, is_delta=is_delta, before_failed=self.failed_in_a_row > 0)
        self._under_way = _UnderWay(step=step, attempt=attempt, publish=publish, writing=writing, begun_s=begun_s)
        self.begun_step = step

    def _insist(self, step: int, publish: Publish) -> None:
        """Saves the present state again and again until it is committed, or until the time is over."""
        started_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
        self._is_insisting = True
        self.finish()
        stop_s: float | None = None
        while self.committed_step != step:
            if stop_s is None and self._is_stopping():
                stop_s, wait_s = self._clock.monotonic_s(), FIRST_WAIT_S
                self._tell_stop(self._until_s(started_s, stop_s) - stop_s)
            if self._clock.monotonic_s() + wait_s > self._until_s(started_s, stop_s):
                seconds = self._until_s(started_s, stop_s) - started_s
                raise self._give_up(f"and none that succeeded within {seconds:.0f} s")
            if self._rest(wait_s, is_cut=stop_s is None):
                continue
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            # The same step has the same names, so nothing of the failed attempt may be left.
            if self._is_clear(step):
                self._start(step, publish)
                self.finish()
        self._is_insisting = False

    def _until_s(self, started_s: float, stop_s: float | None) -> float:
        """Until when saves are tried. `stop_s`: since when the run is to end, if it is."""
        until_s = started_s + self._patience.timeout_s
        is_full = self._last_failure is not None and self._last_failure.is_full
        return until_s if stop_s is None or not is_full else min(until_s, stop_s + FULL_AT_STOP_S)

    def _tell_stop(self, seconds: float) -> None:
        reason = self._last_failure.reason if self._last_failure else "it has not answered yet."
        self._notice(
            f"the run is to end, but the storage fails its last commit: {reason} It is tried again for up to "
            f"{max(0.0, seconds):.0f} s. Ctrl-C once "
            f"more leaves at once; a resume then goes on from step {self.committed_step}"
        )

    def _give_up(self, found: str) -> SavesFailed:
        reason = self._last_failure.reason if self._last_failure else "none was begun."
        return SavesFailed(
            f"Found {self.failed_in_a_row} saves failed in a row, {found}: {reason} Expected a commit before training "
            "goes on or ends. Mend the "
            f"storage, then resume; the commit of step {self.committed_step} stands."
            if self.head
            else f"Found {self.failed_in_a_row} saves failed in a row, {found}: {reason} Expected a first commit. Mend "
            "the storage, then resume."
        )

    def _rest(self, seconds: float, *, is_cut: bool) -> bool:
        """Waits. `is_cut`: ends early, and says so, when the run is asked to end."""
        until_s = self._clock.monotonic_s() + seconds
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if is_cut and self._is_stopping():
                return True
            self._group.on_poll()
            self._clock.sleep(min(_LOOK_S, left_s))
        return False

    def _is_clear(self, step: int) -> bool:
        """Whether nothing is left of a failed attempt to save this step; tries once more to remove it."""
        failure = self._last_failure
        if failure is None or failure.step != step or failure.left is None:
            return True
        attempt = commit_name(step=step, generation=self._generation)
        removing = self._publisher.submit(
            self._removing(attempt, failure.reason, is_full=failure.is_full), self.head, ([], [])
        )
        self._under_way = _UnderWay(
            step=step, attempt=attempt, publish=_nothing, writing=(), begun_s=0.0, publication=removing
        )
        self.finish()
        return self._last_failure is not None and self._last_failure.left is None

    def _count(self, step: int, lost: _Lost) -> None:
        self.failed_in_a_row += 1
        self._last_failure = FailedSave(
            step=step,
            reason=lost.reason,
            in_a_row=self.failed_in_a_row,
            is_awaited=self._is_insisting or self.failed_in_a_row >= self._patience.max_failed_saves,
            head_step=self.committed_step,
            left=lost.left,
            needs_all=self._needs_all or lost.needs_all,
            is_full=lost.is_full,
        )
        self._needs_all = self._last_failure.needs_all
        self._failed(self._last_failure)
        if self._patience.max_failed_saves == 0:
            raise self._give_up("and none may fail")

    # ------------------------------------------------------------------ the publishing thread

    def _concluding(self, under_way: _UnderWay) -> Publish:
        def conclude(head: Manifest | None, receipts: Receipts) -> Manifest:
            try:
                return self._settled(lambda: under_way.publish(head, receipts))
            except Exception as error:
                if isinstance(error, PublicationUnsettled) or not may_pass(error):
                    raise
                needs_all = isinstance(error, FilesLost) and error.is_of_earlier
                is_full = isinstance(error, StorageFull)
                left = self._removed(under_way.attempt)
                raise _Lost(_sentence(error), left, needs_all=needs_all, is_full=is_full) from error

        return conclude

    def _settled(self, publish: Callable[[], Manifest]) -> Manifest:
        """Publishes. While nobody can say whether the manifest is there, it asks again: until then no other commit may
        follow.
        """
        wait_s, waited_s = FIRST_WAIT_S, 0.0
        while True:
            try:
                return publish()
            except PublicationUnsettled as error:
                if waited_s == 0:
                    self._unsettled = error
                if waited_s + wait_s > self._patience.timeout_s or self._is_closing.wait(wait_s):
                    raise
                publish = error.settle
            waited_s += wait_s
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _clearing(self, under_way: _UnderWay, failure: WorkerFailure) -> Publish:
        is_full = any(StorageFull.__name__ in one.message for one in failure.failures)
        return self._removing(under_way.attempt, f"{cause(failure.failures).rstrip('.')}.", is_full=is_full)

    def _removing(self, attempt: str, reason: str, *, is_full: bool) -> Publish:
        def remove(head: Manifest | None, receipts: Receipts) -> Manifest:
            raise _Lost(reason, self._removed(attempt), is_full=is_full)

        return remove

    def _removed(self, attempt: str) -> str | None:
        """Deletes what an attempt wrote. Returns why some of it may be left."""
        try:
            self._remove(attempt)
        except (StorageError, OSError) as error:
            return _sentence(error).rstrip(".")
        return None


def _nothing(head: Manifest | None, receipts: Receipts) -> Manifest:
    raise RuntimeError("An attempt that only removes files has nothing to publish. Expected nobody to ask.")


def _sentence(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if text.endswith(".") else f"{text}."
