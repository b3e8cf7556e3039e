"""How much of a device's step are transfers, and whether the device computes the same bytes twice. Prints one JSON
line.

    python benchmarks/transfers.py --bench A --samples 2048
    JAX_PLATFORMS=cpu python benchmarks/transfers.py --bench A --samples 2048
    JAX_PLATFORMS=cpu python benchmarks/transfers.py --bench C --samples 1024 --ways separate
    XLA_FLAGS=--xla_gpu_deterministic_ops=true python benchmarks/transfers.py --bench A

The device half of a step alone, on what JAX finds, with activations that stay the same. Each way of the arrays gets
turns of steps that are timed in parts (`send_ms`, `compute_ms`, `fetch_ms`, each waited for), and turns of whole steps.
`ahead_ms` is a step whose batch is sent while the devices work on the one before, as with staleness 1. Figures are
medians of the turns.

`copies_ms` has single copies of as many bytes as a step sends, from and to pinned memory and any other.

`same_bytes` compares two workers of the same seed after `--steps` steps: gradients and dense parameters. `losses` are
those of the first steps, to be compared with another device's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.device_step import host_arrays  # noqa: E402
from benchmarks.dlrm import benchmark_job  # noqa: E402
from benchmarks.mixed import mixed_job  # noqa: E402
from benchmarks.workload import NAMES  # noqa: E402
from benchmarks.workloads import NAMES as MIXED_NAMES  # noqa: E402
from podembed.embedding.kernels.threads import Threads  # noqa: E402
from podembed.workers.device.options import Transfers  # noqa: E402
from podembed.workers.device.transfers.pinned import KIND as PINNED  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402
from podembed.workers.thread_pool import ThreadPool  # noqa: E402

WAYS = (Transfers.PACKED.value, Transfers.SEPARATE.value)
STEPS_A_TURN = 16
NUM_LOSSES = 8


class Steps:
    """A device worker and two batches, which take turns as in a channel.

    Args:
      transfers: the way of the arrays.
      thread_pool: copies them on the host.
    """

    def __init__(self, job: Any, num_samples: int, transfers: Transfers, thread_pool: Threads) -> None:
        from podembed.workers.device.model_step import DeviceWorker
        from podembed.workers.device.options import DeviceOptions

        self._batches = [host_arrays(job, num_samples, buffer=buffer) for buffer in (0, 1)]
        self._num_samples, self._step = num_samples, 0
        self._fetched_floats = sum(block.size for block in self._batches[0].gradients)
        self.worker = DeviceWorker(
            job=job, num_samples=num_samples, options=DeviceOptions(transfers=transfers), thread_pool=thread_pool
        )
        self.compile_s = self.worker.build()

    def _begin(self) -> Any:
        begun = self.worker.begin_training(
            self._batches[self._step % 2], weight_sum=float(self._num_samples), step=self._step
        )
        self._step += 1
        return begun

    def losses(self, num_steps: int) -> list[float]:
        """Of so many steps."""
        found = []
        for _ in range(num_steps):
            begun = self._begin()
            begun.finish()
            found.append(float(begun.last))
        return found

    def whole_s(self, num_steps: int) -> float:
        """Seconds of a step that is waited for."""
        started = time.perf_counter()
        for _ in range(num_steps):
            self._begin().finish()
        return (time.perf_counter() - started) / num_steps

    def ahead_s(self, num_steps: int) -> float:
        """Seconds of a step whose batch is sent before the one ahead of it is done."""
        started, begun = time.perf_counter(), self._begin()
        for _ in range(num_steps - 1):
            following = self._begin()
            begun.finish()
            begun = following
        begun.finish()
        return (time.perf_counter() - started) / num_steps

    def parts_s(self, num_steps: int) -> tuple[float, float, float]:
        """Seconds of a step's three parts."""
        import jax

        from podembed.workers.device.transfers.ways import Numbers

        worker, spent = self.worker, [0.0, 0.0, 0.0]
        scale = np.float32(1 / self._num_samples)
        for _ in range(num_steps):
            arrays = self._batches[self._step % 2]
            started = time.perf_counter()
            sent = jax.block_until_ready(worker._way.send(arrays, Numbers(self._step, scale)))
            at_device = time.perf_counter()
            states = worker.params, worker.optimizer_state, worker.state, worker.tables.arrays
            *states, gradients, loss, _ = worker._programs.train(arrays.levels)(*states, None, *sent)
            worker.params, worker.optimizer_state, worker.state, worker.tables.arrays = states
            jax.block_until_ready((gradients, loss))
            computed = time.perf_counter()
            worker.thread_pool.run(worker._way.fetch(gradients, arrays, scale), size=self._fetched_floats)
            fetched = time.perf_counter()
            self._step += 1
            for at, seconds in enumerate((at_device - started, computed - at_device, fetched - computed)):
                spent[at] += seconds / num_steps
        return spent[0], spent[1], spent[2]

    def digest(self) -> str:
        """Of gradients and dense state."""
        found = hashlib.sha256()
        for batch in self._batches:
            for block in batch.gradients:
                found.update(block.tobytes())
        for key, values in sorted(self.worker.dense_arrays().items()):
            found.update(key.encode())
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()

    @property
    def megabytes(self) -> tuple[float, float]:
        """What a step sends and fetches."""
        import jax

        arrays = self._batches[0]
        sent = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays.inputs))
        return round(sent / 1e6, 3), round(sum(block.nbytes for block in arrays.gradients) / 1e6, 3)


