"""Random schedules of pretended slices on real Ray nodes: machines are lost, announced to go, come back and join under
a run that may do with one slice of two. After each, every sample counts as often as it was trained, no machine was
reserved twice, and nothing is left reserved.

python -m tests.faults.slices.schedules --seeds 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
    os.environ.update(RAY_raylet_start_wait_time_s="600", RAY_worker_niceness="0")

import numpy as np
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions import host_watch
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference
from tests.faults.elastic_process import drain
from tests.faults.slices.machines import SliceMachines, groups_held, joined
from tests.orchestrator.driver.test_equality import expected_audit
from tests.run_state import committed_state
from tests.small_job import small_job, write_small_data

TOPOLOGY = Topology.of("2x2x2", "TPU-V4")
OTHER = Topology.of("2x2x1", "TPU-V4")
ACTIONS = ("lose", "lose", "lose", "drain", "return", "half returns", "join", "other kind", "occupied")
EVERY, EPOCHS = 20, 4000
LONGEST_S = 150.0
SETTLED_S = 1.5


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that happens, and for how many seconds the run is left alone before."""

    action: str
    wait_s: float


def draw(seed: int) -> list[Act]:
    chance = random.Random(seed)
    return [Act(chance.choice(ACTIONS), chance.uniform(0.0, 3.0)) for _ in range(chance.randint(2, 4))]


class Schedule(SilentReporter):
    """Lets the acts of a seed happen, one by one, and stops the run then. Mutated."""

    def __init__(self, machines: SliceMachines, seed: int) -> None:
        self.machines, self.chance = machines, random.Random(seed)
        self.acts = draw(seed)
        self.names = [f"{letter}{seed}" for letter in "abc"]
        self.happened: list[str] = []
        self.hosts: list[int] = []
        self.twice: list[str] = []
        self.generation, self.next_s = 0, time.monotonic() + 2.0
        self.began_s, self.base = time.monotonic(), 0
        self.other: Any = None
        self.is_over = False

    def event(self, event: Event) -> None:
        print(f"  {time.monotonic() - self.began_s:6.1f} s: {event.sentence()}", file=sys.stderr, flush=True)
        if event.kind == "hosts_awaited":
            # Nothing else would end the wait, and another program that has the slice would keep it for ever.
            self._leave()
            self._complete(self.names[0])

    def window(self, report: WindowReport) -> None:
        now_s = time.monotonic()
        if report.generation != self.generation:
            self.generation, self.base = report.generation, report.committed_step
            self.hosts.append(report.num_hosts)
            self._look_for_doubles()
            self.next_s = max(self.next_s, now_s + SETTLED_S)
        if self.is_over or now_s < self.next_s or report.committed_step <= self.base:
            return
        if self.acts and now_s - self.began_s < LONGEST_S:
            act = self.acts.pop(0)
            self._act(act.action)
            self.next_s = now_s + SETTLED_S + act.wait_s
        else:
            self.is_over = True
            os.kill(os.getpid(), signal.SIGINT)

    def _look_for_doubles(self) -> None:
        nodes = Counter(
            node
            for group in placement_group_table().values()
            if group["state"] == "CREATED" and not any("-head" in name for b in group["bundles"].values() for name in b)
            for node in group["bundles_to_node_id"].values()
        )
        self.twice += [self.machines.name_of(node) for node, count in nodes.items() if count > 1]

    def _there(self) -> list[tuple[str, int]]:
        return sorted(place for place in self.machines.nodes if place[0] in self.names)

    def _act(self, action: str) -> None:
        there, machines = self._there(), self.machines
        lacking = [(name, worker) for name in self.names[:2] for worker in range(2) if (name, worker) not in there]
        what = ""
        if action in ("lose", "drain") and there:
            place = self.chance.choice(there)
            what = f"{place[0]}.{place[1]}"
            if action == "lose":
                machines.lose(*place)
            else:
                drain(machines.nodes[place].node_id, seconds=600)
        elif action == "return" and lacking:
            what = ", ".join(name for name, _ in lacking)
            for name in {name for name, _ in lacking}:
                self._complete(name)
        elif action == "half returns" and lacking:
            place = self.chance.choice(lacking)
            what = f"{place[0]}.{place[1]}"
            machines.add(*place, TOPOLOGY)
        elif action in ("join", "return", "half returns"):
            what = self.names[2]
            self._complete(what)
        elif action == "other kind":
            what = f"other{self.names[0]}"
            if (what, 0) not in machines.nodes:
                machines.add_slice(what, OTHER)
        elif action == "occupied" and self.other is None:
            what = "a head"
            self.other = placement_group([{f"TPU-{TOPOLOGY.pod_type}-head": 1}])
        self.happened.append(f"{action} {what}" if what else f"({action})")
        print(f"  {time.monotonic() - self.began_s:6.1f} s: -- {self.happened[-1]}", file=sys.stderr, flush=True)

    def _complete(self, name: str) -> None:
        for worker in range(TOPOLOGY.hosts):
            if (name, worker) not in self.machines.nodes:
                self.machines.add(name, worker, TOPOLOGY)

    def _leave(self) -> None:
        """The other program gives its slice back."""
        if self.other is not None:
            remove_placement_group(self.other)
        self.other = None

    def close_acts(self) -> None:
        """Takes away what was added."""
        self._leave()
        for place in [*self.machines.nodes]:
            self.machines.lose(*place)


