"""CPU time of one host's lookups and updates a step, as hosts become many. Prints one JSON line.

    python benchmarks/scaling.py --hosts 8 64 1024
    python benchmarks/scaling.py --hosts 8 64 256 --ways buckets --tables 200
    python benchmarks/scaling.py --hosts 64 256 1024 --balance --rows-divided-by 1

Weak scaling: each host has the same number of samples, whatever the number of hosts. Only one host is real. The others
are numbers: each asks of the real host what the real host asks of itself, and nothing is sent. So the figures are those
of the lookups alone, without sockets, input and dense half.

The real host is the owner of the most features, which is the busiest one. `--ways tables` places tables as a run does
that may have the largest number of hosts. `--ways buckets` cuts every table into buckets.

`--balance` counts bytes instead. It draws the ids of all hosts for one step. Each host sends ids and gradients of its
distinct rows to the owners, and rows to whoever wants them. `hot` are rows that more than a quarter of all hosts want.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.workload import workload  # noqa: E402
from podembed.embedding.buckets import place  # noqa: E402
from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.initializers import Constant  # noqa: E402
from podembed.embedding.kernels.arrays import aligned_empty  # noqa: E402
from podembed.embedding.lookup.activation_layout import Blocks, pooling_owners  # noqa: E402
from podembed.embedding.lookup.compiled import compile_kernels  # noqa: E402
from podembed.embedding.lookup.exchange import Agreement, SingleHost  # noqa: E402
from podembed.embedding.lookup.lookups import Lookups  # noqa: E402
from podembed.embedding.lookup.placement import buckets_for_work, place_tables  # noqa: E402
from podembed.embedding.lookup.steps import LookupPhase, LookupSteps  # noqa: E402
from podembed.embedding.lookup.streams import FeatureBinding  # noqa: E402
from podembed.embedding.optimizers import RowWiseAdagrad  # noqa: E402
from podembed.embedding.ragged import Ragged  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402

NUM_BATCHES = 4
WARM_UP_STEPS = 2
BUCKETS = 2048
ID_BYTES = 4


class Mirrored(SingleHost):
    """The exchange with hosts that are only numbers: each asks what the real host asks of itself."""

    def __init__(self, host: int, num_hosts: int) -> None:
        self._host, self._num_hosts = host, num_hosts

    def ids(
        self, number: int, requests: Sequence[Any], *, weight: float, prefetches: int, levels: Sequence[int] = ()
    ) -> Agreement:
        rows, pooled = requests
        host, count = self._host, self._num_hosts
        frame = pooled.frames[host].copy()
        if len(frame):
            # A host's own frame has room for its rows. Those of others have the keys there.
            num_features = len(pooled.own_keys)
            keys_at = 4 * num_features + int(frame[: 3 * num_features : 3].sum())
            keys = np.concatenate(pooled.own_keys)
            frame[keys_at:].view(np.int32)[: len(keys)] = keys
        words = [
            np.concatenate([rows.asked_counts[host], rows.asked[host]]),
            np.concatenate([np.ones(1, np.int64), frame]),
        ]
        frames = [[of_way.copy() for _ in range(count)] for of_way in words]
        return Agreement(frames=frames, weight_sum=weight * count, prefetches=0, levels=tuple(levels))


def specs_of(num_tables: int, dim: int, divisor: int, *, num_buckets: int | None, most_hosts: int) -> list[TableSpec]:
    """Tables of workload A with fewer rows, over again until there are enough.

    Args:
      num_buckets: of each; None chooses as a run that may have `most_hosts` does.
    """
    sizes = workload("A").table_rows
    rule = RowWiseAdagrad(0.01)
    configs = [
        TableConfig(max(3, sizes[at % len(sizes)] // divisor), dim, name=f"t{at:03d}", initializer=Constant(0.0))
        for at in range(num_tables)
    ]
    specs = [TableSpec.of(config, seed=0, optimizer=rule, num_buckets=num_buckets) for config in configs]
    if num_buckets is not None:
        return specs
    found = []
    for config, spec in zip(configs, specs, strict=True):
        for_work = buckets_for_work(
            num_rows=spec.num_rows, num_features=1, all_features=num_tables, most_hosts=most_hosts
        )
        count = max(spec.layout.num_buckets, for_work)
        found.append(TableSpec.of(config, seed=0, optimizer=rule, num_buckets=count))
    return found


def bags_of(specs: Sequence[TableSpec], num_samples: int) -> list[dict[str, Ragged]]:
    """Ten ids a sample of the large tables of workload A, one of the others; low ids are frequent."""
    rng = np.random.default_rng(0)
    sizes = workload("A").table_rows
    batches = []
    for _ in range(NUM_BATCHES):
        batch = {}
        for at, spec in enumerate(specs):
            count = 10 if sizes[at % len(sizes)] > 200_000 else 1
            ranks = spec.layout.num_rows ** rng.random((num_samples, count))
            batch[f"f{at:03d}"] = Ragged.of_dense(ranks.astype(np.int64) % spec.layout.num_rows)
        batches.append(batch)
    return batches


class Clock:
    """CPU milliseconds of this thread, by phase. Mutated: the sums of the step under way."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    @contextmanager
    def phase(self, phase: LookupPhase | str) -> Iterator[None]:
        before = time.thread_time()
        yield
        self.sums[str(phase)] = self.sums.get(str(phase), 0.0) + 1e3 * (time.thread_time() - before)


