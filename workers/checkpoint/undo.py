"""`Undo`: a host's tables can go back to the last commit without reading it.

One `UndoLog` a table, and the names of the commits that its one or two moments stand for. While a commit is being
written it is the newer moment; when it stands, the moment before is let go. The driver says which of them a new
generation starts from (`back_to`).

The working thread owns everything here. `acknowledge` may come from any thread: it leaves a name, which the working
thread takes up with the next change. It may come after the next `freeze`, too, which therefore says itself what became
of the commit before. A name that comes late costs memory for a while and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.table.stores.store import UndoLog
from podembed.embedding.table.table import Table, kind_of

# The logs of a small shard may take this much in any case.
MIN_LOG_BYTES = 4 << 20


class Undo:
    """The undo logs of one host. Mutated: the logs, and by `back_to` the tables.

    Args:
      tables: all tables of the job as this host holds them.
      share: part of the tables' bytes that the logs may take, at least `MIN_LOG_BYTES` for all.
    """

    def __init__(self, tables: Sequence[Table], *, share: float) -> None:
        self._tables = tuple(tables)
        # Where an update changes all rows, a log would be full at the first step.
        logged = [table for table in tables if table.num_rows and not _changes_all_rows(table)]
        logs = kind_of(tables).undo_logs(
            [table.store for table in logged],
            budget_bytes=log_bytes(sum(table.size_bytes for table in tables), share=share),
        )
        self._logs: dict[str, UndoLog] = {table.spec.name: log for table, log in zip(logged, logs, strict=True)}
        self._older: str | None = None
        self._newer: str | None = None
        self._acknowledged: str | None = None

    @property
    def size_bytes(self) -> int:
        """Memory beside the tables, when all logs are full."""
        return sum(log.size_bytes for log in self._logs.values())

    @property
    def buffers(self) -> list[np.ndarray]:
        """Buffers of all logs. Their memory is taken as rows come in."""
        return [buffer for log in self._logs.values() for buffer in log.buffers]

    def begin(self, commit: str) -> None:
        """The tables are now exactly those of a commit; from here on they can go back to it."""
        for log in self._logs.values():
            log.begin()
        self._older, self._newer, self._acknowledged = commit, None, None

    def freeze(self, commit: str, *, before_failed: bool = False) -> None:
        """The present moment is being written as that commit.

        Args:
          before_failed: the one that was being written before did not become a commit; otherwise it stands.
        """
        if not before_failed:
            # Noted nowhere: another thread may write an older name at this moment.
            self._let_go(self._newer)
        self._settle()
        if self._older is None:
            # Before the first commit there is nothing to go back to; if this one comes about, there is.
            self._older = ""
            for log in self._logs.values():
                log.begin()
        for log in self._logs.values():
            log.freeze()
        # Named last: a commit of that name can be acknowledged only when its moment is frozen in all logs.
        self._newer = commit

    def acknowledge(self, commit: str) -> None:
        """The commit stands; what came before it is needed no more. From any thread."""
        self._acknowledged = commit

    def _settle(self) -> None:
        # The name stays, since another thread may be writing the next one at this moment.
        self._let_go(self._acknowledged)

    def _let_go(self, stands: str | None) -> None:
        """Forgets what came before a commit, if that is the newer moment."""
        if self._newer is not None and stands == self._newer:
            for log in self._logs.values():
                log.advance()
            self._older, self._newer = self._newer, None

    def log_of(self, table: Table) -> UndoLog | None:
        """None where nothing is kept of a table."""
        return self._logs.get(table.spec.name)

    def is_keeping(self) -> bool:
        """Whether the logs must hear of rows that are about to change. By the working thread, before it tells them."""
        self._settle()
        return self._older is not None

    def back_to(self, commit: str) -> list[np.ndarray] | None:
        """Resets rows to their values at a commit, as far as the logs know these. Everything else is forgotten.

        Returns:
          Per table, bool `[buckets held here]`, which of them are those of the commit; None if nothing is known of it,
          and nothing changed then.
        """
        self._settle()
        if not commit or commit not in (self._older, self._newer):
            return None
        to_newer = commit == self._newer
        known = []
        for table in self._tables:
            log = self._logs.get(table.spec.name)
            is_known = np.full(len(table.buckets), log is not None)
            if log is not None:
                is_known[table.bucket_places(log.undo(to_newer=to_newer))] = False
                log.begin()
            known.append(is_known)
        self._older = self._newer = None
        return known


def log_bytes(size_bytes: int, *, share: float) -> int:
    """Bytes that the logs of tables of so many bytes may take."""
    return max(MIN_LOG_BYTES, int(share * size_bytes)) if share else 0


def _changes_all_rows(table: Table) -> bool:
    rule = table.spec.optimizer
    return rule is not None and rule.touches_all_rows
