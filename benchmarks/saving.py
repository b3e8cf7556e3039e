"""What a save costs training: steps with and without one under way, and the memory it takes. Prints one JSON line.

    python benchmarks/saving.py --hosts 2 --saves 3

Hosts and devices are those of `benchmarks/dlrm.py`, on the workload `small`, one call a step, so that every step has a
time. Then three kinds of steps are compared: those without a save, the first one after a save began, and the others
while it was written. The time of that first one counts from the end of the step before, so it holds the whole stall.
Files go to a temporary folder, with the durable writes of a real run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.dlrm import start_group  # noqa: E402
from benchmarks.workload import make_batches, workload  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

WARM_UP_STEPS = 20


class Steps:
    """Trains step by step. Mutated: the next step, the time at which the last one ended, host 0's phases in it, and the
    hosts' waits and memory.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.number = 0
        self.ended_s = time.perf_counter()
        self.wait_s = 0.0
        self.rss_bytes = 0
        self.phase_s: dict[str, float] = {}

    def one(self) -> float:
        """Trains a step; the seconds since the last one ended."""
        hosts, _ = self.group.train(self.number, self.number + 1)
        before, self.ended_s = self.ended_s, time.perf_counter()
        self.number += 1
        self.phase_s = hosts[0].phase_s
        self.wait_s += max(host.phase_s.get("wait for save", 0.0) for host in hosts)
        self.rss_bytes = sum(host.usage.peak_memory_bytes for host in hosts if host.usage)
        return self.ended_s - before


def measure(group: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of undisturbed steps and of a save with the steps beside it."""
    steps = Steps(group)
    for _ in range(WARM_UP_STEPS):
        steps.one()
    rss_before = steps.rss_bytes
    quiet: list[float] = []
    first: list[float] = []
    beside: list[float] = []
    save_s: list[float] = []
    begin_s: list[float] = []
    quiet_phases: list[dict[str, float]] = []
    first_phases: list[dict[str, float]] = []
    size_bytes = 0
    if arguments.incremental:
        group.await_receipts(group.begin_save("s999999999-g00000001", is_delta=False))
        steps.one()
    steps.wait_s = 0.0
    busy_before, started = measuring.machine_cpu_s(), time.perf_counter()
    for number in range(arguments.saves):
        for _ in range(arguments.steps):
            quiet.append(steps.one())
            quiet_phases.append(steps.phase_s)
        began_s = time.perf_counter()
        attempt = f"s{number:09d}-g00000001"
        writing = group.begin_save(attempt, is_delta=arguments.incremental)
        begin_s.append(time.perf_counter() - began_s)
        first.append(steps.one())
        first_phases.append(steps.phase_s)
        while (receipts := group.receipts(writing)) is None:
            beside.append(steps.one())
        save_s.append(time.perf_counter() - began_s)
        # Whoever keeps undo logs lets go of the moment before.
        group.acknowledge(attempt)
        shards, _ = receipts
        tables = [table for shard in shards for table in shard.tables]
        size_bytes = sum(table.buckets.written_bytes for table in tables)
        size_bytes += sum(file.size_bytes for t in tables for part in t.parts for file in part.files)
    busy = (measuring.machine_cpu_s() - busy_before) / (time.perf_counter() - started)
    shard_bytes = sum(ready.shard_bytes for ready in group.ready)
    return {
        "tables_mb": round(shard_bytes / 1e6, 1),
        "saved_mb": round(size_bytes / 1e6, 1),
        "save_s": round(statistics.median(save_s), 2),
        "step_ms": _times(quiet),
        "first_step_ms": _times(first),
        "of_which_begin_ms": _times(begin_s)["median"],
        "phase_ms": _phases(quiet_phases),
        "first_phase_ms": _phases(first_phases),
        "step_beside_save_ms": _times(beside),
        # Samples a second while files are written, over those without.
        "samples_beside_share": round(statistics.fmean(quiet) / statistics.fmean(first + beside), 3),
        "beside_p99_to_p50": round(float(np.quantile(beside, 0.99)) / statistics.median(quiet), 2),
        "stall_steps": round(statistics.median(first) / statistics.median(quiet) - 1, 2),
        # What training lost to a save in all, while it lasted.
        "lost_ms_a_save": round(
            1e3 * (sum(first + beside) - len(first + beside) * statistics.median(quiet)) / arguments.saves, 1
        ),
        "waited_for_save_ms": round(1e3 * steps.wait_s, 2),
        "buffer_share_percent": round(100 * sum(ready.save_bytes for ready in group.ready) / shard_bytes, 2),
        "memory_growth_percent": round(100 * (steps.rss_bytes - rss_before) / shard_bytes, 2),
        "cpus_busy": round(busy, 2),
    }


def _phases(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians over steps, of the phases that take some time."""
    names = {name for phases in steps for name in phases}
    medians = {name: 1e3 * statistics.median(phases.get(name, 0.0) for phases in steps) for name in names}
    return {
        name: round(medians[name], 2) for name in sorted(names, key=lambda name: -medians[name]) if medians[name] > 0.2
    }


def _times(seconds: list[float]) -> dict[str, float]:
    milliseconds = 1e3 * np.asarray(seconds)
    return {
        "median": round(float(np.median(milliseconds)), 2),
        "p90": round(float(np.quantile(milliseconds, 0.9)), 2),
        "p99": round(float(np.quantile(milliseconds, 0.99)), 2),
        "max": round(float(milliseconds.max()), 2),
        "count": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="small", choices=["A", "small", "tiny", "uniform"])
    parser.add_argument("--hosts", type=int, default=2, help="each is a host process and a device process")
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="undisturbed steps before each save")
    parser.add_argument("--incremental", action="store_true", help="save whole once, then only rows that changed")
    parser.add_argument(
        "--undo-share", type=float, default=0.1, help="of the tables' bytes, as in a run; 0 for no undo"
    )
    parser.add_argument("--placement", default="tables", choices=["tables", "buckets"], help="what is placed whole")
    arguments = parser.parse_args()
    # Workers import the job's module by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from podembed.orchestrator.cluster.connection import connected

    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        make_batches(workload(arguments.bench)).write(Path(folder))
        job = {"bench": arguments.bench, "emb_opt": arguments.emb_opt, "folder": folder}
        reference = JobReference(function="benchmarks.dlrm:benchmark_job", arguments=job)
        with connected(arguments.hosts):
            options = {"tracks_changes": arguments.incremental, "undo_share": arguments.undo_share}
            group = start_group(arguments, reference, storage=f"{folder}/run", **options)
            try:
                result = measure(group, arguments)
                group.close()
            finally:
                group.stop()
    config = {
        name: getattr(arguments, name) for name in ("bench", "hosts", "emb_opt", "placement", "saves", "incremental")
    }
    print(json.dumps({"benchmark": "saving", **config, **result}), flush=True)


if __name__ == "__main__":
    main()
