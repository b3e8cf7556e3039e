"""What undo to the last commit costs an update, and how fast going back is. Prints one JSON line.

    python benchmarks/undo.py --bench small --steps 200

Two copies of the tables of one host of two take the same updates in turn, one of them with an undo log. Every
`--commit` steps a commit begins and stands. Times are CPU seconds of the one thread, so that other work on the machine
matters little. A whole step takes several times what its update takes: `benchmarks/dlrm.py` has the phases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.workload import make_batches, workload  # noqa: E402
from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad  # noqa: E402
from podembed.embedding.table.table import Table  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402
from podembed.workers.checkpoint.background_save import BackgroundSave  # noqa: E402
from podembed.workers.checkpoint.undo import Undo  # noqa: E402
from podembed.workers.liveness.progress import Tracker  # noqa: E402

NUM_BATCHES = 64


class Side:
    """The tables, with or without a way back. Mutated: all of it."""

    def __init__(self, specs: list[TableSpec], share: float) -> None:
        self.tables = [Table(spec, np.arange(0, spec.layout.num_buckets, 2)) for spec in specs]
        self.undo = Undo(self.tables, share=share) if share else None
        save = BackgroundSave(
            self.tables, tracker=Tracker(), stalled_after_s=1.0, raise_if_aborted=lambda: None, undo=self.undo
        )
        save.track([], "s0")
        self.cpu_s: list[float] = []

    def update(self, rows: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        started = time.thread_time()
        for table, local, gradient in zip(self.tables, rows, gradients, strict=True):
            table.update(local, gradient, 0.01)
        self.cpu_s.append(time.thread_time() - started)

    def commit(self, number: int) -> None:
        if self.undo is not None:
            self.undo.freeze(f"s{number}")
            self.undo.acknowledge(f"s{number}")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = workload(arguments.bench)
    rule = RowWiseAdagrad(0.01) if arguments.emb_opt == "rowwise" else Adagrad(0.01)
    specs = [
        TableSpec.of(TableConfig(rows, shape.dim, optimizer=rule, name=f"t{at}"), seed=1)
        for at, rows in enumerate(shape.table_rows)
    ]
    batches = make_batches(shape, NUM_BATCHES)
    off, on = Side(specs, 0.0), Side(specs, arguments.share)
    rng = np.random.default_rng(1)
    for step in range(arguments.steps):
        rows = []
        for spec, table, ids in zip(specs, on.tables, batches.ids, strict=True):
            layout = spec.layout
            wanted = np.unique(np.asarray(ids[step % NUM_BATCHES]).reshape(-1).astype(np.int64))
            bucket, position = wanted % layout.num_buckets, wanted // layout.num_buckets
            here = np.isin(bucket, table.buckets)
            rows.append(np.searchsorted(table.buckets, bucket[here]) * layout.rows_per_bucket + position[here])
        gradients = [rng.standard_normal((len(local), shape.dim), np.float32) for local in rows]
        # In turn, so that neither always meets the caches that the other has filled.
        for side in (off, on) if step % 2 else (on, off):
            side.update(rows, gradients)
        if step % arguments.commit == 0:
            on.commit(step)
    logs = on.undo._logs.values() if on.undo is not None else ()
    kept = sum(log.num_kept for log in logs)
    last = (arguments.steps - 1) // arguments.commit * arguments.commit
    started = time.thread_time()
    known = on.undo.back_to(f"s{last}") if on.undo is not None else None
    undo_s = time.thread_time() - started
    ratio = [with_it / without for with_it, without in zip(on.cpu_s[4:], off.cpu_s[4:], strict=True)]
    return {
        "tables_mb": round(sum(table.size_bytes for table in on.tables) / 1e6),
        "update_ms_without": round(1e3 * statistics.fmean(off.cpu_s[4:]), 3),
        "update_ms_with": round(1e3 * statistics.fmean(on.cpu_s[4:]), 3),
        "added_ms_a_step": round(1e3 * (statistics.fmean(on.cpu_s[4:]) - statistics.fmean(off.cpu_s[4:])), 3),
        "median_ratio": round(statistics.median(ratio), 3),
        "rows_kept": kept,
        "undo_ms": round(1e3 * undo_s, 2),
        "all_known": bool(known and all(one.all() for one in known)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="small", choices=["A", "B", "small", "tiny"])
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"])
    parser.add_argument("--share", type=float, default=0.1, help="memory of the logs, of the tables")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--commit", type=int, default=50, help="steps between commits")
    arguments = parser.parse_args()
    print(json.dumps({"benchmark": "undo", **vars(arguments), **measure(arguments)}), flush=True)


if __name__ == "__main__":
    main()
