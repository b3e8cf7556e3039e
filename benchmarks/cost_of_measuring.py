"""What a run's measurements cost: their share of its CPU seconds, on a workload. Prints one JSON line.

    python benchmarks/cost_of_measuring.py --bench A
    python benchmarks/cost_of_measuring.py --bench B --hosts 2 --seconds 120

Two runs of a machine differ by some percent, so a share below one percent does not show in pairs of runs. It is counted
from three parts instead:

* A real run, `podembed train` with Prometheus and its folder. In all its processes, whatever measures is wrapped by the
  clock of its thread. The CPU seconds in there are divided by those of all processes.
* The measurements inside the compiled step, as a program by themselves, less the call of one that does nothing. Inside
  the step, the compiler joins them with what is computed anyway, so this is an upper bound.
* Pairs of the whole device step, with measurements and without, in turns in one process. They check the second part, as
  far as their spread allows. `--pairs 0` leaves them out.

Target: `share`, the sum of the first two, at most 0.005.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.device_step import host_arrays  # noqa: E402
from benchmarks.dlrm import NUM_BATCHES, benchmark_job, prepare_environment  # noqa: E402
from benchmarks.input import write_files  # noqa: E402
from benchmarks.pairs import spread  # noqa: E402
from benchmarks.workload import NAMES, make_batches, workload  # noqa: E402
from podembed.workers.job.job import JobConfig  # noqa: E402

START_TIMEOUT_S = 300.0
NUM_EPOCHS = 1_000_000
STEPS_A_TURN = 8


class Counted:
    """The CPU seconds that a process spent in what measures. Mutated: by the wrapped functions, in all its threads.

    Args:
      folder: gets a file of this process.

    Attributes:
      by_name: seconds and calls.
    """

    def __init__(self, folder: str) -> None:
        self.by_name: dict[str, list[float]] = {}
        self._path = Path(folder) / f"counted-{os.getpid()}.json"

    def wrap(self, owner: Any, name: str, *, writes: bool = False) -> None:
        """Counts a function of a module or class. What it calls is counted as its own, so wrap no two that nest."""
        function = getattr(owner, name)
        is_static = isinstance(vars(owner)[name], staticmethod)
        key = f"{getattr(owner, '__name__', owner)}.{name}".removeprefix("podembed.")

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                spent = self.by_name.setdefault(key, [0.0, 0])
                spent[0] += time.thread_time() - began_s
                spent[1] += 1
                if writes:
                    self.write()

        setattr(owner, name, staticmethod(counted) if is_static else counted)

    def write(self) -> None:
        """All that was counted so far, in place of what the file had."""
        self._path.with_suffix(".new").write_text(json.dumps(self.by_name), encoding="utf-8")
        os.replace(self._path.with_suffix(".new"), self._path)


@functools.cache
def count_in_this_process(folder: str) -> Counted:
    """Wraps what measures in a driver, a host or a device process, whichever this one is."""
    from podembed.orchestrator.driver import windows as driver
    from podembed.tools.metrics import hub
    from podembed.workers.device.measures.window import WindowMeasures
    from podembed.workers.device.tables.held import HeldTables
    from podembed.workers.host import windows as host
    from podembed.workers.host.row_norms import RowNorms
    from podembed.workers.input.data_sample import Sampler

    counted = Counted(folder)
    for owner, name in (
        (driver, "figures_of"),
        (driver, "table_norms"),
        (driver, "_measures"),
        (hub.MetricsHub, "_put"),
        (hub.MetricsHub, "_judged"),
        (hub.MetricsHub, "_say"),
        (Sampler, "take"),
        (Sampler, "finish"),
        (RowNorms, "is_due"),
        (RowNorms, "take"),
        (HeldTables, "_write_rows"),
        (WindowMeasures, "add"),
    ):
        counted.wrap(owner, name)
    # The last in a window of a host, in one of a device, and of what a sink is given.
    counted.wrap(host, "own_usage", writes=True)
    counted.wrap(WindowMeasures, "window", writes=True)
    counted.wrap(hub.SinkThread, "_try", writes=True)
    return counted


def counted_job(*, bench: str, folder: str, rows_on_devices: int = 0) -> JobConfig:
    """The workload from files. Runs in all processes of the run, and wraps what measures there."""
    count_in_this_process(folder)
    return parquet_job(bench=bench, folder=folder, rows_on_devices=rows_on_devices)


def parquet_job(*, bench: str, folder: str, rows_on_devices: int = 0) -> JobConfig:
    """The workload from files."""
    job = benchmark_job(bench=bench, emb_opt="rowwise", folder=folder, input="parquet", rows_on_devices=rows_on_devices)
    return replace(job, num_epochs=NUM_EPOCHS)


def counted_so_far(folder: str) -> dict[str, np.ndarray]:
    """Seconds and calls so far by what was wrapped, over all processes."""
    total: dict[str, np.ndarray] = {}
    for path in Path(folder).glob("counted-*.json"):
        for name, spent in json.loads(path.read_text(encoding="utf-8")).items():
            total[name] = total.get(name, 0.0) + np.asarray(spent)
    return total


def of_a_run(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The share of a real run, from `--warm-up` seconds after its first window on."""
    command = [
        *(sys.executable, "-m", "podembed", "train", "--job", "benchmarks.cost_of_measuring:counted_job"),
        *("--set", f"bench={arguments.bench}", f"folder={folder}", f"rows_on_devices={arguments.rows_on_devices}"),
        *("--hosts", str(arguments.hosts), "--threads-per-host", "1", "--metrics-port", "0"),
        *("--storage", f"{folder}/runs", "--name", "counted"),
    ]
    with open(f"{folder}/log", "w", encoding="utf-8") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for_windows(run, folder)
            time.sleep(arguments.warm_up)
            before, cpu_before = counted_so_far(folder), _cpu_s(run.pid)
            began_s = time.monotonic()
            time.sleep(arguments.seconds)
            after, cpu_s = counted_so_far(folder), _cpu_s(run.pid) - cpu_before
            seconds = time.monotonic() - began_s
            if run.poll() is not None:
                raise RuntimeError(_ended(run, folder))
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                try:
                    run.wait(START_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    run.kill()
                    run.wait()
    parts = {name: spent - before.get(name, 0.0) for name, spent in after.items()}
    shown = sorted(((name, round(spent / cpu_s, 6)) for name, (spent, _) in parts.items()), key=lambda part: -part[1])
    num_steps = parts["WindowMeasures.add"][1]
    return {
        "run_share": round(sum(spent for spent, _ in parts.values()) / cpu_s, 5),
        "run_parts": {name: share for name, share in shown if share >= 1e-5},
        "run_cpu_ms_a_device_step": round(1e3 * cpu_s / num_steps, 3),
        "run_cpus_busy": round(cpu_s / seconds, 2),
        "run_seconds": round(seconds, 1),
    }


def _wait_for_windows(run: subprocess.Popen[bytes], folder: str) -> None:
    """Until a host and a device process have been through a window.

    Raises:
      RuntimeError: the run has ended, or takes too long.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not {"workers.host.windows.own_usage", "WindowMeasures.window"} <= counted_so_far(folder).keys():
        if run.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(_ended(run, folder))
        time.sleep(0.2)


def _ended(run: subprocess.Popen[bytes], folder: str) -> str:
    tail = "\n".join(Path(f"{folder}/log").read_text(encoding="utf-8").splitlines()[-15:])
    return f"Found exit status {run.poll()} of the run. Expected that it trains on. Its last words:\n{tail}"


def _cpu_s(root: int) -> float:
    return sum(measuring.cpu_s(measuring.process_tree(root)).values())


class DeviceStep:
    """The compiled step of one device process, called in this one, with activations that stay the same.

    Args:
      is_measured: with its measurements, or without.
    """

    def __init__(self, job: JobConfig, num_samples: int, *, is_measured: bool) -> None:
        import jax.numpy as jnp

        from podembed.workers.device import programs
        from podembed.workers.device.measures import step_measures, window
        from podembed.workers.device.model_step import DeviceWorker

        self._arrays = host_arrays(job, num_samples)
        self.num_samples, self._step = num_samples, 0
        real = programs.scored, programs.norms, window.measured_labels
        if not is_measured:
            programs.scored = lambda *_: step_measures.DeviceScores((), ())
            programs.norms = lambda *_: jnp.zeros(step_measures.NUM_NORMS)
            window.measured_labels = lambda _: ()
        try:
            self.worker = DeviceWorker(job=job, num_samples=num_samples)
            self.worker.build()
        finally:
            programs.scored, programs.norms, window.measured_labels = real

    def cpu_s(self, num_steps: int) -> float:
        """CPU seconds of a step of this process, all threads, as a window has them."""
        began_s, measures = time.process_time(), self.worker._measures
        for _ in range(num_steps):
            begun = self.worker.begin_training(self._arrays, weight_sum=float(self.num_samples), step=self._step)
            self._step += 1
            begun.finish()
            if begun.measured is not None:
                measures.add(begun.measured, self._arrays.inputs.weights)
        measures.window(losses=(), num_steps=num_steps, seconds=0.0, num_compiled=0, compiled_s=0.0)
        return (time.process_time() - began_s) / num_steps


def of_the_step(job: JobConfig, num_samples: int, *, num_pairs: int) -> dict[str, Any]:
    """The measurements as a program of their own, and the device step with and without them."""
    with_it, without = (DeviceStep(job, num_samples, is_measured=which) for which in (True, False))
    steps = (with_it, without)
    for step in steps:
        step.cpu_s(STEPS_A_TURN)
    found: list[tuple[float, float]] = []
    for pair in range(max(num_pairs, 4)):
        # Who begins changes, so that a machine that gets busier favours neither.
        order = steps if pair % 2 else steps[::-1]
        spent = {step: step.cpu_s(STEPS_A_TURN) for step in order}
        found.append((spent[with_it], spent[without]))
    ratios = [ours / plain for ours, plain in found]
    apart_s = _apart_s(job, with_it.worker.params, num_samples)
    result = {
        "device_step_cpu_ms": round(1e3 * statistics.median(plain for _, plain in found), 3),
        "apart_cpu_ms": round(1e3 * apart_s, 4),
    }
    if num_pairs:
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
        pairs = {"number": len(ratios), **spread(ratios, digits=4), "error_of_median": round(error, 4)}
        result |= {"step_pairs": pairs}
    return result


def _apart_s(job: JobConfig, params: Any, num_samples: int) -> float:
    """CPU seconds of a program that has nothing but a step's measurements, less those of its call."""
    import jax
    import jax.numpy as jnp

    from podembed.workers.device.measures import step_measures
    from podembed.workers.model.batch import ModelBatch

    ones, label = jnp.ones(num_samples), str(job.data.label)
    batch = ModelBatch(dense=ones, activations={}, labels={label: ones}, weights=ones, label_masks={label: ones > 0})

    def measured(number: jax.Array, outputs: jax.Array, gradients: Any, updates: Any, values: Any) -> Any:
        return step_measures.scored(job, outputs, batch), step_measures.norms(gradients, updates, values, number)

    def nothing(*_: Any) -> Any:
        empty = jnp.zeros(1)
        return step_measures.DeviceScores((empty,), (empty,)), empty

    copies = [jax.tree.map(partial(jnp.multiply, scale), params) for scale in (1.0, 2.0, 3.0)]
    outputs = jnp.linspace(-3, 3, num_samples)
    programs, numbers = [jax.jit(measured), jax.jit(nothing)], [jnp.uint32(number) for number in range(16)]
    turns: list[list[float]] = [[], []]
    for turn in range(41):
        for program, spent in zip(programs, turns, strict=True):
            began_s = time.process_time()
            for number in numbers:
                jax.block_until_ready(program(number, outputs, *copies))
            # The first turn compiles.
            spent += [(time.process_time() - began_s) / len(numbers)] if turn else []
    with_it, without = map(statistics.median, turns)
    return with_it - without


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="A", choices=NAMES)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the run, after its warm-up")
    parser.add_argument("--warm-up", type=float, default=20.0, metavar="S", help="of the run, before it is counted")
    parser.add_argument("--pairs", type=int, default=40, help="of turns of 8 device steps each")
    parser.add_argument(
        "--rows-on-devices", type=int, default=0, metavar="N", help="tables of up to N rows lie there in the run"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    os.environ.setdefault("PJRT_NPROC", "1")
    prepare_environment()
    shape = workload(arguments.bench)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        batches = make_batches(shape, NUM_BATCHES)
        write_files(
            Path(folder), shape, batches, rows_per_group=shape.batch_size, num_groups=NUM_BATCHES, compression="snappy"
        )
        del batches
        in_the_run = of_a_run(arguments, folder)
        job = parquet_job(bench=arguments.bench, folder=folder)
        in_the_step = of_the_step(job, shape.batch_size // arguments.hosts, num_pairs=arguments.pairs)
    share = in_the_run["run_share"] + in_the_step["apart_cpu_ms"] / in_the_run["run_cpu_ms_a_device_step"]
    line = {"benchmark": "cost_of_measuring", **vars(arguments), "share": round(share, 5), **in_the_run, **in_the_step}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
