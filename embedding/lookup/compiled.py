"""The kernels of a lookup and an update, in the order of a step, and their compilation ahead of the first step.

ids → `unique_ids` → `route` → (owners: `rows_of_dense_keys`, `gather_to`) → `row_of_each_id` → `pool` → device →
`sum_gradients` → (owners: `Table.update`). A host that holds the whole table can skip the gather: `pool` takes the
table itself as `rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.kernels.bag_frames import BAGS, SPLITS, WEIGHTS, find_pieces
from podembed.embedding.kernels.grouped import group_by_row, select_part
from podembed.embedding.kernels.ids import num_hash_slots, row_of_each_id, unique_ids
from podembed.embedding.kernels.many_tables import BagLists, group_bags, resolve_dense
from podembed.embedding.kernels.pool import pool, sum_gradients
from podembed.embedding.kernels.requests import (
    find_marked_bags,
    find_marked_rows,
    mark_rows,
    rows_by_host,
    rows_by_stream,
)
from podembed.embedding.kernels.row_numbers import copy_keys, route, route_bags, rows_of_dense_keys
from podembed.embedding.kernels.threads import ONE_THREAD, column_parts
from podembed.embedding.row_index import KeyRequest
from podembed.embedding.table.stores.store import PooledFeature
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec


def compile_kernels(
    specs: Iterable[TableSpec], *, num_threads: int = 1, has_weights: bool = False, rows_travel: bool = True
) -> None:
    """Compiles, or loads from numba's cache, what these tables need, by running everything on nothing.

    Without a cache a few seconds for each distinct (dim, optimizer class); then a fraction of one.

    Args:
      num_threads: of the thread pool that will work. Some kernels then run over fewer columns.
      has_weights: whether ids have weights. Those that come without being announced compile at their first update.
      rows_travel: whether `RowsWay` looks up any table. What is only for it takes a fifth of the time.
    """
    ids, positions = np.zeros(0, np.int64), np.zeros(0, np.int32)
    marks, flags = np.zeros(0, np.int32), np.zeros(0, bool)
    mark_rows(ids, marks, 1)
    find_marked_bags(positions, np.zeros(1, np.int64), marks, flags)
    owner = np.zeros(1, np.int32)
    no_weights, no_splits = np.zeros(0, np.float32), np.zeros((1, 1), np.int64)
    route_bags(ids, ids, 0, np.zeros(1, np.int64), None, owner, no_splits, positions.copy(), no_weights)
    copy_keys(ids, 0, positions)
    for keys in (positions, ids):
        rows_of_dense_keys(keys, owner, 1, keys, np.zeros(1, np.int64))
    resolve_dense(np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64), np.zeros((0, BAGS), np.int64))
    pieces = np.zeros((1, 1), np.int64)
    rows_by_host(ids, pieces, pieces, ids.copy())
    if rows_travel:
        find_marked_rows(ids, marks, flags)
        unique_ids(ids, np.zeros((num_hash_slots(0), 2), np.int64), ids, positions)
        route(ids, ids, 0, owner, np.zeros(1, np.int64), ids.copy(), positions)
        row_of_each_id(positions, positions, positions.copy())
        rows_by_stream(ids, pieces, pieces, pieces, ids.copy(), ids.copy())
    find_pieces(ids, np.zeros((1, BAGS), np.int64))
    nothing = BagLists.of([], [], [])
    group_bags(nothing, marks)
    # By marks, and by hashes where there are more rows.
    for some_marks in (marks, np.zeros(1, np.int32)):
        group_by_row(*nothing.entries(), some_marks)
    select_part(positions, ids, 0, 1, positions.copy(), ids.copy())
    feature, splits = PooledFeature(table=0, pooling="sum", combiner="mean"), np.zeros(1, np.int64)
    kinds = [np.zeros((1, BAGS), np.int64) for _ in range(1 + has_weights)]
    for bags, address in zip(kinds, (0, no_weights.ctypes.data), strict=False):
        bags[0, SPLITS], bags[0, WEIGHTS] = splits.ctypes.data, address
    if has_weights:
        entries = np.zeros((0, 2), np.int64)
        group_by_row(positions, entries, marks)
        select_part(positions, entries, 0, 1, positions.copy(), entries.copy())
    dynamic: set[bool] = set()
    for spec in specs:
        table = Table(spec, ids)
        waits = "waiting_key" in spec.keys.columns
        if spec.keys.columns and waits not in dynamic:
            dynamic.add(waits)
            _compile_keys(spec)
        group, no_block = table.stores.group([table], [feature], num_hosts=1), [np.array([[0, 0, 0, spec.dim]])]
        updates_groups = (
            spec.optimizer is not None
            and spec.optimizer.use_gradient_accumulation
            and not spec.optimizer.touches_all_rows
        )
        for bags in kinds:
            group.pool([bags], no_block, ONE_THREAD)
            grouped, scaled = group.group([bags], no_block, ONE_THREAD)
            group.scale(scaled, [bags], no_block, ONE_THREAD)
            if updates_groups:
                group.update(grouped, [0.0], ONE_THREAD)
        no_rows = np.zeros((0, spec.dim), np.float32)
        pool(no_rows, positions, np.zeros(1, np.int64), None, "sum", no_rows, bags=ids)
        if rows_travel:
            table.gather(ids, no_rows)
            table.gather_to(ids, ids)
            pool(no_rows, positions, np.zeros(1, np.int64), None, "sum", no_rows)
            for columns in column_parts(spec.dim, num_threads)[:1]:
                some = no_rows[:, columns]
                sum_gradients(some, positions, np.zeros(1, np.int64), None, "sum", some)
        if spec.optimizer is not None and (rows_travel or not updates_groups):
            table.update(ids, no_rows, 0.0)


def _compile_keys(spec: TableSpec) -> None:
    """The decisions of a table whose keys come and go, made for a table of two rows."""
    layout = BucketLayout(num_rows=2, num_buckets=1)
    table = Table(replace(spec, num_rows=2, layout=layout), np.zeros(1, np.int64))
    keys = np.arange(4)
    requests = [
        KeyRequest(keys, np.empty(4, np.int64), np.ones(4, np.int64)),
        KeyRequest(keys, np.empty(4, np.int64)),
        KeyRequest(keys, np.empty(4, np.int32)),
    ]
    for step in (0, 1, None):
        table.index.accept(requests, step)
    table.index.rebuild()
