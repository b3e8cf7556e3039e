"""Measures the phases of lookups on one host: the real code, on tables made up for it.

The other hosts of a probe are numbers, and nothing is sent. Each asks of the real host what the real host asks of
itself in another batch. Probes differ in way, width, size of the table, ids a bag, bags, features and hosts. So a fit
can tell what a phase takes for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.costs.constants import Counts, Kernels, MemoryCurve, fitted
from podembed.embedding.costs.work import TableTraffic, TableWay, Work, footprint_bytes, table_work
from podembed.embedding.initializers import Constant
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.compiled import compile_kernels, gather
from podembed.embedding.lookup.exchange import Alone, Asked, Prefetched
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.pooled_frames import PooledRequest
from podembed.embedding.lookup.steps import LookupPhase, LookupStep, LookupSteps
from podembed.embedding.lookup.streams import FeatureBinding, Prepared
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec

MEMORY_BYTES = tuple(1 << bits for bits in (16, 18, 20, 21, 22, 23, 24, 25, 26, 28, 29))
_LINE_FLOATS = 16
_READS = 1 << 15
_NUM_BATCHES = 4
_WARM_UP_STEPS = 2
_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kind of step.

    Attributes:
      table_bytes: rows of a table on the real host.
      features: each with a table of its own.
      bags: of a feature on a host.
      combiner: of all features.
      is_wide: whether the optimizer's state is as wide as the rows.
    """

    way: TableWay
    dim: int
    table_bytes: int
    ids_per_bag: int
    bags: int
    features: int = 2
    num_hosts: int = 1
    combiner: str = "sum"
    is_wide: bool = False


def probes() -> list[Probe]:
    """What is measured: every way in caches and out of them, narrow and wide, short bags and long ones."""
    found = []
    near, far = 1 << 16, 1 << 27
    for way in TableWay:
        hosts = 1 if way is TableWay.WHOLE else 2
        for dim in (8, 32, 128):
            for size in (near, far):
                found.append(Probe(way=way, dim=dim, table_bytes=size, ids_per_bag=10, bags=1024, num_hosts=hosts))
        for dim, size in ((16, far), (64, near)):
            found.append(Probe(way=way, dim=dim, table_bytes=size, ids_per_bag=1, bags=4096, num_hosts=hosts))
        # Many small features, and many hosts, show what a call costs.
        found.append(Probe(way=way, dim=16, table_bytes=near, ids_per_bag=1, bags=64, features=32, num_hosts=hosts))
        found.append(Probe(way=way, dim=16, table_bytes=near, ids_per_bag=2, bags=64, features=4, num_hosts=16))
        found.append(
            Probe(way=way, dim=64, table_bytes=1 << 24, ids_per_bag=4, bags=2048, num_hosts=2, combiner="mean")
        )
        found.append(Probe(way=way, dim=64, table_bytes=far, ids_per_bag=4, bags=1024, num_hosts=2, is_wide=True))
    return found


