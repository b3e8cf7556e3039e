"""`FileThreads`: a few threads that write or read the files of one save or restore, so that the storage has several
requests at a time.

Threads: the caller's thread submits jobs and waits in `submit` while as many as there are threads have not ended. So
what jobs hold in memory is bounded. The threads run jobs, nothing else, and own what a job was given until it ends. A
job that fails stops the others from beginning; its exception reaches the caller from the next `submit` or from
`finish`. Leaving the block waits for jobs that have begun: when it is left, no thread touches the storage or the
caller's arrays any more.

Files that jobs write in a `writes` block are synced in batches. A disk takes a batch of files for little more than one,
and each folder once. While training waits for the jobs, nothing is synced: a disk may take seconds for what the
kernel's memory takes at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from podembed.workers.processors import roam
from podembed.workers.storage.local import Unsynced
from podembed.workers.storage.store import Store
from podembed.workers.tracing.recorder import Recorder

Answer = TypeVar("Answer")

NUM_THREADS = 4
SYNC_FILES = 64
SYNC_BYTES = 32 << 20
_LOOK_S = 0.1


class FileThreads:
    """See the module. Used as a context manager.

    Args:
      store: storage that `writes` blocks write to.
      check: function that is called often while the caller waits; raises to end the wait.
      num_threads: number of jobs at a time.
      is_urgent: whether training waits for the jobs; from any thread.
      rest: function that is called after so many bytes within a large file, and may pause; from any thread.
      trace: recorder of writes and syncs while a trace is on.
    """

    def __init__(
        self,
        store: Store,
        *,
        check: Callable[[], None] = lambda: None,
        num_threads: int = NUM_THREADS,
        is_urgent: Callable[[], bool] = lambda: False,
        rest: Callable[[int], None] = lambda num_bytes: None,
        trace: Recorder | None = None,
    ) -> None:
        self._store = store
        self._check = check
        self._is_urgent, self._rest = is_urgent, rest
        self._trace = trace or Recorder()
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "files", initializer=roam)
        self._room = threading.Semaphore(num_threads)
        self._lock = threading.Lock()
        self._unsynced = Unsynced()
        self._error: BaseException | None = None
        self._cpu_s = 0.0

    def __enter__(self) -> FileThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            # Before the wait, so that jobs which have not begun end at once.
            self._fail(error)
        # Jobs hold views of the caller's arrays, which may be freed or changed once the block is left.
        self._pool.shutdown(wait=True)

    def submit(self, job: Callable[[], Answer]) -> Future[Answer]:
        """Hands over a job; waits while all threads are busy.

        Raises:
          Exception: what an earlier job, or `check`, raised. The job was not taken then.
        """
        # With a timeout, because `check` must end the wait where the storage never answers.
        while not self._room.acquire(timeout=_LOOK_S):
            self._check()
        # Only now: a job may have failed during the wait.
        if self._error is not None:
            self._room.release()
            raise self._error
        return self._pool.submit(self._run, job)

    def finish(self) -> None:
        """Waits for all jobs, and makes durable what `writes` blocks left.

        Raises:
          Exception: what a job, a sync or `check` raised.
        """
        # First all writes, then the syncs: a job that still writes would add files behind the sync of the others.
        self._wait_for_jobs()
        for part in _parts(self._take(), self._num_threads):
            self.submit(lambda part=part: self._sync(part))
        self._wait_for_jobs()

    @contextmanager
    def writes(self) -> Iterator[None]:
        """Makes files that a job writes inside the block durable, at the latest in `finish`."""
        written = Unsynced(is_hurried=self._is_urgent(), rest=self._rest)
        with self._store.sync_later(written), self._trace.span("files", "write file"):
            yield
        # Only complete files are noted. The files of a job that fails are not synced: its save becomes no commit.
        with self._lock:
            self._unsynced.add(written)
            is_due = len(self._unsynced.files) >= SYNC_FILES or self._unsynced.size_bytes >= SYNC_BYTES
        # Outside of the lock, since a sync may take seconds. `_take` hands each file to one thread.
        if is_due and not self._is_urgent():
            self._sync(self._take())

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all jobs that have ended."""
        return self._cpu_s

    def raise_if_failed(self) -> None:
        """Raises what a job raised."""
        if self._error is not None:
            raise self._error

    def _sync(self, unsynced: Unsynced) -> None:
        with self._trace.span("files", "sync files", files=len(unsynced.files)):
            self._store.sync(unsynced)

    def _take(self) -> Unsynced:
        with self._lock:
            taken, self._unsynced = self._unsynced, Unsynced()
            return taken

    def _wait_for_jobs(self) -> None:
        # All permits are free when no job runs. They are taken one by one and given back together.
        taken = 0
        try:
            for _ in range(self._num_threads):
                while not self._room.acquire(timeout=_LOOK_S):
                    self._check()
                taken += 1
        finally:
            if taken:
                self._room.release(taken)
        if self._error is not None:
            raise self._error

    def _run(self, job: Callable[[], Answer]) -> Answer:
        began_s = time.thread_time()
        try:
            if self._error is not None:
                raise self._error
            return job()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            # Last the permit: whoever gets it may read the error and the processor time.
            with self._lock:
                self._cpu_s += time.thread_time() - began_s
            self._room.release()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            # The first one is the cause; later ones are often its consequences.
            self._error = self._error or error


def _parts(unsynced: Unsynced, count: int) -> list[Unsynced]:
    """The same files in several parts of about equal length. Many files share a folder, so the folders are in the first
    part alone.
    """
    parts = [Unsynced(files=unsynced.files[at::count]) for at in range(count)]
    parts[0].folders = unsynced.folders
    return [part for part in parts if part.files]
