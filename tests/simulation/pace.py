"""What is replaced in the code under test, and only that: threads and clocks that it does not take as arguments, which
here are fibers and the world's clock; and, for thousands of seeds in minutes, pure functions, whose results are kept,
since the same manifests and names come again and again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from podembed.orchestrator.commit import checkpoint, manifest
from podembed.workers.checkpoint import arrays as whole_files
from podembed.workers.checkpoint import background_save, frozen_rows, save_pace, undo
from podembed.workers.checkpoint import shard as shards
from podembed.workers.host.survivors import moves, surviving_shard, verification
from podembed.workers.liveness import progress
from podembed.workers.storage import store as storage
from podembed.workers.storage.store import Store
from tests.simulation import witness
from tests.simulation.world import World

_from_json = functools.lru_cache(maxsize=256)(manifest.from_json)
_validate_name = functools.lru_cache(maxsize=8192)(storage.validate_name)
_whole_metadata = functools.lru_cache(maxsize=8192)(whole_files.whole_metadata)


@contextmanager
def kept_results() -> Iterator[None]:
    """Reading a manifest from its bytes costs milliseconds, and each is read by drivers, keep policies and checks."""
    with (
        patch.object(checkpoint, "from_json", _from_json),
        patch.object(witness, "from_json", _from_json),
        patch.object(storage, "validate_name", _validate_name),
        patch.object(whole_files, "whole_metadata", _whole_metadata),
    ):
        yield


def _unhurried(tracker: progress.Tracker, **_: object) -> save_pace.SavePace:
    """Pauses never: these would be real ones."""
    return save_pace.SavePace(tracker, processors=math.inf, longest_grace_s=0.0)


class InlineFiles:
    """In place of the threads that write or read the files of one save: each job is done by its caller, and fails as it
    would there.
    """

    cpu_s = 0.0

    def __init__(self, store: Store, **_: object) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> InlineFiles:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self.raise_if_failed()
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            self._error = error
            future.set_exception(error)
        return future

    def finish(self) -> None:
        self.raise_if_failed()

    def writes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


@contextmanager
def in_simulated_time(world: World, *, undo_bytes: int) -> Iterator[None]:
    """Threads of the code under test become fibers, and its clocks the world's; the way back of such small tables may
    be small, too.
    """

    def now_s() -> float:
        return world.now_s

    # Nothing takes processor time here, so no save is ahead of its share of it.
    clock = SimpleNamespace(monotonic=now_s, perf_counter=now_s, time=now_s, thread_time=lambda: 0.0)
    with (
        patch.object(background_save, "time", clock),
        patch.object(frozen_rows, "time", clock),
        patch.object(surviving_shard, "time", clock),
        patch.object(verification, "time", clock),
        patch.object(moves, "time", clock),
        patch.object(moves, "FileThreads", InlineFiles, create=True),
        patch.object(progress, "time", clock),
        patch.object(undo, "MIN_LOG_BYTES", undo_bytes),
        patch.object(background_save, "SavePace", _unhurried, create=True),
        patch.object(background_save, "FileThreads", InlineFiles, create=True),
        patch.object(shards, "FileThreads", InlineFiles, create=True),
    ):
        yield
