"""The full training step on a workload, with the processes of real training. Prints one JSON line.

    python benchmarks/dlrm.py --bench A --hosts 2 --emb-opt rowwise --seconds 20

Hosts are pairs of Ray actors started by `WorkerGroup`, as the driver does it; only the input comes from memory. Rates
are medians over windows of steps, of the quiet ones (other processes used less than 0.2 CPUs) if there are at least
three. On a shared machine compare `samples_per_cpu_s`, which counts the CPU seconds of this process and everything
below it, Ray's own processes included.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring, workloads  # noqa: E402
from benchmarks.in_memory import InMemory, batch_of  # noqa: E402
from benchmarks.mixed import mixed_reference  # noqa: E402
from benchmarks.workload import (  # noqa: E402
    NUM_BATCHES,
    NUM_DENSE,
    Batches,
    Workload,
    dense_values,
    make_batches,
    table_values,
    workload,
)
from podembed.embedding.buckets import split_evenly  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad  # noqa: E402
from podembed.embedding.ragged import Ragged  # noqa: E402
from podembed.embedding.vocabulary.policies import Always, MinCount  # noqa: E402
from podembed.workers.data.batch import Batch  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.device.options import Transfers  # noqa: E402
from podembed.workers.input.index import InputFile, InputIndex, build_index  # noqa: E402
from podembed.workers.input.sources import ReaderSource  # noqa: E402
from podembed.workers.job.job import COMPUTE_DTYPES, WIRE_DTYPES, JobConfig  # noqa: E402
from podembed.workers.job.reference import JobReference  # noqa: E402

NUM_LANES = 16
CHECKED_STEPS = range(30, 40)
WARM_UP_STEPS = 8
WINDOW_S = 1.0
# Hosts of one setting hear nothing while another setting is measured, and there is no heartbeat file.
SILENCE_S = 3600.0
ADMIT = {"any": Always(), "counted": MinCount(2)}
_INSIDE = "PODEMBED_BENCHMARK_INSIDE_NETWORK"
_SHOWN = (
    "bench",
    "hosts",
    "threads",
    "resources",
    "emb_opt",
    "placement",
    "overlap",
    "staleness",
    "wire_dtype",
    "compute_dtype",
    "network",
    "no_shared_memory",
    "device_ms",
    "devices_per_host",
    "transfers",
    "place",
    "keys",
    "new",
)


class MemoryData(InMemory):
    """Batches that `Batches.write` wrote."""

    def load(self, samples: slice) -> list[Batch]:
        batches = Batches.read(Path(self.paths[0]), workload(self.bench).num_tables)
        return [_batch(batches, step, samples) for step in range(len(batches.labels))]


def _batch(batches: Batches, step: int, samples: slice) -> Batch:
    features = {f"f{at:02d}": Ragged.of_dense(np.array(ids[step, samples])) for at, ids in enumerate(batches.ids)}
    return batch_of(np.array(batches.dense[step, samples]), np.array(batches.labels[step, samples]), features)


def benchmark_job(
    *,
    bench: str,
    emb_opt: str,
    folder: str,
    staleness: int = 0,
    overlap: bool | None = None,
    wire_dtype: str = "float32",
    compute_dtype: str = "float32",
    device_ms: float | None = None,
    input: str = "memory",
    rows_on_devices: int = 0,
    place: Any = "host",
    keys: str = "rows",
    new: float = 0.0,
) -> JobConfig:
    """The workload as a job. Runs in the workers, too.

    Args:
      rows_on_devices: tables of up to so many rows lie there.
      place: place of the others.
      keys: "rows" for row numbers; otherwise keys come and go, with room for all, and rows have usual first values.
      new: share of the keys that are others in each round of the batches; row numbers stay what they are.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from podembed.jobs.models.dlrm import DLRM

    shape = workload(bench)

    class GivenDLRM(DLRM):
        """A DLRM whose first weights are those of the workload."""

        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            return {
                part: [{"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)} for weight, bias in layers]
                for part, layers in dense_values(shape).items()
            }

    class Accelerator:
        """Takes its time and no CPU, as a device beside the host's CPUs would; a sum over all activations."""

        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            return {"scale": jnp.ones(())}

        def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
            scores = params["scale"] * sum(jnp.mean(block, axis=1) for block in activations.values())
            zero = jax.ShapeDtypeStruct((), jnp.float32)
            return scores + jax.pure_callback(_wait, zero, jax.lax.stop_gradient(scores[0]), device_ms)

    rate, epsilon = shape.learning_rate, shape.epsilon
    optimizer = RowWiseAdagrad(rate, epsilon=epsilon) if emb_opt == "rowwise" else Adagrad(rate, 0.0, epsilon=epsilon)
    features = {
        f"f{at:02d}": FeatureConfig(
            TableConfig(
                **({"vocabulary_size": rows} if keys == "rows" else {"capacity": rows, "admit": ADMIT[keys]}),
                dim=shape.dim,
                name=f"t{at:02d}",
                combiner="sum",
                initializer=table_values(shape, at) if keys == "rows" else None,
                place="replicated" if rows <= rows_on_devices else place,
            )
        )
        for at, rows in enumerate(shape.table_rows)
    }
    return JobConfig(
        name=f"bench-{bench}",
        features=features,
        model=Accelerator() if device_ms else GivenDLRM(bottom=shape.bottom[:-1], top=shape.top[:-1]),
        data=parquet_data(folder, shape) if input == "parquet" else memory_data(folder, bench, new, keys),
        batch_size=shape.batch_size,
        optimizer=optimizer,
        dense_optimizer=optax.adagrad(rate, shape.dense_accumulator, epsilon),
        num_lanes=NUM_LANES,
        staleness=staleness,
        overlap=overlap,
        wire_dtype=wire_dtype,
        compute_dtype=compute_dtype,
    )


def memory_data(folder: str, bench: str, new: float = 0.0, keys: str = "rows") -> MemoryData:
    """The batches in the folder, without any work of reading. Arguments as of `benchmark_job`."""
    rows = () if keys == "rows" else workload(bench).table_rows
    sizes = tuple((f"f{at:02d}", num_rows) for at, num_rows in enumerate(rows))
    dense = tuple(f"x{at}" for at in range(NUM_DENSE))
    return MemoryData(folder, label="label", dense=dense, bench=bench, new=new, num_rows=sizes)


def parquet_data(folder: str, shape: Workload) -> ParquetData:
    """The files that `benchmarks.input.write_files` left in the folder."""
    return ParquetData(
        f"{folder}/*.parquet",
        label="label",
        dense=tuple(f"i{at}" for at in range(NUM_DENSE)),
        features={f"f{at:02d}": f"c{at}" for at in range(shape.num_tables)},
    )


def _wait(_: Any, device_ms: Any) -> np.ndarray:
    time.sleep(float(device_ms) / 1e3)
    return np.zeros((), np.float32)


def start_group(
    arguments: argparse.Namespace,
    reference: JobReference,
    *,
    storage: str = tempfile.gettempdir(),
    tracks_changes: bool = False,
    shares_memory: bool = True,
    undo_share: float = 0.0,
) -> Any:
    """Hosts and devices of one generation, started, joined, and filled with first values. Saves go to the folder
    `storage`.
    """
    from podembed.jobs.cli.settings import parse_resources
    from podembed.orchestrator.api.config import ScalingConfig
    from podembed.orchestrator.cluster.ray_backend import RayBackend
    from podembed.orchestrator.group.worker_group import Deadlines, WorkerGroup
    from podembed.workers.device.process import DeviceSpec
    from podembed.workers.host.spec import HostReady

    num_hosts, threads = arguments.hosts, getattr(arguments, "threads", 1)
    scaling = ScalingConfig(
        num_hosts=num_hosts,
        threads_per_host=threads,
        resources_per_host=parse_resources(getattr(arguments, "resources", ())),
        devices_per_host=getattr(arguments, "devices_per_host", None),
        transfers=getattr(arguments, "transfers", Transfers.AUTO),
    )
    hosts = host_specs(
        arguments,
        reference,
        storage_url=storage,
        shares_memory=shares_memory,
        tracks_changes=tracks_changes,
        undo_share=undo_share,
        threads=threads,
        sample_multiple=scaling.devices.sample_multiple,
    )

    def device(host: int, ready: HostReady, coordinator: str) -> DeviceSpec:
        return DeviceSpec(
            job=reference,
            host=host,
            num_hosts=num_hosts,
            coordinator=coordinator,
            num_samples=ready.num_samples,
            invitation=ready.invitation,
            storage_url=storage,
            start_timeout_s=300.0,
            step_timeout_s=120.0,
            lease_timeout_s=SILENCE_S,
            threads=threads,
            devices=scaling.devices,
        )

    backend = RayBackend(scaling, lambda event: print(event.sentence(), file=sys.stderr))
    group = WorkerGroup.start(backend, hosts, device, deadlines=Deadlines(), on_poll=lambda: None)
    try:
        group.restore(None)
    except BaseException:
        group.stop()
        raise
    return group


def host_specs(arguments: argparse.Namespace, reference: JobReference, **same: Any) -> list[Any]:
    """`HostSpec` of every host. `same` are further fields."""
    from podembed.workers.host.spec import HostSpec
    from podembed.workers.job.tables import choose_buckets

    job, num_hosts = reference.resolve(), arguments.hosts
    buckets = choose_buckets(job)
    num_batches = NUM_BATCHES if arguments.bench in workloads.NAMES else workload(arguments.bench).num_batches
    file = InputFile(path="memory", size_bytes=0, version="", row_group_rows=(num_batches * job.batch_size,))
    data = job.resolved_data
    index = InputIndex(files=(file,)) if isinstance(data, ReaderSource) else build_index(data)
    lanes, token = tuple(split_evenly(job.num_lanes, num_hosts)), secrets.token_bytes(32)
    placed = placement(job, buckets, arguments)
    return [
        HostSpec(
            job=reference,
            run_id="benchmark",
            generation=1,
            token=token,
            plan_hash=bytes(32),
            host=host,
            num_hosts=num_hosts,
            lanes=lanes,
            table_buckets=buckets,
            placement=placed,
            train_index=index,
            eval_index=None,
            bind_address="",
            step_timeout_s=120.0,
            lease_timeout_s=SILENCE_S,
            **same,
        )
        for host in range(num_hosts)
    ]


def placement(job: JobConfig, buckets: tuple[int, ...], arguments: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """As the driver places a new run, or all tables cut into buckets."""
    from podembed.embedding.buckets import place
    from podembed.embedding.lookup.placement import place_tables
    from podembed.workers.job.tables import host_features_per_table, table_specs

    specs = table_specs(job, buckets)
    if arguments.placement != "buckets":
        return tuple(place_tables(specs, num_features=host_features_per_table(job), num_hosts=arguments.hosts))
    sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
    return tuple(place(bucket_bytes=sizes, num_hosts=arguments.hosts))


def measure(group: Any, arguments: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Windows of steps until the time is over, the losses are known, and enough windows were quiet."""
    hosts, devices = group.train(0, WARM_UP_STEPS, is_followed=True)
    losses = list(devices[0].losses)
    step = WARM_UP_STEPS
    meter = measuring.Meter(os.getpid())
    phases: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}
    window = WARM_UP_STEPS // 2
    sent = num_steps = 0
    started = time.perf_counter()
    device_s = []
    while (
        time.perf_counter() - started < arguments.seconds or step < CHECKED_STEPS.stop or not meter.has_enough_quiet()
    ) and (time.perf_counter() - started < arguments.max_seconds or step < CHECKED_STEPS.stop):
        with meter.window(window * batch_size):
            hosts, devices = group.train(step, step + window, is_followed=True)
        losses += devices[0].losses
        step, num_steps = step + window, num_steps + window
        sent += sum(host.bytes_sent for host in hosts)
        device_s.append(devices[0].seconds / window)
        for found, spent in ((phases, hosts[0].phase_s), (computed, hosts[0].phase_cpu_s)):
            for phase, seconds in spent.items():
                found.setdefault(phase, []).append(seconds / window)
        window = max(4, int(WINDOW_S / meter.seconds_of_last * window))
    return {
        **meter.summary(),
        "step_ms": round(1e3 * batch_size / meter.summary()["samples_per_s"], 2),
        "phase_ms": _medians_ms(phases),
        "phase_cpu_ms": _medians_ms(computed),
        "cpu_ms_per_step": meter.cpu_ms(batch_size),
        "device_ms": round(1e3 * statistics.median(device_s), 2),
        "wire_mb_per_step": round(sent / num_steps / 1e6, 3),
        "pss_gb": measuring.pss_gb(os.getpid()),
        "tables_gb": round(sum(ready.shard_bytes for ready in group.ready) / 1e9, 2),
        "peak_rss_gb": round(measuring.peak_rss_bytes(os.getpid()) / 1e9, 2),
        "steps": step,
        "losses": [round(loss, 4) for loss in losses[:8]],
        "loss_31_40": round(statistics.fmean(losses[at] for at in CHECKED_STEPS), 5),
    }


def _medians_ms(phases: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {phase: round(1e3 * statistics.median(found), 3) for phase, found in phases.items()}


def add_workload(parser: argparse.ArgumentParser, *, names: Sequence[str] = ("A", "B", "tiny")) -> None:
    """The options of what is trained, and where."""
    parser.add_argument("--bench", default="A", choices=names)
    parser.add_argument("--hosts", type=int, default=2, help="each is a host process and a device process")
    parser.add_argument("--threads", type=int, default=1, help="of each of the two processes of a host")
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--placement", default="tables", choices=["tables", "buckets"], help="whole tables, or none")
    parser.add_argument(
        "--resources", nargs="+", default=(), metavar="NAME=AMOUNT", help="Ray resources of a host, such as CPU=4 GPU=1"
    )
    parser.add_argument(
        "--device-ms",
        type=float,
        default=None,
        help="a device that takes so long a step and no CPU, instead of the model",
    )
    parser.add_argument(
        "--network",
        type=float,
        metavar="GBIT_PER_S",
        help="as if every host were a machine of its own, all of them behind one link of that rate; needs root, "
        "unshare, ip and tc",
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser, names=("A", "B", "E", "cut", "D", "tiny", *workloads.NAMES))
    parser.add_argument("--no-shared-memory", action="store_true", help="hosts talk as if on machines of their own")
    parser.add_argument("--seconds", type=float, default=20.0, help="measure for at least so long")
    parser.add_argument(
        "--max-seconds", type=float, default=None, help="wait for quiet windows until then (2 x seconds)"
    )
    parser.add_argument(
        "--overlap", default="auto", choices=["auto", "on", "off"], help="what a step does not touch goes early"
    )
    parser.add_argument("--staleness", type=int, default=0, choices=[0, 1])
    parser.add_argument("--devices-per-host", type=int, default=None, help="so many CPU devices, or all that are there")
    parser.add_argument("--place", default="host", choices=["host", "replicated", "sharded"], help="of all tables")
    parser.add_argument("--keys", default="rows", choices=["rows", *ADMIT], help="any, with a capacity, or row numbers")
    parser.add_argument("--new", type=float, default=0.0, help="share of keys that are others in each 32 steps")
    parser.add_argument("--transfers", default="auto", choices=list(Transfers), help="how arrays reach the devices")
    parser.add_argument("--wire-dtype", default="float32", choices=WIRE_DTYPES)
    parser.add_argument("--compute-dtype", default="float32", choices=COMPUTE_DTYPES, help="of the dense half")
    arguments = parser.parse_args()
    arguments.max_seconds = arguments.max_seconds or 2 * arguments.seconds
    if arguments.bench == "D":  # weak scaling: as many samples a host whatever their number
        arguments.bench = f"D{arguments.hosts}"
    if arguments.device_ms and arguments.bench in workloads.NAMES:
        parser.error(
            f"Found --device-ms with workload {arguments.bench}. Expected A, B, E, cut, D or tiny. Leave one out."
        )
    return arguments


def enter_network(gbit_per_s: float) -> None:
    """Runs this program again in a network namespace of its own, whose loopback is as slow as that. Returns inside of
    it.
    """
    if os.environ.pop(_INSIDE, None):
        return
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {gbit_per_s}gbit burst 256kb limit 100mb"
    command = ["unshare", "--net", "sh", "-c", f'{link} && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "yes"})


def reference_of(folder: str, arguments: argparse.Namespace) -> JobReference:
    """The job that workers build for themselves."""
    job = {name: getattr(arguments, name) for name in ("bench", "emb_opt", "staleness", "wire_dtype", "device_ms")}
    overlap = {"auto": None, "on": True, "off": False}[arguments.overlap]
    job |= {"folder": folder, "overlap": overlap, "input": getattr(arguments, "input", "memory")}
    job |= {"compute_dtype": getattr(arguments, "compute_dtype", "float32")}
    job |= {"rows_on_devices": getattr(arguments, "rows_on_devices", 0), "place": getattr(arguments, "place", "host")}
    job |= {"keys": getattr(arguments, "keys", "rows"), "new": getattr(arguments, "new", 0.0)}
    return JobReference(function="benchmarks.dlrm:benchmark_job", arguments=job)


def write_job(folder: str, arguments: argparse.Namespace) -> tuple[JobReference, int]:
    """Leaves the batches of a workload in a folder. Returns the job that reads them, and the samples of a step."""
    if arguments.bench in workloads.NAMES:
        mixed = workloads.mixed_workload(arguments.bench)
        workloads.write_mixed(mixed, Path(folder))
        return mixed_reference(folder, arguments), mixed.batch_size
    shape = workload(arguments.bench)
    make_batches(shape).write(Path(folder))
    return reference_of(folder, arguments), shape.batch_size


def prepare_environment(resources: Sequence[str] = ()) -> None:
    """What worker processes inherit. With resources of their own, JAX may look for accelerators."""
    # Workers import this module by name to build the job.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if not resources:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> None:
    arguments = parse()
    if arguments.network:
        enter_network(arguments.network)
    prepare_environment(arguments.resources)
    from podembed.orchestrator.cluster.connection import connected

    shares_memory = arguments.network is None and not arguments.no_shared_memory
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        reference, batch_size = write_job(folder, arguments)
        with connected(arguments.hosts):
            group = start_group(arguments, reference, shares_memory=shares_memory)
            try:
                result = measure(group, arguments, batch_size)
                group.close()
            finally:
                group.stop()
    config = {name: getattr(arguments, name) for name in _SHOWN}
    print(json.dumps({"benchmark": "dlrm", **config, **result}), flush=True)


if __name__ == "__main__":
    main()
