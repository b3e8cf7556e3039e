"""Lookup and update alone: what an embedding step costs without input, dense half and network. Prints one JSON line.

    python benchmarks/engine.py --bench A --emb-opt rowwise
    python benchmarks/engine.py --bench C --emb-opt rowwise
    python benchmarks/engine.py --memory --keys any
    python benchmarks/engine.py --bench A --keys any --new 0.1 --fill full

One host holds all tables of the workload. `request` finds owners, `accept` rows, `group` sorts by row, `pool` writes
activations, and `update` sums gradients and applies the optimizer. Times are medians over the batches, which take
turns. With one thread the rate is that of its CPU time, with several that of wall time.

With `--memory` it fills a table whose keys come and go until all rows have a key, and prints the resident memory that
a key takes, beside what `podembed plan` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.workload import (  # noqa: E402
    Workload,
    fill_table,
    make_batches,
    renewed,
    turns_of,
    workload,
)
from benchmarks.workloads import (  # noqa: E402
    NAMES,
    MixedWorkload,
    mixed_table_values,
    mixed_workload,
    read_mixed,
    write_mixed,
)
from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.kernels.arrays import aligned_empty  # noqa: E402
from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks  # noqa: E402
from podembed.embedding.lookup.pooled_way import PooledWay  # noqa: E402
from podembed.embedding.lookup.streams import FeatureBinding  # noqa: E402
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad  # noqa: E402
from podembed.embedding.ragged import Ragged  # noqa: E402
from podembed.embedding.row_index import KeyRequest  # noqa: E402
from podembed.embedding.table.table import Table  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402
from podembed.embedding.vocabulary.dynamic_index import DynamicIndex  # noqa: E402
from podembed.embedding.vocabulary.policies import Always, LeastRecent, MinCount, Never  # noqa: E402
from podembed.jobs.planning.memory import key_bytes  # noqa: E402
from podembed.workers.thread_pool import ThreadPool  # noqa: E402

NUM_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One host that owns all tables."""

    tables: Sequence[Table]
    features: Sequence[FeatureBinding]
    layout: ActivationLayout
    lookup: PooledWay

    @staticmethod
    def of(
        tables: Sequence[Table], features: Sequence[FeatureBinding], layout: ActivationLayout, *, threads: int
    ) -> Engine:
        lookup = PooledWay(tables, features, layout, host=0, num_hosts=1, thread_pool=ThreadPool(threads))
        return Engine(tables=tables, features=features, layout=layout, lookup=lookup)


ADMIT = {"any": Always(), "counted": MinCount(2)}


FIRST_STEP = 3


def build(shape: Workload, emb_opt: str, threads: int, keys: str = "rows", fill: str | None = None) -> Engine:
    """All tables on one host, with the workload's first values in the order of the ids.

    Args:
      keys: "rows" for row numbers. Otherwise keys come and go, and each id has a row before the first step.
      fill: "full": all other rows have keys that nobody names, the first to be forgotten. "half": there is room for
        twice as many keys. None: nothing is forgotten.
    """
    rate, epsilon = shape.learning_rate, shape.epsilon
    rule = RowWiseAdagrad(rate, epsilon=epsilon) if emb_opt == "rowwise" else Adagrad(rate, 0.0, epsilon=epsilon)
    tables, features = [], []
    for at, num_rows in enumerate(shape.table_rows):
        capacity = 2 * num_rows if fill == "half" else num_rows
        dynamic = {"capacity": capacity, "admit": ADMIT.get(keys), "evict": LeastRecent() if fill else Never()}
        size = {"vocabulary_size": num_rows} if keys == "rows" else dynamic
        config = TableConfig(**size, dim=shape.dim, name=f"t{at:02d}", combiner="sum", optimizer=rule)
        spec = TableSpec.of(config, seed=0)
        table = Table(spec, np.arange(spec.layout.num_buckets))
        if keys == "rows":
            # Which row holds which numbers makes no difference here, so the buckets are filled front to back.
            fill_table(shape, at, table.rows[:num_rows])
        if keys != "rows":
            # So many that no bucket has a free row.
            idle = spec.num_rows + spec.num_rows // 4 if fill == "full" else 0
            name_keys(table, -1 - np.arange(idle), step=0)
            name_keys(table, np.arange(num_rows), step=2)
        tables.append(table)
        features.append(FeatureBinding(name=f"f{at:02d}", table=at, combiner="sum", column=at * shape.dim))
    layout = ActivationLayout(
        num_samples=shape.batch_size, widths=(shape.dim,) * len(tables), owners=(0,) * len(tables)
    )
    return Engine.of(tables, features, layout, threads=threads)


