"""`predict`: how long each phase of a step takes on a host, and what crosses the network.

A step is followed host by host, from exchange to exchange. At each of them all hosts wait for the slowest. While a
device works, its host goes on with the next step. If a machine has fewer processors than processes that work, both
take longer. Names of phases are those that a run prints, and the phases are those of host 0, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.costs.constants import Counts, Kernels
from podembed.embedding.costs.work import TableTraffic, TableWay, Work, footprint_bytes, table_work
from podembed.embedding.lookup.prefetch import MIN_PREFETCH_SHARE
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand, traffic_of
from podembed.workers.calibration.record import Calibration
from podembed.workers.liveness.progress import Phase

_FLOAT_BYTES, _ID_BYTES, _ROW_BYTES, _SPLIT_BYTES = 4, 8, 4, 8
_POOLED = "pool/pooled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """One step of a run.

    Attributes:
      phase_s: on host 0, in the order of a step.
      step_s: of all; the same on every host.
      device_s: what the device works, also where its host does not wait for it.
      sent_bytes: by a host, in the mean.
    """

    setting: Setting
    phase_s: Mapping[Phase, float]
    step_s: float
    device_s: float
    sent_bytes: float

    @property
    def samples_per_s(self) -> float:
        return self.setting.batch_size / self.step_s if self.step_s else 0.0


def predict(
    tables: Sequence[TableDemand], setting: Setting, *, calibration: Calibration, dense: DenseHalf
) -> PredictedStep:
    """A step of these tables. A function of its arguments alone; its work grows with tables plus hosts."""
    if setting.overlap is None:
        both = [
            predict(tables, replace(setting, overlap=one), calibration=calibration, dense=dense)
            for one in (False, True)
        ]
        return min(both, key=lambda step: step.step_s)
    kernels = calibration.kernels_for(setting.share_a_machine)
    traffic = traffic_of(tables, setting)
    seconds = _Seconds(tables, traffic, setting, kernels)
    wire = _Wire(traffic, setting, calibration)
    return _Timeline(seconds, wire, setting, calibration, dense).step()


class _Seconds:
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
        does = self.prefetches_pooled if key == _POOLED else self.prefetches_rows
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


class _Wire:
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


class _Timeline:
    """The hosts of one step. Mutated while it is followed: clocks `[num_hosts]` and the phases of host 0."""

    def __init__(
        self, seconds: _Seconds, wire: _Wire, setting: Setting, calibration: Calibration, dense: DenseHalf
    ) -> None:
        self._seconds, self._wire, self._setting, self._calibration = seconds, wire, setting, calibration
        self._clock = np.zeros(setting.num_hosts)
        self._phase_s: dict[Phase, float] = {}
        self._device_s = dense.seconds(setting.host_samples)
        self._reduce_s = wire.all_reduce(dense.gradient_bytes)
        share, cpus = setting.share_a_machine, calibration.machine.cpus
        # How much slower a host is because others have the processors, and how much slower while its device works.
        self._always = max(1.0, share / cpus)
        self._beside = max(self._always, 2 * share / cpus) / self._always - 1

    def step(self) -> PredictedStep:
        # The clock starts as devices do, with the input of step t. The overlapped part is looked at without its stretch
        # first, since that depends on its length.
        self._overlapped(1.0)
        host_s = float(self._clock.max())
        shared_s = min(host_s, self._device_s * self._always)
        reading_s = self._reading_s() if self._setting.share_a_machine >= self._calibration.machine.cpus else 0.0
        stretch = 1 + (self._beside * shared_s + reading_s) / host_s if host_s else 1.0
        self._clock[:], self._phase_s = 0.0, {}
        self._overlapped(stretch)
        device_s = self._device_s * self._always + self._beside * shared_s + self._reduce_s
        waited = np.maximum(self._clock, device_s)
        self._note(Phase.DEVICE, float(waited[0] - self._clock[0]))
        self._clock = waited
        self._after_device()
        if not self._setting.staleness:
            self._forward(rest=True)
        read_s = max(0.0, self._reading_s() - float(self._clock.max()))
        if read_s:
            self._note(Phase.READ, read_s)
        step_s = float(self._clock.max()) + read_s
        return PredictedStep(
            setting=self._setting,
            phase_s=self._phase_s,
            step_s=step_s,
            device_s=device_s,
            sent_bytes=self._wire.sent_bytes,
        )

    def _reading_s(self) -> float:
        """Of the thread that decodes input for one step."""
        if not self._setting.reads_files:
            return 0.0
        return self._calibration.sample_s * self._setting.host_samples + self._calibration.id_s * self._wire.ids

    def _overlapped(self, stretch: float) -> None:
        """What a host does while its device works."""
        of, wire = self._seconds.of, self._wire
        self._work(Phase.DEDUP, of("dedup/pooled", "dedup/partial", "dedup/rows"), stretch)
        self._exchange(Phase.ID_EXCHANGE, wire.id_bytes, own=of("id exchange/pooled", "id exchange/rows"), by=stretch)
        self._work(Phase.GROUP, of("group/pooled"), stretch)
        if self._setting.staleness:
            self._forward(rest=False, stretch=stretch)
            return
        if self._seconds.prefetches_rows:
            self._work(Phase.SPLIT, of("split/rows"), stretch)
            self._work(Phase.PREFETCH_GATHER, self._seconds.early("gather/rows"), stretch)
            self._exchange(Phase.PREFETCH_EXCHANGE, wire.split(wire.row_bytes, of_rows=True, is_early=True), by=stretch)
        if self._seconds.prefetches_pooled:
            self._work(Phase.SPLIT, of("split/pooled"), stretch)
            self._work(Phase.PREFETCH_POOL, self._seconds.early(_POOLED), stretch)
            early = wire.split(wire.vector_bytes, of_rows=False, is_early=True)
            self._exchange(Phase.PREFETCH_EXCHANGE, early, by=stretch)

    def _after_device(self) -> None:
        of, wire = self._seconds.of, self._wire
        self._work(Phase.GRADIENT_SUM, of("gradient sum/rows"), 1.0)
        self._exchange(Phase.GRADIENT_EXCHANGE, wire.vector_bytes + wire.row_bytes)
        self._work(Phase.UPDATE, of("update/pooled", "update/rows"), 1.0)

    def _forward(self, *, rest: bool, stretch: float = 1.0) -> None:
        """From the rows to the activations; `rest` leaves out what was prefetched."""
        seconds, wire, others = self._seconds, self._wire, 1 - 1 / self._setting.num_hosts
        early_rows = seconds.early("gather/rows") if rest else 0.0
        early_pooled = seconds.early(_POOLED) if rest else 0.0
        self._work(Phase.GATHER, seconds.of("gather/rows") - early_rows, stretch)
        row_bytes, vector_bytes = wire.row_bytes, wire.vector_bytes
        if rest and seconds.prefetches_rows:
            row_bytes = wire.split(row_bytes, of_rows=True, is_early=False)
        if rest and seconds.prefetches_pooled:
            vector_bytes = wire.split(vector_bytes, of_rows=False, is_early=False)
        pooled = seconds.of(_POOLED) - early_pooled
        self._work(Phase.POOL_FOR_OTHERS, pooled * others, stretch)
        self._work(Phase.POOL, pooled * (1 - others), stretch)
        self._exchange(Phase.ACTIVATION_EXCHANGE, row_bytes + vector_bytes, by=stretch)
        self._work(Phase.POOL, seconds.of("pool/rows", "sums/partial"), stretch)

    def _work(self, phase: Phase, seconds: np.ndarray, stretch: float) -> None:
        spent = seconds * self._always * stretch
        self._note(phase, float(spent[0]))
        self._clock = self._clock + spent

    def _exchange(self, phase: Phase, num_bytes: float, *, own: np.ndarray | float = 0.0, by: float = 1.0) -> None:
        """All hosts wait for the slowest; then each does its `own` part."""
        spent = np.max(self._clock) - self._clock if self._setting.num_hosts > 1 else 0.0
        spent = spent + (self._wire.exchange(num_bytes) + own) * self._always * by
        spent = np.broadcast_to(spent, self._clock.shape)
        self._note(phase, float(spent[0]))
        self._clock = self._clock + spent

    def _note(self, phase: Phase, seconds: float) -> None:
        if seconds > 0:
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + seconds
