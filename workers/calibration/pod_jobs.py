"""Made-up jobs that a calibration trains: many small tables, a few large ones, cut ones, sequences, and one with files.

They differ in features, bags, widths and samples. So what a phase takes beside its kernels shows in their differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.config import ParquetData
from podembed.workers.input.lanes import LanePlan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference

NUM_DENSE = 4
NUM_BATCHES = 8
_LANES = 4
_GROUPS = 4
_SKEW = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProbe:
    """One made-up job.

    Attributes:
      tables: each with one feature.
      dims, lengths: of the tables in turn: floats of a row, and ids of a bag or of a sequence.
      layers: widths of the dense half.
      is_skewed: whether some ids come often; otherwise all come equally often.
      takes_means: whether every second bag is a mean; otherwise all are sums. `lengths` are then an odd number, so that
        means and sums are equally long.
      is_cut: whether its tables are cut; otherwise they lie whole.
      is_sequence: whether rows travel to the samples.
      reads_files: from Parquet; otherwise batches lie in memory.
    """

    tables: int
    num_rows: int
    dims: tuple[int, ...]
    lengths: tuple[int, ...]
    batch_size: int
    layers: tuple[int, ...] = (64,)
    is_skewed: bool = False
    takes_means: bool = False
    is_cut: bool = False
    is_sequence: bool = False
    reads_files: bool = False


def _files(reads_files: bool) -> PodProbe:
    return PodProbe(tables=26, num_rows=10_000, dims=(16,), lengths=(2,), batch_size=1024, reads_files=reads_files)


PROBES: Mapping[str, PodProbe] = {
    "few": PodProbe(tables=4, num_rows=20_000, dims=(32,), lengths=(4,), batch_size=256),
    "many": PodProbe(tables=40, num_rows=2_000, dims=(16,), lengths=(1,), batch_size=512),
    "hundred": PodProbe(tables=120, num_rows=1_000, dims=(32,), lengths=(3,), batch_size=256, takes_means=True),
    "mixed": PodProbe(
        tables=60, num_rows=5_000, dims=(8, 16, 64, 128), lengths=(1, 3, 40), batch_size=512, takes_means=True
    ),
    "skewed": PodProbe(
        tables=16,
        num_rows=100_000,
        dims=(64,),
        lengths=(1, 8, 4),
        batch_size=1024,
        is_skewed=True,
        takes_means=True,
        layers=(256, 128),
    ),
    "means": PodProbe(
        tables=26, num_rows=2_000, dims=(16,), lengths=(2, 3, 4), batch_size=1024, is_skewed=True, takes_means=True
    ),
    "large": PodProbe(tables=12, num_rows=200_000, dims=(64,), lengths=(10,), batch_size=2048),
    "far": PodProbe(tables=2, num_rows=800_000, dims=(64,), lengths=(30,), batch_size=2048),
    "dense": PodProbe(tables=16, num_rows=10_000, dims=(32,), lengths=(1,), batch_size=2048, layers=(512, 256)),
    # Activations that no cache holds.
    "wide": PodProbe(
        tables=26, num_rows=40_000, dims=(128,), lengths=(1, 10), batch_size=4096, is_skewed=True, layers=(32,)
    ),
    "cut": PodProbe(tables=4, num_rows=100_000, dims=(32,), lengths=(20,), batch_size=512, is_cut=True),
    "cut few": PodProbe(tables=3, num_rows=50_000, dims=(16,), lengths=(10,), batch_size=256, is_cut=True),
    "cut large": PodProbe(tables=2, num_rows=400_000, dims=(32,), lengths=(40,), batch_size=2048, is_cut=True),
    "short": PodProbe(tables=4, num_rows=100_000, dims=(32,), lengths=(1,), batch_size=2048, is_cut=True),
    # So few rows that they travel, whatever is known of lengths.
    "rows": PodProbe(tables=2, num_rows=2_000, dims=(256,), lengths=(4,), batch_size=2048, is_cut=True),
    "rows many": PodProbe(tables=6, num_rows=4_000, dims=(128,), lengths=(10,), batch_size=4096, is_cut=True),
    "sequence": PodProbe(
        tables=2, num_rows=100_000, dims=(16,), lengths=(8,), batch_size=512, is_cut=True, is_sequence=True
    ),
    "files": _files(True),
    "memory": _files(False),
}


@dataclass(frozen=True)
class ProbeData(ParquetData):
    """Batches in memory, used in turn. A reader takes no time.

    Attributes:
      probe: name of it.
    """

    probe: str = ""

    def open_reader(self, plan: LanePlan, lanes: range) -> ProbeReader:
        width = plan.rows_per_lane_step
        part = slice(lanes.start * width, lanes.stop * width)
        return ProbeReader([_batch(self.probe, number, part) for number in range(NUM_BATCHES)])


class ProbeReader:
    """After the last batch comes the first."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def read(self, step: int) -> Batch:
        return self._batches[step % len(self._batches)]

    def close(self) -> None:
        self._batches = []