def name_keys(table: Table, keys: np.ndarray, *, step: int) -> None:
    """Names each key twice in a step, so that it gets a row with all of `ADMIT`."""
    for first in range(0, len(keys), 1 << 16):
        some = np.repeat(keys[first : first + (1 << 16)], 2)
        table.index.accept([KeyRequest(some, np.empty(len(some), np.int64))], step)


def filled(keys: str, *, capacity: int, dim: int = 64, ids: int = 4096) -> Table:
    """A table with row-wise Adagrad, all of whose rows have a key, but for one in a thousand.

    Args:
      keys: of `ADMIT`.
      ids: of a step. Those without a row have memory for that step.
    """
    config = TableConfig(capacity=capacity, dim=dim, name="t", admit=ADMIT[keys], optimizer=RowWiseAdagrad(0.1))
    spec = TableSpec.of(config, seed=0)
    table, rng, step = Table(spec, np.arange(spec.layout.num_buckets)), np.random.default_rng(0), 0
    while np.count_nonzero(table.slots["last"]) < 0.999 * spec.num_rows or step < 2 * spec.num_rows // ids:
        some = rng.integers(-(2**63), 2**63, ids)
        # In turns named twice, so that they get a row with both policies, and once, so that they wait.
        named = np.repeat(some, 1 + (step + 1) % 2)
        table.index.accept([KeyRequest(named, np.empty(len(named), np.int64))], step)
        step += 1
    return table


def key_memory(keys: str) -> dict[str, float]:
    """Bytes that a key more takes, between tables of two capacities, as measured and as planned; and what a table takes
    beside that, whatever its size: huge pages that are touched in part, and rows for keys without one.
    """
    kept, bytes_of, num_keys = [], [], []
    # The first one has what a process takes once, such as kernels and what its allocator keeps.
    for capacity in (50_000, 500_000, 2_000_000):
        before = measuring.resident_bytes()
        kept.append(filled(keys, capacity=capacity))
        bytes_of.append(measuring.resident_bytes() - before)
        num_keys.append(int(np.count_nonzero(kept[-1].slots["last"])))
    measured = (bytes_of[2] - bytes_of[1]) / (num_keys[2] - num_keys[1])
    # A larger table is cut more finely, and so has more rows for a key.
    planned = key_bytes(kept[2].spec)
    beside = {"mb_a_table": round((bytes_of[1] - measured * num_keys[1]) / 1e6, 1)}
    found = {"bytes_a_key": round(measured, 1), "planned": round(planned, 1), "ratio": round(measured / planned, 3)}
    return found | beside


def build_mixed(shape: MixedWorkload, emb_opt: str, threads: int) -> Engine:
    """As `build`, of tables that differ."""
    rate, epsilon = shape.learning_rate, shape.epsilon
    rule = RowWiseAdagrad(rate, epsilon=epsilon) if emb_opt == "rowwise" else Adagrad(rate, 0.0, epsilon=epsilon)
    tables = []
    for at, (rows, dim) in enumerate(zip(shape.table_rows, shape.dims, strict=True)):
        spec = TableSpec.of(TableConfig(rows, dim, name=f"t{at:03d}", optimizer=rule), seed=0)
        table = Table(spec, np.arange(spec.layout.num_buckets))
        table.rows[:rows] = mixed_table_values(shape, at)((rows, dim))
        tables.append(table)
    columns = np.cumsum([0, *shape.widths])
    features = [
        FeatureBinding(name=shape.feature(at), table=table, combiner=shape.combiners[table], column=int(columns[at]))
        for at, table in enumerate(shape.table_of)
    ]
    layout = ActivationLayout(num_samples=shape.batch_size, widths=shape.widths, owners=(0,) * len(features))
    return Engine.of(tables, features, layout, threads=threads)


def mixed_steps(shape: MixedWorkload) -> list[dict[str, Ragged]]:
    """The ids of all batches."""
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        write_mixed(shape, Path(folder))
        whole = slice(0, shape.batch_size)
        batches = [read_mixed(shape, Path(folder), number, whole) for number in range(shape.num_batches)]
    return [{shape.feature(at): Ragged.of(*bag) for at, bag in enumerate(batch.bags)} for batch in batches]


