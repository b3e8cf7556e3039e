"""Memory of host processes over what they hold of the tables, in training, saving, recovering and restoring. Prints one
JSON line.

    python benchmarks/memory.py --gb 2 --hosts 2 --tables cut
    python benchmarks/memory.py --gb 1 --hosts 1 --tables whole --ids hash

A run trains on uniform ids, saves beside training, and loses a host process. A host that lives on recovers, and a new
one restores the lost shard. The resident memory of each host process is read from the kernel 50 times a second. The
figure of a phase is the highest one, over the bytes of rows and slots that the host holds. `base_mb` is the highest of
the same run with tables of a few rows: code, input and exchange. `above_base` leaves it out. `planned_mb` is what
`podembed plan` says of the fullest host, and `plan_off` compares it with the highest peak of all phases, less 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from benchmarks.recovery import KillingReporter, WatchedDriver  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.optimizers import RowWiseAdagrad  # noqa: E402
from podembed.jobs.models.dlrm import DLRM  # noqa: E402
from podembed.jobs.planning.data_at_hand import assumed_profiles  # noqa: E402
from podembed.jobs.planning.memory import host_memory  # noqa: E402
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from podembed.orchestrator.api.signals import StopSignals  # noqa: E402
from podembed.orchestrator.cluster.connection import connected  # noqa: E402
from podembed.orchestrator.cluster.ray_backend import RayBackend  # noqa: E402
from podembed.orchestrator.decisions.table_plan import plan  # noqa: E402
from podembed.orchestrator.events.reporter import tell  # noqa: E402
from podembed.orchestrator.planning.traffic import traffic_of  # noqa: E402
from podembed.orchestrator.run.opening import create_run  # noqa: E402
from podembed.workers.data.columns import IdColumn  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

DIM = 64
ROW_BYTES = 4 * (DIM + 1)
# Whole tables are several, so that two hosts have as much each; one table is cut.
NUM_TABLES = {"whole": 8, "cut": 1}
NUM_SAMPLES, BATCH_SIZE, IDS_A_SAMPLE, NUM_DENSE = 65_536, 2_048, 10, 4
BASE_ROWS = 64
LOOK_S = 0.02


def write_data(folder: str, *, num_tables: int, table_rows: int) -> None:
    """One file of uniform ids, ten in each bag."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"label": (rng.random(NUM_SAMPLES) < 0.3).astype(np.int8)}
    columns |= {f"x{at}": rng.standard_normal(NUM_SAMPLES).astype(np.float32) for at in range(NUM_DENSE)}
    splits = pa.array(np.arange(0, NUM_SAMPLES * IDS_A_SAMPLE + 1, IDS_A_SAMPLE, dtype=np.int32))
    for at in range(num_tables):
        ids = pa.array(rng.integers(0, table_rows, NUM_SAMPLES * IDS_A_SAMPLE))
        columns[f"f{at}"] = pa.ListArray.from_arrays(splits, ids)
    pq.write_table(pa.table(columns), f"{folder}/part.parquet", row_group_size=NUM_SAMPLES // 8)


def memory_job(*, folder: str, num_tables: int, table_rows: int, ids: str) -> JobConfig:
    """The job on what `write_data` wrote. Runs in the workers, too."""
    optimizer = RowWiseAdagrad(0.05)
    names = [f"f{at}" for at in range(num_tables)]
    return JobConfig(
        name="memory",
        features={
            name: FeatureConfig(TableConfig(table_rows, DIM, combiner="sum", name=f"t{name}", optimizer=optimizer))
            for name in names
        },
        model=DLRM(bottom=(DIM,), top=(64,)),
        data=ParquetData(
            f"{folder}/part.parquet",
            label="label",
            dense=tuple(f"x{at}" for at in range(NUM_DENSE)),
            features={name: IdColumn(name, mode="hash" if ids == "hash" else "as_is") for name in names},
        ),
        batch_size=BATCH_SIZE,
        num_lanes=8,
        num_epochs=1_000_000,
    )


def resident_bytes(process: int) -> int:
    """Resident memory of a process, shared pages included; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


class Watch(threading.Thread):
    """Reads the memory of all host processes until `close`.

    Mutated: the attributes, by this thread.

    Attributes:
      peaks: phase → highest ratio of a host's resident bytes to what it holds, with those bytes.
    """

    def __init__(self, driver: WatchedDriver, run: Path) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, tuple[int, int]] = {}
        self._driver, self._run, self._is_over = driver, run, threading.Event()
        self._first: set[int] = set()
        self._generation = 0

    def run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            generation = self._driver.generation
            group = generation.group if generation is not None else None
            if group is None:
                continue
            is_saving = self._is_saving()
            for ready in group.ready:
                if not self._first or ready.process in self._first:
                    others = "recovering" if self._driver.killed_generation else "training"
                else:
                    others = "restoring"
                self._note("saving" if is_saving and others == "training" else others, ready)
            if not self._driver.killed_generation:
                self._first = {ready.process for ready in group.ready}

    def _note(self, phase: str, ready: Any) -> None:
        found, highest = resident_bytes(ready.process), self.peaks.get(phase, (0, 1))
        if found * highest[1] > highest[0] * ready.shard_bytes:
            self.peaks[phase] = (found, ready.shard_bytes)

    def _is_saving(self) -> bool:
        """Whether there are files of a commit that does not stand yet."""
        commits = {path.stem for path in (self._run / "commit").glob("*.json")}
        return any(path.name not in commits for path in (self._run / "data").glob("s*"))

    def close(self) -> None:
        self._is_over.set()
        self.join()


def measure(arguments: argparse.Namespace, folder: str, *, table_rows: int) -> dict[str, tuple[int, int]]:
    """Phase → peak of a host's resident bytes, and the bytes that it holds."""
    num_tables = NUM_TABLES[arguments.tables]
    write_data(folder, num_tables=num_tables, table_rows=table_rows)
    job = {"folder": folder, "num_tables": num_tables, "table_rows": table_rows, "ids": arguments.ids}
    reference = JobReference(function="benchmarks.memory:memory_job", arguments=job)
    run = create_run(f"{folder}/run", reference.resolve(), reference)
    scaling = ScalingConfig(num_hosts=arguments.hosts, threads_per_host=1)
    with StopSignals() as stop, connected(arguments.hosts):
        stop.claim()
        reporter = KillingReporter(arguments, stop)
        backend = RayBackend(scaling, lambda event: tell(reporter, event))
        driver = WatchedDriver(
            run,
            scaling=scaling,
            config=RunConfig(
                name="run",
                storage_path=folder,
                checkpoint_config=CheckpointConfig(every_seconds=arguments.every, num_to_keep=2),
                failure_config=FailureConfig(standby_after_s=0.0),
                evaluate_at_end=False,
            ),
            backend=backend,
            reporter=reporter,
            stop=stop,
        )
        reporter.driver, driver.backend = driver, backend
        watch = Watch(driver, Path(folder) / "run")
        watch.start()
        try:
            driver.run()
        finally:
            watch.close()
    return watch.peaks


def planned_bytes(arguments: argparse.Namespace, *, table_rows: int) -> int:
    """Of the fullest host, as `podembed plan` says it."""
    num_tables, hosts = NUM_TABLES[arguments.tables], arguments.hosts
    job = memory_job(folder="nowhere", num_tables=num_tables, table_rows=table_rows, ids=arguments.ids)
    found = plan(job, num_hosts=hosts)
    profiles = assumed_profiles(job, [float(IDS_A_SAMPLE)] * num_tables)
    traffic = traffic_of(job, found, profiles)
    return host_memory(job, found, traffic, undo_share=FailureConfig().undo_share).total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of all tables with their slots")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--tables", default="cut", choices=NUM_TABLES)
    parser.add_argument("--ids", default="as_is", choices=["as_is", "hash"], help="how a value becomes a row")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between commits")
    arguments = parser.parse_args()
    # Of the reporter that kills: one host process, soon after a commit.
    arguments.kill, arguments.repeat, arguments.settle, arguments.standbys = "host", 1, 1.0, "on"
    # Workers import this module by name to build the job.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    table_rows = int(arguments.gb * 1e9) // ROW_BYTES // NUM_TABLES[arguments.tables]
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        base = measure(arguments, folder, table_rows=BASE_ROWS * arguments.hosts)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        found = measure(arguments, folder, table_rows=table_rows)
    base_bytes = {phase: peak for phase, (peak, _) in base.items()}
    planned, peak = planned_bytes(arguments, table_rows=table_rows), max(peak for peak, _ in found.values())
    result = {
        "peak_mb": round(peak / 1e6, 1),
        "planned_mb": round(planned / 1e6, 1),
        "plan_off": round(planned / peak - 1, 3),
        "shard_mb": round(max(held for _, held in found.values()) / 1e6, 1),
        "base_mb": {phase: round(peak / 1e6, 1) for phase, peak in base_bytes.items()},
        "peak_to_shard": {phase: round(peak / held, 3) for phase, (peak, held) in found.items()},
        "above_base_to_shard": {
            phase: round((peak - base_bytes.get(phase, 0)) / held, 3) for phase, (peak, held) in found.items()
        },
    }
    config = {name: getattr(arguments, name) for name in ("gb", "hosts", "tables", "ids")}
    load1 = {"load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"benchmark": "memory", **config, **result, **load1}), flush=True)


if __name__ == "__main__":
    main()
