"""The lookups of one host of a job, and what is looked up of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from podembed.embedding.lookup.activation_layout import Blocks
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.workers.data.batch import Batch
from podembed.workers.device.shared_memory import ChannelEnd
from podembed.workers.host.spec import HostSpec
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import PaddingLevels, SequencePadding
from podembed.workers.job.tables import Bags, cut_ways, feature_bindings, has_weighted_ids, needs_rows, table_specs
from podembed.workers.thread_pool import ThreadPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLookups:
    """The lookups of a host.

    Attributes:
      both: those of all tables, and of the features that hosts look up, in the job's order. Activations lie as
        `both.layout` says in the memory shared with the device process.
      bags: what is looked up of a batch.
      num_buffers: batches that may be in flight at once.
      thread_pool: threads of the host's kernels; to be closed.
    """

    both: Lookups
    bags: Bags
    num_buffers: int
    thread_pool: ThreadPool

    @staticmethod
    def build(
        spec: HostSpec,
        job: JobConfig,
        *,
        num_samples: int,
        tables: Sequence[Table] | None = None,
    ) -> HostLookups:
        """The lookups of a job on a host.

        Args:
          num_samples: of this host's share of a batch, with padding.
          tables: that a survivor brings along; None allocates new ones.
        """
        # Where the lookup of a step begins before the device is done with the one before, each has memory of its own.
        num_buffers = 2 if job.overlap is not False or job.staleness else 1
        specs = table_specs(job, spec.table_buckets)
        thread_pool = ThreadPool(spec.threads)
        pools_cut = spec.pools_cut
        if pools_cut is None:
            ways = cut_ways(job, specs, bag_lengths(job, spec.train_index), num_hosts=spec.num_hosts)
            pools_cut = tuple(way.is_pooled for way in ways)
        both = Lookups.build(
            specs,
            [binding for binding in feature_bindings(job) if binding.name in job.host_features],
            spec.placement,
            host=spec.host,
            num_hosts=spec.num_hosts,
            num_samples=num_samples,
            inner=[job.activation_shapes[name][:-1] for name in job.host_features],
            needs_rows=needs_rows(job),
            pools_cut=list(pools_cut),
            quantization=[table.quantization_config for table in job.tables],
            num_buffers=num_buffers,
            tables=tables,
            thread_pool=thread_pool,
        )
        compile_kernels(
            specs,
            num_threads=thread_pool.num_threads,
            has_weights=has_weighted_ids(job),
            # With several hosts also where no row travels now: with another number of them some may, and to compile
            # then would lengthen a recovery.
            rows_travel=spec.num_hosts > 1 or both.rows.is_used,
        )
        return HostLookups(both=both, bags=Bags(job), num_buffers=num_buffers, thread_pool=thread_pool)


Lengths = Mapping[str, np.ndarray]
"""By feature, int64 `[num_samples]` of the host's share, 0 on padding."""


class HostSequences:
    """The sequences of one host in one generation, from their lengths to their places in the memory of the device.

    A batch says how long its sequences are (`lengths`, `levels`). All hosts agree on the room that they get, together
    with the exchange of ids. Then the positions are laid out for the devices (`laid_out`). A job without sequences has
    nothing to do here.

    Args:
      sequences: as `JobConfig.sequences`.
      features: those that hosts look up, in the job's order.
      device: the end of the memory that is shared with the device process.
    """

    def __init__(self, sequences: Mapping[str, int], features: list[str], *, bags: Bags, device: ChannelEnd) -> None:
        self._sequences, self._bags, self._device = sequences, bags, device
        self._at = {name: features.index(name) for name in sequences if name in features}
        self._rooms: SequencePadding | None = None

    @property
    def _known_rooms(self) -> SequencePadding:
        if self._rooms is None:
            num_samples = self._device.layout.num_samples
            # The device process has said so before the first step.
            self._rooms = SequencePadding(self._sequences, num_samples // self._device.num_devices)
        return self._rooms

    def lengths(self, batch: Batch) -> Lengths:
        """Of the sequences of a batch, as the device will have them."""
        found = {}
        for name in self._sequences:
            column = found[name] = np.zeros(self._device.layout.num_samples, np.int64)
            column[: batch.num_samples] = self._bags.lengths(name, batch.features[name])
        return found

    def levels(self, lengths: Lengths) -> PaddingLevels:
        """The room that a batch needs; empty without sequences."""
        return self._known_rooms.levels_for(lengths) if self._sequences else ()

    def laid_out(self, bags: Mapping[str, Ragged], lengths: Lengths, levels: PaddingLevels) -> Mapping[str, Ragged]:
        """The bags with a place for every position, once the hosts have agreed on the room."""
        return {
            **bags,
            **{name: self._known_rooms.laid_out(name, bags[name], column, levels) for name, column in lengths.items()},
        }

    def used(self, blocks: Blocks, bags: Mapping[str, Ragged]) -> Blocks:
        """The activations, or their gradients, of a step: of a sequence what it has room for."""
        if not self._sequences:
            return blocks
        arrays = list(blocks.arrays)
        for name, at in self._at.items():
            arrays[at] = arrays[at][: bags[name].num_samples]
        return replace(blocks, arrays=arrays)

    def write(self, arrays: Mapping[str, np.ndarray], lengths: Lengths) -> None:
        """Into the shared memory."""
        for name, column in self._device.layout.lengths_in(arrays).items():
            column[:] = lengths[name]
