"""From the kill of a process to the next finished step, in a real run on two hosts. Prints one JSON line.

    python benchmarks/recovery.py --kill host
    python benchmarks/recovery.py --kill device --scale 16
    python benchmarks/recovery.py --kill device --scale 10 --place sharded --devices 2

A run trains, commits, and trains on. Then one process gets a SIGKILL in the middle of a window. The time from there
until the first step of the next generation is done is what counts. `--repeat` does that several times in one run, with
a commit in between. `--scale` multiplies the rows of the tables, which take 100 MB with it at 1; `--standbys off` and
`--undo off` show what these are for. `begin_commit_s` is what training waited for each commit to begin, when rows of
tables on devices come to their hosts. `commit_s` is how long each took in all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from rich.console import Console  # noqa: E402

from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad  # noqa: E402
from podembed.embedding.vocabulary.policies import LeastRecent  # noqa: E402
from podembed.jobs.cli.settings import parse_resources  # noqa: E402
from podembed.jobs.models.dlrm import DLRM  # noqa: E402
from podembed.jobs.reporters.console import ConsoleReporter  # noqa: E402
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from podembed.orchestrator.api.signals import StopSignals  # noqa: E402
from podembed.orchestrator.cluster.connection import connected  # noqa: E402
from podembed.orchestrator.cluster.ray_backend import RayBackend  # noqa: E402
from podembed.orchestrator.driver.driver import Driver  # noqa: E402
from podembed.orchestrator.driver.generation import Generation, Placement  # noqa: E402
from podembed.orchestrator.events.progress import WindowReport  # noqa: E402
from podembed.orchestrator.events.reporter import tell  # noqa: E402
from podembed.orchestrator.group.worker_group import WorkerGroup  # noqa: E402
from podembed.orchestrator.run.opening import create_run  # noqa: E402
from podembed.workers.data.columns import IdColumn  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

NUM_TABLES = 4
DIM = 16
# Rows and accumulators: 128 bytes a row, 102 MB in all.
TABLE_ROWS = 200_000
NUM_SAMPLES = 65_536
BATCH_SIZE = 1_024
NUM_DENSE = 8


def write_data(folder: str, table_rows: int) -> None:
    """One file; ids after a Zipf law, spread over the table."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"label": (rng.random(NUM_SAMPLES) < 0.3).astype(np.int8)}
    columns |= {f"x{at}": rng.standard_normal(NUM_SAMPLES).astype(np.float32) for at in range(NUM_DENSE)}
    for at in range(NUM_TABLES):
        columns[f"f{at}"] = rng.zipf(1.2, NUM_SAMPLES) * 2_654_435_761 % table_rows
    pq.write_table(pa.table(columns), f"{folder}/part.parquet", row_group_size=NUM_SAMPLES // 8)


def recovery_job(*, folder: str, table_rows: int, place: Any = "host", keys: str = "rows") -> JobConfig:
    """The job on what `write_data` wrote. Runs in the workers, too."""
    size = {"vocabulary_size": table_rows} if keys == "rows" else {"capacity": table_rows, "evict": LeastRecent()}
    tables = {
        f"f{at}": TableConfig(**size, dim=DIM, name=f"t{at}", optimizer=Adagrad(0.05), place=place)
        for at in range(NUM_TABLES)
    }
    return JobConfig(
        name="recovery",
        features={name: FeatureConfig(table) for name, table in tables.items()},
        model=DLRM(bottom=(64,), top=(64, 32)),
        data=ParquetData(
            f"{folder}/part.parquet",
            label="label",
            dense=tuple(f"x{at}" for at in range(NUM_DENSE)),
            features={name: IdColumn(name) for name in tables},
        ),
        batch_size=BATCH_SIZE,
        num_lanes=8,
        num_epochs=1_000_000,
    )


class KillingReporter(ConsoleReporter):
    """Kills a process after each commit, in the middle of a window, and takes the time to the next step.

    Mutated: all attributes, by the driver's thread.

    Attributes:
      seconds: of each kill.
    """

    def __init__(self, arguments: argparse.Namespace, stop: StopSignals) -> None:
        super().__init__(Console(file=sys.stderr, highlight=False))
        self.driver: WatchedDriver | None = None
        self.seconds: list[float] = []
        self._arguments = arguments
        self._stop = stop
        self.commit_s: list[float] = []
        self._kill_from_s: float | None = None
        self._killed_s: float | None = None

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        super().commit(name, size_bytes=size_bytes, seconds=seconds)
        self.commit_s.append(round(seconds, 2))
        if self._kill_from_s is None and self._killed_s is None and len(self.seconds) < self._arguments.repeat:
            self._kill_from_s = time.monotonic() + self._arguments.settle

    def window(self, report: WindowReport) -> None:
        super().window(report)
        now_s = time.monotonic()
        if self._killed_s is not None and self.driver is not None and report.generation > self.driver.killed_generation:
            self.seconds.append(now_s - self._killed_s)
            self.notice(f"kill to step {self.seconds[-1]:.2f} s")
            self._killed_s = None
            if len(self.seconds) == self._arguments.repeat:
                self._stop.request("measured")
        elif self._kill_from_s is not None and now_s >= self._kill_from_s and self.driver is not None:
            if self._arguments.standbys == "on" and not self.driver.standbys_are_ready():
                return
            self._kill_from_s = None
            self.driver.killed_generation = report.generation
            victim = self.driver.process_of(self._arguments.kill)
            threading.Timer(0.5, self._kill, (victim,)).start()

    def _kill(self, victim: int) -> None:
        self._killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)


