"""`TableLooks`: looks at samples of the rows that a host owns. Each row has one owner, so looks of hosts add up.

All hosts together send at most 65,536 numbers of a table, or 64 rows of it where these are wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from podembed.embedding.initializers import fills_single_rows, row_source, table_seed
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.table_looks.figures import LEAST_WIDTH, TableLook

MOST_TABLES = 32
"""The largest ones. A look at each costs about a millisecond."""
MOST_ROWS, LEAST_ROWS = 1024, 64
MOST_NUMBERS = 1 << 16
"""Of a table's sample, over all hosts."""
MOST_CHANGED = 256
FIRST_LOOK, LOOK_EVERY, LATER_EVERY = 4, 16, 32
"""In windows in which hosts look at samples at all. Later, when a run has been seen for a while, they come more
seldom."""


class TableLooks:
    """The looks of one host. Mutated: how many windows were sampled, and what was seen.

    Args:
      tables: of this host; those that are not trained are left out.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        trained = [table for table in tables if table.spec.optimizer is not None]
        self._tables = sorted(trained, key=lambda table: -table.spec.num_rows * table.spec.dim)[:MOST_TABLES]
        self._samples: list[_Sample] | None = None
        self._num_windows = 0
        self._seen: tuple[TableLook, ...] = ()

    def is_due(self) -> bool:
        """Whether a window with samples gets a look. To be asked once in each."""
        self._num_windows += 1
        every = LOOK_EVERY if self._num_windows <= LATER_EVERY else LATER_EVERY
        return self._num_windows % every == FIRST_LOOK

    @contextmanager
    def around_update(self) -> Iterator[None]:
        """Around the update of a step, at whose end it looks."""
        if self._samples is None:
            self._samples = [_Sample.of(table) for table in self._tables]
        watched = [_Changes(table) for table in self._tables]
        try:
            yield
        finally:
            for one in watched:
                one.table.on_change = None
        self._seen = tuple(sample.look(one) for sample, one in zip(self._samples, watched, strict=True))

    def take(self) -> tuple[TableLook, ...]:
        """What the last look saw; nothing if that was taken."""
        seen, self._seen = self._seen, ()
        return seen


class _Changes:
    """Some rows of a table before an update. Mutated by the table, until its `on_change` is taken away.

    Attributes:
      num_updated: rows that the update changes, each counted once; None where it changes all.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.num_updated: int | None = 0
        self._rows = np.zeros(0, np.int64)
        self._before = np.zeros((0, table.spec.dim), np.float32)
        self._is_new = np.zeros(0, bool)
        table.on_change = self._take

    def _take(self, local_rows: np.ndarray) -> None:
        optimizer = self.table.spec.optimizer
        if optimizer is None or optimizer.touches_all_rows:
            self.num_updated = None
        elif self.num_updated is not None:
            is_merged = optimizer.use_gradient_accumulation
            self.num_updated += len(local_rows) if is_merged else len(np.unique(local_rows))
        if not len(self._rows):
            stride = max(1, -(-len(local_rows) // MOST_CHANGED))
            self._rows = np.unique(local_rows[::stride])
            self._before = self.table.rows[self._rows]
            # Of a rule without slots nothing tells, and all count.
            self._is_new = np.zeros(len(self._rows), bool)
            if (is_trained := _traces(self.table, self._rows)) is not None:
                self._is_new = ~is_trained

    def ratios(self) -> np.ndarray:
        """float32, of those rows: norm of the change over that of the row.

        The first change of a row that begins near zero is large, and right, so first changes are left out. Rows with a
        gradient that do not change count, whatever happened before.
        """
        norms = np.linalg.norm(self._before, axis=1)
        moved = np.linalg.norm(self.table.rows[self._rows] - self._before, axis=1)
        rests, counts = moved == 0, ~self._is_new
        if self.num_updated is not None:
            counts |= rests
        counts &= rests | (norms > 0)
        return (moved[counts] / np.where(norms > 0, norms, 1)[counts]).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Local rows of a table's sample, and their first values where only these tell what was trained."""

    table: Table
    rows: np.ndarray
    first: np.ndarray | None

    @staticmethod
    def of(table: Table) -> _Sample:
        ids = sampled_ids(table.spec)
        local = table.index.rows_of(ids)
        ids, local = ids[local >= 0], local[local >= 0]
        return _Sample(table, local.astype(np.int64), None if table.slots else _first_values(table.spec, ids))

    def look(self, changes: _Changes) -> TableLook:
        values = self.table.rows[self.rows]
        is_trained = self._are_trained(values)
        trained = values if is_trained is None else values[is_trained]
        width = self.table.spec.dim
        return TableLook(
            table=self.table.spec.name,
            num_rows=len(self.rows),
            num_trained=None if is_trained is None else len(trained),
            num_updated=changes.num_updated,
            norms=np.linalg.norm(trained, axis=1),
            factor=None if width < LEAST_WIDTH else _factor(trained),
            changes=changes.ratios(),
        )

    def _are_trained(self, values: np.ndarray) -> np.ndarray | None:
        """bool `[n]`; None where nothing tells. Slots tell it best."""
        if self.first is not None:
            return (values != self.first).any(axis=1)
        return _traces(self.table, self.rows)


def _traces(table: Table, rows: np.ndarray) -> np.ndarray | None:
    """Whether each local row has slots that an update has changed: bool `[n]`; None for tables without slots."""
    optimizer, slots = table.spec.optimizer, table.slots
    if optimizer is None or not optimizer.slots:
        return None
    return np.logical_or.reduce(
        [(slots[slot.name][rows] != slot.initial_value).any(axis=1) for slot in optimizer.slots]
    )


def sampled_ids(spec: TableSpec) -> np.ndarray:
    """int64, rising: the ids that are looked at, the same on all hosts and in all generations."""
    count = min(spec.num_rows, MOST_ROWS, max(LEAST_ROWS, MOST_NUMBERS // spec.dim))
    if count == spec.num_rows:
        return np.arange(count)
    random = np.random.default_rng(table_seed(spec.seed, f"look/{spec.name}"))
    return np.unique(random.integers(0, spec.num_rows, count))


def _first_values(spec: TableSpec, ids: np.ndarray) -> np.ndarray | None:
    """float32 `[n, dim]`; None where they cost more than these rows, or cannot be had any more."""
    if not fills_single_rows(spec.initializer, spec.name):
        return None
    first = np.empty((len(ids), spec.dim), np.float32)
    fill = row_source(spec.initializer, seed=spec.seed, table_name=spec.name, num_rows=spec.num_rows, dim=spec.dim)
    try:
        fill(ids, first)
    except Exception:
        # It is the job's own function, and the rows came from a commit. A look stops no training.
        return None
    return first


def _factor(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(values, mode="r")) if len(values) > values.shape[1] else values
