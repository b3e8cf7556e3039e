"""The same job with its small tables on hosts and on devices: ratios of what a CPU second and a second train. Prints
one JSON line.

    python benchmarks/placed.py --bench A10 --hosts 2
    python benchmarks/placed.py --bench A10 --hosts 2 --tcp --most-rows 2000

Tables of up to `--most-rows` rows are moved. Both contenders are `Trainer`'s hosts and devices with input from memory,
and stand side by side. Windows of steps take turns, so that a machine that gets busier in between favours neither. A
ratio is that of the devices over that of the hosts, the median over pairs of windows with its 10th and 90th percentile.
Above 1, devices are better. CPU seconds are those of each contender's own processes.

With `--tcp` hosts of one machine share no memory, as between machines. The program fails if the losses of the first
steps differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import measuring  # noqa: E402
from benchmarks.dlrm import NUM_BATCHES, WARM_UP_STEPS, prepare_environment, reference_of, start_group  # noqa: E402
from benchmarks.pairs import add_options, largest_difference, spread  # noqa: E402
from benchmarks.workload import make_batches, workload  # noqa: E402

NUM_CHECKED = 8
TOLERANCE = 1e-4


class Contender:
    """Hosts and devices with the small tables in one place. Mutated: all attributes.

    Attributes:
      moved: rows of each table on the devices.
      losses: of all steps.
      rates: by window, samples a second and samples a CPU second.
    """

    def __init__(self, arguments: argparse.Namespace, folder: str, *, most_rows: int) -> None:
        chosen = argparse.Namespace(**{**vars(arguments), "rows_on_devices": most_rows})
        reference = reference_of(folder, chosen)
        self.moved = [table.vocabulary_size for table in reference.resolve().tables if table.is_on_devices]
        self._group = start_group(chosen, reference, shares_memory=arguments.shared_memory)
        # Ray's own processes serve both contenders.
        self._processes = [one.process for one in (*self._group.ready, *self._group.devices)]
        self._batch_size, self._step = workload(arguments.bench).batch_size, 0
        self.losses: list[float] = []
        self.rates: list[tuple[float, float]] = []

    def train(self, num_steps: int) -> None:
        _, devices = self._group.train(self._step, self._step + num_steps, is_followed=True)
        self._step += num_steps
        self.losses += devices[0].losses

    def window(self, num_steps: int) -> None:
        """Trains and keeps the rates."""
        before, began_s = self._cpu_s(), time.perf_counter()
        self.train(num_steps)
        samples = num_steps * self._batch_size
        self.rates.append((samples / (time.perf_counter() - began_s), samples / (self._cpu_s() - before)))

    def _cpu_s(self) -> float:
        return sum(measuring.cpu_s(self._processes).values())

    def close(self) -> None:
        self._group.stop()


def measure(arguments: argparse.Namespace, hosts: Contender, devices: Contender) -> dict[str, Any]:
    """Pairs of windows; who begins changes from pair to pair."""
    both = [hosts, devices]
    for contender in both:
        contender.train(max(WARM_UP_STEPS, NUM_CHECKED))
    for number in range(arguments.pairs):
        for contender in both if number % 2 == 0 else both[::-1]:
            contender.window(arguments.window)
    here, there = np.array(hosts.rates), np.array(devices.rates)
    return {
        "on_hosts": _rates(here),
        "on_devices": _rates(there),
        "samples_per_s_ratio": spread(there[:, 0] / here[:, 0]),
        "samples_per_cpu_s_ratio": spread(there[:, 1] / here[:, 1]),
        "losses": [round(loss, 6) for loss in hosts.losses[:NUM_CHECKED]],
        "largest_difference": largest_difference(
            devices.losses, hosts.losses, NUM_CHECKED, TOLERANCE, ("with tables on devices", "on hosts")
        ),
    }


def _rates(found: np.ndarray) -> dict[str, float]:
    rate, cpu_rate = np.median(found, axis=0)
    return {"samples_per_s": round(float(rate), 1), "samples_per_cpu_s": round(float(cpu_rate), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--most-rows", type=int, default=20_000, help="tables of up to so many rows are moved")
    arguments = parser.parse_args()
    prepare_environment()
    from podembed.orchestrator.cluster.connection import connected

    shape = workload(arguments.bench)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder, ExitStack() as stack:
        make_batches(shape, NUM_BATCHES).write(Path(folder))
        stack.enter_context(connected(2 * arguments.hosts))
        contenders = []
        for most_rows in (0, arguments.most_rows):
            contenders.append(Contender(arguments, folder, most_rows=most_rows))
            stack.callback(contenders[-1].close)
        result, moved = measure(arguments, *contenders), contenders[-1].moved
    shown = {name: getattr(arguments, name) for name in ("bench", "hosts", "emb_opt", "most_rows", "shared_memory")}
    shown |= {"moved_tables": len(moved), "tables": shape.num_tables, "moved_rows": sum(moved)}
    shown |= {"pairs": arguments.pairs, "window_steps": arguments.window}
    end = {"load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({"benchmark": "placed", **shown, **result, **end}), flush=True)


if __name__ == "__main__":
    main()
