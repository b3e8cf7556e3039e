"""Reads what a run committed, for comparisons."""

from __future__ import annotations

import numpy as np

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.manifest import Manifest
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.checkpoint.zarr_metadata import DTYPES
from podembed.workers.storage.store import Store


def committed_state(path: str) -> dict[str, np.ndarray]:
    """All arrays of a run's newest commit: `table/array` `[num_rows, width]` in row order, and `dense/key`."""
    store = Store(path)
    manifest = checkpoint.load_head(store)
    assert manifest is not None
    return tables_of(store, manifest) | {f"dense/{leaf.key}": read_dense(store, leaf) for leaf in manifest.dense}


def tables_of(store: Store, manifest: Manifest) -> dict[str, np.ndarray]:
    state = {}
    for table in manifest.tables:
        arrays = {a.name: np.empty((table.num_rows, a.width), DTYPES[a.dtype]) for a in table.arrays}
        for bucket in range(table.num_buckets):
            rows = np.arange(bucket, table.num_rows, table.num_buckets)
            for array, values in zip(table.arrays, read_bucket(store, table, bucket), strict=True):
                arrays[array.name][rows] = values[: len(rows)]
        state |= {f"{table.name}/{name}": values for name, values in arrays.items()}
    return state


def assert_same_bytes(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Every array bitwise equal; the message names the first that differs and where."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        if values.tobytes() != other[name].tobytes():
            at = np.argwhere(values != other[name])
            raise AssertionError(f"{name} differs at {len(at)} of {values.size} places, first at {at[:1].tolist()}")
