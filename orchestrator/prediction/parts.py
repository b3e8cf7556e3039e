"""What the parts of a step take by themselves: lookups on every host, and exchanges between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.costs.constants import Counts, Kernels
from podembed.embedding.costs.work import TableTraffic, TableWay, Work, footprint_bytes, table_work
from podembed.embedding.lookup.prefetch import MIN_PREFETCH_SHARE
from podembed.orchestrator.prediction.demand import Setting, TableDemand
from podembed.workers.calibration.record import Calibration

_ID_BYTES, _ROW_BYTES, _SPLIT_BYTES = 8, 4, 8
POOLED = "pool/pooled"


class HostSeconds:
    """Seconds of each key of `Work` on every host, `[num_hosts]` each. `early` is the part that is prefetched."""

    def __init__(
        self, tables: Sequence[TableDemand], traffic: Sequence[TableTraffic], setting: Setting, kernels: Kernels
    ) -> None:
        self._num_hosts = num_hosts = setting.num_hosts
        self._at: dict[str, np.ndarray] = {}
        self._early: dict[str, np.ndarray] = {}
        footprint = footprint_bytes(traffic, num_hosts)
        self.prefetches_rows = _is_worthwhile(traffic, setting, of_rows=True)
        self.prefetches_pooled = _is_worthwhile(traffic, setting, of_rows=False)
        keys: set[str] = set()
        for table, asked in zip(tables, traffic, strict=True):
            work = table_work(asked, num_hosts=num_hosts, footprint=footprint, memory=kernels.memory)
            self._add(work.every_host, asked, None, kernels)
            self._add(work.owner, asked, table.owner, kernels)
            keys |= work.every_host.counts.keys() | work.owner.counts.keys()
        for key in keys:
            self._at[key] += kernels.seconds(key, Counts(steps=1.0, peers=num_hosts - 1.0))

    def _add(self, work: Work, asked: TableTraffic, owner: int | None, kernels: Kernels) -> None:
        for key, counts in work.counts.items():
            spent = kernels.seconds(key, counts)
            whole = self._at.setdefault(key, np.zeros(self._num_hosts))
            early = self._early.setdefault(key, np.zeros(self._num_hosts))
            share = asked.free_rows if asked.way is TableWay.ROWS else asked.free_bags
            hosts = slice(None) if owner is None else owner
            whole[hosts] += spent
            early[hosts] += spent * share

    def of(self, *keys: str) -> np.ndarray:
        found = np.zeros(self._num_hosts)
        for key in keys:
            found = found + self._at.get(key, 0.0)
        return found

    def early(self, key: str) -> np.ndarray:
        """The part of a phase that does not wait for the step before."""
        does = self.prefetches_pooled if key == POOLED else self.prefetches_rows
        return self._early.get(key, np.zeros(self._num_hosts)) * float(does)


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
        """Seconds of an exchange with all other hosts that carries so many bytes."""
        return self._calibration.wire.seconds(peers=self._setting.num_hosts - 1, num_bytes=num_bytes)

    def split(self, num_bytes: float, *, of_rows: bool, is_early: bool) -> float:
        """The bytes that go before the update of the step under way, or after it."""
        share = self._free_rows if of_rows else self._free_vectors
        return num_bytes * (share if is_early else 1 - share)

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds in which devices add up so many bytes each."""
        hosts = self._setting.num_hosts
        if hosts == 1:
            return 0.0
        rounds = float(np.ceil(np.log2(hosts)))
        wire = self._calibration.wire
        return 2 * rounds * wire.seconds(peers=1, num_bytes=0.0) + 2 * (1 - 1 / hosts) * num_bytes * wire.byte_s

    @property
    def sent_bytes(self) -> float:
        return self.id_bytes + 2 * self.vector_bytes + 2 * self.row_bytes


def _mean_share(traffic: Sequence[TableTraffic]) -> float:
    sizes = [table.bags * table.dim for table in traffic]
    free = [table.free_rows if table.way is TableWay.ROWS else table.free_bags for table in traffic]
    total = sum(sizes)
    return sum(size * share for size, share in zip(sizes, free, strict=True)) / total if total else 0.0
