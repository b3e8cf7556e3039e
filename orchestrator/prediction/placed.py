"""The tables of a job at given owners, as a prediction needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podembed.embedding.costs.profile import TableProfile
from podembed.embedding.costs.work import TableWay
from podembed.embedding.lookup.pooling_choice import why_not_pooled
from podembed.orchestrator.prediction.demand import TableDemand
from podembed.workers.calibration.pod_specs import index_of
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import choose_buckets, cut_ways, feature_bindings, needs_rows, table_specs


def placed_demands(
    job: JobConfig, owners: Sequence[np.ndarray], profiles: Sequence[TableProfile], *, num_hosts: int
) -> list[TableDemand]:
    """The tables of a job that lie at these owners.

    Args:
      owners: per table int32 `[num_buckets]`.
      profiles: one a table.
    """
    specs, travels = table_specs(job, choose_buckets(job)), needs_rows(job)
    cut = cut_ways(job, specs, bag_lengths(job, index_of(job)), num_hosts=num_hosts)
    bound = feature_bindings(job)
    tables = []
    for at, (spec, placed, profile) in enumerate(zip(specs, owners, profiles, strict=True)):
        is_whole = bool((placed == placed[0]).all())
        pools = (why_not_pooled(spec) is None and not travels[at]) if is_whole else cut[at].is_pooled
        way = TableWay.ROWS if not pools else TableWay.WHOLE if is_whole else TableWay.PARTIAL
        features = [feature for feature in bound if feature.table == at]
        tables.append(
            TableDemand(
                spec=spec,
                way=way,
                owner=int(placed[0]) if way is TableWay.WHOLE else None,
                num_features=len(features),
                num_divided=sum(feature.combiner != "sum" for feature in features),
                profile=profile,
                must_travel=travels[at],
            )
        )
    return tables