def measure_memory() -> MemoryCurve:
    """Nanoseconds of a random read, by the size of the memory."""
    matrix = np.full((MEMORY_BYTES[-1] // (4 * _LINE_FLOATS), _LINE_FLOATS), 0.5, np.float32)
    out = aligned_empty((_READS, _LINE_FLOATS))
    rng = np.random.default_rng(0)
    found = []
    for size in MEMORY_BYTES:
        table = matrix[: size // (4 * _LINE_FLOATS)]
        batches = [rng.integers(0, len(table), _READS) for _ in range(6)]
        times = []
        for rows in batches:
            began = time.process_time()
            gather(table, rows, out)
            times.append(time.process_time() - began)
        found.append(1e9 * min(times[1:]) / _READS)
    # A curve that dips is noise of the clock.
    rising = np.maximum.accumulate(found)
    return MemoryCurve(size_bytes=MEMORY_BYTES, row_ns=tuple(float(value) for value in rising))


class _Others(Alone):
    """The exchange with hosts that are numbers. Mutated: `number`, the batch of the real host."""

    def __init__(self, host: int, num_hosts: int, asked: Sequence[LookupStep]) -> None:
        self._host, self._num_hosts, self._asked = host, num_hosts, asked

    def ids(
        self,
        number: int,
        prepared: Prepared,
        request: PooledRequest,
        *,
        weight: float,
        prefetched: Prefetched,
        levels: Sequence[int] = (),
    ) -> Asked:
        own = self._host
        others = [self._asked[(number + host) % len(self._asked)] for host in range(self._num_hosts)]
        return Asked(
            wanted=[step.prepared.asked[own] for step in others],
            wanted_counts=np.array([step.prepared.asked_counts[own] for step in others]),
            frames=[step.request.frames[own] for step in others],
            are_usual=[True] * self._num_hosts,
            weight_sum=weight * self._num_hosts,
            prefetched=Prefetched.ROWS | Prefetched.POOLED,
            levels=tuple(levels),
        )


class _Clock:
    """Processor seconds by phase, which other programs change little. Mutated: the sums of the step under way."""

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        self.sums: dict[str, float] = {}
        self._num_pools = 0

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        began = time.process_time()
        yield
        # A step pools its own bags, then the rows that came. The third time it adds up partial sums.
        self._num_pools += phase == LookupPhase.POOL
        name = "sums" if phase == LookupPhase.POOL and self._num_pools == 3 else str(phase)
        self.sums[name] = self.sums.get(name, 0.0) + time.process_time() - began


class _Setup:
    """The lookups of a probe and what they work on."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        rule = Adagrad(0.01) if probe.is_wide else RowWiseAdagrad(0.01)
        held = max(16, probe.table_bytes // (4 * probe.dim))
        is_cut = probe.way is not TableWay.WHOLE
        self.num_rows = held * (probe.num_hosts if is_cut else 1)
        num_buckets = 1 << (probe.num_hosts - 1).bit_length() if is_cut else 1
        self.specs = [
            TableSpec.of(
                TableConfig(self.num_rows, probe.dim, name=f"t{at:02d}", initializer=Constant(0.0)),
                seed=0,
                optimizer=rule,
                num_buckets=num_buckets,
            )
            for at in range(probe.features)
        ]
        compile_kernels(self.specs[:1])
        owners = np.arange(num_buckets, dtype=np.int32) % probe.num_hosts
        features = [
            FeatureBinding(name=f"f{at:02d}", table=at, combiner=probe.combiner, column=at * probe.dim)
            for at in range(probe.features)
        ]
        self.lookups = Lookups.build(
            self.specs,
            features,
            [owners] * probe.features,
            host=0,
            num_hosts=probe.num_hosts,
            num_samples=probe.bags,
            needs_rows=[probe.way is TableWay.ROWS] * probe.features,
            pools_cut=[probe.way is TableWay.PARTIAL] * probe.features,
            quantization=[None] * probe.features,
            num_buffers=2,
        )
        for table in self.lookups.tables:
            for array in table.store.arrays.values():
                array.fill(0.1)
        rng = np.random.default_rng(1)
        self.batches = [
            {
                feature.name: Ragged.of_dense(rng.integers(0, self.num_rows, (probe.bags, probe.ids_per_bag)))
                for feature in features
            }
            for _ in range(_NUM_BATCHES)
        ]

    def traffic(self) -> TableTraffic:
        """Of each of the probe's tables."""
        probe = self.probe
        widths = self.specs[0].widths
        own = [set(map(int, batch["f00"].values)) for batch in self.batches]
        hosts = min(probe.num_hosts, len(own))
        together = float(len(set().union(*own[:hosts])))
        bags = float(probe.bags)
        return TableTraffic(
            dim=probe.dim,
            slot_floats=sum(widths.values()) - probe.dim,
            num_rows=self.num_rows,
            way=probe.way,
            features=1,
            bags=bags,
            ids=bags * probe.ids_per_bag,
            divided_bags=0.0 if probe.combiner == "sum" else bags,
            host_rows=float(np.mean([len(rows) for rows in own])),
            all_rows=together,
        )

    def steps(self) -> dict[str, float]:
        """Seconds of each phase in a step: the quickest quarter of several, since other programs only slow them."""
        lookups, clock = self.lookups, _Clock()
        plain = LookupSteps(lookups, Alone())
        asked = [plain.find(batch) for batch in self.batches]
        steps = LookupSteps(lookups, _Others(0, self.probe.num_hosts, asked), phase=clock.phase)
        layout = lookups.layout
        activations = [Blocks.of(layout, np.zeros(layout.memory_floats, np.float32)) for _ in range(2)]
        gradients = [Blocks.of(layout, np.full(layout.num_floats, 1e-4, np.float32)) for _ in range(2)]
        rates = [0.01] * len(self.specs)
        found: list[dict[str, float]] = []
        previous: LookupStep | None = None
        for number in range(_WARM_UP_STEPS + _STEPS):
            clock.begin_step()
            with clock.phase("dedup"):
                step = steps.find(self.batches[number % _NUM_BATCHES], buffer=number % 2)
            steps.ask(step, number, gradients=gradients[number % 2])
            if previous is not None:
                with clock.phase("nothing"):
                    self._split(step, previous, clock)
            for host in range(1, self.probe.num_hosts):
                lookups.pooled.gradient_memory(step.request, host).fill(1e-4)
            steps.forward(step, activations[number % 2])
            steps.backward(step, gradients[number % 2], rates)
            found.append(clock.sums)
            previous = step
        later = found[_WARM_UP_STEPS:]
        return {name: float(np.quantile([one[name] for one in later], 0.25)) for name in later[0]}

    def _split(self, step: LookupStep, previous: LookupStep, clock: _Clock) -> None:
        """Times what a prefetch looks for, and then forgets it, so that pooling is measured whole."""
        with clock.phase("split"):
            if self.probe.way is TableWay.ROWS:
                self.lookups.sharded.split(step.prepared, previous.prepared)
            else:
                self.lookups.pooled.split(step.request, previous.request)
        step.prepared.splits = [None] * self.probe.num_hosts
        step.request.splits = [None] * self.probe.num_hosts


def work_of(traffic: TableTraffic, *, features: int, num_hosts: int, memory: MemoryCurve) -> Work:
    """What the real host of a probe does in a step."""
    found = Work()
    footprint = footprint_bytes([traffic] * features, num_hosts)
    of_table = table_work(traffic, num_hosts=num_hosts, footprint=footprint, memory=memory)
    found.merge(of_table.every_host, times=features)
    found.merge(of_table.owner, times=features)
    return found


def measure_lookups(*, num_processes: int, chosen: Sequence[Probe] | None = None) -> Kernels:
    """Runs all probes and fits the constants of every phase."""
    memory = measure_memory()
    samples: dict[str, list[tuple[Counts, float]]] = {}
    for probe in probes() if chosen is None else chosen:
        setup = _Setup(probe)
        spent = setup.steps()
        work = work_of(setup.traffic(), features=probe.features, num_hosts=probe.num_hosts, memory=memory)
        for key, counts in work.of_host(probe.num_hosts).items():
            samples.setdefault(key, []).append((counts, seconds_of(key, spent)))
    fits = {key: fitted(found) for key, found in samples.items()}
    return Kernels(
        num_processes=num_processes,
        memory=memory,
        factors_ns={key: factors for key, (factors, _) in fits.items()},
        errors={key: error for key, (_, error) in fits.items()},
    )


def seconds_of(key: str, spent: Mapping[str, float]) -> float:
    """The measured seconds that belong to a key of `Work`."""
    phase = key.partition("/")[0]
    also = spent.get(LookupPhase.POOL_FOR_OTHERS, 0.0) if phase == LookupPhase.POOL else 0.0
    return spent.get(phase, 0.0) + also
