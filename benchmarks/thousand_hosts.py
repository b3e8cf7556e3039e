"""What the driver and one host do as hosts become many, without their steps. Prints one JSON line.

    python benchmarks/thousand_hosts.py
    python benchmarks/thousand_hosts.py --hosts 8 1024 --tables 26

For each number of hosts and of tables it counts seconds and bytes of what happens once a generation or once a commit:

* `place_s`, `replace_s`: who owns what, at first and after one host is lost;
* `plan_s`, `replan_s`: the specs of all hosts, with the placement;
* `start_bytes`: what the driver packs for the calls `start`, `connect` and `restore` of all hosts, and `shared_bytes`
  of it what is packed once for all;
* `mesh_s`, `sockets`, `descriptors`: one real host forms its mesh. Its peers are sockets of this process that shake
  hands as hosts do. Descriptors are what a host asks for before it listens;
* `receipt_bytes`, `assemble_s`, `check_s`, `encode_s`, `decode_s`, `manifest_bytes`, `files`, `files_a_host`: a commit,
  with made-up receipts of all hosts;
* `listing_s`, `verify_sizes_s`: files of the commit, empty but of the right length, listed and compared, as before each
  publication and by `podembed fsck`. Only up to `--most-files`.

No rows are held and no worker processes run. Everything else is the code of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.commit import assemble_made_up, made_up_receipts, manifest_of  # noqa: E402
from benchmarks.workload import workload  # noqa: E402
from podembed.embedding.config import FeatureConfig, TableConfig  # noqa: E402
from podembed.embedding.lookup.placement import place_tables  # noqa: E402
from podembed.embedding.optimizers import Adagrad  # noqa: E402
from podembed.orchestrator.api.config import RunConfig  # noqa: E402
from podembed.orchestrator.cluster.ray_calls import SharedArguments  # noqa: E402
from podembed.orchestrator.commit.manifest import commit_name, from_json, problems, to_json  # noqa: E402
from podembed.orchestrator.commit.run_record import RunRecord, TableRecord  # noqa: E402
from podembed.orchestrator.commit.verification import size_damages  # noqa: E402
from podembed.orchestrator.group.generation_plan import plan_generation, renumbered  # noqa: E402
from podembed.orchestrator.run.run import OpenRun  # noqa: E402
from podembed.workers.checkpoint.checkpoint_files import buckets_per_file  # noqa: E402
from podembed.workers.checkpoint.shard import table_plan  # noqa: E402
from podembed.workers.data.config import ParquetData  # noqa: E402
from podembed.workers.descriptors import needed_by_host  # noqa: E402
from podembed.workers.input.index import InputFile, InputIndex  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.job.tables import choose_buckets, features_per_table, table_specs  # noqa: E402
from podembed.workers.mesh.handshake import NONCE_BYTES, MeshIdentity, dial  # noqa: E402
from podembed.workers.mesh.mesh import Mesh  # noqa: E402
from podembed.workers.storage.store import Store  # noqa: E402

Answer = TypeVar("Answer")

DIM = 32
SAMPLES_PER_HOST = 64
FILES_OF_DATA = 1000
PEER_THREADS = 4
PATIENCE_S = 300.0


def packed_bytes(value: Any) -> int:
    """Bytes of a value as a call takes it along."""
    from ray import cloudpickle

    buffers: list[Any] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)  # type: ignore[attr-defined]
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


def timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """What a call returns, and its seconds."""
    began_s = time.perf_counter()
    answer = call()
    return answer, round(time.perf_counter() - began_s, 3)


class NoModel:
    """Never called."""

    def init(self, key: Any, num_dense: int, widths: Mapping[str, int]) -> Any:
        return {}

    def apply(self, params: Any, dense: Any, activations: Any) -> Any:
        return dense[:, 0]


def job_of(num_tables: int, num_hosts: int, rows_times: int) -> JobConfig:
    """Tables of workload A with more rows, over again until there are enough, in a run with a lane a host."""
    sizes = workload("A").table_rows
    tables = [
        TableConfig(rows_times * sizes[at % len(sizes)], DIM, name=f"table_{at:03d}", optimizer=Adagrad(0.1))
        for at in range(num_tables)
    ]
    return JobConfig(
        name="thousand",
        features={f"feature_{at:03d}": FeatureConfig(table) for at, table in enumerate(tables)},
        model=NoModel(),
        data=ParquetData("nowhere", label="l", dense=("d",)),
        batch_size=SAMPLES_PER_HOST * num_hosts,
        num_lanes=num_hosts,
    )


def run_of(job: JobConfig, num_hosts: int, folder: str) -> OpenRun:
    """A run of the job, of which no file is there."""
    specs = table_specs(job, choose_buckets(job))
    file = {"size_bytes": 1 << 28, "version": "x" * 32, "row_group_rows": (1 << 20,)}
    files = tuple(InputFile(path=f"part-{at:05d}.parquet", **file) for at in range(FILES_OF_DATA))
    record = RunRecord(
        run_id="benchmark",
        created_unix_s=0.0,
        seed=0,
        num_lanes=num_hosts,
        batch_size=job.batch_size,
        tables=tuple(
            TableRecord(
                name=spec.name,
                num_rows=spec.num_rows,
                dim=spec.dim,
                num_buckets=spec.layout.num_buckets,
                slots={name: width for name, width in spec.widths.items() if name != "rows"},
            )
            for spec in specs
        ),
        job_function="",
        job_arguments="{}",
        num_samples=1 << 30,
        input_fingerprint="",
        staleness=0,
        wire_dtype="float32",
        overlap=None,
    )
    index = InputIndex(files=files)
    return OpenRun(
        url=folder,
        store=Store(folder),
        record=record,
        job=job,
        reference=None,
        train_index=index,
        eval_index=None,
    )


def measure(num_tables: int, num_hosts: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one number of tables and hosts."""
    job = job_of(num_tables, num_hosts, arguments.rows_times)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-", dir=arguments.folder) as folder:
        run = run_of(job, num_hosts, folder)
        specs, features = table_specs(job, run.table_buckets), features_per_table(job)
        placement, place_s = timed(lambda: place_tables(specs, num_features=features, num_hosts=num_hosts))
        plan, plan_s = timed(lambda: plan_generation(run, RunConfig(), 1, None, None, num_hosts=num_hosts))
        commit, manifest = measure_commit(run, placement, num_hosts, arguments)
        # The last host is lost: the others keep their numbers, and a new one takes its place or none does.
        left = {host: host for host in range(num_hosts - 1)}
        before = renumbered(plan.placement, left, num_hosts=num_hosts - 1)
        _, replace_s = timed(
            lambda: place_tables(
                specs, num_features=features, num_hosts=num_hosts - 1, previous=[np.asarray(o) for o in before.values()]
            )
        )

        def recover() -> None:
            was = renumbered(plan.placement, left, num_hosts=num_hosts)
            plan_generation(run, RunConfig(), 2, manifest, was, num_hosts=num_hosts)

        _, replan_s = timed(recover)
        start = measure_start(plan.hosts, manifest.tables)
    owners = [np.bincount(owned, minlength=num_hosts) for owned in placement]
    held = sum(count * spec.bucket_bytes for count, spec in zip(owners, specs, strict=True))
    largest = max(range(len(specs)), key=lambda at: specs[at].layout.num_buckets)
    return {
        "tables": num_tables,
        "hosts": num_hosts,
        "gib": round(float(np.sum(held)) / 2**30),
        "num_buckets": sum(run.table_buckets),
        "busiest_to_mean": round(float(np.max(held) / np.mean(held)), 3),
        "busiest_to_mean_of_largest": round(float(owners[largest].max() / owners[largest].mean()), 3),
        "place_s": place_s,
        "replace_s": replace_s,
        "plan_s": plan_s,
        "replan_s": replan_s,
        **start,
        **commit,
    }


