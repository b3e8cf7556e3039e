"""Measures the phases of lookups on one host: the real code, on tables made up for it.

The other hosts of a probe are numbers, and nothing is sent. Each asks of the real host what the real host asks of
itself in another batch. Probes differ in way, width, size of the table, ids a bag, bags, features and hosts. They also
differ in how often the same ids come. So a fit can tell what a phase takes for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from podembed.embedding.config import TableConfig
from podembed.embedding.costs.constants import Caches, Counts, Kernels, MemoryCurve, fitted
from podembed.embedding.costs.work import TableTraffic, TableWay, Touched, Work, table_work
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
_NUM_PROBES = {TableWay.WHOLE: 72, TableWay.PARTIAL: 32, TableWay.ROWS: 32}
_LEAST_IDS, _MOST_IDS = 1_000, 800_000
_LEAST_ROWS, _MOST_BYTES = 16, 1 << 29
_OF_L2, _OF_L3 = 0.1, 0.8
_SCATTER = 2_654_435_761
"""A prime by which frequent ids are multiplied, so that they do not lie side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kind of step.

    Attributes:
      table_bytes: rows of a table on the real host.
      features: each with a table of its own.
      bags: of a feature on a host.
      ids_per_bag: of each bag, or the mean where lengths are drawn (Poisson).
      skew: exponent of the law by which ids repeat (Zipf); with 0 all come equally often.
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
    skew: float = 0.0
    is_ragged: bool = False
    combiner: str = "sum"
    is_wide: bool = False

    @property
    def num_ids(self) -> int:
        """That the real host works on, of all hosts."""
        return self.ids_per_bag * self.bags * self.features * self.num_hosts


def probes() -> list[Probe]:
    """What is measured. Steps are drawn, always the same: a few that are chosen by hand miss what most jobs do."""
    rng = np.random.default_rng(5)
    return [_drawn(way, rng) for way, count in _NUM_PROBES.items() for _ in range(count)]


def _drawn(way: TableWay, rng: np.random.Generator) -> Probe:
    hosts = (1, 1, 2, 16) if way is TableWay.WHOLE else (2, 2, 4, 16)
    while True:
        found = Probe(
            way=way,
            dim=int(rng.choice((8, 16, 32, 64, 128))),
            table_bytes=1 << int(rng.integers(13, 30)),
            ids_per_bag=int(rng.choice((1, 2, 4, 10, 20))),
            bags=int(rng.choice((64, 256, 1024, 2048, 4096))),
            features=int(rng.choice((1, 2, 4, 8, 26, 64))),
            num_hosts=int(rng.choice(hosts)),
            skew=float(rng.choice((0.0, 0.0, 0.8, 1.05, 1.3))),
            is_ragged=bool(rng.random() < 0.4),
            combiner="mean" if rng.random() < 0.25 else "sum",
            is_wide=bool(rng.random() < 0.25),
        )
        held = found.features * found.table_bytes * (2 if found.is_wide else 1)
        fits = held * found.num_hosts <= _MOST_BYTES
        if fits and _LEAST_IDS <= found.num_ids <= _MOST_IDS and found.table_bytes >= _LEAST_ROWS * 4 * found.dim:
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


