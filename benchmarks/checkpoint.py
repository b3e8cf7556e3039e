"""Write and read rates of our checkpoint files beside plain `dd`, zarr-python and Orbax, on one disk and in one run, as
one JSON line.

    python benchmarks/checkpoint.py --folder .data/checkpoint-benchmark --mib 512 --rounds 5 \\
        --orbax-python VENV/bin/python

All write the same table: rows and one slot, float32, cut into buckets of one MiB. Each contender runs in a process of
its own, in turn, in an order that changes from round to round. A write counts until every file is on the disk. Ours and
dd sync themselves; for the others, every file is synced afterwards within the time. Before a read, the files are
dropped from the page cache. Ours verifies checksums and digests, zarr checksums; dd and Orbax verify nothing.
`one-by-one` is ours with one thread that syncs each file before it writes the next. Rates are medians over rounds in
decimal units; ratios to dd are medians of the ratios within rounds. Orbax is no dependency: it is measured where
`--orbax-python` names an interpreter that has it, and null otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

CONTENDERS = ("dd", "podembed", "one-by-one", "zarr", "orbax")
WIDTH = 64
ROWS_PER_BUCKET = 2048  # with one slot of the same width, one MiB
SEED = 7


def table(num_bytes: int) -> dict[str, np.ndarray]:
    """Rows and a slot, `[buckets, rows per bucket, width]`: noise, which no file system compresses."""
    num_buckets = num_bytes // (2 * 4 * WIDTH * ROWS_PER_BUCKET)
    shape = (num_buckets, ROWS_PER_BUCKET, WIDTH)
    rng = np.random.default_rng(SEED)
    return {name: rng.standard_normal(shape, np.float32) for name in ("rows", "accumulator")}


class Podembed:
    """As a host saves and restores: buckets in several threads, files synced in batches."""

    num_threads: int | None = None

    def write(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        from podembed.workers.checkpoint.checkpoint_files import TablePlan, WrittenBuckets
        from podembed.workers.checkpoint.files import assemble_table, write_buckets, write_table_metadata
        from podembed.workers.storage.store import Store

        store, (num_buckets, _, width) = Store(folder), values["rows"].shape
        plan = TablePlan(
            attempt="s000000001-g00000001",
            name="table",
            num_rows=num_buckets * ROWS_PER_BUCKET,
            num_buckets=num_buckets,
            widths=dict.fromkeys(values, int(width)),
            dtypes={},
        )
        with self._threads(store) as threads:

            def write(bucket: int) -> Any:
                with threads.writes():
                    return write_buckets(store, plan, bucket, [array[bucket] for array in values.values()])

            with threads.writes():
                arrays = write_table_metadata(store, plan)
            receipts = [threads.submit(partial(write, bucket)) for bucket in range(num_buckets)]
            threads.finish()
            written = WrittenBuckets.of(plan, [receipt.result() for receipt in receipts])
        self._files = assemble_table(plan, arrays, [written])

    def read(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        from podembed.workers.checkpoint.files import read_bucket
        from podembed.workers.storage.store import Store

        store = Store(folder)
        with self._threads(store) as threads:
            for bucket in range(self._files.num_buckets):
                out = [array[bucket] for array in values.values()]
                threads.submit(partial(read_bucket, store, self._files, bucket, out=out))
            threads.finish()

    def _threads(self, store: Any) -> Any:
        from podembed.workers.checkpoint.file_threads import NUM_THREADS, FileThreads

        return FileThreads(store, num_threads=self.num_threads or NUM_THREADS)


class OneByOne(Podembed):
    """One thread, and every file synced before the next is written."""

    num_threads = 1

    def _threads(self, store: Any) -> Any:
        threads = super()._threads(store)
        threads.writes = contextlib.nullcontext
        return threads


class Zarr:
    def write(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        import zarr
        from zarr.codecs import BytesCodec, Crc32cCodec

        for name, array in values.items():
            target = zarr.create_array(
                store=str(folder / name),
                shape=array.shape,
                chunks=(1, *array.shape[1:]),
                dtype=array.dtype,
                serializer=BytesCodec(),
                compressors=[Crc32cCodec()],
            )
            target[:] = array
        sync_files(folder)

    def read(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        import zarr

        for name, array in values.items():
            array[...] = zarr.open_array(str(folder / name), mode="r")[:]


class Orbax:
    def write(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(folder / "tree", {name: jnp.asarray(array) for name, array in values.items()})
        checkpointer.close()
        sync_files(folder)

    def read(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        import orbax.checkpoint as ocp

        restored = ocp.PyTreeCheckpointer().restore(folder / "tree")
        for name, array in values.items():
            array[...] = np.asarray(restored[name])


class Dd:
    """One file, written and read by another program; the copy comes from the page cache."""

    def write(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        subprocess.run(
            ["dd", f"if={folder}.source", f"of={folder / 'file'}", "bs=1M", "conv=fsync", "status=none"], check=True
        )

    def read(self, folder: Path, values: dict[str, np.ndarray]) -> None:
        subprocess.run(["dd", f"if={folder / 'file'}", "of=/dev/null", "bs=1M", "status=none"], check=True)


def sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def cpu_s() -> float:
    """Of this process and of the programs that it ran."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds)."""
    cpu, started = cpu_s(), time.perf_counter()
    call()
    return time.perf_counter() - started, cpu_s() - cpu


