"""What a commit of one large table costs on one host: files, seconds, manifest, the start from it, and the steps beside
it. Prints one JSON line.

    python benchmarks/commit.py --gb 2
    python benchmarks/commit.py --gb 16 --hosts 1024

One process holds the table and changes uniform random rows of it, with an undo log as in training. A second thread
writes the frozen moment, as a host does, and the driver's part publishes it. Then the table is filled from the commit.
`first_ms` counts from the freeze to the end of the step after it. `beside_ms` are steps while files were written.

With several hosts nothing is trained and no rows are written. The receipts of all hosts are made up. What the driver
does with them is measured: the placement, and making, checking and reading the manifest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from podembed.embedding.config import TableConfig  # noqa: E402
from podembed.embedding.lookup.placement import place_tables  # noqa: E402
from podembed.embedding.optimizers import Adagrad, RowWiseAdagrad  # noqa: E402
from podembed.embedding.table.table import Table  # noqa: E402
from podembed.embedding.table_spec import TableSpec  # noqa: E402
from podembed.orchestrator.commit import checkpoint  # noqa: E402
from podembed.orchestrator.commit.claiming import acquire  # noqa: E402
from podembed.orchestrator.commit.holder import Holder  # noqa: E402
from podembed.orchestrator.commit.manifest import (  # noqa: E402
    Manifest,
    commit_file,
    commit_name,
    from_json,
    problems,
    to_json,
)
from podembed.workers.checkpoint.background_save import BackgroundSave  # noqa: E402
from podembed.workers.checkpoint.checkpoint_files import (  # noqa: E402
    ArrayFiles,
    BucketReceipt,
    ChunkFile,
    TableFiles,
    TablePlan,
    WrittenBuckets,
    buckets_per_file,
)
from podembed.workers.checkpoint.chunks import chunk_name, file_bytes  # noqa: E402
from podembed.workers.checkpoint.files import assemble_table  # noqa: E402
from podembed.workers.checkpoint.shard import read_shard, table_plan  # noqa: E402
from podembed.workers.checkpoint.undo import Undo  # noqa: E402
from podembed.workers.liveness.memory import populate  # noqa: E402
from podembed.workers.liveness.progress import Phase, Tracker  # noqa: E402
from podembed.workers.storage.store import Store  # noqa: E402

Answer = TypeVar("Answer")

OPTIMIZERS = {"adagrad": Adagrad, "rowwise": RowWiseAdagrad}
UNDO_SHARE = 0.1
WARM_UP_STEPS = 20


def timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """What a call returns, and its seconds."""
    began_s = time.perf_counter()
    answer = call()
    return answer, round(time.perf_counter() - began_s, 3)


def table_spec(arguments: argparse.Namespace) -> TableSpec:
    """The table: as many rows as fill the bytes, with their slot."""
    optimizer = OPTIMIZERS[arguments.optimizer](0.1)
    row_bytes = TableSpec.of(TableConfig(1, arguments.dim, optimizer=optimizer, name="table"), seed=1).row_bytes
    config = TableConfig(int(arguments.gb * 1e9) // row_bytes, arguments.dim, optimizer=optimizer, name="table")
    return TableSpec.of(config, seed=1, most_hosts=arguments.hosts)


def manifest_of(name: str, tables: tuple[TableFiles, ...], placement: list[np.ndarray], num_hosts: int) -> Manifest:
    """A commit's manifest without a dense state."""
    return Manifest(
        run_id="benchmark",
        step=int(name[1:10]),
        generation=1,
        parent=None,
        created_unix_s=0.0,
        hosts=num_hosts,
        cursor={},
        tables=tables,
        dense=(),
        placement={table.name: tuple(owners.tolist()) for table, owners in zip(tables, placement, strict=True)},
        counters={},
        versions={},
    )


