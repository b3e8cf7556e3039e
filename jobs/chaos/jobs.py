"""Jobs for `podembed chaos`: a tiny one, and any other one with an audit table that counts how often each sample was
trained.

The audit is one feature more, whose id is the sample's own. The rows of its table go up by exactly one with each
update. Their optimizer is SGD with rate 1, on gradients that are limited to -1 from both sides. The model does not see
it. What no ledger can claim, the table holds: a sample that was lost is at 0, one that was trained twice at 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.features.activations import Activations
from podembed.embedding.features.feature_order import FeatureOrder
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from podembed.jobs.finished_folder import create_once
from podembed.jobs.search_path import current_folder
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.model.batch import ModelBatch
from podembed.workers.model.context import StepContext
from podembed.workers.model.contract import Model, ModelSpec, ShortModel, has_short_form

AUDIT = "podembed_audit"
DEFAULT_FOLDER = Path(".data/chaos")
NUM_ROWS = 1_900
BATCH_SIZE = 96
NUM_LANES = 12
DIM = 8
CUT_ROWS = 20_000
ID_FAULTS = ("none", "negative", "too_large", "largest", "all_equal", "one_bucket", "huge_bag")
HUGE_BAG = 20_000


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One hidden layer over the dense inputs and all activations; compiles in a fraction of a second."""

    width: int = 16
    order: FeatureOrder = field(default_factory=FeatureOrder, init=False, repr=False, compare=False)

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> dict[str, jax.Array]:
        self.order.tell(widths)
        inputs = num_dense + sum(widths.values())
        first, second = jax.random.split(key)
        return {
            "hidden": jax.random.normal(first, (inputs, self.width)) / np.sqrt(inputs),
            "out": jax.random.normal(second, (self.width,)) / np.sqrt(self.width),
        }

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        inputs = jnp.concatenate([dense, *self.order.read(activations)], axis=1)
        return jnp.tanh(inputs @ params["hidden"]) @ params["out"]


@dataclass(frozen=True, slots=True)
class Audited:
    """A model that does not see the audit feature."""

    model: ShortModel

    def init(self, key: jax.Array, num_dense: int, widths: Mapping[str, int]) -> Any:
        return self.model.init(key, num_dense, _without(widths))

    def apply(self, params: Any, dense: jax.Array, activations: Mapping[str, jax.Array]) -> jax.Array:
        return self.model.apply(params, dense, Activations(_without(activations)))

    @property
    def loss(self) -> Any:
        return _loss_of(self.model)


@dataclass(frozen=True, slots=True)
class AuditedLong:
    """The same for a model of the long form."""

    model: Model

    def init(self, key: jax.Array, spec: ModelSpec) -> Any:
        return self.model.init(key, replace(spec, activation_shapes=_without(spec.activation_shapes)))

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> Any:
        return self.model.apply(params, _seen(batch), context)

    @property
    def loss(self) -> Any:
        return _loss_of(self.model)


def _loss_of(model: Any) -> Any:
    loss = getattr(model, "loss", None)
    return loss and (lambda outputs, batch, context: loss(outputs, _seen(batch), context))


def _seen(batch: ModelBatch) -> ModelBatch:
    return replace(batch, activations=Activations(_without(batch.activations)))


def audited(*, function: str, arguments: dict[str, Any], num_rows: int | None) -> JobConfig:
    """A job without its evaluation and, if `num_rows` is given, with the audit.

    Args:
      function: `package.module:function` of the job.
      num_rows: number of rows of the audit table, above the largest sample id; the data must then name its column of
        sample ids.

    Raises:
      JobError: the job cannot be made.
    """
    job = JobReference(function=function, arguments=arguments, folder=current_folder()).resolve()
    data = replace(job.data, eval_paths=())
    if num_rows is None or data.sample_id is None:
        return replace(job, data=data)
    table = TableConfig(
        num_rows, 1, Constant(0.0), combiner="sum", name=AUDIT, optimizer=SGD(1.0, clipvalue=(-1.0, -1.0))
    )
    declared = data.id_columns | {AUDIT: IdColumn(data.sample_id)}
    return replace(
        job,
        features={**job.features, AUDIT: FeatureConfig(table)},
        model=Audited(job.model) if has_short_form(job.model) else AuditedLong(job.model),  # type: ignore[arg-type]
        data=replace(data, features=declared),
    )


