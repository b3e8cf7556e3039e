"""`plans/`: how tables lie in runs of older versions, which chose that by predicted times.

A file says how tables lie from a step on, on so many hosts. That decides in which order numbers are added. So what is
recorded is followed, and nothing new is recorded. Such a run also has a `PLANNING.json`, from which those plans were
made; nothing reads it any more. On other numbers of hosts than were planned, tables lie by the rule of all other runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from podembed.embedding.lookup.placement import Chosen
from podembed.workers.storage.records import decode, read_document
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused

FOLDER = "plans"
_FILE = re.compile(r"s(\d{9,18})-h(\d{5,9})\.json")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRecord:
    """A table's `Chosen`, with its name."""

    name: str
    is_whole: bool
    pools: bool
    work: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """How tables lie from a step on.

    Attributes:
      step: from which on, on `num_hosts` hosts.
      why: this plan was chosen.
      step_s, other_s: predicted seconds of the hosts in a step with it, and with the plan before it. Before the first
        plan that is the rule.
      tables: all, in the job's order; none of them where tables lie by the rule.
    """

    step: int
    num_hosts: int
    why: str
    step_s: float
    other_s: float
    tables: tuple[ChosenRecord, ...]

    @property
    def chosen(self) -> tuple[Chosen, ...] | None:
        """As `place_tables` takes it; None for the rule."""
        return (
            tuple(
                Chosen(is_whole=one.is_whole, pools=one.pools, work=one.work, reason=one.reason) for one in self.tables
            )
            or None
        )


def read_plan(store: Store, *, step: int, num_hosts: int) -> PlanRecord | None:
    """The plan that is in force at a step on so many hosts; None where none was recorded.

    Raises:
      DocumentRefused: it is damaged.
    """
    newest = max((found for found in plan_steps(store, num_hosts=num_hosts) if found <= step), default=None)
    if newest is None:
        return None
    name = plan_file(newest, num_hosts)
    record = decode(PlanRecord, name, read_document(store, name, max_bytes=_MAX_BYTES), max_bytes=_MAX_BYTES)
    if (record.step, record.num_hosts) != (newest, num_hosts):
        found = f"the plan of step {record.step} on {record.num_hosts} hosts"
        raise DocumentRefused(name, found, "the one that the file is named after")
    return record


def plan_steps(store: Store, *, num_hosts: int) -> list[int]:
    """The steps from which on there are plans for so many hosts, rising."""
    return sorted(step for step, hosts in plan_names(store) if hosts == num_hosts)


def damaged_plans(store: Store) -> list[DocumentRefused]:
    """Records that cannot be read."""
    found: list[DocumentRefused] = []
    for step, hosts in plan_names(store):
        try:
            read_plan(store, step=step, num_hosts=hosts)
        except DocumentRefused as error:
            found.append(error)
    return found


def plan_file(step: int, num_hosts: int) -> str:
    """Name of the plan that counts from a step on."""
    return f"{FOLDER}/s{step:09d}-h{num_hosts:05d}.json"


def plan_names(store: Store) -> list[tuple[int, int]]:
    """Step and hosts of each plan."""
    matches = [_FILE.fullmatch(name) for name in sorted(store.children(FOLDER))]
    return [(int(match.group(1)), int(match.group(2))) for match in matches if match is not None]
