"""Which schedules a campaign runs."""

from __future__ import annotations

import re

from podembed.jobs.chaos.curated import curated
from podembed.jobs.chaos.drawn import drawn
from podembed.jobs.chaos.schedule import RunShape, Schedule
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.faults.plan import read_plan

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
