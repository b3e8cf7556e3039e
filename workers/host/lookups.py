"""The lookups of one host of a job, and what is looked up of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.table.table import Table
from podembed.workers.crew import ThreadCrew
from podembed.workers.host.spec import HostSpec
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.bags import Bags
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import cut_ways, feature_bindings, needs_rows, table_specs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLookups:
    """The lookups of a host.

    Attributes:
      both: those of all tables and features, in the job's order. Activations lie as `both.layout` says in the memory
        shared with the device process.
      bags: what is looked up of a batch.
      num_buffers: batches that may be in flight at once.
      crew: the threads of the host's kernels; to be closed.
    """

    both: Lookups
    bags: Bags
    num_buffers: int
    crew: ThreadCrew

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
        crew = ThreadCrew(spec.threads)
        compile_kernels(specs, num_threads=crew.num_threads)
        ways = cut_ways(job, specs, bag_lengths(job, spec.train_index), num_hosts=spec.num_hosts)
        both = Lookups.build(
            specs,
            feature_bindings(job),
            spec.placement,
            host=spec.host,
            num_hosts=spec.num_hosts,
            num_samples=num_samples,
            inner=[shape[:-1] for shape in job.activation_shapes.values()],
            needs_rows=needs_rows(job),
            pools_cut=[way.is_pooled for way in ways],
            quantization=[table.quantization_config for table in job.tables],
            num_buffers=num_buffers,
            tables=tables,
            crew=crew,
        )
        return HostLookups(both=both, bags=Bags(job), num_buffers=num_buffers, crew=crew)