class Training:
    """Steps that change uniform random rows of one table. Mutated: the table.

    Attributes:
      samples: rows that a step looks up and changes.
    """

    def __init__(self, table: Table, *, samples: int) -> None:
        self.table, self.samples, self.tracker = table, samples, Tracker()
        self._rng = np.random.default_rng(1)
        self._out = np.empty((samples, table.spec.dim), np.float32)
        self._gradients = self._rng.standard_normal((samples, table.spec.dim), np.float32)

    def step(self) -> float:
        """Seconds of one lookup and update."""
        rows = self._rng.integers(0, self.table.num_rows, self.samples)
        began_s = time.perf_counter()
        with self.tracker.phase(Phase.UPDATE):
            self.table.gather(rows, self._out)
            self.table.update(rows, self._gradients, 0.1)
        self.tracker.finish_step()
        return time.perf_counter() - began_s


def measure_one_host(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes commits beside steps, publishes the last one, and starts from it."""
    spec = table_spec(arguments)
    placement = place_tables([spec], num_features=[1], num_hosts=1)
    table = Table(spec, np.arange(spec.layout.num_buckets))
    table.initialize()
    training = Training(table, samples=arguments.samples)
    undo = Undo([table], share=UNDO_SHARE)
    per_file = buckets_per_file([spec], placement, num_hosts=1)
    save = BackgroundSave(
        [table],
        tracker=training.tracker,
        stalled_after_s=600.0,
        raise_if_aborted=lambda: None,
        undo=undo,
        buckets_per_file=per_file,
    )
    populate([*save.rows.buffers, *undo.buffers])
    quiet, first, beside, write_s = [], [], [], []
    for _ in range(WARM_UP_STEPS):
        training.step()
    with tempfile.TemporaryDirectory(prefix="podembed-bench-", dir=arguments.folder) as folder:
        store = Store(f"{folder}/run")
        lease = acquire(store, holder=Holder.current("benchmark"))
        with ThreadPoolExecutor(1) as saver:
            for number in range(1, arguments.saves + 1):
                shutil.rmtree(f"{folder}/run/data", ignore_errors=True)
                attempt = commit_name(step=number, generation=1)
                quiet += [training.step() for _ in range(arguments.steps)]
                began_s = time.perf_counter()
                save.freeze(attempt)
                writing = saver.submit(save.write, store, attempt, is_first=True)
                training.step()
                first.append(time.perf_counter() - began_s)
                while not writing.done():
                    beside.append(training.step())
                receipt = writing.result()
                write_s.append(time.perf_counter() - began_s)
                undo.acknowledge(attempt)
        entry, plan = receipt.tables[0], table_plan(spec, attempt, buckets_per_file=per_file["table"])
        files = (assemble_table(plan, entry.arrays, [entry.buckets]),)
        manifest = manifest_of(attempt, files, placement, 1)
        _, commit_s = timed(lambda: checkpoint.commit(store, manifest, lease))
        loaded, load_s = timed(lambda: checkpoint.load(store, attempt))
        del save, undo
        _, restore_s = timed(lambda: read_shard(store, [table], loaded.tables, on_chunk=lambda: None))
        num_files, manifest_bytes = len(store.sizes(f"data/{attempt}")), store.size(commit_file(attempt))
    quiet_s, beside_s = np.asarray(quiet), np.asarray(beside)
    return {
        "num_buckets": spec.layout.num_buckets,
        "buckets_per_file": per_file["table"],
        "files": num_files,
        "manifest_bytes": manifest_bytes,
        "write_s": round(float(np.median(write_s)), 2),
        "commit_s": commit_s,
        "load_s": load_s,
        "restore_s": restore_s,
        "step_ms": milliseconds(quiet_s),
        "first_ms": milliseconds(np.asarray(first)),
        "beside_ms": milliseconds(beside_s),
        "first_to_p50": round(float(np.median(first) / np.median(quiet_s)), 2),
        "beside_p99_to_p50": round(float(np.quantile(beside_s, 0.99) / np.median(quiet_s)), 2),
        # Of the mean step: what throughput loses while files are written.
        "samples_beside_share": round(float(quiet_s.mean() / beside_s.mean()), 3),
        "waited_for_save_s": round(training.tracker.phase_s.get(Phase.WAIT_FOR_SAVE, 0.0), 3),
    }


def milliseconds(seconds: np.ndarray) -> dict[str, float]:
    """How long steps took."""
    quantiles = {f"p{share}": np.quantile(seconds, share / 100) for share in (50, 90, 99)}
    found = {name: round(1e3 * float(value), 2) for name, value in {**quantiles, "max": seconds.max()}.items()}
    return {**found, "count": len(seconds)}


def measure_many_hosts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the driver does with the receipts of many hosts."""
    spec = table_spec(arguments)
    placement, place_s = timed(lambda: place_tables([spec], num_features=[1], num_hosts=arguments.hosts))
    fewer, move_s = timed(
        lambda: place_tables([spec], num_features=[1], num_hosts=arguments.hosts - 1, previous=placement)
    )
    counts = np.bincount(placement[0], minlength=arguments.hosts)
    per_file = buckets_per_file([spec], placement, num_hosts=arguments.hosts)
    plan = table_plan(spec, commit_name(step=1, generation=1), buckets_per_file=per_file["table"])
    receipts = made_up_receipts(plan, placement[0], arguments.hosts)
    tables, assemble_s = timed(lambda: (assemble_made_up(plan, receipts),))
    manifest = manifest_of(plan.attempt, tables, placement, arguments.hosts)
    found, check_s = timed(lambda: problems(manifest))
    if found:
        raise RuntimeError(f"Found {found[0]} in a made-up manifest.")
    document, encode_s = timed(lambda: to_json(manifest))
    _, decode_s = timed(lambda: from_json(manifest.name, document))
    return {
        "num_buckets": spec.layout.num_buckets,
        "buckets_per_file": plan.buckets_per_file,
        "busiest_to_mean": round(float(counts.max() / counts.mean()), 3),
        "buckets_moved": int((fewer[0] != placement[0]).sum()),
        "files": len(manifest.file_sizes()),
        "manifest_bytes": len(document),
        "place_s": place_s,
        "move_s": move_s,
        "assemble_s": assemble_s,
        "check_s": check_s,
        "encode_s": encode_s,
        "decode_s": decode_s,
    }


def made_up_receipts(plan: TablePlan, owners: np.ndarray, num_hosts: int) -> list[WrittenBuckets]:
    """As if each host had written every bucket that it owns."""
    per_file = plan.buckets_per_file
    metadata = {array: plan.metadata(array) for array in plan.widths}
    receipts: list[list[BucketReceipt]] = [[] for _ in range(num_hosts)]
    for first in range(0, plan.num_buckets, per_file):
        buckets = range(first, first + per_file)
        chunks = tuple(
            ChunkFile(
                array=array,
                bucket=first,
                name=chunk_name(described, (first, 0, 0)),
                size_bytes=file_bytes(described),
                crc32c=tuple(buckets),
            )
            for array, described in metadata.items()
        )
        digests = tuple(f"{bucket:032x}" for bucket in buckets)
        receipts[owners[first]].append(BucketReceipt(bucket=first, chunks=chunks, digests=digests))
    return [WrittenBuckets.of(plan, of_host) for of_host in receipts]


def assemble_made_up(plan: TablePlan, receipts: list[WrittenBuckets]) -> TableFiles:
    """The table of those receipts."""
    arrays = tuple(
        ArrayFiles(
            name=array,
            path=plan.metadata(array).path,
            width=width,
            dtype="float32",
            metadata_size_bytes=400,
            metadata_crc32c=1,
        )
        for array, width in plan.widths.items()
    )
    return assemble_table(plan, arrays, receipts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the table with its slot")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--optimizer", default="adagrad", choices=OPTIMIZERS)
    parser.add_argument("--hosts", type=int, default=1, help="above 1: made-up receipts of so many hosts")
    parser.add_argument("--samples", type=int, default=16_384, help="rows that a step looks up and changes")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="undisturbed steps before each save")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    arguments = parser.parse_args()
    found = measure_one_host(arguments) if arguments.hosts == 1 else measure_many_hosts(arguments)
    config = {name: getattr(arguments, name) for name in ("gb", "dim", "optimizer", "hosts", "samples", "saves")}
    load1 = {"load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"benchmark": "commit", **config, **found, **load1}), flush=True)


if __name__ == "__main__":
    main()
