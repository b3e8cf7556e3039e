"""The lookups of one host: which features are pooled at the owner of their table, which rows come here, and where the
activations of each lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.lookup.activation_layout import ActivationLayout, pooling_owners
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.owner_pooled import PooledLookup, can_pool_at_owner
from podembed.embedding.lookup.sharded import ShardedLookup
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.spec import HostSpec
from podembed.workers.job.bags import Bags
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import feature_bindings, needs_rows, table_specs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLookups:
    """Both lookups of a host, and what they have in common.

    Attributes:
      specs: all tables, in the job's order.
      features: all features, in the job's order.
      layout: of the activations and of their gradients in the memory shared with the device process.
      sharded: the features whose rows come to this host.
      pooled: the features that are pooled where their table is.
      bags: what is looked up of a batch.
      num_buffers: batches that may be in flight at once.
    """

    specs: tuple[TableSpec, ...]
    features: tuple[FeatureBinding, ...]
    layout: ActivationLayout
    sharded: ShardedLookup
    pooled: PooledLookup
    bags: Bags
    num_buffers: int

    @staticmethod
    def build(
        spec: HostSpec, job: JobConfig, *, num_samples: int, tables: Sequence[Table] | None = None
    ) -> HostLookups:
        """Decides for each table what will cross the network: vectors pooled at its owner, or rows.

        Args:
          num_samples: of this host's share of a batch, with padding.
          tables: that a survivor brings along; None allocates new ones.
        """
        specs, features = table_specs(job, spec.table_buckets), feature_bindings(job)
        whole = pooling_owners(spec.placement)
        owners = [
            owner if can_pool_at_owner(table) and not as_rows else -1
            for owner, table, as_rows in zip(whole, specs, needs_rows(job), strict=True)
        ]
        layout = ActivationLayout(
            num_samples=num_samples,
            widths=tuple(job.widths.values()),
            owners=tuple(owners[feature.table] for feature in features),
            inner=tuple(shape[:-1] for shape in job.activation_shapes.values()),
        )
        # Where the lookup of a step begins before the device is done with the one before, each has memory of its own.
        num_buffers = 2 if job.overlap or job.staleness else 1
        sharded = ShardedLookup(
            specs,
            features,
            spec.placement,
            host=spec.host,
            num_hosts=spec.num_hosts,
            elsewhere={at for at, owner in enumerate(owners) if owner >= 0},
            tables=tables,
            quantization=[table.quantization_config for table in job.tables],
        )
        pooled = PooledLookup(
            sharded.tables, features, layout, host=spec.host, num_hosts=spec.num_hosts, num_buffers=num_buffers
        )
        compile_kernels(specs)
        return HostLookups(
            specs=specs,
            features=features,
            layout=layout,
            sharded=sharded,
            pooled=pooled,
            bags=Bags(job),
            num_buffers=num_buffers,
        )

    def blocks(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """By feature, its block of the activations or of the gradients."""
        blocks = self.layout.blocks(memory)
        return {feature.name: block for feature, block in zip(self.features, blocks, strict=True)}
