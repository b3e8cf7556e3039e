"""Looking for numbers that are not finite in a commit whose bytes are good: a model that went wrong before it was
saved.

They are no damage, since the files hold what was committed. This is therefore apart from `tools.fsck`, and done
only on request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podembed.orchestrator.api.text import printable
from podembed.orchestrator.run.reference import CommittedState
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.storage.store import Store

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """NaN or infinity in one array of a table, or in one dense leaf.

    Attributes:
      where: `table 'users', accumulator`, or `dense 'params/w'`.
      count: rows of the table that hold any; elements of a leaf.
      of: rows or elements in all.
      first_rows: numbers of some of the rows; empty for a leaf.
    """

    where: str
    count: int
    of: int
    first_rows: tuple[int, ...] = ()

    def describe(self) -> str:
        rows = f" (row {', '.join(map(str, self.first_rows))}{' ...' if self.count > len(self.first_rows) else ''})"
        kind = f"of {self.of:,} rows" if self.first_rows else f"of {self.of:,} elements"
        return printable(f"{self.where}: {self.count:,} {kind} not finite{rows if self.first_rows else ''}")


def scan_values(state: CommittedState) -> tuple[NotFinite, ...]:
    """All arrays of a commit that hold NaN or infinity. Memory: one bucket of one table.

    Raises:
      ChunkDamaged: a file is not what was committed.
    """
    found = [finding for table in state.manifest.tables for finding in _scan_table(state.store, table)]
    for leaf in state.manifest.dense:
        values = read_dense(state.store, leaf)
        count = int(values.size - np.isfinite(values).sum()) if _may_be_infinite(values) else 0
        if count:
            found.append(NotFinite(where=f"dense '{leaf.key}'", count=count, of=values.size))
    return tuple(found)


def _scan_table(store: Store, table: TableFiles) -> list[NotFinite]:
    rows: dict[str, list[int]] = {array.name: [] for array in table.arrays}
    counts = dict.fromkeys(rows, 0)
    for bucket in range(table.num_buckets):
        filled = table.layout.num_rows_of(bucket)
        for array, values in zip(table.arrays, read_bucket(store, table, bucket), strict=True):
            if not _may_be_infinite(values):
                continue
            at = np.flatnonzero(~np.isfinite(values[:filled]).all(axis=1))
            counts[array.name] += len(at)
            rows[array.name] = sorted([*rows[array.name], *(table.layout.ids_of(bucket, at[:MAX_SHOWN]))])[:MAX_SHOWN]
    return [
        NotFinite(
            where=f"table '{table.name}', {name}",
            count=count,
            of=table.num_rows,
            first_rows=tuple(int(row) for row in rows[name]),
        )
        for name, count in counts.items()
        if count
    ]


def _may_be_infinite(values: np.ndarray) -> bool:
    return values.dtype.kind not in "biu"