def ids_of(probe: PodProbe, number: int) -> list[np.ndarray]:
    """Ids of one batch, of each table int64 `[batch_size, length]`."""
    rng = np.random.default_rng(number)
    found = []
    for at in range(probe.tables):
        shape = (probe.batch_size, probe.lengths[at % len(probe.lengths)])
        if probe.is_skewed:
            found.append((probe.num_rows * rng.random(shape) ** _SKEW).astype(np.int64))
        else:
            found.append(rng.integers(0, probe.num_rows, shape))
    return found


def _batch(name: str, number: int, part: slice) -> Batch:
    probe = PROBES[name]
    ids = [of_table[part] for of_table in ids_of(probe, number)]
    count = len(ids[0])
    return Batch(
        dense=np.full((count, NUM_DENSE), 0.1, np.float32),
        labels=np.arange(count, dtype=np.float32) % 2,
        weights=np.ones(count, np.float32),
        features={feature_name(at): Ragged.of_dense(of_table) for at, of_table in enumerate(ids)},
        sample_ids=np.arange(count),
    )


def feature_name(at: int) -> str:
    return f"f{at:03d}"


def write_files(name: str, folder: Path) -> None:
    """The batches of a probe as one Parquet file with lists of ids."""
    import pyarrow as pa
    from pyarrow import parquet

    probe = PROBES[name]
    batches = zip(*(ids_of(probe, number) for number in range(NUM_BATCHES)), strict=True)
    ids = [np.concatenate(of_table) for of_table in batches]
    count = len(ids[0])
    columns: dict[str, pa.Array] = {f"x{at}": pa.array(np.full(count, 0.1, np.float32)) for at in range(NUM_DENSE)}
    columns["label"] = pa.array(np.arange(count, dtype=np.float32) % 2)
    for at, of_table in enumerate(ids):
        offsets = pa.array(np.arange(0, of_table.size + 1, of_table.shape[1], dtype=np.int32))
        columns[feature_name(at)] = pa.ListArray.from_arrays(offsets, pa.array(of_table.reshape(-1)))
    parquet.write_table(pa.table(columns), folder / "probe.parquet", row_group_size=count // _GROUPS)


def reference_of(name: str, folder: str) -> JobReference:
    return JobReference(function=f"{__name__}:probe_job", arguments={"probe": name, "folder": folder})


def probe_job(*, probe: str, folder: str) -> JobConfig:
    """A probe as a job. Runs in the children, too."""
    import jax
    import jax.numpy as jnp

    shape = PROBES[probe]

    class Layers:
        """Layers over all activations side by side."""

        def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
            sizes = pairwise((num_dense + sum(widths.values()), *shape.layers))
            return {
                "below": [0.01 * jax.random.normal(key, size) for size in sizes],
                "above": jnp.full((shape.layers[-1],), 0.01),
            }

        def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
            blocks = [block.mean(axis=1) if block.ndim > 2 else block for block in activations.values()]
            found = jnp.concatenate([dense, *blocks], axis=1)
            for below in params["below"]:
                found = jax.nn.relu(found @ below)
            return found @ params["above"]

    names = [feature_name(at) for at in range(shape.tables)]
    dense = tuple(f"x{at}" for at in range(NUM_DENSE))
    columns = {name: name for name in names}

    def feature(at: int) -> FeatureConfig:
        combiner = "mean" if shape.takes_means and at % 2 else "sum"
        dim, length = shape.dims[at % len(shape.dims)], shape.lengths[at % len(shape.lengths)]
        table = TableConfig(shape.num_rows, dim, name=names[at], combiner=combiner, initializer=Constant(0.01))
        return FeatureConfig(table, max_sequence_length=length if shape.is_sequence else 0)

    return JobConfig(
        name=f"calibration-{probe.replace(' ', '-')}",
        features={name: feature(at) for at, name in enumerate(names)},
        model=Layers(),
        data=ParquetData(f"{folder}/probe.parquet", label="label", dense=dense, features=columns)
        if shape.reads_files
        else ProbeData(folder, label="label", dense=dense, features=columns, probe=probe),
        batch_size=shape.batch_size,
        optimizer=RowWiseAdagrad(0.01),
        num_epochs=1000,
        num_lanes=_LANES,
        overlap=True,
    )