def run(machines: SliceMachines, seed: int, data: str, storage: str) -> dict[str, Any]:
    """Carries out the schedule of a seed. Returns what came of it, with `problems` that should be none."""
    schedule = Schedule(machines, seed)
    for name in schedule.names[:2]:
        machines.add_slice(name, TOPOLOGY)
    print(f"seed {seed}: {', '.join(act.action for act in draw(seed))}", file=sys.stderr, flush=True)
    began_s = schedule.began_s = time.monotonic()
    try:
        result = Trainer(
            JobReference(function="tests.small_job:small_job", arguments={"folder": data, "epochs": EPOCHS}),
            scaling_config=ScalingConfig(
                topology="2x2x2", accelerator_type="TPU-V4", num_slices=(1, 2), platform="cpu", threads_per_host=1
            ),
            run_config=RunConfig(
                name=f"seed{seed}",
                storage_path=storage,
                checkpoint_config=CheckpointConfig(every_steps=EVERY),
                failure_config=FailureConfig(standby_after_s=2.0, max_failures=9),
            ),
            reporter=schedule,
        ).fit()
    finally:
        left = groups_held()
        if schedule.other is not None and left["head"]:
            left["head"].pop()
        schedule.close_acts()
    problems = [f"left reserved: {left}"] if any(left.values()) else []
    problems += [f"reserved twice: {schedule.twice}"] if schedule.twice else []
    problems += [f"not over after {len(schedule.happened)} acts"] if schedule.acts else []
    audit = committed_state(result.path)["audit/rows"][:, 0]
    if not np.allclose(audit, expected_audit(small_job(folder=data, epochs=EPOCHS), result.step), rtol=1e-5):
        problems.append("samples were not trained as often as they should")
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "step": result.step,
        "happened": schedule.happened,
        "hosts": schedule.hosts,
        "recoveries": len(result.recoveries),
        "survivors": sum(recovery.survivors for recovery in result.recoveries),
        "problems": problems,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.slices.schedules", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    options = parser.parse_args(arguments)
    host_watch.LOOK_S = 0.5
    failed, done = 0, 0
    machines = SliceMachines()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write_small_data(f"{folder}/data")
        try:
            joined(machines)
            for seed in range(options.first, options.first + options.seeds):
                try:
                    found = run(machines, seed, f"{folder}/data", f"{folder}/runs")
                except Exception as error:
                    found = {"seed": seed, "problems": [f"{type(error).__name__}: {error}"]}
                failed += bool(found["problems"])
                done += 1
                print(json.dumps(found), flush=True)
        finally:
            ray.shutdown()
            machines.close()
    print(f"{done} schedules of slices on real Ray nodes: {done - failed} green, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