def caches_of_machine(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> Caches | None:
    """The sizes that the kernel knows; None where it does not say them, as in some virtual machines."""
    found: dict[str, int] = {}
    for index in sorted(Path(folder).glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K") and size[:-1].isdigit():
            found[level] = int(size[:-1]) << 10
    second, last = found.get("2", 0), found.get("3", found.get("2", 0))
    return Caches(l2_bytes=second, l3_bytes=last) if second and last else None


def caches_of(memory: MemoryCurve) -> Caches:
    """Sizes that fit to a measured curve. Up to the first one, random rows take little more than the nearest ones. From
    the second one on they take nearly as much as the farthest ones.
    """
    nearest, farthest = memory.row_ns[0], memory.row_ns[-1]
    shares = [(value - nearest) / max(1e-9, farthest - nearest) for value in memory.row_ns]
    sizes = memory.size_bytes
    l2 = max((size for size, share in zip(sizes, shares, strict=True) if share <= _OF_L2), default=sizes[0])
    l3 = max((size for size, share in zip(sizes, shares, strict=True) if share <= _OF_L3), default=sizes[0])
    return Caches(l2_bytes=l2, l3_bytes=l3)


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
        self.batches = [{feature.name: self._bags(rng) for feature in features} for _ in range(_NUM_BATCHES)]

    def _bags(self, rng: np.random.Generator) -> Ragged:
        """Of one feature in one batch."""
        probe = self.probe
        lengths = np.full(probe.bags, probe.ids_per_bag)
        if probe.is_ragged:
            lengths = rng.poisson(probe.ids_per_bag, probe.bags)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        return Ragged.of(skewed(rng, self.num_rows, int(splits[-1]), probe.skew), splits)

    def traffic(self) -> TableTraffic:
        """Of each of the probe's tables."""
        probe = self.probe
        widths = self.specs[0].widths
        own = [batch["f00"].values for batch in self.batches]
        hosts = min(probe.num_hosts, len(own))
        bags = float(probe.bags)
        return TableTraffic(
            dim=probe.dim,
            slot_floats=sum(widths.values()) - probe.dim,
            num_rows=self.num_rows,
            way=probe.way,
            features=1,
            bags=bags,
            ids=float(np.mean([len(ids) for ids in own])),
            divided_bags=0.0 if probe.combiner == "sum" else bags,
            host_rows=float(np.mean([len(np.unique(ids)) for ids in own])),
            all_rows=float(len(np.unique(np.concatenate(own[:hosts])))),
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


def skewed(rng: np.random.Generator, num_rows: int, count: int, skew: float) -> np.ndarray:
    """Ids whose frequencies follow Zipf's law with this exponent, int64 `[count]`. With 0 all come equally often."""
    if not skew:
        return rng.integers(0, num_rows, count)
    # The inverse of the law's distribution, taken as continuous.
    most = float(num_rows) ** (1 - skew)
    ranks = (rng.random(count) * (most - 1) + 1) ** (1 / (1 - skew))
    return np.minimum(ranks.astype(np.int64), num_rows - 1) * _SCATTER % num_rows


def work_of(traffic: TableTraffic, *, features: int, num_hosts: int, caches: Caches) -> Work:
    """What the real host of a probe does in a step."""
    found = Work()
    touched = Touched.of([traffic] * features, num_hosts)
    if traffic.way is TableWay.WHOLE:
        # The real host owns all tables, and no other host owns any.
        owned = replace(traffic, bags=traffic.bags * num_hosts, ids=traffic.ids * num_hosts)
        touched = Touched.of([owned] * features, 1)
    of_table = table_work(traffic, num_hosts=num_hosts, touched=touched, caches=caches)
    found.merge(of_table.every_host, times=features)
    found.merge(of_table.owner, times=features)
    return found


def measure_lookups(*, num_processes: int, chosen: Sequence[Probe] | None = None) -> Kernels:
    """Runs all probes and fits the constants of every phase."""
    memory = measure_memory()
    caches = caches_of_machine() or caches_of(memory)
    samples: dict[str, list[tuple[Counts, float]]] = {}
    for probe in probes() if chosen is None else chosen:
        setup = _Setup(probe)
        spent = setup.steps()
        work = work_of(setup.traffic(), features=probe.features, num_hosts=probe.num_hosts, caches=caches)
        for key, counts in work.of_host(probe.num_hosts).items():
            samples.setdefault(key, []).append((counts, seconds_of(key, spent)))
    fits = {key: fitted(found) for key, found in samples.items()}
    return Kernels(
        num_processes=num_processes,
        memory=memory,
        caches=caches,
        factors_ns={key: factors for key, (factors, _) in fits.items()},
        errors={key: error for key, (_, error) in fits.items()},
    )


def seconds_of(key: str, spent: Mapping[str, float]) -> float:
    """The measured seconds that belong to a key of `Work`."""
    phase = key.partition("/")[0]
    also = spent.get(LookupPhase.POOL_FOR_OTHERS, 0.0) if phase == LookupPhase.POOL else 0.0
    return spent.get(phase, 0.0) + also
