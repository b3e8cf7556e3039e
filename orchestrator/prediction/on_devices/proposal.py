"""Which host tables devices could hold, and whether that pays. Functions of their arguments alone, but for
`dense_and_proposal`, which measures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from podembed.embedding.costs.profile import TableProfile
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.decisions.table_plan import Plan
from podembed.orchestrator.prediction.choices import TableChoice, table_choices
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.dense_half import dense_halves
from podembed.orchestrator.prediction.forecast import demands
from podembed.orchestrator.prediction.on_devices.exchanged import device_sizes, ids_per_bag
from podembed.orchestrator.prediction.step import predict
from podembed.orchestrator.prediction.timeline import PredictedStep
from podembed.workers.calibration.record import Calibration
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.on_devices.moved import on_devices
from podembed.workers.job.reference import JobReference

MOST_PROPOSED_BYTES = 1 << 30
"""Of all tables that are proposed, on each device: the rest of it is for the model and its batches."""
LEAST_SHARE = 0.02
"""Of what hosts do for tables, that a table must have to be worth a word."""
LEAST_GAIN = 0.05
"""Of the step: predictions are no better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedTable:
    """A host table that devices could hold.

    Attributes:
      host_s: seconds of a host in the mean that a step then takes less, messages included.
      sent_bytes: by a host in a step, in the mean, that fall away.
      device_bytes: rows and slots on each device.
    """

    name: str
    host_s: float
    sent_bytes: float
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The tables of a job that devices could hold, all of them together.

    Attributes:
      before, after: the step as tables lie now, and with these on the devices.
    """

    tables: tuple[ProposedTable, ...]
    before: PredictedStep
    after: PredictedStep

    @property
    def pays(self) -> bool:
        """Whether the step gets so much shorter that it is worth saying."""
        return self.after.step_s <= (1 - LEAST_GAIN) * self.before.step_s

    @property
    def device_bytes(self) -> int:
        """That each device holds of them."""
        return sum(table.device_bytes for table in self.tables)


def candidates(job: JobConfig, tables: Sequence[TableChoice]) -> tuple[str, ...]:
    """Host tables that may lie on devices, are busy, and fit there together; those that save most a byte come first.

    Args:
      tables: what each costs on hosts, in the job's order.
    """
    total_s = sum(table.cost.host_s for table in tables)
    sizes = device_sizes(job)
    busy = [
        table
        for table, config in zip(tables, job.tables, strict=True)
        if not config.is_on_devices and table.cost.host_s >= LEAST_SHARE * total_s > 0 and _may_move(job, table.name)
    ]
    found, held = [], 0
    for table in sorted(busy, key=lambda table: (-table.cost.host_s / sizes[table.name], table.name)):
        if held + sizes[table.name] <= MOST_PROPOSED_BYTES:
            found.append(table.name)
            held += sizes[table.name]
    return tuple(found)


def _may_move(job: JobConfig, name: str) -> bool:
    try:
        on_devices(job, (name,))
    except JobError:
        return False
    return True


def dense_and_proposal(
    job: JobConfig,
    reference: JobReference | None,
    plan: Plan,
    profiles: Sequence[TableProfile],
    setting: Setting,
    *,
    calibration: Calibration,
) -> tuple[DenseHalf, Proposal | None]:
    """The dense half of a job, and what it would be worth to put its busy tables on the devices. One child measures
    both steps, so that they can be compared.

    Args:
      reference: by which a child builds the job; None leaves out the dense half, and proposes nothing.
      plan: of its tables.
      profiles: one a table.

    Raises:
      MeasuringFailed: a child ended without an answer.
    """
    here = demands(job, plan, profiles)
    costs = table_choices(here, setting, whys=[table.why for table in plan.tables], calibration=calibration)
    names = candidates(job, costs) if reference is not None else ()
    dense, *others = dense_halves(
        job,
        reference,
        calibration,
        num_hosts=setting.num_hosts,
        num_processes=min(setting.share_a_machine, calibration.machine.cpus),
        threads=setting.threads,
        lengths=ids_per_bag(job, profiles),
        moved=((), names) if names else ((),),
    )
    if not others:
        return dense, None
    found = proposal(job, names, here, costs, setting, calibration=calibration, dense=dense, dense_with=others[0])
    return dense, found


def proposal(
    job: JobConfig,
    names: Collection[str],
    demands: Sequence[TableDemand],
    choices: Sequence[TableChoice],
    setting: Setting,
    *,
    calibration: Calibration,
    dense: DenseHalf,
    dense_with: DenseHalf,
) -> Proposal:
    """What it would be worth to put these tables on the devices.

    Args:
      demands, choices: of all tables as they lie now.
      dense: the device step of the job.
      dense_with: the same with these tables on the devices.
    """
    moved = [replace(table, is_on_devices=table.is_on_devices or table.spec.name in names) for table in demands]
    sizes = device_sizes(job)
    return Proposal(
        tables=tuple(
            ProposedTable(
                name=table.name,
                host_s=table.cost.host_s,
                sent_bytes=table.cost.sent_bytes,
                device_bytes=sizes[table.name],
            )
            for table in sorted(choices, key=lambda table: -table.cost.host_s)
            if table.name in names
        ),
        before=predict(demands, setting, calibration=calibration, dense=dense),
        after=predict(moved, setting, calibration=calibration, dense=dense_with),
    )


def render_proposal(found: Proposal) -> str:
    """What `podembed plan` says of tables that devices could hold: a table if it pays, else a line."""
    before, after = found.before, found.after
    steps = f"{1e3 * after.step_s:.2f} ms a step instead of {1e3 * before.step_s:.2f}"
    devices = f"a device works {1e3 * after.device_s:.2f} ms of it instead of {1e3 * before.device_s:.2f}"
    if not found.pays:
        names = ", ".join(table.name for table in found.tables[:3]) + (", ..." if len(found.tables) > 3 else "")
        return printable(f"place='device' does not pay for {names}: predicted {steps}, and {devices}")
    rows = [("place='device' pays for", "hosts save, ms a step", "and send less", "on each device")]
    for table in found.tables:
        cells = f"{1e3 * table.host_s:.3f}", format_bytes(table.sent_bytes), format_bytes(table.device_bytes)
        rows.append((table.name, *cells))
    total = f"{plural(len(found.tables), 'table')} there: predicted {steps}; {devices}"
    held = f"each device holds {format_bytes(found.device_bytes)} more of rows and slots"
    return f"{printable(columns(rows))}\n{printable(f'{total}; {held}')}"
