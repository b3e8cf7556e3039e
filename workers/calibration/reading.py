"""Measures reading and decoding of Parquet input: seconds for a sample, and for an id."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from podembed.workers.data.config import ParquetData
from podembed.workers.input.reader import InputReader, build_index, training_plan

_SAMPLES, _BATCH, _DENSE, _FEATURES, _LENGTH = 1 << 15, 1024, 4, 4, 8
_VOCABULARY = 1 << 20


def measure_reading() -> tuple[float, float]:
    """Seconds for a sample without ids, and for an id, read by one process from a file in the page cache."""
    with tempfile.TemporaryDirectory(prefix="podembed-calibrate-") as folder:
        without, with_ids = _measured(Path(folder) / "short", 1), _measured(Path(folder) / "long", _LENGTH)
    id_s = max(0.0, (with_ids - without) / (_FEATURES * (_LENGTH - 1)))
    return max(0.0, without - _FEATURES * id_s), id_s


def _measured(path: Path, length: int) -> float:
    """Seconds of a sample with so many ids a feature."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {f"i{at}": pa.array(rng.random(_SAMPLES, np.float32)) for at in range(_DENSE)} | {
        "label": pa.array(rng.integers(0, 2, _SAMPLES).astype(np.float32))
    }
    offsets = pa.array(np.arange(0, length * _SAMPLES + 1, length, dtype=np.int32))
    for at in range(_FEATURES):
        ids = pa.array(rng.integers(0, _VOCABULARY, length * _SAMPLES))
        columns[f"c{at}"] = pa.ListArray.from_arrays(offsets, ids)
    parquet.write_table(pa.table(columns), f"{path}.parquet", row_group_size=_SAMPLES // 4)
    data = ParquetData(
        f"{path}.parquet",
        label="label",
        dense=tuple(f"i{at}" for at in range(_DENSE)),
        features={f"f{at}": f"c{at}" for at in range(_FEATURES)},
    ).resolved({f"f{at}": _VOCABULARY for at in range(_FEATURES)}, keeps_outside=[])
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=_BATCH, seed=0)
    reader = InputReader(data, index, plan, range(1))
    try:
        # An epoch, after one row group in which everything is compiled.
        for step in range(_SAMPLES // 4 // _BATCH):
            reader.read(step)
        began, steps = time.perf_counter(), range(_SAMPLES // 4 // _BATCH, _SAMPLES // _BATCH)
        for step in steps:
            reader.read(step)
        return (time.perf_counter() - began) / (len(steps) * _BATCH)
    finally:
        reader.close()
