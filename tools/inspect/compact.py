"""Making a full commit of a run whose newest one is a chain of deltas, by hand, under a lease of its own.

The state does not change: it is written once more, whole, under the same step, and becomes the newest commit. Commits
before it stay until the keep policy or `prune` removes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from podembed.orchestrator.commit.manifest import Manifest
from podembed.tools.inspect.rewriting import open_newest, rewrite, whole_table


def compact(url: str, *, single_writer: bool = False, unix_s: Callable[[], float] = time.time) -> Manifest:
    """Writes the newest commit of a run whole. Memory: the buckets of one file with their slots.

    Args:
      single_writer: accept a storage that cannot keep a driver out while this goes on.
      unix_s: the wall clock, for heartbeats and the record of when it was done.

    Returns:
      The new commit, or the newest one if that is full already.

    Raises:
      ConfigurationError: no run, or nothing committed in it.
      StoreCannotCreateExclusively: the storage cannot, and that was not accepted.
      RunIsHeld: a driver is at work.
      NoLoadableCommit, ChunkDamaged: the newest commit is damaged; nothing has changed.
    """
    store, head = open_newest(url, single_writer=single_writer, purpose="compact")
    if not head.num_deltas:
        return head

    def change(attempt: str, on_bucket: Callable[[], None]) -> Manifest:
        tables = [whole_table(store, table, attempt, on_bucket) if table.deltas else table for table in head.tables]
        return replace(head, tables=tuple(tables))

    return rewrite(store, head, change, purpose="compact", unix_s=unix_s)
