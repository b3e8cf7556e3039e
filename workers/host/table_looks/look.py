"""`TableLooks`: looks at samples of the rows that a host owns. Each row has one owner, so looks of hosts add up.

All hosts together send at most 65,536 numbers of a table, or 64 rows of it where these are wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from podembed.embedding.initializers import fills_single_rows, row_source, table_seed
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.table_looks.figures import LEAST_WIDTH, TableLook, growth_of

MOST_TABLES = 32
"""The largest ones. A look at each costs about a millisecond."""
MOST_ROWS, LEAST_ROWS = 1024, 64
MOST_NUMBERS = 1 << 16
"""Of a table's sample, over all hosts."""
MOST_CHANGED = 256
FIRST_LOOK, LOOK_EVERY, LATER_EVERY = 4, 16, 32
"""In windows in which hosts look at samples at all. Later, when a run has been seen for a while, they come more
seldom."""


class SeenTable(Protocol):
    """A host's rows of a table, wherever they lie. By what number each is called is the table's business."""

    @property
    def spec(self) -> TableSpec: ...

    def numbers_of(self, ids: np.ndarray) -> np.ndarray:
        """int64: those of the rows that this host owns, and -1 for the others."""
        ...

    def values(self, numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        """Copies of these rows and of their slots, as they are now: float32 `[n, width]` by name."""
        ...

    def watch(self, take: Callable[[np.ndarray], None] | None) -> None:
        """From now on, `take` gets the numbers of rows that are about to change; None ends that."""
        ...


class HostTable:
    """A table whose rows lie here. Numbers are local rows."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def spec(self) -> TableSpec:
        return self._table.spec

    def numbers_of(self, ids: np.ndarray) -> np.ndarray:
        return self._table.index.rows_of(ids)

    def values(self, numbers: np.ndarray) -> Mapping[str, np.ndarray]:
        return {name: array[numbers] for name, array in self._table.store.arrays.items()}

    def watch(self, take: Callable[[np.ndarray], None] | None) -> None:
        self._table.on_change = take


class TableLooks:
    """The looks of one host. Mutated: how many windows were sampled, and what was seen.

    Args:
      tables: of this host; those that are not trained are left out.
      named: returns which rows a step updates of tables on devices, by name of the table; an exchange of all hosts.
    """

    def __init__(
        self,
        tables: Sequence[SeenTable],
        named: Callable[[int, Mapping[str, Ragged]], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        trained = [table for table in tables if table.spec.optimizer is not None]
        self._tables = sorted(trained, key=lambda table: -table.spec.num_rows * table.spec.dim)[:MOST_TABLES]
        self._named = named
        self._begun: dict[str, _Changes] = {}
        self._samples: list[_Sample] | None = None
        self._num_windows = 0
        self._seen: tuple[TableLook, ...] = ()

    def is_due(self) -> bool:
        """Whether a window with samples gets a look. To be asked once in each."""
        self._num_windows += 1
        every = LOOK_EVERY if self._num_windows <= LATER_EVERY else LATER_EVERY
        return self._num_windows % every == FIRST_LOOK

    def begin(self, step: int, bags: Mapping[str, Ragged]) -> None:
        """Before the devices get a step at whose end it looks, since they update their tables within it.

        Args:
          bags: of this host's batch.
        """
        named = {} if self._named is None else self._named(step, bags)
        self._begun = {table.spec.name: _Changes(table) for table in self._tables if table.spec.name in named}
        for name, changes in self._begun.items():
            changes.take(named[name])

    @contextmanager
    def around_update(self) -> Iterator[None]:
        """Around the update of a step, at whose end it looks."""
        if self._samples is None:
            self._samples = [_Sample.of(table) for table in self._tables]
        begun, self._begun = self._begun, {}
        watched = [begun.get(table.spec.name) or _Changes(table) for table in self._tables]
        try:
            yield
        finally:
            for one in watched:
                one.table.watch(None)
        self._seen = tuple(sample.look(one) for sample, one in zip(self._samples, watched, strict=True))

    def take(self) -> tuple[TableLook, ...]:
        """What the last look saw; nothing if that was taken."""
        seen, self._seen = self._seen, ()
        return seen


class _Changes:
    """Some rows of a table before an update. Mutated by `take`.

    Attributes:
      num_updated: rows that the update changes, each counted once; None where it changes all.
    """

    def __init__(self, table: SeenTable) -> None:
        self.table = table
        self.num_updated: int | None = 0
        self._rows = np.zeros(0, np.int64)
        self._before = np.zeros((0, table.spec.dim), np.float32)
        self._is_new = np.zeros(0, bool)
        table.watch(self.take)

    def take(self, numbers: np.ndarray) -> None:
        """Rows that the update will change. Those of the first call are looked at."""
        optimizer = self.table.spec.optimizer
        if optimizer is None or optimizer.touches_all_rows:
            self.num_updated = None
        elif self.num_updated is not None:
            is_merged = optimizer.use_gradient_accumulation
            self.num_updated += len(numbers) if is_merged else len(np.unique(numbers))
        if not len(self._rows):
            stride = max(1, -(-len(numbers) // MOST_CHANGED))
            self._rows = np.unique(numbers[::stride])
            values = self.table.values(self._rows)
            self._before = values["rows"]
            # Of a rule without slots nothing tells, and all count.
            self._is_new = np.zeros(len(self._rows), bool)
            if (is_trained := _traces(self.table.spec, values)) is not None:
                self._is_new = ~is_trained

    def ratios(self) -> np.ndarray:
        """float32, of those rows: norm of the change over that of the row.

        The first change of a row that begins near zero is large, and right, so first changes are left out. Rows with a
        gradient that do not change count, whatever happened before.
        """
        norms = np.linalg.norm(self._before, axis=1)
        moved = np.linalg.norm(self.table.values(self._rows)["rows"] - self._before, axis=1)
        rests, counts = moved == 0, ~self._is_new
        if self.num_updated is not None:
            counts |= rests
        counts &= rests | (norms > 0)
        return (moved[counts] / np.where(norms > 0, norms, 1)[counts]).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """The numbers of a sample's rows, and their first values; None where these cannot be had."""

    table: SeenTable
    rows: np.ndarray
    first: np.ndarray | None

    @staticmethod
    def of(table: SeenTable) -> _Sample:
        ids = sampled_ids(table.spec)
        numbers = table.numbers_of(ids)
        ids, numbers = ids[numbers >= 0], numbers[numbers >= 0]
        return _Sample(table, numbers.astype(np.int64), _first_values(table.spec, ids))

    def look(self, changes: _Changes) -> TableLook:
        found = self.table.values(self.rows)
        values, is_trained = found["rows"], self._are_trained(found)
        trained = values if is_trained is None else values[is_trained]
        width, norms = self.table.spec.dim, np.linalg.norm(trained, axis=1)
        growth = np.zeros(0, np.float32)
        if self.first is not None and width >= LEAST_WIDTH:
            growth = growth_of(norms, self.first if is_trained is None else self.first[is_trained])
        return TableLook(
            table=self.table.spec.name,
            num_rows=len(self.rows),
            num_trained=None if is_trained is None else len(trained),
            num_updated=changes.num_updated,
            norms=norms,
            factor=None if width < LEAST_WIDTH else _factor(trained),
            changes=changes.ratios(),
            growth=growth,
        )

    def _are_trained(self, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """bool `[n]`; None where nothing tells. Slots tell it best."""
        is_trained = _traces(self.table.spec, values)
        if is_trained is None and self.first is not None:
            return (values["rows"] != self.first).any(axis=1)
        return is_trained


def _traces(spec: TableSpec, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Whether each row has slots that an update has changed: bool `[n]`; None for tables without slots."""
    optimizer = spec.optimizer
    if optimizer is None or not optimizer.slots:
        return None
    return np.logical_or.reduce([(values[slot.name] != slot.initial_value).any(axis=1) for slot in optimizer.slots])


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
