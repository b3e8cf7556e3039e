"""Files of click data whose parts differ, a job on them, and what health says of them when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.jobs.chaos.jobs import TinyModel
from podembed.orchestrator.driver.windows import LOOK_EVERY_S
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData, ReadOrder
from podembed.workers.input.data_sample import Sampler
from podembed.workers.input.index import build_index
from podembed.workers.input.sources import job_plan, open_reader
from podembed.workers.job.job import JobConfig
from tests.tools.health.points import Driver
from tests.tools.metrics.windows import window

BATCH_SIZE = 1024
VOCABULARY = 4_000
Columns = Mapping[str, Any]


def click_columns(count: int, *, seed: int) -> dict[str, Any]:
    """`user`, `item`, `shop` and bags of `tags`, all uneven; numbers `price` and `age`; clicks."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tags = pa.array(np.minimum(rng.zipf(1.5, int(offsets[-1])), 300).astype(np.int64))
    return {
        "user": rng.integers(0, VOCABULARY, count),
        "item": np.minimum(rng.zipf(1.3, count) * 7, VOCABULARY - 1),
        "shop": rng.integers(0, 40, count),
        "tags": pa.ListArray.from_arrays(pa.array(offsets), tags),
        "price": np.exp(rng.standard_normal(count)).astype(np.float32),
        "age": rng.standard_normal(count).astype(np.float32),
        "label": (rng.random(count) < 0.2).astype(np.float32),
    }


def write_part(folder: Path, number: int, columns: Columns, *, group: int = 8192) -> None:
    """A file; those with higher numbers are read later in the order of files."""
    folder.mkdir(exist_ok=True)
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)


def data_job(*, folder: str, order: ReadOrder = "files", epochs: int = 1, seed: int = 3) -> JobConfig:
    """A small job on files of `write_part`."""
    ids = ("user", "item", "shop", "tags")
    # Hashed, so that an id may stand in another column.
    data = ParquetData(
        f"{folder}/part-*.parquet",
        label="label",
        dense=("price", "age"),
        features={name: IdColumn(name, mode="hash") for name in ids},
        order=order,
    )
    return JobConfig(
        name="changing",
        features={name: FeatureConfig(TableConfig(VOCABULARY, 4, name=name, combiner="sum")) for name in ids},
        model=TinyModel(),
        data=data,
        batch_size=BATCH_SIZE,
        num_epochs=epochs,
        seed=seed,
    )


def feed(driver: Driver, job: JobConfig, *, num_hosts: int = 1, epochs: int = 1) -> None:
    """All batches of the job's files, one a window, as `num_hosts` hosts read and sample them."""
    index = build_index(job.resolved_data)
    plan = job_plan(job, index)
    share = plan.num_lanes // num_hosts
    lanes = [range(at * share, (at + 1) * share) for at in range(num_hosts)]
    readers = [open_reader(job.resolved_data, index, plan, one) for one in lanes]
    samplers = [Sampler(job, num_hosts=num_hosts) for _ in readers]
    for step in range(plan.steps_per_epoch * epochs):
        for reader, sampler in zip(readers, samplers, strict=True):
            sampler.take(reader.read(step))
        samples = [sampler.finish() for sampler in samplers]
        driver.clock.now_s += LOOK_EVERY_S
        falling = 0.4 + 0.3 * math.exp(-driver.step / 100)
        made = window(driver.step, driver.step + 1, seconds=LOOK_EVERY_S, loss=falling, num_hosts=num_hosts)
        hosts = [replace(host, data=sample) for host, sample in zip(made.hosts, samples, strict=True)]
        driver.step += 1
        driver.event(replace(made, hosts=tuple(hosts)))
    for reader in readers:
        reader.close()


def changed(columns: Columns, change: Callable[[dict[str, Any], np.random.Generator], None]) -> Columns:
    """A copy, changed."""
    found = dict(columns)
    change(found, np.random.default_rng(1))
    return found
