"""Runs to be reported: one that was really trained, and copies of it with what a test needs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.tools.metrics.point import POINT, Measurement, Point, StreamLine
from podembed.tools.metrics.segments import Segments
from podembed.workers.storage.store import Store
from tests.clock import FakeClock
from tests.small_job import small_job
from tests.training import fit_job

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"
NUM_STEPS = 12


def trained_run(data: str, storage: Path, *, name: str = "clicks") -> Path:
    """Twelve steps with commits and evaluations, in this process."""
    fit_job(
        small_job(folder=data, evaluate=True),
        storage,
        name=name,
        max_steps=NUM_STEPS,
        eval_every_steps=4,
        checkpoint_config=CheckpointConfig(every_steps=3, num_to_keep=None),
    )
    return storage / name


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def without_measurements(run: Path, to: Path) -> Path:
    """As an older version leaves a run."""
    copied(run, to)
    shutil.rmtree(to / "metrics")
    return to


def an_event(kind: str, text: str, values: Mapping[str, Any], *, unix_s: float = 2e9) -> StreamLine:
    return StreamLine(kind=kind, unix_s=unix_s, values=values, text=text)


def a_point(step: int, *measurements: Measurement, generation: int = 1, unix_s: float = 2e9) -> StreamLine:
    point = Point(generation=generation, first_step=step - 1, step=step, unix_s=unix_s, measurements=measurements)
    return StreamLine(kind=POINT, unix_s=unix_s, values=point.to_json(), point=point)


def an_evaluation(step: int, *, auc: float, **others: float) -> StreamLine:
    """Its point, with other series beside the AUC."""
    measurements = (
        Measurement("evaluation", auc, {"metric": "auc"}),
        *(Measurement(name, value) for name, value in others.items()),
    )
    point = Point(generation=1, first_step=step, step=step, unix_s=2e9, measurements=measurements)
    return StreamLine(kind=POINT, unix_s=2e9, values=point.to_json(), point=point)


def add_lines(run: Path, *lines: StreamLine) -> None:
    """As a later driver writes them; another one with each call."""
    number = len([*run.glob("metrics/9*-beef")])
    driver = f"{9_000_000_000_000 + number}-beef"
    segments = Segments(Store(str(run)), driver=driver, monotonic_s=FakeClock().monotonic_s)
    for line in lines:
        segments.write(line)
    segments.close()


def a_fault(cause: str) -> list[StreamLine]:
    """The events of a fault and of the recovery from it."""
    lost = {"generation": 1, "cause": cause, "workers": [], "fault": "host", "base_step": 9}
    recovery = {"generation": 2, "cause": cause, "base_step": 9, "discarded_steps": 2, "total_s": 4.0}
    return [
        an_event("generation_lost", f"fault: {cause}", lost),
        an_event("recovery", f"recovered from {cause}", recovery, unix_s=2e9 + 5),
    ]
