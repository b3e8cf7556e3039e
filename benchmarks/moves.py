"""Buckets that get another owner: sent by the host that has them, or read from the commit. Prints one JSON line for
each way.

    python benchmarks/moves.py --hosts 1 2 --megabytes 400
    python benchmarks/moves.py --hosts 2 3 --cold

Each host is a process, joined to the others by a mesh over the loopback interface. A commit of the tables is written to
`--folder`. The first number of hosts loads it, and then the second number of hosts shares it out. The seconds are those
of the slowest host, from the joined mesh until its shard is complete and every digest was compared. The processor time
is that of all processes. `--cold` drops the commit's files from the page cache first, as they are on a machine that did
not write them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from podembed.embedding.buckets import place  # noqa: E402
from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.optimizers import Adagrad  # noqa: E402
from podembed.embedding.table.table import Table  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402
from podembed.workers.checkpoint.checkpoint_files import TableFiles, WrittenBuckets  # noqa: E402
from podembed.workers.checkpoint.files import assemble_table, write_buckets, write_table_metadata  # noqa: E402
from podembed.workers.checkpoint.shard import read_shard, table_plan  # noqa: E402
from podembed.workers.host.survivors.moves import BucketExchange  # noqa: E402
from podembed.workers.host.survivors.surviving_shard import SurvivingShard  # noqa: E402
from podembed.workers.mesh.handshake import MeshIdentity  # noqa: E402
from podembed.workers.mesh.mesh import Mesh  # noqa: E402
from podembed.workers.storage.store import Store  # noqa: E402

DIM = 16
NUM_TABLES = 4
COMMIT = "s000000001-g00000001"
PATIENCE_S = 120.0


def specs_of(megabytes: int) -> list[TableSpec]:
    rows = megabytes * 1_000_000 // (NUM_TABLES * 2 * 4 * DIM)
    return [
        TableSpec.of(TableConfig(rows, DIM, name=f"t{at}", optimizer=Adagrad(0.1)), seed=1) for at in range(NUM_TABLES)
    ]


def commit(folder: str, specs: list[TableSpec]) -> tuple[TableFiles, ...]:
    store, rng, found = Store(folder), np.random.default_rng(1), []
    for spec in specs:
        table, plan = Table(spec, np.arange(spec.layout.num_buckets)), table_plan(spec, COMMIT)
        table.rows[...] = rng.standard_normal(table.rows.shape, np.float32)
        table.slots["accumulator"][...] = rng.random(table.rows.shape, np.float32)
        arrays = write_table_metadata(store, plan)
        receipts = [write_buckets(store, plan, int(b), [*table.bucket(int(b)).values()]) for b in table.buckets]
        found.append(assemble_table(plan, arrays, [WrittenBuckets.of(plan, receipts)]))
    return tuple(found)


def placements(specs: list[TableSpec], before: int, after: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
    old = place(bucket_bytes=sizes, num_hosts=before)
    return old, place(bucket_bytes=sizes, num_hosts=after, previous=old)


def host(rank: int, arguments: argparse.Namespace, folder: str, files: Any, way: str, pipe: Any, barrier: Any) -> None:
    specs = specs_of(arguments.megabytes)
    old, new = placements(specs, *arguments.hosts)
    store, num_hosts = Store(folder), arguments.hosts[1]
    tables = [Table(spec, np.flatnonzero(owners == rank)) for spec, owners in zip(specs, old, strict=True)]
    surviving = SurvivingShard.none_of(tables)
    if rank < arguments.hosts[0]:
        surviving.restore(store, tables, files, on_chunk=lambda: None)
    else:
        # Its kernels are compiled as in a host that stands by.
        spare = [Table(spec, np.arange(1)) for spec in specs]
        read_shard(store, spare, files, on_chunk=lambda: None)
    started = time.monotonic()
    tables = surviving.recut(tables, specs, new, host=rank)
    cut_s = time.monotonic() - started
    if way == "files":
        surviving.leaving.clear()
    identity = MeshIdentity(
        run_id="r", generation=1, token=bytes(32), rank=rank, num_ranks=num_hosts, plan_hash=bytes(32)
    )
    mesh = Mesh.listen(identity, bind_address="127.0.0.1")
    pipe.send(mesh.address)
    mesh.connect(pipe.recv(), timeout_s=PATIENCE_S)
    barrier.wait()
    started, cpu = time.monotonic(), time.process_time()
    moves = BucketExchange(
        mesh=mesh,
        tables=tables,
        files=files,
        placement=new,
        known=surviving.known,
        leaving=surviving.leaving,
        store=store,
        timeout_s=PATIENCE_S,
        on_round=lambda: None,
        round_bytes=arguments.round_mib << 20,
    )
    moved = moves.run()
    wanted = [table.buckets[~known].tolist() for table, known in zip(tables, surviving.known, strict=True)]
    num_bytes = read_shard(store, tables, files, on_chunk=lambda: None, wanted=wanted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send((time.monotonic() - started, time.process_time() - cpu, moved, num_bytes, cut_s, peak))
    barrier.wait()
    mesh.close()


def drop_from_cache(folder: str) -> None:
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run(arguments: argparse.Namespace, folder: str, files: tuple[TableFiles, ...], way: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    num_hosts = arguments.hosts[1]
    barrier = context.Barrier(num_hosts + 1)
    pipes = [context.Pipe() for _ in range(num_hosts)]
    processes = [
        context.Process(target=host, args=(rank, arguments, folder, files, way, pipes[rank][1], barrier))
        for rank in range(num_hosts)
    ]
    for process in processes:
        process.start()
    addresses = [pipe.recv() for pipe, _ in pipes]
    if arguments.cold:
        drop_from_cache(folder)
    for pipe, _ in pipes:
        pipe.send(addresses)
    barrier.wait()
    seen = [pipe.recv() for pipe, _ in pipes]
    barrier.wait()
    for process in processes:
        process.join()
    return {
        "seconds": max(one[0] for one in seen),
        "cpu_s": sum(one[1] for one in seen),
        "cut_s": max(one[4] for one in seen),
        "moved_mb": sum(one[2].size_bytes for one in seen) / 1e6,
        "refused": sum(one[2].num_refused for one in seen),
        "read_mb": sum(one[3] for one in seen) / 1e6,
        "peak_mb": max(one[5] for one in seen) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs=2, default=[1, 2], metavar=("BEFORE", "AFTER"))
    parser.add_argument("--megabytes", type=int, default=400, help="of all tables with their slots")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--round-mib", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["files", "hosts"], choices=["files", "hosts"])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", help="where the commit is written; a temporary folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podembed-bench-", dir=arguments.folder) as folder:
        files = commit(folder, specs_of(arguments.megabytes))
        for way in arguments.ways:
            runs = [run(arguments, folder, files, way) for _ in range(arguments.repeat)]
            middle = {name: round(statistics.median(one[name] for one in runs), 3) for name in runs[0]}
            each_s = [round(one["seconds"], 3) for one in runs]
            print(
                json.dumps({"benchmark": "moves", **vars(arguments), "way": way, **middle, "each_s": each_s}),
                flush=True,
            )


if __name__ == "__main__":
    main()
