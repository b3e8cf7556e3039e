"""`Publication`: how a save becomes a commit, once all workers have written it; and the thread that does this.

A publication answers with a value: `Published`, `SaveLost` or `Unsettled`. An exception of it ends the run.

Threads: verifying, publishing and deleting need storage, which may be slow. So the publishing thread does them, one at
a time. It calls the lease's `check`, `publish` and `settle`. The driver's thread meanwhile calls the heartbeat and
reads names, nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Protocol

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.checkpoint import FilesLost
from podembed.orchestrator.commit.lease import Lease, PublicationUnsettled
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.driver.upkeep import Upkeep
from podembed.orchestrator.group.worker_group import Receipts
from podembed.orchestrator.run.history_record import HistoryKeeper, HistoryRecord
from podembed.orchestrator.run.manifest_of_save import manifest_of
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.storage.storage_errors import StorageError, StorageFull, may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The commit stands, and may be acknowledged to anybody."""

    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLost:
    """The save did not become a commit; the commit before it stays the head.

    Attributes:
      reason: a sentence.
      left: why files of the save are still there; None if they are gone.
      needs_all: files of earlier commits are lost, so that the next save must write all rows.
      is_full: the storage has no room, which does not pass by itself.
    """

    reason: str
    left: str | None = None
    needs_all: bool = False
    is_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """Whether the commit of `manifest` stands is unknown. No other may follow until `settle` gets an answer."""

    manifest: Manifest
    error: PublicationUnsettled


Answer = Published | SaveLost | Unsettled


class Publication(Protocol):
    """Makes a commit of one save. Every method is called from the publishing thread."""

    def publish(self, parent: Manifest | None, receipts: Receipts, *, failed_saves: int) -> Answer:
        """Verifies what the workers wrote and publishes it as the commit after `parent`.

        Args:
          failed_saves: number of saves that failed since the parent.
        """
        ...

    def settle(self, unsettled: Unsettled) -> Answer:
        """Asks the storage once more whether the commit stands."""
        ...

    def clear(self, lost: SaveLost) -> SaveLost:
        """Deletes the files of a lost save. The answer says whether some of them are left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunPublication:
    """The publication of one save of a run. Its values are fixed when the save begins.

    Attributes:
      record: loss and evaluations up to `step`, written after the commit.
      counters: further counters of the run, by name.
      metrics: results of an evaluation of this very state, and what early stopping keeps.
      unix_s: wall clock.
      read_back: compare every byte on storage before publishing, and not only sizes.
    """

    run: OpenRun
    lease: Lease
    upkeep: Upkeep
    keeper: HistoryKeeper
    record: HistoryRecord
    step: int
    placement: Mapping[str, Sequence[int]]
    num_hosts: int
    counters: Mapping[str, int]
    metrics: Mapping[str, float]
    read_back: bool
    unix_s: Callable[[], float]

    def publish(self, parent: Manifest | None, receipts: Receipts, *, failed_saves: int) -> Answer:
        """As `Publication.publish`.

        Raises:
          Fenced, RunVanished: the run is no longer this driver's.
          ReplicasDiffer, StateSpoilt, CommitRefused: the state must not be committed.
        """
        try:
            # First: a driver that was replaced must neither verify nor delete what may be the newer driver's.
            self.upkeep.look(self.lease, parent)
            manifest = manifest_of(
                self.run,
                step=self.step,
                generation=self.lease.generation,
                created_unix_s=self.unix_s(),
                parent=parent,
                placement=self.placement,
                num_hosts=self.num_hosts,
                receipts=receipts,
                counters=self.counters,
                metrics=self.metrics,
                failed_saves=failed_saves,
            )
            try:
                checkpoint.commit(self.run.store, manifest, self.lease, read_back=self.read_back)
            except PublicationUnsettled as error:
                # The manifest may stand, so the files that it names must stay. `clear` is not called.
                return Unsettled(manifest=manifest, error=error)
        except Exception as error:
            if not may_pass(error):
                raise
            # A delta builds on files of earlier commits, so the next save may be a delta only if all of them are there.
            needs_all = isinstance(error, FilesLost) and error.is_of_earlier
            return self.clear(
                SaveLost(reason=in_words(error), needs_all=needs_all, is_full=isinstance(error, StorageFull))
            )
        return self._committed(manifest)

    def settle(self, unsettled: Unsettled) -> Answer:
        try:
            self.lease.settle()
        except PublicationUnsettled as error:
            return replace(unsettled, error=error)
        return self._committed(unsettled.manifest)

    def clear(self, lost: SaveLost) -> SaveLost:
        try:
            self.run.store.delete_folder(f"data/{commit_name(step=self.step, generation=self.lease.generation)}")
        except (StorageError, OSError) as error:
            return replace(lost, left=in_words(error).rstrip("."))
        return replace(lost, left=None)

    def _committed(self, manifest: Manifest) -> Published:
        # After the commit, since it names steps that only now cannot be lost. Last goes what the keep policies let go:
        # older commits are deleted only when the new one stands.
        self.keeper.write(self.record)
        self.upkeep.clean(self.lease)
        return Published(manifest=manifest)


class Publisher(Protocol):
    """Does publications beside the driver's thread, one at a time."""

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]: ...

    def wait(self, answer: Future[Answer], *, timeout_s: float | None = None) -> None:
        """Returns when it is there, or after the time."""
        ...

    def close(self, *, timeout_s: float | None = None) -> bool:
        """Ends, after what is being done; False if that is not over after the time."""
        ...


class PublishingThread:
    """One thread that does publications in the order of `submit`."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Answer], Callable[[], Answer]] | None] = queue.SimpleQueue()
        # A daemon: a storage that hangs in the middle of a request must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            answer, work = item
            try:
                answer.set_result(work())
            except BaseException as error:
                # Whoever waits for the answer raises it; this thread goes on to the next one, or to its end.
                answer.set_exception(error)

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        answer: Future[Answer] = Future()
        self._work.put((answer, work))
        return answer

    def wait(self, answer: Future[Answer], *, timeout_s: float | None = None) -> None:
        wait([answer], timeout=timeout_s)

    def close(self, *, timeout_s: float | None = None) -> bool:
        # Behind all that was submitted, so a commit that has begun is finished, if there is time.
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def in_words(error: BaseException) -> str:
    """An error's type and text, with a full stop."""
    text = f"{type(error).__name__}: {error}"
    return text if text.endswith(".") else f"{text}."