def measure(arguments: argparse.Namespace, num_hosts: int) -> Mapping[str, object]:
    """Medians over the steps of one host among so many."""
    is_whole = arguments.ways == "tables"
    num_buckets = None if is_whole else BUCKETS
    specs = specs_of(
        arguments.tables,
        arguments.dim,
        arguments.rows_divided_by,
        num_buckets=num_buckets,
        most_hosts=max(arguments.hosts),
    )
    compile_kernels(specs)
    if is_whole:
        placement = place_tables(specs, num_features=[1] * len(specs), num_hosts=num_hosts)
    else:
        sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
        placement = place(bucket_bytes=sizes, num_hosts=num_hosts)
    owners = [owner for owner in pooling_owners(placement) if owner >= 0]
    # The work of a host is its share of the buckets of each table.
    work = sum(np.bincount(owners, minlength=num_hosts) / len(owners) for owners in placement)
    host = int(np.argmax(work))
    features = [
        FeatureBinding(name=f"f{at:03d}", table=at, combiner="sum", column=at * arguments.dim)
        for at in range(len(specs))
    ]
    lookups = Lookups.build(
        specs,
        features,
        placement,
        host=host,
        num_hosts=num_hosts,
        num_samples=arguments.samples,
        needs_rows=[False] * len(specs),
        quantization=[None] * len(specs),
    )
    clock = Clock()
    steps = LookupSteps(lookups, Mirrored(host, num_hosts), phase=clock.phase)
    batches = bags_of(specs, arguments.samples)
    activations = Blocks.of(lookups.layout, aligned_empty((lookups.layout.num_floats,)))
    gradients = Blocks.of(lookups.layout, np.full(lookups.layout.num_floats, 1e-3, np.float32))
    found: list[dict[str, float]] = []
    for number in range(WARM_UP_STEPS + arguments.steps):
        clock.sums = {}
        with clock.phase("step"):
            with clock.phase("find"):
                step = steps.find(batches[number % NUM_BATCHES])
            steps.ask(step, number, training_step=number, gradients=gradients)
            steps.forward(step, activations)
            steps.backward(step, gradients, [0.01] * len(specs))
        found.append(clock.sums)
    later = found[WARM_UP_STEPS:]
    phases = {name: round(statistics.median(one.get(name, 0.0) for one in later), 3) for name in found[-1]}
    total = phases.pop("step")
    return {
        "hosts": num_hosts,
        "whole_tables": len(owners),
        "features_of_host": owners.count(host),
        "cpu_ms": total,
        "phases_cpu_ms": {name: value for name, value in phases.items() if value >= 0.01},
    }


def count_bytes(arguments: argparse.Namespace, num_hosts: int) -> Mapping[str, object]:
    """What each host sends in one step."""
    sizes, dim = workload("A").table_rows, arguments.dim
    specs = specs_of(
        arguments.tables, dim, arguments.rows_divided_by, num_buckets=None, most_hosts=max(arguments.hosts)
    )
    placement = place_tables(specs, num_features=[1] * len(specs), num_hosts=num_hosts)
    rng = np.random.default_rng(0)
    asked, answered, hot = np.zeros((3, num_hosts))
    for at, (spec, owners) in enumerate(zip(specs, placement, strict=True)):
        num_rows, num_ids = spec.layout.num_rows, arguments.samples * (10 if sizes[at % len(sizes)] > 200_000 else 1)
        ids = (num_rows ** rng.random((num_hosts, num_ids))).astype(np.int64) % num_rows
        if len({*owners.tolist()}) == 1:
            # Ids go to the one owner, vectors come back, and their gradients go there.
            asked += ID_BYTES * num_ids + 4 * dim * arguments.samples
            answered[owners[0]] += 4 * dim * arguments.samples * (num_hosts - 1)
            continue
        # A host asks once for each of its distinct rows.
        hosts, rows = np.divmod(np.unique(np.arange(num_hosts)[:, None] * num_rows + ids), num_rows)
        owner = owners[spec.layout.buckets_of(rows)]
        hosts, rows, owner = (column[owner != hosts] for column in (hosts, rows, owner))
        _, place, wanted_by = np.unique(rows, return_inverse=True, return_counts=True)
        asked += np.bincount(hosts, minlength=num_hosts) * (ID_BYTES + 4 * dim)
        answered += np.bincount(owner, minlength=num_hosts) * 4 * dim
        hot += np.bincount(owner[wanted_by[place] > num_hosts / 4], minlength=num_hosts) * 4 * dim
    sent = asked + answered
    return {
        "hosts": num_hosts,
        "mean_kb": round(sent.mean() / 1e3, 1),
        "busiest_to_mean": round(sent.max() / sent.mean(), 3),
        "busiest_to_mean_without_hot": round((sent - hot).max() / (sent - hot).mean(), 3),
        "hot_share_of_rows": round(hot.sum() / answered.sum(), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--samples", type=int, default=64, help="of each host, a step")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ways", default="tables", choices=["tables", "buckets"])
    parser.add_argument(
        "--rows-divided-by", type=int, default=100, help="tables of workload A are made so much smaller"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--balance", action="store_true", help="count what each host sends")
    arguments = parser.parse_args()
    measuring.tune_allocator()
    found = [(count_bytes if arguments.balance else measure)(arguments, count) for count in arguments.hosts]
    line = {
        "benchmark": "scaling",
        "ways": arguments.ways,
        "tables": arguments.tables,
        "dim": arguments.dim,
        "samples_a_host": arguments.samples,
        "rows_divided_by": arguments.rows_divided_by,
        "of_hosts": found,
    }
    if not arguments.balance:
        line["growth"] = round(float(found[-1]["cpu_ms"]) / float(found[0]["cpu_ms"]), 2)  # type: ignore[arg-type]
    print(json.dumps(line | {"load1": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}))


if __name__ == "__main__":
    main()