def measure_start(hosts: Sequence[Any], tables: Sequence[Any]) -> dict[str, Any]:
    """Bytes and seconds of the driver's calls that start a generation from a commit, as `RayHandle` packs them."""
    from podembed.workers.actors import in_pieces

    addresses = [(f"10.0.{at >> 8}.{at & 255}", 40_000) for at in range(len(hosts))]
    shared_bytes = 0

    def put(value: Any) -> str:
        nonlocal shared_bytes
        shared_bytes += packed_bytes(value)
        return "a reference to an object of Ray, of some size"

    own_bytes, most_bytes = 0, 0
    began_s = time.perf_counter()
    shared = SharedArguments(len(hosts), put)
    for spec in hosts:
        host_bytes = 0
        for arguments in ([spec], [addresses, 60.0], [tables]):
            own = shared.of_call(arguments)
            if own is None:
                in_pieces(arguments)
            host_bytes += packed_bytes(arguments if own is None else own)
        own_bytes, most_bytes = own_bytes + host_bytes, max(most_bytes, host_bytes)
    return {
        "start_s": round(time.perf_counter() - began_s, 3),
        "start_bytes": own_bytes + shared_bytes,
        "shared_bytes": shared_bytes,
        "bytes_a_host": most_bytes,
    }


def measure_commit(
    run: OpenRun, placement: Sequence[np.ndarray], num_hosts: int, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """A commit of all hosts, with made-up receipts; and its manifest."""
    specs = table_specs(run.job, run.table_buckets)
    per_file = buckets_per_file(specs, placement, num_hosts=num_hosts)
    plans = [table_plan(s, commit_name(step=1, generation=1), buckets_per_file=per_file[s.name]) for s in specs]
    receipts = [made_up_receipts(plan, owners, num_hosts) for plan, owners in zip(plans, placement, strict=True)]
    receipt_bytes = sum(packed_bytes([of_table[host] for of_table in receipts]) for host in range(num_hosts))
    tables, assemble_s = timed(
        lambda: tuple(assemble_made_up(plan, found) for plan, found in zip(plans, receipts, strict=True))
    )
    manifest = manifest_of(plans[0].attempt, tables, list(placement), num_hosts)
    found, check_s = timed(lambda: problems(manifest))
    if found:
        raise RuntimeError(f"Found {found[0]} in a made-up manifest.")
    document, encode_s = timed(lambda: to_json(manifest))
    loaded, decode_s = timed(lambda: from_json(manifest.name, document))
    sizes, names_s = timed(manifest.file_sizes)
    busiest = max(
        sum(
            int((owned[:: plan.buckets_per_file] == host).sum()) * len(plan.widths)
            for owned, plan in zip(placement, plans, strict=True)
        )
        for host in range(min(num_hosts, 8))
    )
    result = {
        "receipt_bytes": receipt_bytes,
        "assemble_s": assemble_s,
        "check_s": check_s,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "names_s": names_s,
        "manifest_bytes": len(document),
        "files": len(sizes),
        "files_a_host": busiest,
    }
    if len(sizes) <= arguments.most_files:
        result |= measure_listing(run.store, loaded)
    return result, loaded


def measure_listing(store: Store, manifest: Any) -> dict[str, Any]:
    """Sizes of all files of a commit, which are holes on the disk."""
    for name, size_bytes in manifest.file_sizes().items():
        path = Path(store.locate(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(size_bytes)
    _, listing_s = timed(lambda: store.sizes(f"data/{manifest.name}"))
    damages, verify_s = timed(lambda: [*size_damages(store, manifest)])
    if damages:
        raise RuntimeError(f"Found {damages[0]} in a made-up commit.")
    return {"listing_s": listing_s, "verify_sizes_s": verify_s}


def measure_mesh(num_hosts: int) -> dict[str, Any]:
    """Host 0 meets all others, which all dial it."""
    token = bytes(32)

    def identity(rank: int) -> MeshIdentity:
        return MeshIdentity(run_id="benchmark", generation=1, token=token, rank=rank, num_ranks=num_hosts)

    # The peers of this process have descriptors of their own.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    before = len(os.listdir("/proc/self/fd"))
    mesh = Mesh.listen(identity(0), bind_address="127.0.0.1")
    peers: list[socket.socket] = []

    def dial_all(ranks: range) -> None:
        for rank in ranks:
            connection = socket.create_connection(mesh.address)
            peers.append(connection)
            dialogue = dial(identity(rank), expected_rank=0, nonce=os.urandom(NONCE_BYTES))
            turn = next(dialogue)
            try:
                while True:
                    connection.sendall(turn.message)
                    heard = b""
                    while len(heard) < turn.num_bytes:
                        heard += connection.recv(turn.num_bytes - len(heard))
                    turn = dialogue.send(heard)
            except StopIteration:
                continue

    threads = [
        threading.Thread(target=dial_all, args=(range(1 + at, num_hosts, PEER_THREADS),)) for at in range(PEER_THREADS)
    ]
    for thread in threads:
        thread.start()
    began_s = time.thread_time()
    _, wall_s = timed(lambda: mesh.connect([mesh.address] * num_hosts, timeout_s=PATIENCE_S))
    cpu_s = round(time.thread_time() - began_s, 3)
    for thread in threads:
        thread.join()
    open_now = len(os.listdir("/proc/self/fd")) - before - len(peers)
    for peer in peers:
        peer.close()
    mesh.close()
    return {
        "hosts": num_hosts,
        "mesh_s": wall_s,
        "mesh_cpu_s": cpu_s,
        "sockets": num_hosts - 1,
        "descriptors_open": open_now,
        "descriptors": needed_by_host(num_hosts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--tables", type=int, nargs="+", default=[26, 200])
    parser.add_argument("--rows-times", type=int, default=400, help="rows of workload A's tables, so many times")
    parser.add_argument("--most-files", type=int, default=150_000, help="that are made to be listed")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where they are made")
    arguments = parser.parse_args()
    mesh = [measure_mesh(count) for count in arguments.hosts]
    found = [measure(tables, count, arguments) for tables in arguments.tables for count in arguments.hosts]
    load1 = round(os.getloadavg()[0], 2)
    config = {"rows_times": arguments.rows_times, "dim": DIM, "load1": load1, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"benchmark": "thousand_hosts", **config, "mesh": mesh, "driver": found}), flush=True)


if __name__ == "__main__":
    main()
