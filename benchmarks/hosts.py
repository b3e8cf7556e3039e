"""CPU time, frames and bytes of real hosts a step, as hosts on one machine become many. Prints one JSON line.

    python benchmarks/hosts.py --hosts 4 8 16 32
    python benchmarks/hosts.py --hosts 4 8 16 --ways buckets --dims 8 16 32

Weak scaling: each host has the same number of samples. Hosts are real: processes with input, mesh, lookups and tables,
as in training, and without Ray. A thread stands for the device process and only echoes, so the dense half is left out.
The CPU time is that of each host's working thread, in the quickest of some windows. Processes share the CPUs of one
machine, so wall time says nothing.

They share its caches, too, and find less there the more they are. So a smaller pod is measured alone, and once more
with others of its size beside it. All together are then as many hosts as the largest pod has. `growth` compares with it
alone, `growth_as_crowded` with it among others. The latter is what a pod's size costs, since hosts of a real pod have
caches of their own.

Hosts exchange everything as between machines, unless `--machines one`. `--ways tables` places tables as a run does, and
`--ways buckets` cuts every table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import measuring  # noqa: E402
from benchmarks.in_memory import BatchesInTurn, batch_of  # noqa: E402
from benchmarks.workload import workload  # noqa: E402
from podembed.embedding.buckets import place, split_evenly  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.initializers import Constant  # noqa: E402
from podembed.embedding.lookup.compiled import compile_kernels  # noqa: E402
from podembed.embedding.lookup.placement import place_tables  # noqa: E402
from podembed.embedding.optimizers import RowWiseAdagrad  # noqa: E402
from podembed.embedding.ragged import Ragged  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.data.input_files import InputFile  # noqa: E402
from podembed.workers.device.doorway import ChannelError  # noqa: E402
from podembed.workers.device.shared_memory import Invitation, Record, RecordKind  # noqa: E402
from podembed.workers.host.host import HostWorker  # noqa: E402
from podembed.workers.host.spec import HostSpec  # noqa: E402
from podembed.workers.input.index import InputIndex  # noqa: E402
from podembed.workers.input.lanes import LanePlan  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.tables import choose_buckets, features_per_table, table_specs  # noqa: E402

NUM_BATCHES = 4
WARM_UP_STEPS = 12
PATIENCE_S = 600.0


@dataclass(frozen=True)
class RandomIds(ParquetData):
    """Ids drawn by each host for itself; low ids are frequent.

    Attributes:
      rows, ids: per feature, rows of its table, and ids a sample.
    """

    rows: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()

    def open_reader(self, plan: LanePlan, lanes: range) -> BatchesInTurn:
        count, rng = plan.rows_per_lane_step * len(lanes), np.random.default_rng(lanes.start)
        batches = []
        for _ in range(NUM_BATCHES):
            features = {}
            for at, (rows, width) in enumerate(zip(self.rows, self.ids, strict=True)):
                ranks = (rows ** rng.random((count, width))).astype(np.int64)
                features[f"f{at:03d}"] = Ragged.of_dense(ranks * 2_654_435_761 % rows)
            batches.append(batch_of(np.zeros((count, 1), np.float32), np.zeros(count, np.float32), features))
        return BatchesInTurn(batches)


class NoModel:
    """Never called: the device only echoes."""

    def init(self, key: Any, num_dense: int, widths: Mapping[str, int]) -> Any:
        return {}

    def apply(self, params: Any, dense: Any, activations: Any) -> Any:
        return dense[:, 0]


def spec_of(arguments: argparse.Namespace, num_hosts: int) -> HostSpec:
    """That of host 0."""
    sizes = workload("A").table_rows
    rows = tuple(max(3, sizes[at % len(sizes)] // arguments.rows_divided_by) for at in range(arguments.tables))
    ids = tuple(10 if sizes[at % len(sizes)] > 200_000 else 1 for at in range(arguments.tables))
    dims = [arguments.dims[at % len(arguments.dims)] for at in range(arguments.tables)]
    tables = [
        TableConfig(count, dim, name=f"t{at:03d}", initializer=Constant(0.0))
        for at, (count, dim) in enumerate(zip(rows, dims, strict=True))
    ]
    job = JobConfig(
        name="hosts",
        features={f"f{at:03d}": FeatureConfig(table) for at, table in enumerate(tables)},
        model=NoModel(),
        data=RandomIds("nowhere", label="l", dense=("d",), rows=rows, ids=ids),
        batch_size=arguments.samples * num_hosts,
        optimizer=RowWiseAdagrad(0.01),
        num_lanes=num_hosts,
        overlap=arguments.overlap == "on",
    )
    buckets = choose_buckets(job) if arguments.ways == "tables" else (2048,) * len(tables)
    specs = table_specs(job, buckets)
    compile_kernels(specs)
    if arguments.ways == "tables":
        placed = place_tables(specs, num_features=features_per_table(job), num_hosts=num_hosts)
    else:
        cut = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
        placed = place(bucket_bytes=cut, num_hosts=num_hosts)
    file = InputFile(path="memory", size_bytes=0, version="", row_group_rows=(64 * job.batch_size,))
    return HostSpec(
        job=job,
        run_id="r",
        generation=1,
        token=bytes(32),
        plan_hash=bytes(32),
        host=0,
        num_hosts=num_hosts,
        lanes=tuple(split_evenly(num_hosts, num_hosts)),
        table_buckets=buckets,
        placement=tuple(placed),
        storage_url=tempfile.gettempdir(),
        train_index=InputIndex(files=(file,)),
        eval_index=None,
        bind_address="127.0.0.1",
        step_timeout_s=PATIENCE_S,
        lease_timeout_s=10 * PATIENCE_S,
        shares_memory=arguments.machines == "one",
    )


def echo(invitation: Invitation) -> None:
    """Stands for the device process: answers at once, with the gradients that lie there."""
    end = invitation.connect(timeout_s=PATIENCE_S)
    try:
        while True:
            record = end.receive(timeout_s=PATIENCE_S)
            if record.kind is not RecordKind.END:
                end.send(Record(kind=RecordKind.DONE, step=record.step, buffer=record.buffer))
    except ChannelError:
        return


def run_host(spec: HostSpec, steps: int, windows: int, pipe: Connection) -> None:
    """One host: joins the others, trains, and sends what it measured."""
    worker = HostWorker()
    ready = worker.start(spec)
    threading.Thread(target=echo, args=(ready.invitation,), daemon=True).start()
    pipe.send(ready.mesh_address)
    addresses = pipe.recv()
    began = time.thread_time()
    worker.connect(addresses, PATIENCE_S)
    connect_ms = 1e3 * (time.thread_time() - began)
    worker.restore(None)
    worker.train(0, WARM_UP_STEPS, True)
    mesh = worker._present.mesh
    before, cpu_ms, spans = mesh.statistics, [], []
    for window in range(windows):
        first, began, began_s = WARM_UP_STEPS + window * steps, time.thread_time(), time.monotonic()
        worker.train(first, first + steps, True)
        cpu_ms.append(1e3 * (time.thread_time() - began) / steps)
        spans.append((began_s, time.monotonic()))
    after, count = mesh.statistics, windows * steps
    pipe.send(
        {
            "cpu_ms": cpu_ms,
            "spans": spans,
            "connect_ms": connect_ms,
            "exchanges": (after.num_exchanges - before.num_exchanges) / count,
            "frames": (after.num_frames - before.num_frames) / count,
            "kb": (after.bytes_sent - before.bytes_sent) / count / 1e3,
        }
    )
    # The others are still in the last step.
    pipe.recv()
    worker.close()


class Pod:
    """Hosts that train with each other.

    Args:
      spec: of host 0.
    """

    def __init__(self, spec: HostSpec, arguments: argparse.Namespace) -> None:
        # Forked, so that kernels are compiled once. The parent has no threads yet.
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for host in range(spec.num_hosts):
            near, far = context.Pipe()
            process = context.Process(
                target=run_host, args=(replace(spec, host=host), arguments.steps, arguments.windows, far)
            )
            process.start()
            self._pipes.append(near)
            self._processes.append(process)
        self._addresses = [pipe.recv() for pipe in self._pipes]

    def begin(self) -> None:
        """Lets all of them go."""
        for pipe in self._pipes:
            pipe.send(self._addresses)

    def found(self) -> list[dict[str, Any]]:
        """What each measured. They wait afterwards."""
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("done")
        for process in self._processes:
            process.join()


def cpu_ms_of(pods: Sequence[Sequence[Mapping[str, Any]]]) -> list[np.ndarray]:
    """By pod `[windows, hosts]`, in the windows in which all pods trained.

    Raises:
      SystemExit: there are none.
    """
    spans = [np.array([one["spans"] for one in pod]) for pod in pods]
    begin_s = max(of_pod[:, 0, 0].max() for of_pod in spans)
    end_s = min(of_pod[:, -1, 1].min() for of_pod in spans)
    found = []
    for pod, of_pod in zip(pods, spans, strict=True):
        is_within = (of_pod[:, :, 0].max(axis=0) >= begin_s) & (of_pod[:, :, 1].min(axis=0) <= end_s)
        found.append(np.array([one["cpu_ms"] for one in pod]).T[is_within])
    if not all(map(len, found)):
        sys.exit("Found no window in which all pods trained. Pass more --windows.")
    return found


def measure(arguments: argparse.Namespace, num_hosts: int, num_pods: int) -> dict[str, Any]:
    """Means over all hosts in the quickest window, and the host that sends most."""
    spec = spec_of(arguments, num_hosts)
    pods = [Pod(spec, arguments) for _ in range(num_pods)]
    for pod in pods:
        pod.begin()
    measured = [pod.found() for pod in pods]
    for pod in pods:
        pod.close()
    found = [one for of_pod in measured for one in of_pod]
    mean = {name: float(np.mean([one[name] for one in found])) for name in ("exchanges", "frames", "kb", "connect_ms")}
    # Other programs only slow them.
    by_pod = cpu_ms_of(measured)
    quickest = [windows[np.argmin(windows.mean(axis=1))] for windows in by_pod]
    whole = sum(bool((owners == owners[0]).all()) for owners in spec.placement)
    return {
        "hosts": num_hosts,
        "pods": num_pods,
        "whole_tables": whole,
        "cpu_ms": round(float(np.mean(quickest)), 2),
        "cpu_ms_busiest": round(float(np.mean([hosts.max() for hosts in quickest])), 2),
        "cpu_ms_median_window": round(float(np.mean([np.median(windows.mean(axis=1)) for windows in by_pod])), 2),
        "exchanges": round(mean["exchanges"], 2),
        "frames_a_peer": round(mean["frames"] / max(1, num_hosts - 1), 2),
        "kb_sent": round(mean["kb"], 1),
        "kb_sent_most_over_mean": round(max(one["kb"] for one in found) / max(1e-9, mean["kb"]), 2),
        "connect_cpu_ms": round(mean["connect_ms"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--samples", type=int, default=64, help="of each host, a step")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--dims", type=int, nargs="+", default=[16], help="of the tables, in turn")
    parser.add_argument("--ways", default="tables", choices=["tables", "buckets"])
    parser.add_argument("--machines", default="many", choices=["one", "many"])
    parser.add_argument("--overlap", default="off", choices=["on", "off"])
    parser.add_argument(
        "--rows-divided-by", type=int, default=100, help="tables of workload A are made so much smaller"
    )
    parser.add_argument("--steps", type=int, default=12, help="of a window")
    parser.add_argument("--windows", type=int, default=6)
    arguments = parser.parse_args()
    measuring.tune_allocator()
    load_before = os.getloadavg()[0]
    most = max(arguments.hosts)
    found = [measure(arguments, num_hosts, 1) for num_hosts in arguments.hosts]
    crowded = [
        measure(arguments, num_hosts, most // num_hosts) if num_hosts < most else one
        for num_hosts, one in zip(arguments.hosts, found, strict=True)
    ]
    setting = ("ways", "machines", "overlap", "tables", "dims", "samples", "steps")
    line = {
        "benchmark": "hosts",
        **{name: getattr(arguments, name) for name in setting},
        "of_hosts": found,
        "of_hosts_as_crowded": [one for one in crowded if one["pods"] > 1],
        "growth": round(found[-1]["cpu_ms"] / found[0]["cpu_ms"], 2),
        "growth_as_crowded": round(crowded[-1]["cpu_ms"] / crowded[0]["cpu_ms"], 2),
        "load1_before": load_before,
    }
    print(json.dumps(line | {"date": time.strftime("%Y-%m-%d")}))


if __name__ == "__main__":
    main()
