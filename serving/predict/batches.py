"""Batches of data with the activations of a commit, one after another, in bounded memory.

Rows are fetched for many batches at once. Of tables that do not fit the memory, a bucket is then read once for all of
these, and not once for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from podembed.serving.predict.pooled_rows import FoundIds, LookedUp, PooledRows
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import InputData
from podembed.workers.input.index import InputIndex
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.read_ahead import StepReader
from podembed.workers.input.sources import open_reader

WINDOW_BYTES = 256 << 20
_logger = logging.getLogger(__name__)


def log_of(data: InputData) -> BadRowLog:
    """Takes malformed rows, and warns of columns of which no value is in their vocabulary."""
    return BadRowLog(data.max_bad_rows, tell=lambda column: _logger.warning("%s", column))


def read_batches(
    data: InputData, index: InputIndex, plan: LanePlan, *, bad_rows: BadRowLog | None = None
) -> Iterator[Batch]:
    """All batches of one epoch of a plan, with all its lanes.

    Raises:
      InputError: the data cannot be read, or holds a value that its declaration refuses.
    """
    reader = open_reader(data, index, plan, range(plan.num_lanes), bad_rows=bad_rows)
    yield from all_of(reader, plan.steps_per_epoch)


def all_of(reader: StepReader, num_batches: int) -> Iterator[Batch]:
    """The first batches of a reader, which is closed behind them.

    Raises:
      InputError: as `read_batches`.
    """
    try:
        for number in range(num_batches):
            yield reader.read(number)
    finally:
        reader.close()


def looked_up(batches: Iterable[Batch], rows: PooledRows, *, window_bytes: int = WINDOW_BYTES) -> Iterator[LookedUp]:
    """Each batch with its activations.

    Args:
      window_bytes: bytes of rows that are fetched at once.

    Raises:
      ChunkDamaged: a bucket is not what was committed.
    """
    window: list[FoundIds] = []
    size_bytes = 0
    for batch in batches:
        found = rows.find(batch)
        window.append(found)
        size_bytes += rows.size_bytes(found)
        if size_bytes >= window_bytes:
            yield from _of_window(window, rows)
            window, size_bytes = [], 0
    yield from _of_window(window, rows)


def _of_window(window: list[FoundIds], rows: PooledRows) -> Iterator[LookedUp]:
    if window:
        rows.fetch(window)
        for found in window:
            yield rows.look_up(found)
