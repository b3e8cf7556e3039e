"""Settings of one job against each other: overlap, staleness, what the wire carries, in which type the model computes,
where samples come from. Prints one JSON line.

    python benchmarks/settings.py --bench A --settings overlap=off overlap=on staleness=1
    python benchmarks/settings.py --bench A --placement buckets --network 4 --settings overlap=off overlap=on
    python benchmarks/settings.py --bench A --settings input=memory input=parquet
    python benchmarks/settings.py --bench A --settings compute_dtype=float32 compute_dtype=bfloat16

Each setting has a group of hosts of its own, and all stand side by side in memory. Windows of steps take turns, so that
a machine that gets busier in between favours none. A round is one window of each. The ratios are medians over rounds,
to the first setting in the same round, with their 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
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
from benchmarks.dlrm import (  # noqa: E402
    NUM_BATCHES,
    NUM_LANES,
    WARM_UP_STEPS,
    add_workload,
    enter_network,
    prepare_environment,
    reference_of,
    start_group,
)
from benchmarks.input import GROUPS_PER_FILE, write_files  # noqa: E402
from benchmarks.workload import Batches, make_batches, workload  # noqa: E402

SETTINGS = ("overlap", "staleness", "wire_dtype", "compute_dtype", "input")


class Contender:
    """One setting with its hosts. Mutated by `run_window`.

    Attributes:
      rates, cpu_rates: samples a second and a CPU second, one a window.
    """

    def __init__(self, setting: str, arguments: argparse.Namespace, folder: str) -> None:
        self.setting = setting
        self.arguments = argparse.Namespace(
            **vars(arguments),
            overlap="on",
            staleness=0,
            wire_dtype="float32",
            compute_dtype="float32",
            input="memory",
        )
        for part in setting.split(","):
            name, _, value = part.partition("=")
            if name not in SETTINGS:
                raise SystemExit(f"Found setting {part!r}. Expected one of {', '.join(SETTINGS)}, and =VALUE.")
            setattr(self.arguments, name, int(value) if name == "staleness" else value)
        self.group: Any = start_group(
            self.arguments, reference_of(folder, self.arguments), shares_memory=self.arguments.network is None
        )
        self.step = 0
        self.rates: list[float] = []
        self.cpu_rates: list[float] = []
        self.losses: list[float] = []
        self.phases: dict[str, list[float]] = {}
        self.read_shares: list[float] = []
        self.bytes_sent = 0

    def train(self, num_steps: int) -> list[Any]:
        hosts, devices = self.group.train(self.step, self.step + num_steps, is_followed=True)
        self.step += num_steps
        self.losses += devices[0].losses
        return hosts

    def run_window(self, num_steps: int, num_samples: int) -> None:
        cpu_s, started = _cpu_s(), time.perf_counter()
        hosts = self.train(num_steps)
        self.rates.append(num_samples / (time.perf_counter() - started))
        self.cpu_rates.append(num_samples / (_cpu_s() - cpu_s))
        self.bytes_sent += sum(host.bytes_sent for host in hosts)
        for phase, seconds in hosts[0].phase_s.items():
            self.phases.setdefault(phase, []).append(1e3 * seconds / num_steps)
        self.read_shares.append(hosts[0].phase_s.get("read", 0.0) / sum(hosts[0].phase_s.values()))

    def summary(self, first: Contender) -> dict[str, Any]:
        num_steps = self.step - WARM_UP_STEPS
        return {
            "setting": self.setting,
            "samples_per_s": round(statistics.median(self.rates), 1),
            "samples_per_cpu_s": round(statistics.median(self.cpu_rates), 1),
            "samples_per_s_ratio": _ratio(self.rates, first.rates),
            "samples_per_cpu_s_ratio": _ratio(self.cpu_rates, first.cpu_rates),
            "wire_mb_per_step": round(self.bytes_sent / num_steps / 1e6, 3),
            "loss": round(statistics.fmean(self.losses[WARM_UP_STEPS : WARM_UP_STEPS + 32]), 6),
            "has_the_losses_of_the_first": self.losses == first.losses,
            "share_of_waiting_for_input": round(statistics.median(self.read_shares), 4),
            "phase_ms": {phase: round(statistics.median(ms), 2) for phase, ms in self.phases.items()},
        }


def _cpu_s() -> float:
    return sum(measuring.cpu_s(measuring.process_tree(os.getpid())).values())


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(np.array(ours) / np.array(theirs), [0.1, 0.5, 0.9])
    return {"median": round(float(middle), 3), "p10": round(float(low), 3), "p90": round(float(high), 3)}


def early_shares(batches: Batches) -> dict[str, float]:
    """Of what a step looks up, the part that the step before does not touch: of its distinct rows, and of its bags."""
    rows: list[np.ndarray] = []
    bags: list[np.ndarray] = []
    for ids in batches.ids:
        for before, now in itertools.pairwise(ids[:4]):
            rows.append(~np.isin(np.unique(now), before))
            bags.append(~np.isin(now, before).any(axis=1))
    return {name: round(float(np.concatenate(found).mean()), 3) for name, found in (("rows", rows), ("bags", bags))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--settings", nargs="+", default=["overlap=off", "overlap=on", "staleness=1"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--window", type=int, default=8, help="steps of a window")
    arguments = parser.parse_args()
    if arguments.network:
        enter_network(arguments.network)
    prepare_environment(arguments.resources)
    from podembed.orchestrator.cluster.connection import connected

    shape = workload(arguments.bench)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder, ExitStack() as stack:
        batches = make_batches(shape, NUM_BATCHES)
        batches.write(Path(folder))
        if any("input=parquet" in setting for setting in arguments.settings):
            rows = shape.batch_size * NUM_BATCHES // GROUPS_PER_FILE
            write_files(
                Path(folder), shape, batches, rows_per_group=rows, num_groups=4 * NUM_LANES, compression="snappy"
            )
        stack.enter_context(connected(arguments.hosts * len(arguments.settings)))
        contenders = []
        for setting in arguments.settings:
            contenders.append(Contender(setting, arguments, folder))
            stack.callback(contenders[-1].group.stop)
        for contender in contenders:
            contender.train(WARM_UP_STEPS)
        for number in range(arguments.rounds):
            # Who begins changes from round to round.
            order = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            for contender in order:
                contender.run_window(arguments.window, arguments.window * shape.batch_size)
        result = [contender.summary(contenders[0]) for contender in contenders]
    shown = {
        name: getattr(arguments, name)
        for name in ("bench", "hosts", "emb_opt", "placement", "network", "device_ms", "rounds")
    }
    line = {
        "benchmark": "settings",
        **shown,
        "window_steps": arguments.window,
        "early": early_shares(batches),
        "settings": result,
    }
    print(json.dumps({**line, "load1": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d")}), flush=True)


if __name__ == "__main__":
    main()