def keys_of(tables: Sequence[Table], num_steps: int) -> dict[str, float]:
    """How full the tables are at the end, and how many keys a step got and lost their rows."""
    counts = [table.index.take_counts() for table in tables if isinstance(table.index, DynamicIndex)]
    num_keys, num_rows = (sum(getattr(one, name) for one in counts) for name in ("num_keys", "num_rows"))
    found = {"filled": round(num_keys / max(1, num_rows), 3)}
    return found | {
        name: sum(getattr(one, name) for one in counts) // num_steps for name in ("admitted", "evicted", "refused")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="A", choices=["A", "B", "A10", "B10", "tiny", *NAMES])
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--keys", default="rows", choices=["rows", *ADMIT], help="of A and B: any with a capacity")
    parser.add_argument("--new", type=float, default=0.0, help="share of ids that are others in each round of batches")
    parser.add_argument("--fill", choices=["half", "full"], help="of tables of keys, which then forget the oldest ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--memory", action="store_true", help="of a key, with --keys any or counted")
    arguments = parser.parse_args()
    measuring.tune_allocator()
    turns: list[np.ndarray] = []
    if arguments.memory:
        print(json.dumps({"benchmark": "key memory", "keys": arguments.keys, **key_memory(arguments.keys)}))
        return
    if arguments.bench in NAMES:
        shape = mixed_workload(arguments.bench)
        steps = mixed_steps(shape)
        engine = build_mixed(shape, arguments.emb_opt, arguments.threads)
    else:
        shape = workload(arguments.bench)
        batches = make_batches(shape, NUM_BATCHES)
        steps = [
            {f"f{at:02d}": Ragged.of_dense(ids[step]) for at, ids in enumerate(batches.ids)}
            for step in range(NUM_BATCHES)
        ]
        engine = build(shape, arguments.emb_opt, arguments.threads, arguments.keys, arguments.fill)
        if arguments.new and arguments.keys != "rows":
            turns = [turns_of(ids, arguments.new) for ids in batches.ids]
    lookup, layout = engine.lookup, engine.layout
    activations, gradients = aligned_empty((layout.num_floats,)), aligned_empty((layout.num_floats,))
    gradients[:] = np.random.default_rng(0).standard_normal(layout.num_floats, dtype=np.float32) * 1e-3
    activation_blocks, gradient_blocks = Blocks.of(layout, activations), Blocks.of(layout, gradients)
    rates = [shape.learning_rate] * len(shape.table_rows)
    # The CPU time of one thread leaves out what other programs take.
    now = time.thread_time if arguments.threads == 1 else time.perf_counter
    # Forgets what was counted while the tables were filled.
    keys_of(engine.tables, 1)
    parts: dict[str, list[float]] = {"request": [], "accept": [], "group": [], "pool": [], "update": []}
    stop = time.perf_counter() + arguments.seconds
    number = 0
    cpu_s = 0.0
    while time.perf_counter() < stop or number < 2 * NUM_BATCHES:
        step = steps[number % len(steps)]
        if turns:
            round_, at = divmod(number, len(steps))
            step = {
                f"f{table:02d}": Ragged.of_dense(
                    renewed(ids[at], turns[table][at], arguments.new, number=round_, num_rows=shape.table_rows[table])
                )
                for table, ids in enumerate(batches.ids)
            }
        before_s = time.process_time()
        clock = [now()]
        request = lookup.request(step)
        clock.append(now())
        lookup.accept(request, [np.empty(0, np.int64)], training_step=number + FIRST_STEP)
        clock.append(now())
        lookup.group(request, gradient_blocks)
        clock.append(now())
        lookup.gather_own(request, activation_blocks)
        clock.append(now())
        lookup.update(request, gradient_blocks, rates)
        clock.append(now())
        number += 1
        # The first steps compile, and touch memory for the first time.
        if number > NUM_BATCHES:
            cpu_s += time.process_time() - before_s
            for part, seconds in zip(parts, np.diff(clock), strict=True):
                parts[part].append(1e3 * seconds)
    found = {part: round(float(np.median(values)), 2) for part, values in parts.items()}
    total = float(np.median(np.sum(list(parts.values()), axis=0)))
    line = {name: getattr(arguments, name) for name in ("bench", "emb_opt", "keys", "new", "fill", "threads")}
    if arguments.keys != "rows":
        line |= keys_of(engine.tables, number)
    rate = round(shape.batch_size / total * 1e3, 0)
    per_cpu = rate if arguments.threads == 1 else round(shape.batch_size * len(parts["pool"]) / cpu_s, 0)
    times = {"ms": round(total, 2), "parts_ms": found, "samples_per_s": rate, "samples_per_cpu_s": per_cpu}
    print(json.dumps({"benchmark": "engine", **line, **times, "load1": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
