"""`Lookups`: both ways of looking up on one host, and which feature takes which.

Vectors of a table that lies whole on one host are pooled there (`PooledWay`). So are those of a table that is cut,
by each owner for its rows, where `pools_cut` says so. Rows of all other tables come to the host of the samples
(`RowsWay`). The choice is made here, one entry a table, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from podembed.embedding.config import QuantizationConfig
from podembed.embedding.kernels.threads import ONE_THREAD, Threads
from podembed.embedding.lookup.activation_layout import EVERY_HOST, ROWS_TRAVEL, ActivationLayout, pooling_owners
from podembed.embedding.lookup.pooled_way import PooledWay
from podembed.embedding.lookup.pooling_choice import can_pool_at_owner
from podembed.embedding.lookup.rows_way import RowsWay
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.lookup.way import Way
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookups:
    """Both lookups of a host, and what they have in common.

    Attributes:
      specs: all tables.
      features: all features, in the order of the batch.
      layout: of the activations and of their gradients.
      rows: the features whose rows come to this host.
      pooled: the features that are pooled where the rows of their table are.
    """

    specs: tuple[TableSpec, ...]
    features: tuple[FeatureBinding, ...]
    layout: ActivationLayout
    rows: RowsWay
    pooled: PooledWay

    @staticmethod
    def build(
        specs: Sequence[TableSpec],
        features: Sequence[FeatureBinding],
        placement: Sequence[np.ndarray],
        *,
        host: int,
        num_hosts: int,
        num_samples: int,
        inner: Sequence[tuple[int, ...]] = (),
        vectors: Sequence[int] = (),
        needs_rows: Sequence[bool],
        pools_cut: Sequence[bool] = (),
        quantization: Sequence[QuantizationConfig | None],
        num_buffers: int = 1,
        tables: Sequence[Table] | None = None,
        thread_pool: Threads = ONE_THREAD,
    ) -> Lookups:
        """Decides for each table what will cross the network: vectors pooled at its owner, or rows.

        Args:
          placement: per table, the owner of each bucket.
          num_samples: of this host's share of a batch, with padding.
          inner: per feature, the axes of its activations between samples and width; empty if none has any.
          vectors: per feature, those of a usual batch; empty for one a sample and position.
          needs_rows: per table, whether its rows must come to the samples in any case.
          pools_cut: per table, whether its owners pool if it is cut; the same on all hosts. Empty for none.
          quantization: per table, or None.
          num_buffers: batches that may be in flight at once.
          tables: the shard, where it is here already; None allocates it.
          thread_pool: threads of the host.
        """
        whole = pooling_owners(placement)
        owners = [ROWS_TRAVEL] * len(specs)
        for at, (owner, spec, as_rows) in enumerate(zip(whole, specs, needs_rows, strict=True)):
            if can_pool_at_owner(spec) and not as_rows:
                pools = EVERY_HOST if pools_cut and pools_cut[at] else ROWS_TRAVEL
                owners[at] = owner if owner >= 0 else pools
        # Tables in which no host looks up live on devices. Their rows here do not change between commits.
        others = set(range(len(specs))) - {feature.table for feature in features}
        layout = ActivationLayout(
            num_samples=num_samples,
            widths=tuple(specs[feature.table].dim for feature in features),
            owners=tuple(owners[feature.table] for feature in features),
            inner=tuple(inner),
            vectors=tuple(vectors),
            num_hosts=num_hosts,
        )
        rows = RowsWay(
            specs,
            features,
            placement,
            host=host,
            num_hosts=num_hosts,
            elsewhere=others | {at for at, owner in enumerate(owners) if owner != ROWS_TRAVEL},
            tables=tables,
            quantization=quantization,
            thread_pool=thread_pool,
        )
        pooled = PooledWay(
            rows.tables,
            features,
            layout,
            host=host,
            num_hosts=num_hosts,
            placement=placement,
            num_buffers=num_buffers,
            thread_pool=thread_pool,
        )
        return Lookups(specs=tuple(specs), features=tuple(features), layout=layout, rows=rows, pooled=pooled)

    @property
    def tables(self) -> tuple[Table, ...]:
        """This host's shard of every table."""
        return self.rows.tables

    @property
    def ways(self) -> tuple[Way, ...]:
        """In the same order on all hosts."""
        return self.rows, self.pooled

    def by_name(self, values: Sequence[Value]) -> dict[str, Value]:
        """One value a feature, by the feature's name."""
        return {feature.name: value for feature, value in zip(self.features, values, strict=True)}
