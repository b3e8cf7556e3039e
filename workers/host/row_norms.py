"""`RowNorms`: norms of samples of a host's rows; and `table_norms`, what those of all hosts come to.

Each row has one owner, so what hosts find adds up. Rows are only read. They show a table whose rows grow too far, and
rows that no sample ever names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.initializers import fills_single_rows, row_source, table_seed
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec

QUANTILES = (0.1, 0.5, 0.9)
LEAST_WIDTH = 8
"""Weights of linear models are narrower, and have no usual size. So they have no growth."""
LEAST_SCALE = 0.2
"""Root mean square of a row's numbers, from which on growth counts. Where rates are right, rows that began near zero
grow as far as that, or a few times as far.
"""
MOST_TABLES = 32
"""The largest ones. To read a sample of each costs about a millisecond."""
MOST_ROWS, LEAST_ROWS = 1024, 64
MOST_NUMBERS = 1 << 16
"""Most numbers of a table's sample, over all hosts, where its rows are wide."""
FIRST_LOOK, LOOK_EVERY, LATER_EVERY = 4, 16, 32
"""In windows in which hosts look at samples at all. Later, when a run has been seen for a while, they come more
seldom."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostNorms:
    """A host's part of a table's sample.

    Attributes:
      table: its name.
      num_rows: rows of the sample that this host owns.
      num_trained: those that are not as they began; None where nothing tells. Then all count as trained.
      norms: float32 `[num_trained]`, Euclidean, of trained rows.
      growth: float32 `[num_trained]`, `growth_of` the same rows; empty where first values cannot be had, and for rows
        narrower than 8.
    """

    table: str
    num_rows: int
    num_trained: int | None
    norms: np.ndarray
    growth: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNorms:
    """Norms of one table, over all hosts.

    Attributes:
      table: its name.
      num_rows, num_trained: of the sample, and those that are not as they began; the latter None where nothing tells.
      norms: the tenth, half and nine tenths quantiles of trained rows' Euclidean norms; empty without any.
      growth: the same quantiles of `growth_of` these rows; empty where first values cannot be had.
    """

    table: str
    num_rows: int
    num_trained: int | None
    norms: tuple[float, ...]
    growth: tuple[float, ...] = ()


def table_norms(hosts: Sequence[Sequence[HostNorms]], *, began_anew: bool = True) -> tuple[TableNorms, ...]:
    """The norms of each table; none unless all hosts looked.

    Args:
      hosts: tables of each host, the same on all.
      began_anew: whether the run began with initial values. Rows of another run have grown there, so they have no
        growth here.
    """
    if not all(hosts):
        return ()
    found = []
    for parts in zip(*hosts, strict=True):
        trained = [part.num_trained for part in parts if part.num_trained is not None]
        found.append(
            TableNorms(
                table=parts[0].table,
                num_rows=sum(part.num_rows for part in parts),
                num_trained=sum(trained) if len(trained) == len(parts) else None,
                norms=_quantiles(np.concatenate([part.norms for part in parts])),
                growth=_quantiles(np.concatenate([part.growth for part in parts])) if began_anew else (),
            )
        )
    return tuple(found)


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    finite = values[np.isfinite(values)]
    return tuple(float(one) for one in np.quantile(finite, QUANTILES)) if len(finite) else ()


def growth_of(norms: np.ndarray, first: np.ndarray) -> np.ndarray:
    """float32 `[n]`: norms of rows over those of their first values. Small first values count as `LEAST_SCALE`.

    Args:
      norms: float32 `[n]`.
      first: float32 `[n, dim]`.
    """
    least = LEAST_SCALE * np.sqrt(np.float32(first.shape[1]))
    return (norms / np.maximum(np.linalg.norm(first, axis=1), least)).astype(np.float32)


class RowNorms:
    """The samples of one host. Mutated: how many windows were counted, and first values once they were computed.

    Args:
      tables: tables of this host; those that are not trained are left out.
      on_devices: by position, a function for each table whose rows are on devices. It returns rows and slots of some
        ids as they are now, float32 `[n, width]` by name.
    """

    def __init__(
        self, tables: Sequence[Table], on_devices: Mapping[int, Callable[[np.ndarray], Mapping[str, np.ndarray]]]
    ) -> None:
        # A sample is of fixed rows, which says nothing where keys come and go.
        trained = [
            (at, table)
            for at, table in enumerate(tables)
            if table.spec.optimizer is not None and not table.index.is_dynamic
        ]
        trained.sort(key=lambda one: -one[1].spec.num_rows * one[1].spec.dim)
        self._tables, self._on_devices = trained[:MOST_TABLES], on_devices
        self._samples: list[_Sample] | None = None
        self._num_windows = 0

    def is_due(self) -> bool:
        """Whether a window with samples has norms. To be asked once in each."""
        self._num_windows += 1
        every = LOOK_EVERY if self._num_windows <= LATER_EVERY else LATER_EVERY
        return self._num_windows % every == FIRST_LOOK

    def take(self) -> tuple[HostNorms, ...]:
        """The norms now, between two steps."""
        if self._samples is None:
            self._samples = [_Sample.of(table, self._on_devices.get(at)) for at, table in self._tables]
        return tuple(sample.norms() for sample in self._samples)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Reads a sample's rows, and their first values; None where these cannot be had."""

    spec: TableSpec
    read: Callable[[], Mapping[str, np.ndarray]]
    num_rows: int
    first: np.ndarray | None

    @staticmethod
    def of(table: Table, on_devices: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None) -> _Sample:
        ids = sampled_ids(table.spec)
        rows = table.index.rows_of(ids)
        ids, rows = ids[rows >= 0], rows[rows >= 0].astype(np.int64)
        read = (lambda: table.store.read(rows)) if on_devices is None else (lambda: on_devices(ids))
        return _Sample(table.spec, read, len(ids), _first_values(table.spec, ids))

    def norms(self) -> HostNorms:
        found = self.read()
        values, is_trained, first = found["rows"], self._are_trained(found), self.first
        if is_trained is not None:
            values, first = values[is_trained], None if first is None else first[is_trained]
        norms = np.linalg.norm(values, axis=1)
        return HostNorms(
            table=self.spec.name,
            num_rows=self.num_rows,
            num_trained=None if is_trained is None else len(values),
            norms=norms,
            growth=np.zeros(0, np.float32) if first is None or self.spec.dim < LEAST_WIDTH else growth_of(norms, first),
        )

    def _are_trained(self, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """bool `[n]`; None where nothing tells. Slots tell it best."""
        slots = () if self.spec.optimizer is None else self.spec.optimizer.slots
        if slots:
            return np.logical_or.reduce([(values[slot.name] != slot.initial_value).any(axis=1) for slot in slots])
        return None if self.first is None else (values["rows"] != self.first).any(axis=1)


def sampled_ids(spec: TableSpec) -> np.ndarray:
    """int64, rising: ids of the sample, the same on all hosts and in all generations."""
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
        # It is the job's own function, and the rows came from a commit. What is only measured stops no training.
        return None
    return first
