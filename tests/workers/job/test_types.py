"""What stands in a job's fields by mistake is refused when the job is declared, with the field, what was found and what
to write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam
from podembed.embedding.tf.keras.keras_optimizers import Adagrad as KerasAdagrad
from podembed.jobs.fitting import tables_with_counting_rates
from podembed.jobs.models.dlrm import DLRM
from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn
from podembed.workers.data.config import CsvData, InputData, ParquetData
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.ranking import RecallAt
from tests.small_job import SmallModel

TABLE = TableConfig(100, 4, name="users")


def _injected(rate: float) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.adam)(learning_rate=rate)


def job_of(**changes: Any) -> JobConfig:
    declared: dict[str, Any] = {
        "name": "test",
        "features": {"u": FeatureConfig(TABLE)},
        "model": SmallModel(),
        "data": ParquetData("x", label="y"),
        "batch_size": 32,
    }
    return JobConfig(**{**declared, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": optax.adam(1e-3)}, "transformation of optax as optimizer, which updates rows.*dense_optimizer"),
        ({"optimizer": Adagrad}, r"optimizer=the class Adagrad\. Expected .*Write Adagrad\(\.\.\.\)"),
        ({"optimizer": "adagrad"}, "optimizer='adagrad'. Expected a row optimizer"),
        ({"optimizer": None}, "optimizer=None. Expected a row optimizer"),
        ({"optimizer": KerasAdagrad()}, r"optimizer=KerasAdagrad, a Keras optimizer.*as_optax\(\)"),
        ({"features": {"u": TABLE}}, r"TableConfig as features\['u'\]\. Expected a FeatureConfig\. Write FeatureConfig\(table\)"),
        ({"features": {"u": {"rows": 5}}}, r"features\['u'\]={'rows': 5}\. Expected a FeatureConfig"),
        ({"features": {"u": FeatureConfig}}, r"features\['u'\]=the class FeatureConfig"),
        ({"features": {}}, "features={}. Expected a dictionary .* at least one"),
        ({"features": [FeatureConfig(TABLE)]}, "features=.*Expected a dictionary"),
        ({"features": {3: FeatureConfig(TABLE)}}, "names that are text"),
        ({"features": {"u": FeatureConfig(TableConfig(9, 4, name="t", optimizer=optax.sgd(1.0)))}}, "as optimizer of table 't'"),
        ({"features": {"u": FeatureConfig(TableConfig(9, 4, name="t", dtype="int32"))}}, "dtype of table 't'='int32'. Expected float32"),
        ({"model": None}, r"model=None\. Expected an object with init\(.*\) and apply\("),
        ({"model": SmallModel}, r"model=the class SmallModel.*Write model=SmallModel\(\.\.\.\)"),
        ({"model": lambda x: x}, "model=a function. Expected an object with init"),
        ({"dense_optimizer": Adagrad()}, r"dense_optimizer=Adagrad, which updates rows.*optax\.adagrad\(\.\.\.\)"),
        ({"dense_optimizer": KerasAdagrad()}, r"dense_optimizer=KerasAdagrad, a Keras optimizer.*Write dense_optimizer=optimizer\.as_optax\(\)"),
        ({"dense_optimizer": optax.adam}, r"dense_optimizer=a function.*Call it: adam\(\.\.\.\)"),
        ({"dense_optimizer": 0.1}, "dense_optimizer=0.1. Expected a transformation of optax"),
        ({"dense_optimizer": optax.adam(float("nan"))}, "dense_optimizer with step_size=nan. Expected finite numbers"),
        ({"dense_optimizer": optax.adam(1e-3, b1=float("nan"))}, "dense_optimizer with b1=nan. Expected finite"),
        ({"dense_optimizer": optax.sgd(float("inf"))}, "dense_optimizer with step_size=-inf. Expected finite numbers"),
        ({"dense_optimizer": optax.adam(-1)}, "dense_optimizer with the learning rate -1, which goes uphill"),
        ({"dense_optimizer": optax.chain(optax.scale(0.5), optax.sgd(-0.1))}, "learning rate -0.1, which goes uphill"),
        ({"dense_optimizer": _injected(-0.1)}, "learning rate -0.1, which goes uphill. Write a finite"),
        ({"data": ["a.parquet"]}, r"data=\['a.parquet'\]. Expected ParquetData, CsvData or NpyData"),
        ({"data": "a.parquet"}, "data='a.parquet'. Expected ParquetData"),
        # Declared with what all kinds share, so that nothing could read it.
        ({"data": InputData("x", label="y")}, "data=an? InputData. Expected ParquetData, CsvData or NpyData"),
        ({"data": ({} for _ in range(3))}, "data=a generator. Expected ParquetData"),
        ({"data": ParquetData}, "data=the class ParquetData"),
        ({"loss": "mse"}, "loss='mse'. Expected a function"),
        ({"loss": 0.5}, "loss=0.5. Expected a function"),
        ({"batch_size": "32"}, "batch_size='32' in JobConfig. Expected a whole number. Write it so without quotes"),
        ({"batch_size": 32.0}, "batch_size=32.0 in JobConfig. Expected a whole number"),
        ({"batch_size": -16}, "batch_size=-16"),
        ({"num_epochs": None}, "num_epochs=None in JobConfig"),
        ({"seed": 1.5}, "seed=1.5 in JobConfig"),
        ({"seed": True}, "seed=True in JobConfig"),
        ({"name": 7}, "name=7 in JobConfig. Expected text"),
        ({"name": ""}, "no name in JobConfig"),
        ({"overlap": "yes"}, "overlap='yes' in JobConfig. Expected True or False"),
        ({"staleness": "1"}, "staleness='1'"),
        ({"best_auc": "0.8"}, "best_auc='0.8'"),
        ({"metrics": RecallAt(3, group_by="u")}, r"metrics=RecallAt.*Write metrics=\(metric,\)"),
        ({"metrics": ("auc",)}, r"metrics=\('auc',\)"),
        ({"baseline": {"AUC": 0.5}}, "baseline={'AUC': 0.5}. Expected a Baseline"),
    ],
)  # fmt: skip
def test_what_a_field_is_not_for_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=f"Found .*{message}") as raised:
        job_of(**changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: ParquetData("x", label=("a", "b")), r"label=\('a', 'b'\) in ParquetData. Expected text"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", sample_weight=1), "sample_weight=1"),  # type: ignore[arg-type]
        (lambda: ParquetData(7, label="y"), "paths=7. Expected a path"),  # type: ignore[arg-type]
        (lambda: ParquetData(({"y": 1},), label="y"), "{'y': 1} among paths"),  # type: ignore[arg-type]
        (lambda: ParquetData({"a": 1}, label="y"), "paths={'a': 1}"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", dense=("a", 3)), r"dense=\('a', 3\)"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", dense={"a": 3}), "dense={'a': 3}"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", features=("u",)), r"features=\('u',\)"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", features={"u": 3}), r"features\['u'\]=3"),  # type: ignore[arg-type]
        (lambda: ParquetData("x", label="y", max_bad_rows="9"), "max_bad_rows='9'"),  # type: ignore[arg-type]
        (lambda: CsvData("x", label="y", rows_per_block=1.5), "rows_per_block=1.5"),  # type: ignore[arg-type]
        (lambda: CsvData("x", label="y", list_separators=("a",)), r"list_separators=\('a',\)"),  # type: ignore[arg-type]
        (lambda: DenseColumn(("a",)), r"name=\('a',\) in DenseColumn"),  # type: ignore[arg-type]
        (lambda: IdColumn("a", vocabulary_size="10"), "vocabulary_size='10' in IdColumn"),  # type: ignore[arg-type]
        (lambda: IdColumn("a", "hash", salt="x"), "salt='x' in IdColumn"),  # type: ignore[arg-type]
    ],
)
def test_what_data_cannot_be_declared_with_is_named(declare: Any, message: str) -> None:
    with pytest.raises(DataConfigError, match=f"Found {message}"):
        declare()


def test_what_is_meant_as_well_is_taken() -> None:
    """Paths as objects, numpy's whole numbers, lists of metrics; what a job had before stays as it is."""
    data = ParquetData((Path("a"), "b"), label="y", eval_paths=Path("c"))  # type: ignore[arg-type]
    assert (data.paths, data.eval_paths) == (("a", "b"), ("c",))
    job = job_of(data=data, batch_size=np.int64(32), metrics=[RecallAt(3, group_by="u")], optimizer=SGD(0.1))
    assert type(job.batch_size) is int
    assert job.metrics == (RecallAt(3, group_by="u"),)
    assert job_of(model=DLRM(), dense_optimizer=KerasAdagrad().as_optax(), loss=optax.squared_error).dense_optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.0),
        optax.adam(optax.linear_schedule(1.0, 0.0, 10)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale(0.5), optax.adam(1e-3)),
        optax.chain(optax.scale_by_adam(), optax.scale(-1e-3)),
        optax.chain(optax.scale(2.0), optax.stateless(lambda updates, params: updates)),
        optax.adafactor(1e-3),
        optax.lbfgs(),
        optax.multi_transform({"a": optax.sgd(0.1), "b": optax.set_to_zero()}, lambda params: params),
        optax.apply_if_finite(optax.lamb(1e-3), 3),
        optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
        _injected(0.1),
        optax.contrib.prodigy(),
        optax.contrib.cocob(),
        optax.contrib.schedule_free_adamw(1e-3),
    ],
)
def test_transformations_that_go_down_are_taken(optimizer: optax.GradientTransformation) -> None:
    assert job_of(dense_optimizer=optimizer).dense_optimizer is optimizer


def test_rates_that_may_count_their_calls_are_known_by_their_tables() -> None:
    assert tables_with_counting_rates(job_of(optimizer=Adagrad(lambda: 0.1)))
    assert tables_with_counting_rates(job_of(optimizer=Adam.corrected(lambda: 0.1)))
    for rate in (0.1, lambda step: 0.1, optax.linear_schedule(1.0, 0.0, 10)):
        assert not tables_with_counting_rates(job_of(optimizer=Adagrad(rate)))
        assert not tables_with_counting_rates(job_of(optimizer=Adam.corrected(rate)))
