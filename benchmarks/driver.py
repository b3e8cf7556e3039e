"""CPU time of the driver per step, with the real driver code over hosts that only pretend to work. Prints one JSON line
a number of hosts.

    python benchmarks/driver.py --hosts 2 4 64 256 1024

Every fake worker answers a call after the time that the work would take, control calls at once. What a call costs in
Ray is not in it, nor are commits, whose work lies with the hosts. `--calls` measures the former on a few real actors:

    python benchmarks/driver.py --calls 8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.lookup.activation_layout import ActivationLayout  # noqa: E402
from podembed.jobs.models.dlrm import DLRM  # noqa: E402
from podembed.orchestrator.api.config import RunConfig, ScalingConfig  # noqa: E402
from podembed.orchestrator.api.signals import StopSignals  # noqa: E402
from podembed.orchestrator.cluster.connection import connected  # noqa: E402
from podembed.orchestrator.driver import driver as driver_module  # noqa: E402
from podembed.orchestrator.driver.committing import Committing  # noqa: E402
from podembed.orchestrator.driver.driver import Driver  # noqa: E402
from podembed.orchestrator.driver.generation import Finished, Generation, HostsLeave  # noqa: E402
from podembed.orchestrator.driver.windows import DriverWindows  # noqa: E402
from podembed.orchestrator.events.reporter import SilentReporter  # noqa: E402
from podembed.orchestrator.group.worker_group import HostHandles, WorkerGroup  # noqa: E402
from podembed.orchestrator.run.opening import create_run  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.device.process import DeviceReady, DeviceWindow  # noqa: E402
from podembed.workers.device.shared_memory import ChannelLayout, Invitation  # noqa: E402
from podembed.workers.host.spec import HostReady, HostWindow  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.liveness.progress import Phase, Progress  # noqa: E402

PHASES = (
    Phase.READ,
    Phase.DEDUP,
    Phase.ID_EXCHANGE,
    Phase.GROUP,
    Phase.POOL,
    Phase.DEVICE,
    Phase.GRADIENT_EXCHANGE,
    Phase.UPDATE,
)


@dataclass(frozen=True, slots=True, eq=False)
class FakeCall:
    """A call that ends at a time, with an answer that is known before."""

    worker: str
    answer: Any
    ends_s: float


@dataclass(slots=True)
class FakeHandle:
    """A worker that answers with values of the right types. Mutated: `step`."""

    worker: str
    step_s: float
    where: str = "nowhere"
    step: int = 0

    def call(self, method: str, *arguments: Any) -> FakeCall:
        seconds = 0.0
        answer: Any = None
        if method == "start":
            answer = (
                _host_ready()
                if self.worker.startswith("host")
                else DeviceReady(process=1, platform="cpu", num_devices=1, compile_s=0.0)
            )
        elif method == "reserve_coordinator":
            answer = "127.0.0.1:1"
        elif method == "train":
            first, last, _ = arguments
            FakeBackend.window, seconds, self.step = last - first, (last - first) * self.step_s, last
            spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.01)
            answer = HostWindow(num_samples=last - first, phase_s=spent, bytes_sent=0)
        elif method == "serve_window":
            steps = FakeBackend.window
            seconds = steps * self.step_s
            answer = DeviceWindow(losses=(0.5,) * steps, num_steps=steps, seconds=seconds)
        return FakeCall(self.worker, answer, time.monotonic() + seconds)

    def control(self, method: str, *arguments: Any) -> FakeCall:
        now = time.time()
        progress = Progress(step=self.step, phase=Phase.DEVICE, marks=int(now * 1e3), step_unix_s=now)
        return FakeCall(self.worker, progress, time.monotonic())


class FakeBackend:
    """Hosts that pretend. `window` is the length of the last window that hosts got; real devices learn it from their
    hosts.
    """

    window = 0

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def launch(self, num_hosts: int, on_wait: Callable[[], None]) -> Sequence[HostHandles]:
        return [
            HostHandles(FakeHandle(f"host {at}", self._step_s), FakeHandle(f"device {at}", self._step_s))
            for at in range(num_hosts)
        ]

    def settled(self, calls: Sequence[Any], *, timeout_s: float) -> tuple[list[Any], list[Any]]:
        first_end = min(call.ends_s for call in calls)
        wait_s = min(timeout_s, first_end - time.monotonic())
        if wait_s > 0:
            time.sleep(wait_s)
        now = time.monotonic()
        return [c for c in calls if c.ends_s <= now], [c for c in calls if c.ends_s > now]

    def result(self, call: Any) -> Any:
        return call.answer

    def stop(self, handles: Sequence[HostHandles]) -> None:
        pass


def _host_ready() -> HostReady:
    layout = ChannelLayout(num_dense=1, activations=ActivationLayout(num_samples=1, widths=(8,), owners=(0,)))
    invitation = Invitation(address="", secret=b"", generation=1, layout=layout)
    return HostReady(
        mesh_address=("127.0.0.1", 1),
        invitation=invitation,
        num_samples=1,
        process=1,
        hostname="",
        shard_bytes=0,
        save_bytes=0,
    )


class TrainingGeneration(Generation):
    """The generation without commits, and with a clock at the beginning and end of its steps."""

    spent_s = 0.0

    def _train(self, group: WorkerGroup, windows: DriverWindows, committing: Committing) -> Finished | HostsLeave:
        committing.begin = lambda step: None  # type: ignore[method-assign]
        committing.conclude = lambda step: None  # type: ignore[method-assign]
        started = time.thread_time()
        ending = super()._train(group, windows, committing)
        TrainingGeneration.spent_s = time.thread_time() - started
        return ending


def job_in(folder: str, num_hosts: int) -> JobConfig:
    """A job over a file that is never read, with a lane for each host."""
    rows = 4 * num_hosts
    columns = {"label": np.zeros(rows, np.int8), "x": np.zeros(rows, np.float32), "a": np.zeros(rows, np.int64)}
    pq.write_table(pa.table(columns), f"{folder}/part.parquet")
    return JobConfig(
        name="driver",
        features={"a": FeatureConfig(TableConfig(1_000_000, 8, name="a"))},
        model=DLRM(bottom=(), top=()),
        data=ParquetData(f"{folder}/part.parquet", label="label", dense=("x",)),
        batch_size=num_hosts,
        num_lanes=num_hosts,
        num_epochs=1_000_000,
    )


def measure(num_hosts: int, step_s: float, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        run = create_run(f"{folder}/run", job_in(folder, num_hosts), None)
        config = RunConfig(name="run", max_steps=num_steps, evaluate_at_end=False)
        driver = Driver(
            run,
            scaling=ScalingConfig(num_hosts=num_hosts),
            config=replace(config, storage_path=folder),
            backend=FakeBackend(step_s),
            reporter=SilentReporter(),
            stop=StopSignals(),
        )
        with patch.object(driver_module, "Generation", TrainingGeneration):
            driver.run()
    spent_s = TrainingGeneration.spent_s / num_steps
    return {
        "benchmark": "driver",
        "hosts": num_hosts,
        "step_ms": 1e3 * step_s,
        "steps": num_steps,
        "driver_cpu_ms_per_step": round(1e3 * spent_s, 4),
        "share_of_step_percent": round(100 * spent_s / step_s, 3),
    }


def measure_calls(num_actors: int, num_calls: int = 2000) -> dict[str, Any]:
    """CPU time of this process for one call of a real actor and its answer, all asked at once as a window is."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with connected(num_actors):
        import ray

        @ray.remote(num_cpus=0)
        class Answering:
            def run(self, *arguments: Any) -> tuple[Any, ...]:
                return arguments

        actors = [Answering.remote() for _ in range(num_actors)]
        ray.get([actor.run.remote() for actor in actors])
        process_s, thread_s = time.process_time(), time.thread_time()
        references = [actors[at % num_actors].run.remote("train", 1, 2) for at in range(num_calls)]
        ray.get(references)
        process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    return {
        "benchmark": "driver",
        "actors": num_actors,
        "calls": num_calls,
        "cpu_ms_per_call": round(1e3 * process_s / num_calls, 4),
        "thread_cpu_ms_per_call": round(1e3 * thread_s / num_calls, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 64, 256, 1024])
    parser.add_argument("--step-ms", type=float, default=100.0, help="what a step of the fake hosts takes")
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps, for each number of hosts")
    parser.add_argument("--calls", type=int, metavar="ACTORS", help="measure calls of so many real actors instead")
    arguments = parser.parse_args()
    if arguments.calls:
        print(json.dumps(measure_calls(arguments.calls)))
        return
    for num_hosts in arguments.hosts:
        step_s = arguments.step_ms / 1e3
        print(json.dumps(measure(num_hosts, step_s, int(arguments.seconds / step_s))), flush=True)


if __name__ == "__main__":
    main()
