"""What fault points cost a run without faults: nanoseconds a point, points a step, and their share of a step. Prints
one JSON line.

    python benchmarks/fault_points.py [--steps 200]

A point without a plan is one comparison; a phase, which is a point too, was a context manager before. The points of a
step count themselves in a run of the tiny chaos job in this process. The step's time is that of the same run without a
plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import timeit

from podembed.jobs.chaos.jobs import tiny
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.plan import POINTS, Fault, FaultPlan
from podembed.workers.liveness.progress import Tracker


class Counted(FaultPoints):
    """Counts its points instead of striking."""

    passed = 0

    def hit(self, point: str, **_: object) -> None:  # type: ignore[override]
        Counted.passed += 1


def nanoseconds(statement: str, names: dict[str, object]) -> float:
    """Of one execution: the least of seven runs of 200,000."""
    return min(timeit.repeat(statement, globals=names, number=200_000, repeat=7)) / 200_000 * 1e9


def train(folder: str, name: str, *, steps: int, plan: FaultPlan | None) -> float:
    """Seconds of a step of the tiny job, the median over its windows."""
    result = Trainer(
        tiny(folder=f"{folder}/data", epochs=steps // 20),
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(
            name=name,
            storage_path=folder,
            checkpoint_config=CheckpointConfig(every_steps=steps),
            fault_plan=plan,
        ),
        reporter=SilentReporter(),
    ).fit()
    return 96 / result.median_samples_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    off, on = Tracker(), Tracker()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        unreachable = tuple(
            Fault(point=point, action="kill", step=-1) for point in POINTS if not point.startswith("storage")
        )
        plan = FaultPlan(folder=folder, faults=unreachable)
        on.faults = FaultPoints.of(plan, "host 0")
        point_off = nanoseconds("tracker.point('step.done')", {"tracker": off})
        point_on = nanoseconds("tracker.point('step.done')", {"tracker": on})
        comparison = nanoseconds("if faults is not None: pass", {"faults": None})
        empty = nanoseconds("pass", {})
        step_s = statistics.median(train(folder, f"off-{at}", steps=steps, plan=None) for at in range(3))
        real = FaultPoints.of
        FaultPoints.of = staticmethod(lambda plan, rank, acts=None: plan and Counted(plan, rank))  # type: ignore[method-assign]
        Counted.passed = 0
        train(folder, "counted", steps=steps, plan=plan)
        FaultPoints.of = real  # type: ignore[method-assign]
    points_a_step = Counted.passed / steps
    print(
        json.dumps(
            {
                "comparison_ns": round(comparison - empty, 1),
                "point_without_plan_ns": round(point_off, 1),
                "point_with_plan_ns": round(point_on, 1),
                "points_a_step": round(points_a_step, 1),
                "step_ms": round(step_s * 1e3, 3),
                "share_of_a_step": f"{points_a_step * point_off * 1e-9 / step_s:.2e}",
                "seconds": round(time.monotonic() - started_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
