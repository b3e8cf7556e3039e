"""Which schedules a campaign runs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from podembed.jobs.chaos.plan_file import describe, read_plan
from podembed.jobs.chaos.process_faults import (
    driver_killed,
    frozen_or_slow,
    killed_in_a_step,
    killed_together,
    killed_while_restoring,
    killed_while_saving,
    signals_and_sizes,
)
from podembed.jobs.chaos.schedule import DEVICE_POINTS, PHASES, RunShape, Schedule, kill
from podembed.jobs.chaos.storage_faults import storage_that_fails, storage_that_lies
from podembed.jobs.chaos.value_faults import frames, memory_and_values
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.faults.plan import Fault
from podembed.workers.liveness.worker import Worker

_SELECTOR = re.compile(r"F\d{1,2}(\.\d{1,2})?|all")


def select(
    shape: RunShape, *, only: str, num_random: int, first_seed: int, plan: str | None, in_process: bool
) -> list[Schedule]:
    """The requested ones, in the order in which they run.

    Args:
      only: numbers and labels of the curated list, separated by commas. Empty takes the whole list, or none of it
        where random ones are requested.
      num_random: how many are drawn, the first of them with `first_seed`.
      plan: file of a plan of faults, which is then the only schedule.
      in_process: leaves out what means nothing for one host in the driver's own process.

    Raises:
      ConfigurationError: nothing is selected.
      FaultPlanError: `plan` is no plan.
    """
    if plan is not None:
        return [Schedule(number="plan", label="plan", title=plan, faults=read_plan(plan).faults)]
    chosen: list[Schedule] = []
    wanted = {part.strip() for part in only.split(",") if part.strip()}
    if unknown := [part for part in wanted if not _SELECTOR.fullmatch(part)]:
        raise ConfigurationError(f"Found --only {','.join(unknown)}. Expected numbers such as F1 or F6.3, or all.")
    if wanted or not num_random:
        known = [one for one in curated(shape) if not (in_process and one.needs_hosts)]
        chosen = [one for one in known if not wanted or not wanted.isdisjoint(("all", one.number, one.label))]
        if not chosen:
            numbers = ", ".join(dict.fromkeys(one.number for one in known))
            raise ConfigurationError(
                f"Found --only {only}. Expected some of {numbers}; docs/faults.md says where the others are shown."
            )
    return chosen + [drawn(first_seed + at, shape) for at in range(num_random)]


def curated(shape: RunShape) -> list[Schedule]:
    """Every schedule of the curated list, in the order of the faults' numbers, with its label."""
    parts: tuple[Callable[[RunShape], list[Schedule]], ...] = (
        killed_in_a_step,
        killed_together,
        frozen_or_slow,
        killed_while_saving,
        killed_while_restoring,
        driver_killed,
        frames,
        storage_that_fails,
        storage_that_lies,
        memory_and_values,
        signals_and_sizes,
    )
    found: list[Schedule] = []
    for schedule in (schedule for part in parts for schedule in part(shape)):
        place = 1 + sum(before.number == schedule.number for before in found)
        found.append(replace(schedule, label=f"{schedule.number}.{place}"))
    return found


def drawn(seed: int, shape: RunShape) -> Schedule:
    """A random schedule of one to three faults that a run must survive with the same bytes."""
    rng = random.Random(seed)
    menus: Sequence[Callable[[random.Random, RunShape], Fault]] = (
        _worker_kill,
        _worker_kill,
        _save_fault,
        _driver_kill,
        _storage_error,
    )
    # At most two kills in one interval between commits: the run's patience is for three.
    faults = [rng.choice(menus)(rng, shape) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    flags = ("--full-every", "3") if rng.random() < 0.3 else ()
    title = "; ".join(describe(fault) for fault in faults)
    return Schedule(number="random", label=f"seed {seed}", title=title, faults=tuple(faults), flags=flags)


def _worker_kill(rng: random.Random, shape: RunShape) -> Fault:
    host, step = rng.randrange(shape.num_hosts), rng.randrange(1, shape.num_steps - 1)
    if rng.random() < 0.3:
        return kill(rng.choice(DEVICE_POINTS), str(Worker("device", host)), step=step)
    return kill(
        rng.choice([point for names in PHASES.values() for point in names if "end" not in point]),
        str(Worker("host", host)),
        step=step,
    )


def _save_fault(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    rank, match = str(Worker("host", rng.randrange(shape.num_hosts))), f"data/s{commit:09d}"
    if rng.random() < 0.5:
        return Fault(point="storage.write", action="kill_midway", rank=rank, match=match, nth=rng.randrange(1, 4))
    return kill(rng.choice(("storage.write", "storage.written")), rank, match=match, nth=rng.randrange(1, 4))


def _driver_kill(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    return rng.choice(
        (
            kill("driver.window", "driver", step=commit),
            kill("storage.create", "driver", match=f"commit/s{commit:09d}"),
            kill("storage.written", "driver", match=f"commit/s{commit:09d}"),
            kill("storage.written", "driver", match=r"lease/.*claim"),
            kill("storage.create", "driver", match=r"lease/.*base"),
        )
    )


def _storage_error(rng: random.Random, shape: RunShape) -> Fault:
    commit = rng.randrange(1, shape.num_steps // shape.commit_every + 1) * shape.commit_every
    rank, match = str(Worker("host", rng.randrange(shape.num_hosts))), f"data/s{commit:09d}"
    return rng.choice(
        (
            Fault(point="storage.write", action="http_error", rank=rank, match=match, times=2, arguments={"code": 503}),
            Fault(point="storage.write", action="lost_answer", rank=rank, match=match),
            Fault(point="storage.create", action="lost_answer", rank="driver", match=f"commit/s{commit:09d}"),
            Fault(point="storage.create", action="precondition_failed", rank="driver", match=f"commit/s{commit:09d}"),
        )
    )