class WatchedDriver(Driver):
    """The driver, which shows whom to kill and when. Mutated: all attributes. `backend`: of the workers."""

    backend: Any = None
    generation: Generation | None = None
    killed_generation = 0

    def _next(self, placement: Placement | None) -> Generation:
        self.generation = super()._next(placement)
        return self.generation

    def standbys_are_ready(self) -> bool:
        import ray

        standbys = [one.prepared for found in self.backend._reservations.values() for one in found.standbys]
        return bool(standbys) and len(ray.wait(standbys, num_returns=len(standbys), timeout=0)[0]) == len(standbys)

    def process_of(self, kind: str) -> int:
        group = self.generation.group if self.generation else None
        if group is None:
            raise RuntimeError("Found no group. Expected a window before.")
        return (group.ready if kind == "host" else group.devices)[-1].process


def take_begin_times() -> list[float]:
    """The seconds that each commit takes to begin, from now on. The driver waits for that here, and only here."""
    import ray

    found: list[float] = []
    begin_save = WorkerGroup.begin_save

    def timed(group: WorkerGroup, *arguments: Any, **named: Any) -> Any:
        started_s = time.monotonic()
        begun: Any = begin_save(group, *arguments, **named)
        answers = [call.reference for call in begun if call.method == "begin_save"]
        ray.wait(answers, num_returns=len(answers), timeout=60)
        found.append(round(time.monotonic() - started_s, 3))
        return begun

    WorkerGroup.begin_save = timed
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", default="host", choices=["host", "device"])
    parser.add_argument("--scale", type=int, default=1, help="multiplies the rows of the tables")
    parser.add_argument("--place", default="host", choices=["host", "replicated", "sharded"])
    parser.add_argument("--keys", default="rows", choices=["rows", "any"], help="any, with a capacity, or row numbers")
    parser.add_argument("--devices", type=int, help="CPU devices of a host")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="seconds between commits")
    parser.add_argument("--settle", type=float, default=6.0, metavar="S", help="from a commit to the kill, at least")
    parser.add_argument("--standbys", default="on", choices=["on", "off"])
    parser.add_argument(
        "--resources", nargs="+", default=(), metavar="NAME=AMOUNT", help="Ray resources of a host, such as CPU=4 GPU=1"
    )
    parser.add_argument("--undo", default="on", choices=["on", "off"])
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    table_rows = arguments.scale * TABLE_ROWS
    write_data(folder, table_rows)
    reference = JobReference(
        function="benchmarks.recovery:recovery_job",
        arguments={"folder": folder, "table_rows": table_rows, "place": arguments.place, "keys": arguments.keys},
    )
    begin_s = take_begin_times()
    run = create_run(f"{folder}/run", reference.resolve(), reference)
    failures = FailureConfig(
        undo_share=0.1 if arguments.undo == "on" else 0.0,
        standby_after_s=0.0 if arguments.standbys == "on" else None,
    )
    scaling = ScalingConfig(
        num_hosts=arguments.hosts,
        devices_per_host=arguments.devices,
        threads_per_host=1,
        resources_per_host=parse_resources(arguments.resources),
    )
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
                failure_config=failures,
                evaluate_at_end=False,
            ),
            backend=backend,
            reporter=reporter,
            stop=stop,
        )
        reporter.driver, driver.backend = driver, backend
        result = driver.run()
    parts = [_rounded(asdict(recovery)) for recovery in result.recoveries]
    return {
        "tables_mb": round(NUM_TABLES * table_rows * 8 * DIM / 1e6),
        "kill_to_step_s": round(statistics.median(reporter.seconds), 2),
        "each_s": [round(seconds, 2) for seconds in reporter.seconds],
        "begin_commit_s": begin_s,
        "commit_s": reporter.commit_s,
        "parts": parts,
    }


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the millisecond, in inner dictionaries, too."""
    return {
        name: _rounded(value) if isinstance(value, dict) else round(value, 3) if isinstance(value, float) else value
        for name, value in values.items()
    }


def main() -> None:
    arguments = parse()
    # Workers import this module by name to build the job.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if not arguments.resources:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        result = measure(arguments, folder)
    print(json.dumps({"benchmark": "recovery", **vars(arguments), **result}), flush=True)


if __name__ == "__main__":
    main()