def tiny(*, folder: str = str(DEFAULT_FOLDER), epochs: int = 3, id_fault: str = "none", seed: int = 7) -> JobConfig:
    """A job of 20 steps an epoch that has all that can go wrong. It has bags, empty bags, a shared table, tables that
    lie whole, one that is cut over the hosts, and three row optimizers.

    Args:
      folder: of its data, which is written if it is not there.
      id_fault: one of `ID_FAULTS`. The first three after `none` spoil one id. The others are legal and uneven: all
        samples have one id, all ids lie in one bucket, one sample has a bag of thousands.
    """
    where = _write(Path(folder) / id_fault, id_fault)
    features = tiny_features()
    return JobConfig(
        name="tiny",
        features=features,
        model=TinyModel(),
        data=tiny_data(where, features),
        batch_size=BATCH_SIZE,
        num_lanes=NUM_LANES,
        num_epochs=epochs,
        dense_optimizer=optax.adam(1e-2),
        seed=seed,
    )


def tiny_features(*, cut_rows: int = CUT_ROWS) -> dict[str, FeatureConfig]:
    """The features of `tiny`; table b has `cut_rows` rows."""
    bags = TableConfig(300, DIM, name="bags", combiner="mean", optimizer=RowWiseAdagrad(0.05))
    return {
        "a": FeatureConfig(TableConfig(50, DIM, name="a", combiner="sum", optimizer=Adagrad(0.1))),
        "b": FeatureConfig(TableConfig(cut_rows, 2 * DIM, name="b", combiner="sum", optimizer=Adam(0.01))),
        "bag": FeatureConfig(bags),
        "other_bag": FeatureConfig(bags, combiner="sqrtn"),
    }


def tiny_data(folder: Path | str, features: Iterable[str]) -> ParquetData:
    """What `write_tiny_files` wrote."""
    return ParquetData(
        f"{folder}/part-*.parquet",
        label="label",
        dense=("x", "y"),
        features={name: IdColumn(name) for name in features},
        sample_id="sample_id",
    )


def _without(features: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in features.items() if name != AUDIT}


def _write(folder: Path, id_fault: str) -> Path:
    if id_fault not in ID_FAULTS:
        raise ValueError(f"Found id_fault={id_fault!r}. Expected one of {ID_FAULTS}.")
    create_once(folder, lambda unfinished: write_tiny_files(unfinished, id_fault=id_fault))
    return folder


def write_tiny_files(
    folder: Path, *, id_fault: str = "none", num_rows: int = NUM_ROWS, cut_rows: int = CUT_ROWS, seed: int = 5
) -> dict[str, Any]:
    """Two files of uneven row groups; columns `label`, `x`, `y`, `a`, `b`, `bag`, `other_bag`, `sample_id`.

    Args:
      folder: there already.
      id_fault: as in `tiny`.
      cut_rows: of table b.

    Returns:
      What to report of them.
    """
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        "bag": [rng.integers(0, 300, rng.integers(0, 6)).tolist() for _ in range(num_rows)],
        "other_bag": [rng.integers(0, 300, rng.integers(0, 4)).tolist() for _ in range(num_rows)],
        "label": (rng.random(num_rows) < 0.3).astype(np.int8),
        "x": rng.standard_normal(num_rows).astype(np.float32),
        "y": rng.standard_normal(num_rows).astype(np.float32),
        "a": rng.integers(0, 50, num_rows),
        "b": np.minimum(rng.zipf(1.3, num_rows), 999) * 37 % cut_rows,
        "sample_id": np.arange(num_rows),
    }
    _spoil(columns, id_fault, rng, one=num_rows // 2, cut_rows=cut_rows)
    lists = {name: pa.array(columns.pop(name), pa.list_(pa.int64())) for name in ("bag", "other_bag")}
    table = pa.table({name: pa.array(values) for name, values in columns.items()} | lists)
    first = num_rows * 2 // 3
    pq.write_table(table.slice(0, first), folder / "part-0.parquet", row_group_size=170)
    pq.write_table(table.slice(first), folder / "part-1.parquet", row_group_size=90)
    return {"rows": num_rows}


def _spoil(columns: dict[str, Any], id_fault: str, rng: np.random.Generator, *, one: int, cut_rows: int) -> None:
    """Changes ids in place; `one` is the sample that is spoilt."""
    match id_fault:
        case "negative" | "too_large" | "largest":
            columns["b"][one] = {"negative": -1, "too_large": cut_rows, "largest": 2**63 - 1}[id_fault]
        case "all_equal":
            columns["b"][:] = columns["b"][one]
        case "one_bucket":
            # More than any table of this size has buckets, so all these rows are in bucket 0.
            columns["b"] = columns["b"] // 64 * 64
        case "huge_bag":
            columns["bag"][one] = rng.integers(0, 300, HUGE_BAG).tolist()
