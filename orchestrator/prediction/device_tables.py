"""Tables on devices in predictions: what they hold, what devices exchange for them, and which host tables should go
there.

What a device takes to look up and update is measured with the job's own step (`dense_half`). Functions of their
arguments alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from podembed.embedding.costs.profile import TableProfile
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.decisions.table_plan import Plan
from podembed.orchestrator.prediction.choices import TableChoice
from podembed.orchestrator.prediction.demand import DenseHalf, Setting, TableDemand
from podembed.orchestrator.prediction.step import predict
from podembed.orchestrator.prediction.timeline import PredictedStep
from podembed.workers.calibration.record import Calibration
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.on_devices.declared import device_tables, weighted_features
from podembed.workers.job.on_devices.moved import on_devices
from podembed.workers.job.on_devices.rooms import level_for, room_at

MOST_PROPOSED_BYTES = 1 << 30
"""Of all tables that are proposed, on each device: the rest of it is for the model and its batches."""
LEAST_SHARE = 0.02
"""Of what hosts do for tables, that a table must have to be worth a word."""
LEAST_GAIN = 0.05
"""Of the step: predictions are no better than that."""
_WORD_BYTES = 4


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


def ids_per_bag(job: JobConfig, profiles: Sequence[TableProfile]) -> Mapping[str, float]:
    """By feature the mean length of its bags.

    Args:
      profiles: one a table.
    """
    found = {}
    for table, profile in zip(job.tables, profiles, strict=True):
        names = [name for name, feature in job.features.items() if feature.table is table]
        for name, ids in zip(names, profile.ids_per_sample, strict=True):
            found[name] = ids / _bags_per_sample(job, name)
    return found


def exchanged_bytes(job: JobConfig, lengths: Mapping[str, float]) -> float:
    """What devices exchange in a step for the tables that they hold, as the bytes of a sum over all devices.

    Of a table with fewer rows than bags, the sums of all rows are added up. Of others, all devices get the ids and
    gradients of all. That is half the way of a sum.

    Args:
      lengths: by feature the mean length of its bags.
    """
    found, weighted = 0.0, weighted_features(job)
    for table in device_tables(job):
        spec = table.spec
        if spec.optimizer is None:
            continue
        bags = {name: job.batch_size * _bags_per_sample(job, name) for name in table.features}
        if spec.optimizer.touches_all_rows or spec.num_rows <= sum(bags.values()):
            found += _WORD_BYTES * spec.num_rows * (spec.dim + 1)
            continue
        for name, count in bags.items():
            room = room_at(level_for(math.ceil(lengths.get(name, 1.0)))) * (2 if name in weighted else 1)
            found += _WORD_BYTES * count * (spec.dim + room) / 2
    return found


def _bags_per_sample(job: JobConfig, name: str) -> int:
    return math.prod(job.activation_shapes[name][:-1])


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


def device_sizes(job: JobConfig) -> Mapping[str, int]:
    """By table, the bytes of its rows and slots on a device."""
    return {
        name: table.vocabulary_size
        * ((table.optimizer or job.optimizer).row_bytes(table.dim) if table.trainable else _WORD_BYTES * table.dim)
        for name, table in zip(job.table_names, job.tables, strict=True)
    }


def _may_move(job: JobConfig, name: str) -> bool:
    try:
        on_devices(job, (name,))
    except JobError:
        return False
    return True


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


def render_held(found: Plan) -> str | None:
    """What each device holds of the tables that lie there; None where there are none."""
    tables = [table for table in found.tables if table.is_on_devices]
    if not tables:
        return None
    rows = [("on the devices", "rows", "on each device")]
    rows += [(table.spec.name, f"{table.spec.num_rows:,}", format_bytes(table.device_bytes)) for table in tables]
    rows.append(("all", "", format_bytes(sum(table.device_bytes for table in tables))))
    note = "hosts send nothing for them; each keeps its buckets of the last commit, which count among its rows"
    return f"{printable(columns(rows))}\n{note}"


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
