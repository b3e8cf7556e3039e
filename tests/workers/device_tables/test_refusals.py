"""What a table on devices may not be, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, CustomRowOptimizer, Optimizer
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.job import JobConfig, JobError
from tests.workers.device_tables.jobs import Perceptron, train


class Halving(Adagrad):
    """A rule of a user's own."""


def branching(gradient: Any, row: Any, slots: Any, learning_rate: Any, hyperparameters: Any) -> Any:
    return (row - learning_rate * gradient if gradient.sum() > 0 else row), slots


def job_of(
    num_rows: int,
    optimizer: Optimizer,
    *,
    trainable: bool = True,
    dim: int = 8,
    place: Any = "device",
) -> JobConfig:
    table = TableConfig(num_rows, dim, name="t", optimizer=optimizer, place=place, trainable=trainable)
    return JobConfig(
        name="refused",
        features={"t": FeatureConfig(table)},
        model=Perceptron(),
        data=ParquetData("nowhere/*.parquet", label="label"),
        batch_size=8,
        num_lanes=4,
    )


@pytest.mark.parametrize(
    ("num_rows", "optimizer", "options", "message"),
    [
        (9_000_000, SGD(), {}, r"9,000,000 rows with place='replicated'. Expected at most 8,388,608"),
        (
            8_000_000,
            Adam(),
            {"dim": 128},
            r"with its slots, and place='replicated'. Expected at most 4,294,967,296",
        ),
        (9_000_000, SGD(), {"trainable": False}, r"9,000,000 rows"),
        (1_100_000_000, SGD(), {"place": "sharded"}, r"place='sharded'. Expected at most 1,073,741,824"),
        (10, Halving(), {"place": "sharded"}, r"place='sharded' and a Halving, whose rule is compiled for hosts"),
        (8_000_000, SGD(), {"trainable": False, "dim": 256}, r"8,192,000,000 bytes"),
        (
            10,
            CustomRowOptimizer(branching),
            {"place": "sharded"},
            r"a CustomRowOptimizer whose rule JAX cannot trace: TracerBoolConversionError",
        ),
        (10, Halving(), {}, r"a Halving, whose rule is compiled for hosts"),
        (10, replace(SGD(), use_gradient_accumulation=False), {}, r"use_gradient_accumulation=False"),
    ],
)
def test_a_job_is_refused_with_the_remedy(num_rows: int, optimizer: Optimizer, options: dict, message: str) -> None:
    with pytest.raises(JobError, match=message) as refused:
        job_of(num_rows, optimizer, **options)
    assert "Leave place out, which keeps the table on the hosts" in str(refused.value)


def test_other_places_do_not_exist() -> None:
    assert TableConfig(10, 8, place="device").place == "replicated"
    with pytest.raises(ValueError, match="place"):
        TableConfig(10, 8, place="chip")  # pyright: ignore[reportArgumentType]


def test_an_id_outside_its_table_and_more_ids_than_have_room_end_the_run(tmp_path: Path) -> None:
    columns = {"label": [0.0] * 80, "x": [0.5] * 80}
    for name in ("few", "many", "cut"):
        columns |= {f"{name}_id": [1] * 80, f"{name}_bag": [[2]] * 80}
    columns["few_id"] = [1] * 79 + [12]
    pq.write_table(pa.table(columns), tmp_path / "outside.parquet")
    with pytest.raises(InputError, match=r"12.*'?few_id"):
        train(tmp_path, tmp_path / "runs", "outside", on_devices=["few"])
    columns |= {"few_id": [1] * 80, "few_bag": [[2]] * 79 + [[3] * (1 << 20)]}
    pq.write_table(pa.table(columns), tmp_path / "outside.parquet")
    with pytest.raises(InputError, match="1048615 ids of feature 'few_bag' in a device's part.*at most 1048576"):
        train(tmp_path, tmp_path / "runs", "long", on_devices=["few"])
