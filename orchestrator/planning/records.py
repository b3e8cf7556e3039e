"""`PLANNING.json` and `plans/`: what a run plans with, and the plans that it followed.

`PLANNING.json` is written once, before the first commit of a run, on a machine whose constants are known. It has these
constants and what samples ask of each table. So every later plan is a function of the run's folder, wherever it goes
on. A file of `plans/` says how tables lie from a step on, on so many hosts. It is written before anything of that plan
is trained, and never changed: a restart follows what it says, and so do newer programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from podembed.embedding.costs.profile import TableProfile
from podembed.embedding.lookup.placement import Chosen
from podembed.workers.calibration.record import Calibration, has_another_format
from podembed.workers.storage.errors import NameNotFound
from podembed.workers.storage.records import decode, encode, from_document, read_document
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused, unseal

PLANNING_FILE = "PLANNING.json"
FOLDER = "plans"
_FILE = re.compile(r"s(\d{9,18})-h(\d{5,9})\.json")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """A `TableProfile`; `samples` and `rows` are its curve of distinct rows."""

    ids_per_sample: tuple[float, ...]
    samples: tuple[float, ...]
    rows: tuple[float, ...]
    hot_share: float
    free_bags: float
    free_rows: float
    is_measured: bool

    @staticmethod
    def of(profile: TableProfile) -> ProfileRecord:
        return ProfileRecord(
            ids_per_sample=profile.ids_per_sample,
            samples=tuple(count for count, _ in profile.distinct),
            rows=tuple(rows for _, rows in profile.distinct),
            hot_share=profile.hot_share,
            free_bags=profile.free_bags,
            free_rows=profile.free_rows,
            is_measured=profile.is_measured,
        )

    @property
    def profile(self) -> TableProfile:
        return TableProfile(
            ids_per_sample=self.ids_per_sample,
            distinct=tuple(zip(self.samples, self.rows, strict=False)),
            hot_share=self.hot_share,
            free_bags=self.free_bags,
            free_rows=self.free_rows,
            is_measured=self.is_measured,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRecord:
    """What a run plans with.

    Attributes:
      threads: of a host's kernels when the run began. A later start may have others, and follows the same plans.
      profiles: one a table, in the job's order.
    """

    calibration: Calibration
    threads: int
    profiles: tuple[ProfileRecord, ...]


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


def read_planning(store: Store) -> PlanningRecord | None:
    """None where a run has none: it was begun without constants, or by another version.

    Raises:
      DocumentRefused: it is damaged.
    """
    try:
        data = read_document(store, PLANNING_FILE, max_bytes=_MAX_BYTES)
    except NameNotFound:
        return None
    document = unseal(PLANNING_FILE, data, max_bytes=_MAX_BYTES)
    # Another version's constants mean other things. Plans that were made with them are recorded and stay.
    if has_another_format(document.get("calibration")):
        return None
    return from_document(PlanningRecord, PLANNING_FILE, document)


def write_planning(store: Store, record: PlanningRecord) -> None:
    """Of a new run; leaves the record of another driver."""
    store.create_exclusive(PLANNING_FILE, encode(record))


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
    """From which steps on there are plans for so many hosts, rising."""
    return sorted(step for step, hosts in _names(store) if hosts == num_hosts)


def write_plan(store: Store, record: PlanRecord) -> None:
    """For the holder of the lease. A plan that is there already stays."""
    store.create_exclusive(plan_file(record.step, record.num_hosts), encode(record))


def damaged_plans(store: Store) -> list[DocumentRefused]:
    """Records that cannot be read."""
    found: list[DocumentRefused] = []
    for step, hosts in [(None, 0), *_names(store)]:
        try:
            if step is None:
                read_planning(store)
            else:
                read_plan(store, step=step, num_hosts=hosts)
        except DocumentRefused as error:
            found.append(error)
    return found


def plan_file(step: int, num_hosts: int) -> str:
    """Name of the plan that counts from a step on."""
    return f"{FOLDER}/s{step:09d}-h{num_hosts:05d}.json"


def _names(store: Store) -> list[tuple[int, int]]:
    """Step and hosts of each plan."""
    matches = [_FILE.fullmatch(name) for name in sorted(store.children(FOLDER))]
    return [(int(match.group(1)), int(match.group(2))) for match in matches if match is not None]
