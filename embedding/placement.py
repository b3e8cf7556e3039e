"""Which tables are placed whole, and who owns what.

A table on one host lets that host combine rows where they lie, and only vectors cross the network (`PooledLookup`): the fastest way for
long bags, and no deduplication anywhere. So every table that one host can hold is placed whole, and only larger ones are cut into buckets.
Hosts get even shares of memory and work together: a table costs its bytes, and for each of its features an even part of all bytes, since
what a feature costs a step depends on samples and bags and not on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedding.buckets import place
from embedding.pooled_lookup import can_pool_at_owner
from embedding.table_spec import TableSpec


def place_tables(
    specs: Sequence[TableSpec],
    *,
    num_features: Sequence[int],
    num_hosts: int,
    previous: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Decides which host owns each bucket of each table. A function of its arguments alone.

    Args:
      specs: all tables.
      num_features: per table, how many features look up in it.
      num_hosts: hosts of the new generation.
      previous: per table, int32 `[num_buckets]` the owner in the previous generation; None for a new run.

    Returns:
      Per table, int32 `[num_buckets]`, the owner; all the same for a table that is placed whole.
    """
    table_bytes = [spec.bucket_bytes * spec.layout.num_buckets for spec in specs]
    # A table above the fair share would leave its host with more than the others even if it held nothing else.
    fair_bytes = sum(table_bytes) // num_hosts
    is_whole = [size <= fair_bytes and can_pool_at_owner(spec) for size, spec in zip(table_bytes, specs, strict=True)]
    feature_bytes = sum(table_bytes) // max(1, sum(num_features))
    units = []
    for spec, size, count, whole in zip(specs, table_bytes, num_features, is_whole, strict=True):
        num_units = 1 if whole else spec.layout.num_buckets
        units.append(np.full(num_units, (size + count * feature_bytes) // num_units, np.int64))
    before = None
    if previous is not None:
        before = [_owner(owners) if whole else owners for owners, whole in zip(previous, is_whole, strict=True)]
    placed = place(bucket_bytes=units, num_hosts=num_hosts, previous=before)
    return [
        np.full(spec.layout.num_buckets, owners[0], np.int32) if whole else owners
        for spec, owners, whole in zip(specs, placed, is_whole, strict=True)
    ]


def _owner(owners: np.ndarray) -> np.ndarray:
    """Where a table that becomes whole was before: with its one owner, or with nobody."""
    return np.array([owners[0] if (owners == owners[0]).all() else -1], np.int32)