def timed(steps: Steps, num_turns: int) -> dict[str, Any]:
    """Medians over turns, in which whole steps and parts alternate."""
    found: dict[str, list[float]] = {}
    for _ in range(num_turns):
        parts = dict(zip(("send_ms", "compute_ms", "fetch_ms"), steps.parts_s(STEPS_A_TURN), strict=True))
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds)
        found.setdefault("whole_ms", []).append(steps.whole_s(STEPS_A_TURN))
        found.setdefault("ahead_ms", []).append(steps.ahead_s(STEPS_A_TURN))
    middle = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    moved = middle["send_ms"] + middle["fetch_ms"]
    share = moved / (moved + middle["compute_ms"])
    return {name: round(milliseconds, 3) for name, milliseconds in middle.items()} | {"share": round(share, 3)}


def copies_ms(num_bytes: int, num_turns: int) -> dict[str, float]:
    """Medians of single copies between the host and a device, from and to pinned memory and any other."""
    import jax
    from jax.sharding import SingleDeviceSharding

    device = jax.local_devices()[0]
    there, pinned = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind=PINNED)
    given = np.random.default_rng(0).random(num_bytes // 4, dtype=np.float32)
    plus_one = jax.jit(lambda values: values + 1)
    # `np.asarray` keeps what it made, so each turn fetches another array.
    made = jax.device_put(given, there)
    in_pinned = jax.device_put(given, pinned)
    ways = {
        "to_device": lambda: jax.device_put(given, there).block_until_ready(),
        "to_device_from_pinned": lambda: jax.device_put(in_pinned, there).block_until_ready(),
        "computed": lambda: plus_one(made).block_until_ready(),
        "computed_and_fetched": lambda: np.asarray(plus_one(made)),
        "computed_and_fetched_by_pinned": lambda: np.asarray(jax.device_put(plus_one(made), pinned)),
    }
    found = {}
    for name, way in ways.items():
        way()
        seconds = []
        for _ in range(num_turns):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
        found[name] = round(1e3 * statistics.median(seconds), 3)
    return found


def same_bytes(job: Any, num_samples: int, num_steps: int, thread_pool: Threads) -> bool:
    """Whether two workers of one seed have the same bytes after so many steps."""
    digests = []
    for _ in range(2):
        steps = Steps(job, num_samples, Transfers.AUTO, thread_pool)
        steps.losses(num_steps)
        digests.append(steps.digest())
    return digests[0] == digests[1]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="A", choices=[*NAMES, *MIXED_NAMES])
    parser.add_argument(
        "--samples", type=int, default=None, help="a step of this host; the workload's batch by default"
    )
    parser.add_argument("--threads", type=int, default=1, help="that copy arrays on the host")
    parser.add_argument("--turns", type=int, default=10, help=f"of {STEPS_A_TURN} steps of each kind")
    parser.add_argument("--steps", type=int, default=100, help="after which bytes are compared; 0 leaves it out")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="of the arrays")
    parser.add_argument("--compute-dtype", default="float32", choices=["float32", "bfloat16"])
    return parser.parse_args(given)


def job_of(arguments: argparse.Namespace) -> JobConfig:
    """The workload. Nothing of it is read.

    Raises:
      SystemExit: a type of its dense half that it does not have.
    """
    if arguments.bench not in MIXED_NAMES:
        return benchmark_job(
            folder="unread", bench=arguments.bench, emb_opt="rowwise", compute_dtype=arguments.compute_dtype
        )
    if arguments.compute_dtype != "float32":
        sys.exit(f"Found --compute-dtype {arguments.compute_dtype} with --bench {arguments.bench}. Expected float32.")
    return mixed_job(folder="unread", bench=arguments.bench, emb_opt="rowwise")


def main() -> None:
    arguments = parse()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        # As in device processes, which have these settings where their devices are CPUs.
        measuring.tune_allocator()
    import jax

    thread_pool = ThreadPool(arguments.threads)

    job = job_of(arguments)
    num_samples = arguments.samples or job.batch_size
    line: dict[str, Any] = {"benchmark": "transfers", **vars(arguments), "samples": num_samples}
    device = jax.local_devices()[0]
    line |= {"platform": device.platform, "device": device.device_kind, "devices": jax.local_device_count()}
    line |= {
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "precision": os.environ.get("JAX_DEFAULT_MATMUL_PRECISION", ""),
    }
    for way in map(Transfers, arguments.ways):
        steps = Steps(job, num_samples, way, thread_pool)
        losses = steps.losses(NUM_LOSSES)
        line.setdefault("losses", [round(loss, 7) for loss in losses])
        line["sent_mb"], line["fetched_mb"] = steps.megabytes
        line["copies_ms"] = copies_ms(int(1e6 * line["sent_mb"]), arguments.turns)
        line[way.value] = timed(steps, arguments.turns) | {"compile_s": round(steps.compile_s, 2)}
    if arguments.steps:
        line["same_bytes"] = same_bytes(job, num_samples, arguments.steps, thread_pool)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
