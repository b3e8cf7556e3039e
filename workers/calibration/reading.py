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
_EPOCHS = 3


def measure_reading() -> tuple[float, float]:
    """Seconds for a sample without ids, and for an id, read by one process from a file in the page cache."""
    with tempfile.TemporaryDirectory(prefix="podembed-calibrate-") as folder:
        return costs_of(_measured(Path(folder) / "short", 1), _measured(Path(folder) / "long", _LENGTH))


def costs_of(one_id_s: float, many_ids_s: float) -> tuple[float, float]:
    """Seconds for a sample without ids, and for an id, from those of a sample with one and with `_LENGTH` ids in each
    feature. Never below 0, which other programs on the machine could make of them.
    """
    id_s = max(0.0, (many_ids_s - one_id_s) / (_FEATURES * (_LENGTH - 1)))
    return max(0.0, one_id_s - _FEATURES * id_s), id_s


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
    ).resolved({f"f{at}": _VOCABULARY for at in range(_FEATURES)})
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=_BATCH, seed=0)
    reader = InputReader(data, index, plan, range(1))
    try:
        # The first epoch compiles. Of the others the fastest one counts, since other programs only make them slower.
        epochs, steps = [], _SAMPLES // _BATCH
        for epoch in range(1 + _EPOCHS):
            began = time.perf_counter()
            for step in range(epoch * steps, (epoch + 1) * steps):
                reader.read(step)
            epochs.append(time.perf_counter() - began)
        return min(epochs[1:]) / _SAMPLES
    finally:
        reader.close()
