"""`Threads`: who does the parts of a piece of work, and how work is cut into parts.

Kernels use one thread and hold no lock of Python. So several of them run at a time, each on bags, rows or columns of
its own. No two parts write the same number, and the order of a sum never depends on the cut. Results therefore have the
same bytes with any number of threads. `workers.thread_pool` has the threads; this package starts none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

# Below so many floats, about 0.1 ms of one thread's work, waking other threads costs more than it saves. A call that is
# much smaller is mostly Python, of which one thread runs at a time.
_MIN_SHARED = 1 << 20
_CALLS_OF_MIN = 8
_MIN_PART = 1 << 19
# More parts than threads, since a thread may be late or its rows far away.
_PARTS_PER_THREAD = 4
_MIN_COLUMNS = 16


class Threads(Protocol):
    """One or more threads that work for the caller."""

    @property
    def num_threads(self) -> int: ...

    def run(self, calls: Sequence[Callable[[], None]], *, size: int) -> None:
        """Makes all calls, in any order and several at a time; returns when all have ended.

        Args:
          size: floats that they read or write, to tell whether several threads pay.

        Raises:
          Exception: what a call raised. Some of the others may not have been made then.
        """
        ...


class OneThread:
    """The caller's own thread, alone."""

    num_threads = 1

    def run(self, calls: Sequence[Callable[[], None]], *, size: int) -> None:
        for call in calls:
            call()


ONE_THREAD = OneThread()


def is_worth_sharing(size: int, num_calls: int = 1) -> bool:
    """Whether several threads do work on so many floats, by so many calls, sooner than one."""
    return size >= _MIN_SHARED * max(1.0, num_calls / _CALLS_OF_MIN)


def cut(lengths: Sequence[int], sizes: Sequence[int], num_threads: int) -> list[tuple[int, int, int]]:
    """Cuts items into parts of about the same size.

    Args:
      lengths: per item, how many elements it has; the parts of an item are runs of them.
      sizes: per item, floats that it reads or writes.

    Returns:
      (item, first element, the one after the last) of each part. Items that are not cut come whole, in their order.
      With several threads large parts come first.
    """
    whole = [(item, 0, length) for item, length in enumerate(lengths)]
    total = sum(sizes)
    if num_threads == 1 or not is_worth_sharing(total):
        return whole
    wanted = max(_MIN_PART, total // (_PARTS_PER_THREAD * num_threads))
    found: list[tuple[float, tuple[int, int, int]]] = []
    for item, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        count = max(1, min(length, round(size / wanted)))
        for number in range(count):
            found.append((size / count, (item, length * number // count, length * (number + 1) // count)))
    found.sort(key=lambda part: part[0], reverse=True)
    return [part for _, part in found]


def cut_into_runs(
    lengths: np.ndarray, sizes: np.ndarray, num_threads: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """As `cut`, for kernels that take many items in a call. Parts that are small go together.

    Args:
      lengths, sizes: int64 `[n]`.

    Returns:
      Of each call int64 items, first elements, and those after the last. With too little for several threads there is
      one call.
    """
    total = int(sizes.sum())
    if num_threads == 1 or not is_worth_sharing(total):
        return [(np.arange(len(lengths)), np.zeros_like(lengths), lengths)]
    parts = np.array(cut(lengths.tolist(), sizes.tolist(), num_threads), np.int64).reshape(-1, 3)
    items, firsts, stops = parts.T
    shares = sizes[items] * (stops - firsts) / np.maximum(lengths[items], 1)
    wanted = max(_MIN_PART, total // (_PARTS_PER_THREAD * num_threads))
    # Parts come from large to small, and a part that begins in another stretch of that size begins another call.
    ends = np.flatnonzero(np.diff((np.cumsum(shares) - shares) // wanted)) + 1
    return [(run[:, 0], run[:, 1], run[:, 2]) for run in np.split(parts, ends)]


def column_parts(dim: int, num_threads: int) -> list[slice]:
    """Cuts the columns of a row into equal parts of whole cache lines, at most one a thread."""
    count = 1
    while 2 * count <= num_threads and dim % (2 * count * _MIN_COLUMNS) == 0:
        count *= 2
    return [slice(dim * number // count, dim * (number + 1) // count) for number in range(count)]
