"""The processes that prepare text: children without shared state.

They get a piece, write files, and end when the process that began them does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from podembed.jobs.prepare.settings import PrepareError
from podembed.jobs.search_path import without_current_folder


class Crew:
    """The processes that work; with one, this process itself."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise PrepareError(f"Found {workers} workers. Expected at least 1. Pass --workers 1 or more.")
        # Spawned, not forked: the parent may have threads.
        context = multiprocessing.get_context("spawn")
        with without_current_folder():
            self._pool = ProcessPoolExecutor(workers, context, _begin_worker) if workers > 1 else None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._pool is not None:
            # What runs is let finish, since its record will be of use; what waits is not begun.
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Makes all calls; yields the result of each as it is done, in any order.

        Raises:
          PrepareError: a process died.
        """
        if self._pool is None:
            for call in calls:
                yield function(*call)
            return
        try:
            # The first call begins the processes.
            with without_current_folder():
                waiting = [self._pool.submit(function, *call) for call in calls]
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool as error:
            raise PrepareError(
                "Found that a process of the preparation died. Expected it to end in order; it may have been killed "
                "for its memory. "
                "Repeat the command to go on where it was, with fewer --workers."
            ) from error


def _begin_worker() -> None:
    """In a new process: Ctrl-C is the parent's business, and the end of the parent is the end of this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=_end_with, args=(sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
