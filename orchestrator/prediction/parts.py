"""What the parts of a step take by themselves: lookups on every host, and exchanges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.costs.constants import Counts, Kernels
from podembed.embedding.costs.work import TableTraffic, TableWay, Touched, Work, table_work
from podembed.embedding.lookup.prefetch import MIN_PREFETCH_SHARE
from podembed.orchestrator.prediction.demand import Setting, TableDemand
from podembed.workers.calibration.record import Calibration

_ID_BYTES, _ROW_BYTES, _SPLIT_BYTES = 8, 4, 8
POOLED = "pool/pooled"


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """What a phase does on each host, arrays `[num_hosts]`. They add up and can be multiplied.

    Attributes:
      seconds: that it takes alone.
      calls: of kernels.
      floats: of vectors that another process wrote, or will read.
    """

    seconds: np.ndarray
    calls: np.ndarray
    floats: np.ndarray

    @staticmethod
    def nothing(num_hosts: int) -> Alone:
        return Alone(*(np.zeros(num_hosts) for _ in range(3)))

    def __add__(self, other: Alone) -> Alone:
        return Alone(self.seconds + other.seconds, self.calls + other.calls, self.floats + other.floats)

    def __mul__(self, share: float | np.ndarray) -> Alone:
        return Alone(self.seconds * share, self.calls * share, self.floats * share)

    def part(self, share: float | np.ndarray) -> Alone:
        """A share of the work that takes all of the calls."""
        return Alone(self.seconds * share, self.calls, self.floats * share)


class HostSeconds:
    """What each key of `Work` takes alone on every host.

    Attributes:
      num_features, width: of all tables; floats of a sample's vectors.
      touched: in a step, by all tables together.
      prefetches_rows, prefetches_pooled: whether hosts send what the step before does not touch ahead of its update.
    """

    def __init__(
        self, tables: Sequence[TableDemand], traffic: Sequence[TableTraffic], setting: Setting, kernels: Kernels
    ) -> None:
        self._num_hosts = num_hosts = setting.num_hosts
        self._at: dict[str, Alone] = {}
        self._early_s: dict[str, np.ndarray] = {}
        self.touched = touched = Touched.of(traffic, num_hosts)
        self.num_features = sum(table.features for table in traffic)
        self.width = sum(table.features * table.dim for table in traffic)
        self.prefetches_rows = _is_worthwhile(traffic, setting, of_rows=True)
        self.prefetches_pooled = _is_worthwhile(traffic, setting, of_rows=False)
        for table, asked in zip(tables, traffic, strict=True):
            if table.is_on_devices:
                continue
            work = table_work(asked, num_hosts=num_hosts, touched=touched, caches=kernels.caches)
            self._add(work.every_host, asked, None, kernels)
            self._add(work.owner, asked, table.owner, kernels)
        for key, alone in self._at.items():
            alone.seconds[:] += kernels.seconds(key, Counts(steps=1.0, peers=num_hosts - 1.0))

    def _add(self, work: Work, asked: TableTraffic, owner: int | None, kernels: Kernels) -> None:
        for key, counts in work.counts.items():
            spent = kernels.seconds(key, counts)
            whole = self._at.setdefault(key, Alone.nothing(self._num_hosts))
            early_s = self._early_s.setdefault(key, np.zeros(self._num_hosts))
            share = asked.free_rows if asked.way is TableWay.ROWS else asked.free_bags
            hosts = slice(None) if owner is None else owner
            whole.seconds[hosts] += spent
            whole.calls[hosts] += counts.calls
            whole.floats[hosts] += counts.shared_floats
            early_s[hosts] += spent * share

    def of(self, *keys: str) -> Alone:
        found = Alone.nothing(self._num_hosts)
        for key in keys:
            if key in self._at:
                found = found + self._at[key]
        return found

    def early_share(self, key: str) -> np.ndarray:
        """The share of a phase that does not wait for the step before."""
        does = self.prefetches_pooled if key == POOLED else self.prefetches_rows
        if key not in self._at or not does:
            return np.zeros(self._num_hosts)
        return self._early_s[key] / np.maximum(self._at[key].seconds, 1e-30)


def _is_worthwhile(traffic: Sequence[TableTraffic], setting: Setting, *, of_rows: bool) -> bool:
    """Whether enough of the floats is free for hosts to prefetch."""
    if not setting.overlap or setting.staleness:
        return False
    chosen = [table for table in traffic if (table.way is TableWay.ROWS) == of_rows]
    floats = [(table.host_rows if of_rows else table.bags) * table.dim for table in chosen]
    free = [
        size * (table.free_rows if of_rows else table.free_bags) for size, table in zip(floats, chosen, strict=True)
    ]
    return sum(free) > 0 and sum(free) >= MIN_PREFETCH_SHARE * sum(floats)


def _bytes_of(traffic: Sequence[TableTraffic], setting: Setting) -> tuple[float, float, float]:
    """Bytes of ids, of pooled vectors one way, and of rows one way, that a host sends in the mean."""
    hosts = setting.num_hosts
    others = 1 - 1 / hosts
    pooled = [table for table in traffic if table.way is not TableWay.ROWS]
    rows = [table for table in traffic if table.way is TableWay.ROWS]
    ids = others * sum(
        _ROW_BYTES * table.ids + _SPLIT_BYTES * table.bags * (hosts if table.way is TableWay.PARTIAL else 1)
        for table in pooled
    ) + others * sum(_ID_BYTES * table.host_rows for table in rows)
    # Hosts of one machine find pooled vectors where they are needed.
    width = 0 if setting.is_one_machine else setting.wire_bytes
    vectors = width * sum(
        table.bags * table.dim * ((hosts - 1) if table.way is TableWay.PARTIAL else others) for table in pooled
    )
    return ids, vectors, setting.wire_bytes * others * sum(table.host_rows * table.dim for table in rows)


def sent_bytes(traffic: Sequence[TableTraffic], setting: Setting) -> float:
    """That a host sends in a step, in the mean: ids, and vectors and rows both ways."""
    ids, vectors, rows = _bytes_of(traffic, setting)
    return ids + 2 * vectors + 2 * rows


class Wire:
    """Seconds of the exchanges, and bytes that a host sends in them."""

    def __init__(self, traffic: Sequence[TableTraffic], setting: Setting, calibration: Calibration) -> None:
        self._setting, self._calibration = setting, calibration
        self.ids = sum(table.ids for table in traffic)
        pooled = [table for table in traffic if table.way is not TableWay.ROWS]
        rows = [table for table in traffic if table.way is TableWay.ROWS]
        self.id_bytes, self.vector_bytes, self.row_bytes = _bytes_of(traffic, setting)
        self._free_vectors, self._free_rows = (_mean_share(part) for part in (pooled, rows))

    def exchange(self, num_bytes: float) -> float:
        """Seconds of a host that exchanges so many bytes with all other hosts."""
        return self._calibration.wire.seconds(peers=self._setting.num_hosts - 1, num_bytes=num_bytes)

    def split(self, num_bytes: float, *, of_rows: bool, is_early: bool) -> float:
        """The bytes that go before the update of the step under way, or after it."""
        share = self._free_rows if of_rows else self._free_vectors
        return num_bytes * (share if is_early else 1 - share)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of a device that adds up so many bytes with all others."""
        return 2 * (1 - 1 / self._setting.num_hosts) * num_bytes * self._calibration.wire.byte_s

    @property
    def sent_bytes(self) -> float:
        return self.id_bytes + 2 * self.vector_bytes + 2 * self.row_bytes


def _mean_share(traffic: Sequence[TableTraffic]) -> float:
    sizes = [table.bags * table.dim for table in traffic]
    free = [table.free_rows if table.way is TableWay.ROWS else table.free_bags for table in traffic]
    total = sum(sizes)
    return sum(size * share for size, share in zip(sizes, free, strict=True)) / total if total else 0.0