def measure(contender: str, folder: Path, num_bytes: int) -> dict[str, float]:
    """One write and one read in this process.

    Raises:
      RuntimeError: what was read is not what was written.
    """
    values = table(num_bytes)
    targets = {"dd": Dd, "podembed": Podembed, "one-by-one": OneByOne, "zarr": Zarr, "orbax": Orbax}
    target: Any = targets[contender]()
    # Imports, and what is compiled or opened at first use.
    small = {name: array[:2].copy() for name, array in values.items()}
    warm_up = folder.with_name("warm-up")
    warm_up.mkdir()
    Path(f"{warm_up}.source").write_bytes(b"".join(array.tobytes() for array in small.values()))
    target.write(warm_up, small)
    target.read(warm_up, small)
    folder.mkdir()
    Path(f"{folder}.source").write_bytes(b"".join(memoryview(array).cast("B") for array in values.values()))
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_s, write_cpu_s = timed(lambda: target.write(folder, values))
    drop_from_cache(folder)
    found = {name: np.zeros_like(array) for name, array in values.items()}
    read_s, read_cpu_s = timed(lambda: target.read(folder, found))
    if contender != "dd" and any(found[name].tobytes() != array.tobytes() for name, array in values.items()):
        raise RuntimeError(f"{contender} read something else than it wrote.")
    size = sum(array.nbytes for array in values.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "write_mb_per_s": size / write_s / 1e6,
        "read_mb_per_s": size / read_s / 1e6,
        "write_cpu_s_per_gb": write_cpu_s / size * 1e9,
        "read_cpu_s_per_gb": read_cpu_s / size * 1e9,
        # Above the table and the copy that is read into, where the contender needs more than they do.
        "extra_peak_mb": max(0.0, (peak - peak_before) * 1024 - size) / 1e6,
    }


def run(contender: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One round of one contender in a process of its own."""
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    own = tempfile.mkdtemp(prefix="round-", dir=Path(arguments.folder).absolute())
    folder = Path(own) / "table"
    python = arguments.orbax_python if contender == "orbax" else sys.executable
    command = [
        python,
        __file__,
        "--threads",
        str(arguments.threads or 0),
        "--contender",
        contender,
        "--folder",
        str(folder),
        "--mib",
        str(arguments.mib),
    ]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(own, ignore_errors=True)


def summary(rounds: list[dict[str, float]], beside: list[dict[str, float]]) -> dict[str, float]:
    """Medians over rounds; of the rates also the median of the ratios to dd in the same round."""
    found = {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
    for rate in ("write_mb_per_s", "read_mb_per_s"):
        ratios = [one[rate] / other[rate] for one, other in zip(rounds, beside, strict=True)]
        found[rate.replace("mb_per_s", "rate_to_dd")] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        default=".data/checkpoint-benchmark",
        help="on the disk to measure; a folder is made in it and removed",
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the table with its slot")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--orbax-python", default=None, help="interpreter that has orbax-checkpoint")
    parser.add_argument("--threads", type=int, default=None, help="file threads of ours; the default is that of a host")
    parser.add_argument("--contender", choices=CONTENDERS, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        Podembed.num_threads = arguments.threads or None
        print(json.dumps(measure(arguments.contender, Path(arguments.folder), arguments.mib << 20)))
        return
    contenders = [name for name in CONTENDERS if name != "orbax" or arguments.orbax_python]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(arguments.rounds):
        turn = number % len(contenders)
        for name in [*contenders[turn:], *contenders[:turn]]:
            found[name].append(run(name, arguments))
            print(number, name, {key: round(value, 2) for key, value in found[name][-1].items()}, file=sys.stderr)
    result: dict[str, Any] = {"benchmark": "checkpoint", "mib": arguments.mib, "rounds": arguments.rounds}
    result |= {name: summary(found[name], found["dd"]) if name in found else None for name in CONTENDERS}
    result |= {"load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
