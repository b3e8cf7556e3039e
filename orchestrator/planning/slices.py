"""What a run on TPU slices needs and sends, and what the loss of a slice costs. Counted from the job and its plan.

Host processes exchange ids, rows and activations over the data center network (DCN), also inside a slice. Chips add up
the gradients of the dense model over the links of their slice (ICI), and then between slices over DCN. That is how XLA
does it where slices are alike. No run here has seen a TPU, so these are counts and no measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from podembed.orchestrator.api.text import columns, format_bytes, plural, printable
from podembed.orchestrator.api.topology import Topology
from podembed.orchestrator.decisions.table_plan import PlacementPlan
from podembed.workers.device.dense_half import initial
from podembed.workers.input.table_profile import TableProfile
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import padded_ids, padding_level
from podembed.workers.job.tables import device_tables, weighted_features

_WORD_BYTES = 4  # of a float, and of an id on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSlices:
    """A job on some slices.

    Attributes:
      held_bytes: rows and slots of the host that has most.
      all_bytes, all_rows: bytes and rows of all hosts.
      sent_bytes: bytes that a host sends to others in a step over DCN, in the mean.
      gradient_bytes: bytes of the dense model, and of tables on the devices.
      lost_bytes, lost_rows: bytes and rows of the slice that has most; rows in the mean, as if all had equally
        many bytes.
    """

    topology: Topology
    num_slices: int
    held_bytes: int
    all_bytes: int
    all_rows: int
    sent_bytes: float
    gradient_bytes: int
    lost_bytes: int
    lost_rows: int

    @property
    def num_hosts(self) -> int:
        return self.num_slices * self.topology.hosts

    @property
    def ici_bytes(self) -> float:
        """Bytes that a chip sends in a step to sum gradients in its slice, in both halves of an all-reduce."""
        return 2 * (1 - 1 / self.topology.chips) * self.gradient_bytes

    @property
    def dcn_gradient_bytes(self) -> float:
        """Bytes that the chips of a host send in a step to other slices: each its part of the slice's sum."""
        part = self.gradient_bytes * self.topology.chips_per_host / self.topology.chips
        return 2 * (1 - 1 / self.num_slices) * part

    @property
    def reading_hosts(self) -> int:
        """Hosts that read the rows of a lost slice: those that are left, or those of its replacement."""
        return self.topology.hosts * max(1, self.num_slices - 1)


def on_slices(
    job: JobConfig,
    plan: PlacementPlan,
    profiles: Sequence[TableProfile],
    *,
    topology: Topology,
    num_slices: int,
    sent_bytes: float,
) -> OnSlices:
    """Counts what a job needs on slices.

    Args:
      plan: of its tables, on all hosts. Hosts of a slice have numbers in a row.
      profiles: one a table.
      sent_bytes: bytes that a host sends in a step for tables.
    """
    held = [host.shard_bytes for host in plan.hosts]
    of_slices = [sum(held[first : first + topology.hosts]) for first in range(0, len(held), topology.hosts)]
    all_rows, all_bytes = sum(table.spec.num_rows for table in plan.tables), sum(held)
    return OnSlices(
        topology=topology,
        num_slices=num_slices,
        held_bytes=max(held),
        all_bytes=all_bytes,
        all_rows=all_rows,
        sent_bytes=sent_bytes,
        gradient_bytes=gradient_bytes(job) + math.ceil(exchanged_bytes(job, ids_per_bag(job, profiles))),
        lost_bytes=max(of_slices),
        lost_rows=round(all_rows * max(of_slices) / all_bytes) if all_bytes else 0,
    )


def gradient_bytes(job: JobConfig) -> int:
    """Bytes of the gradients that devices add up in a step: all parameters, as float32, and the loss."""
    params, _ = jax.eval_shape(lambda: initial(job, jax.random.key(job.seed)))
    return _WORD_BYTES * (1 + sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)))


def ids_per_bag(job: JobConfig, profiles: Sequence[TableProfile]) -> Mapping[str, float]:
    """The mean length of each feature's bags.

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
      lengths: mean length of bags, by feature.
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
            room = padded_ids(padding_level(math.ceil(lengths.get(name, 1.0)))) * (2 if name in weighted else 1)
            found += _WORD_BYTES * count * (spec.dim + room) / 2
    return found


def _bags_per_sample(job: JobConfig, name: str) -> int:
    return math.prod(job.activation_shapes[name][:-1])


def render_slices(found: OnSlices) -> str:
    """Text for `podembed plan`."""
    topology = found.topology
    each = f"{format_bytes(found.lost_bytes / found.reading_hosts)} each"
    lost = f"about {found.lost_rows:,} of {found.all_rows:,} rows, {format_bytes(found.lost_bytes)}"
    rows = [
        (f"{plural(found.num_slices, 'slice')} of {topology}", ""),
        ("hosts", f"{found.num_hosts}, {topology.hosts} a slice with {plural(topology.chips_per_host, 'chip')} each"),
        ("devices", f"{found.num_slices * topology.chips}, {topology.chips} a slice"),
        ("the fullest host holds", f"{format_bytes(found.held_bytes)} of {format_bytes(found.all_bytes)}"),
        ("a host sends over DCN, a step", f"{format_bytes(found.sent_bytes)} of ids, rows and activations"),
        ("and to other slices", f"{format_bytes(found.dcn_gradient_bytes)} of gradients"),
        ("a chip sends over ICI, a step", f"{format_bytes(found.ici_bytes)} of gradients"),
        ("a lost slice held", lost),
        (f"then {plural(found.reading_hosts, 'host')} read from storage", each),
        ("and all do again", "the steps since the last commit"),
    ]
    return printable(columns(rows)) + "\ncounted, not measured: no run has seen a TPU"
