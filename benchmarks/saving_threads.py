"""What a save costs the thread that trains, in one process without Ray: updates with and without a save beside them.
Prints one JSON line.

    python benchmarks/saving_threads.py --saves 6 --switch-ms 5 0.5

Tables as one host of a recommender has them; a step updates random rows of each. A second thread writes saves to a
temporary folder. Python lets threads take turns after `sys.setswitchinterval`; the settings take turns save by save, so
that their ratio says something on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.optimizers import RowWiseAdagrad  # noqa: E402
from podembed.embedding.table.table import Table  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402
from podembed.workers.checkpoint.background_save import BackgroundSave  # noqa: E402
from podembed.workers.liveness.progress import Phase, Tracker  # noqa: E402
from podembed.workers.storage.store import Store  # noqa: E402


class Training:
    """Mutated: the tables."""

    def __init__(self, *, num_tables: int, num_rows: int, dim: int, rows_a_step: int) -> None:
        configs = [TableConfig(num_rows, dim, optimizer=RowWiseAdagrad(0.1), name=f"t{at}") for at in range(num_tables)]
        specs = [TableSpec.of(config, seed=1, num_buckets=16) for config in configs]
        self.tables = [Table(spec, np.arange(16)) for spec in specs]
        for table in self.tables:
            table.initialize()
        self.tracker = Tracker()
        self._rng = np.random.default_rng(1)
        self._gradients = self._rng.standard_normal((rows_a_step, dim), np.float32)

    def step(self) -> float:
        """Seconds."""
        rows = [self._rng.integers(0, table.num_rows, len(self._gradients)) for table in self.tables]
        started = time.perf_counter()
        with self.tracker.phase(Phase.UPDATE):
            for table, some in zip(self.tables, rows, strict=True):
                table.update(some, self._gradients, 0.1)
        return time.perf_counter() - started


def _median_ms(seconds: list[float]) -> float:
    return round(1e3 * float(np.median(seconds)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows-a-step", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=6, help="of each setting")
    parser.add_argument("--steps", type=int, default=20, help="undisturbed steps before each save")
    parser.add_argument(
        "--processors", type=float, default=None, help="that a save may keep busy; default as in training"
    )
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[1e3 * sys.getswitchinterval()])
    arguments = parser.parse_args()
    training = Training(
        num_tables=arguments.tables,
        num_rows=arguments.rows,
        dim=arguments.dim,
        rows_a_step=arguments.rows_a_step,
    )
    save = BackgroundSave(
        training.tables,
        tracker=training.tracker,
        stalled_after_s=600.0,
        raise_if_aborted=lambda: None,
        processors=arguments.processors,
    )
    found: dict[float, dict[str, list[float]]] = {
        ms: {"quiet": [], "first": [], "beside": [], "save": []} for ms in arguments.switch_ms
    }
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder, ThreadPoolExecutor(1) as saver:
        for number in range(arguments.saves * len(arguments.switch_ms) + 1):
            milliseconds = arguments.switch_ms[number % len(arguments.switch_ms)]
            sys.setswitchinterval(milliseconds / 1e3)
            times = found[milliseconds] if number else {name: [] for name in ("quiet", "first", "beside", "save")}
            times["quiet"] += [training.step() for _ in range(arguments.steps)]
            began_s = time.perf_counter()
            save.freeze()
            writing = saver.submit(save.write, Store(f"{folder}/{number}"), "s000000001-g00000001", is_first=True)
            frozen_s = time.perf_counter() - began_s
            times["first"].append(frozen_s + training.step())
            while not writing.done():
                times["beside"].append(training.step())
            writing.result()
            times["save"].append(time.perf_counter() - began_s)
    result: dict[str, Any] = {
        "benchmark": "saving_threads",
        "tables_mb": sum(t.size_bytes for t in training.tables) // 10**6,
    }
    for milliseconds, times in found.items():
        result[f"switch {milliseconds:g} ms"] = {f"{name}_ms": _median_ms(times[name]) for name in times} | {
            "first_to_quiet": round(float(np.median(times["first"]) / np.median(times["quiet"])), 2),
            "beside_to_quiet": round(float(np.median(times["beside"]) / np.median(times["quiet"])), 2),
        }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
