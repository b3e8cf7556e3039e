"""What a run on TPU slices needs and sends, and what the loss of a slice costs. Counted from the job and its plan.

Host processes exchange ids, rows and activations over the data center network (DCN), also inside a slice. Chips add up
the gradients of the dense model over the links of their slice (ICI), and then between slices over DCN. That is how XLA
does it where slices are alike. No run here has seen a TPU, so these are counts and no measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from podembed.embedding.costs.profile import TableProfile
from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.table_plan import Plan
from podembed.orchestrator.prediction.demand import Setting, traffic_of
from podembed.orchestrator.prediction.forecast import demands
from podembed.orchestrator.prediction.on_devices.exchanged import exchanged_bytes, ids_per_bag
from podembed.orchestrator.prediction.parts import sent_bytes
from podembed.workers.device.dense_half import initial
from podembed.workers.job.job import JobConfig

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesForecast:
    """A job on some slices.

    Attributes:
      held_bytes: rows and slots of the host that has most.
      all_bytes, all_rows: of all hosts.
      exchanged_bytes: that a host sends to others in a step over DCN, in the mean.
      gradient_bytes: of the dense model, and of tables on the devices.
      lost_bytes, lost_rows: of the slice that has most; rows in the mean, as if all had equally many bytes.
    """

    topology: Topology
    num_slices: int
    held_bytes: int
    all_bytes: int
    all_rows: int
    exchanged_bytes: float
    gradient_bytes: int
    lost_bytes: int
    lost_rows: int

    @property
    def num_hosts(self) -> int:
        return self.num_slices * self.topology.hosts

    @property
    def ici_bytes(self) -> float:
        """That a chip sends in a step: a sum of the gradients in its slice, in both halves of an all-reduce."""
        return 2 * (1 - 1 / self.topology.chips) * self.gradient_bytes

    @property
    def dcn_gradient_bytes(self) -> float:
        """That the chips of a host send in a step to other slices: each its part of the slice's sum."""
        part = self.gradient_bytes * self.topology.chips_per_host / self.topology.chips
        return 2 * (1 - 1 / self.num_slices) * part

    @property
    def reading_hosts(self) -> int:
        """That read what a lost slice held: those that are left, or those of a slice that takes its place."""
        return self.topology.hosts * max(1, self.num_slices - 1)

    def reading_s(self, byte_s: float) -> float:
        """Seconds to read what a lost slice held, if each host gets a byte in so many seconds."""
        return self.lost_bytes / self.reading_hosts * byte_s


def forecast_slices(
    job: JobConfig,
    plan: Plan,
    profiles: Sequence[TableProfile],
    setting: Setting,
    *,
    topology: Topology,
    num_slices: int,
) -> SlicesForecast:
    """Counts what a job needs on slices.

    Args:
      plan: of its tables, on all hosts. Hosts of a slice have numbers in a row.
      profiles: one a table.
      setting: of all hosts, each on a machine of its own.
    """
    held = [host.shard_bytes for host in plan.hosts]
    of_slices = [sum(held[first : first + topology.hosts]) for first in range(0, len(held), topology.hosts)]
    all_rows, all_bytes = sum(table.spec.num_rows for table in plan.tables), sum(held)
    return SlicesForecast(
        topology=topology,
        num_slices=num_slices,
        held_bytes=max(held),
        all_bytes=all_bytes,
        all_rows=all_rows,
        exchanged_bytes=sent_bytes(traffic_of(demands(job, plan, profiles), setting), setting),
        gradient_bytes=gradient_bytes(job) + math.ceil(exchanged_bytes(job, ids_per_bag(job, profiles))),
        lost_bytes=max(of_slices),
        lost_rows=round(all_rows * max(of_slices) / all_bytes) if all_bytes else 0,
    )


def gradient_bytes(job: JobConfig) -> int:
    """Of the gradients that devices add up in a step: those of all parameters, as float32, and the loss."""
    params, _ = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
    return _FLOAT_BYTES * (1 + sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)))


def render_slices(found: SlicesForecast, *, byte_s: float | None) -> str:
    """Text for `podembed plan`.

    Args:
      byte_s: of this machine's constants, for a byte between hosts; None where there are none.
    """
    topology = found.topology
    each = f"{format_bytes(found.lost_bytes / found.reading_hosts)} each"
    lost = f"about {found.lost_rows:,} of {found.all_rows:,} rows, {format_bytes(found.lost_bytes)}"
    if byte_s is not None:
        rate = format_bytes(1 / byte_s)
        each += f", in {found.reading_s(byte_s):.1f} s if it comes as fast as between hosts here ({rate}/s)"
    rows = [
        (f"{plural(found.num_slices, 'slice')} of {topology}", ""),
        ("hosts", f"{found.num_hosts}, {topology.hosts} a slice with {plural(topology.chips_per_host, 'chip')} each"),
        ("devices", f"{found.num_slices * topology.chips}, {topology.chips} a slice"),
        ("the fullest host holds", f"{format_bytes(found.held_bytes)} of {format_bytes(found.all_bytes)}"),
        ("a host sends over DCN, a step", f"{format_bytes(found.exchanged_bytes)} of ids, rows and activations"),
        ("and to other slices", f"{format_bytes(found.dcn_gradient_bytes)} of gradients"),
        ("a chip sends over ICI, a step", f"{format_bytes(found.ici_bytes)} of gradients"),
        ("a lost slice held", lost),
        (f"then {plural(found.reading_hosts, 'host')} read from storage", each),
        ("and all do again", "the steps since the last commit"),
    ]
    return printable(columns(rows)) + "\ncounted, not measured: no run has seen a TPU"
