"""`BackgroundCommits`: the commits of one generation, made while the workers train on; at most one is under way.

A commit begins at a step: the workers freeze that moment, which takes them no time, and write it beside their steps. When all have said
what they wrote, it is verified and published, then acknowledged. What a commit means does not change by this: before its manifest exists
there is nothing, and a fault before that leaves files that nobody refers to.

Threads: the driver's thread calls everything here, `poll` whenever it waits for workers. Verifying and publishing need storage, which may be
slow, so a thread of its own does that, for one commit at a time; it gets values and answers with the manifest or an exception. Of the lease
it uses `check` and `publish`, the driver's thread meanwhile only the heartbeat and names. The thread ends with `close`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from orchestrator.errors import WorkerFailure
from orchestrator.manifest import Manifest, commit_name
from orchestrator.worker_group import Call, Receipts, WorkerGroup

# (commit before it, what the workers wrote) → the published manifest; called from the publishing thread.
Publish = Callable[[Manifest | None, Receipts], Manifest]
_LOOK_S = 0.05


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A commit that has begun. Mutated: `publication`, when all workers have written."""

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

    Attributes:
      head: the last acknowledged commit.
      begun_step: step of the last commit that began; that of the head at first.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        generation: int,
        head: Manifest | None,
        full_every: int,
        acknowledge: Callable[[Manifest, float], None],
    ) -> None:
        self.head = head
        self.begun_step = self.committed_step
        self._group = group
        self._generation = generation
        self._full_every = full_every
        self._acknowledge = acknowledge
        self._under_way: _UnderWay | None = None
        self._publisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")

    @property
    def committed_step(self) -> int:
        """Step of the last acknowledged commit, 0 before the first."""
        return self.head.step if self.head else 0

    def begin(self, step: int, publish: Publish) -> None:
        """Begins to commit the present state, which is that after `step` steps. Waits for the commit before, if it is under way.

        Args:
          publish: makes the commit when all is written; what it says of the run is fixed now.

        Raises:
          As `finish`.
        """
        self.finish()
        begun_s = time.monotonic()
        is_delta = self.head is not None and self.head.num_deltas + 1 < self._full_every
        writing = self._group.begin_save(commit_name(step=step, generation=self._generation), is_delta=is_delta)
        self._under_way = _UnderWay(publish=publish, writing=writing, begun_s=begun_s)
        self.begun_step = step

    def poll(self) -> None:
        """Takes the commit under way as far as it can go without waiting.

        Raises:
          WorkerFailure: a worker could not write.
          Exception: whatever `publish` raised.
        """
        under_way = self._under_way
        if under_way is None:
            return
        if under_way.publication is None:
            receipts = self._group.receipts(under_way.writing)
            if receipts is None:
                return
            under_way.publication = self._publisher.submit(under_way.publish, self.head, receipts)
        if under_way.publication.done():
            # Whatever comes of it, it is over.
            self._under_way = None
            self.head = under_way.publication.result()
            self._acknowledge(self.head, time.monotonic() - under_way.begun_s)

    def finish(self) -> None:
        """Waits until the commit under way is acknowledged.

        Raises:
          WorkerFailure: a worker could not write, or is gone.
          Exception: whatever `publish` raised.
        """
        while (under_way := self._under_way) is not None:
            if under_way.publication is None:
                self._group.await_receipts(under_way.writing)
            else:
                wait([under_way.publication], timeout=_LOOK_S)
                self._group.on_poll()
            self.poll()

    def leave(self, *, can_finish: bool) -> None:
        """Ends with the generation, after a fault or an error: a commit that all workers have written is still published.

        Args:
          can_finish: the workers live, so that they may finish writing.

        Raises:
          Exception: whatever `publish` raised.
        """
        # What made the generation end is reported by its own exception.
        with contextlib.suppress(WorkerFailure):
            if can_finish:
                self.finish()
            self.poll()
        if self._under_way is not None and self._under_way.publication is not None:
            wait([self._under_way.publication])
            self.poll()
        self._under_way = None

    def close(self) -> None:
        """Ends the publishing thread, after what it is doing."""
        self._publisher.shutdown(wait=True)
