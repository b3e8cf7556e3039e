"""A stream of clicks whose items come and go (`drift`): a table with a capacity beside tables that ids are hashed into.

Three models of one form learn side by side from the same batches. Each has tables and a bias of its own, and nothing of
one is read or changed by another. So each learns what it would learn alone. The true probabilities, which
`jobs.drift_files` knows, stand beside them as a fourth model.

A sample is scored before it is trained on. The scores are counted by day, and the AUC of each day is printed at the
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podembed import (
    Callback,
    FeatureConfig,
    IdColumn,
    IntegerColumn,
    JobConfig,
    JobError,
    ModelBatch,
    ModelSpec,
    ParquetData,
    Result,
    StepContext,
    TableConfig,
    Task,
    WithState,
)
from podembed.embedding import (
    Adagrad,
    Always,
    LeastFrequent,
    LeastRecent,
    MinCount,
    Never,
    SmallNorm,
    TruncatedNormal,
)
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import Evict
from podembed.jobs.drift_files import DEFAULT_CACHE, DriftSpec, write_drift
from podembed.orchestrator.run.reference import open_commit
from podembed.workers.checkpoint.shard import read_dense
from podembed.workers.job.quality import area_under_curve

BEST = "best"
# Each model's share of the memory that the dynamic one has for its items.
MEMORY = {"dynamic": 1, "hashed": 1, "hashed4": 4}
EVICTIONS: dict[str, Callable[[int], Evict]] = {
    "never": lambda half_life: Never(),
    "least_recent": lambda half_life: LeastRecent(),
    "least_frequent": LeastFrequent,
    "small_norm": lambda half_life: SmallNorm(),
}
SPREAD = TruncatedNormal(stddev=0.05)
NUM_BINS, LARGEST_ODDS = 1024, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftModels:
    """Matrix factorization, once for each of `names`, and the true log odds as `best`.

    The last number of a vector is its bias. The state has counts of the scores in training, float32 `[days, models,
    bins, 2]`: by the day of the sample, model, bin of the score, and label.
    """

    names: tuple[str, ...]
    days: int

    def init(self, key: jax.Array, spec: ModelSpec) -> WithState:
        """A bias for each model, and no counts."""
        counts = jnp.zeros((self.days, len(self.names) + 1, NUM_BINS, 2))
        return WithState({name: jnp.zeros(()) for name in self.names}, {"counts": counts})

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> WithState:
        """`[n]` for each model."""
        scores = {}
        for name in self.names:
            user, item = batch.activations[f"{name}_user"], batch.activations[f"{name}_item"]
            scores[name] = jnp.sum(user[:, :-1] * item[:, :-1], axis=1) + user[:, -1] + item[:, -1] + params[name]
        scores[BEST] = batch.columns["odds"]
        return WithState(scores, _counted(scores, batch, context) if context.training else context.state)


def _counted(scores: Mapping[str, jax.Array], batch: ModelBatch, context: StepContext) -> dict[str, jax.Array]:
    odds = jax.lax.stop_gradient(jnp.stack([*scores.values()], axis=1))
    bins = jnp.clip((odds + LARGEST_ODDS) * (NUM_BINS / (2 * LARGEST_ODDS)), 0, NUM_BINS - 1).astype(jnp.int32)
    of_samples = bins, batch.columns["day"], batch.labels[BEST].astype(jnp.int32), batch.weights
    bins, day, label, weights = map(context.all_gather, of_samples)
    at = day[:, None], jnp.arange(bins.shape[1]), bins, label[:, None]
    return {"counts": context.state["counts"].at[at].add(weights[:, None])}


class TellDays(Callback):
    """Prints the AUC by day when a call ends.

    Args:
      items: tables of the models' items, by name of the model.
    """

    def __init__(self, items: Mapping[str, TableSpec]) -> None:
        self._items = dict(items)

    def on_end(self, result: Result | None) -> None:
        if result is not None and result.commit is not None:
            print("", *by_day(counts_of(result.path), self._items), sep="\n", flush=True)


def counts_of(run: str) -> np.ndarray:
    """The counts of a run's newest commit, see `DriftModels`."""
    commit = open_commit(run)
    files = [file for file in commit.manifest.dense if file.key == "state/counts"]
    return read_dense(commit.store, files)["state/counts"]


def by_day(counts: np.ndarray, items: Mapping[str, TableSpec]) -> list[str]:
    """Lines of a table: what each model takes for its items, and its AUC in each day that has samples.

    Args:
      counts: as those of `DriftModels`.
      items: tables of the models' items, in the order of the counts.
    """
    sizes = {name: (f"{spec.num_rows:,}", f"{bytes_of(spec) / 1024:,.0f}") for name, spec in items.items()}
    names = (*items, BEST)
    lines = [
        "AUC by day, each sample scored before it is trained on",
        _line("", "", names),
        _line("", "rows", [rows for rows, _ in sizes.values()]),
        _line("", "KiB", [size for _, size in sizes.values()]),
        _line("day", "samples", []),
    ]
    for day, of_day in enumerate(counts, 1):
        if num_samples := of_day[0].sum():
            lines.append(_line(f"{day}", f"{num_samples:,.0f}", [f"{auc_of(one):.4f}" for one in of_day]))
    return lines


def _line(day: str, what: str, figures: Sequence[str]) -> str:
    return f"{day:>3}{what:>9}" + "".join(f"{figure:>9}" for figure in figures)


def auc_of(counts: np.ndarray) -> float:
    """AUC of counts `[bins, 2]`; scores of one bin are equal. NaN without samples of both labels."""
    if not counts.sum(axis=0).all():
        return math.nan
    bins, labels = np.indices(counts.shape)
    return area_under_curve(bins.ravel(), labels.ravel(), counts.ravel())


def bytes_of(spec: TableSpec) -> int:
    """Memory of a table on one host: its rows with slots, the columns of its keys, the marks of 4 bytes that every
    table has, and the maps of keys that come and go.
    """
    of_rows = 4 * spec.num_rows * (sum(spec.widths.values()) + 1)
    return of_rows + (spec.keys.map_bytes(spec.layout) if isinstance(spec.keys, DynamicKeys) else 0)


def drift(
    *,
    cache: str = str(DEFAULT_CACHE),
    models: Sequence[str] = tuple(MEMORY),
    days: int = 10,
    samples_per_day: int = 100_000,
    users: int = 1_000,
    items_per_day: int = 1_000,
    capacity: int = 5_000,
    min_count: int = 1,
    evict: str = "least_frequent",
    half_life: int = 200,
    forget_after: int | None = None,
    dim: int = 16,
    batch_size: int = 512,
    learning_rate: float = 0.1,
    dense_learning_rate: float = 1e-2,
    seed: int = 0,
) -> JobConfig:
    """Models on a stream of clicks, which is written below `cache` if it is not there.

    Items of `dynamic` have a table with a capacity. Those of `hashed` are hashed into a table that takes as much
    memory, and those of `hashed4` into one that takes four times as much.

    Args:
      models: those that are trained.
      items_per_day: items that each day brings.
      capacity, half_life, forget_after: as of the table with a capacity.
      min_count: how often an item is named before it has a row there.
      evict: a key of `EVICTIONS`.

    Raises:
      JobError: an unknown model or policy.
    """
    names = tuple(models)
    if not names or not {*names} <= {*MEMORY} or evict not in EVICTIONS:
        raise JobError(
            f"Found models={[*names]} and evict='{evict}'. Expected some of {[*MEMORY]}, and one of {[*EVICTIONS]}."
        )
    spec = DriftSpec(days=days, samples_per_day=samples_per_day, users=users, items_per_day=items_per_day)
    folder = write_drift(Path(cache), spec, (*MEMORY, BEST))
    optimizer = Adagrad(learning_rate)
    dynamic = TableConfig(
        capacity=capacity,
        dim=dim,
        initializer=SPREAD,
        admit=MinCount(min_count) if min_count > 1 else Always(),
        evict=EVICTIONS[evict](half_life),
        forget_after=forget_after,
        name="dynamic_items",
    )
    items = {name: dynamic if name == "dynamic" else _hashed(name, dynamic, optimizer) for name in names}
    features, columns = {}, {}
    for name in names:
        users_of = TableConfig(users, dim, SPREAD, name=f"{name}_users")
        features |= {f"{name}_user": FeatureConfig(users_of), f"{name}_item": FeatureConfig(items[name])}
        mode = "as_is" if name == "dynamic" else "hash"
        columns |= {f"{name}_user": IdColumn("user"), f"{name}_item": IdColumn("item", mode=mode)}
    return JobConfig(
        name="drift",
        features=features,
        model=DriftModels(names=names, days=days),
        # The label of each model is the same. It has a column for each, since a task is named by its column.
        data=ParquetData(
            str(folder / "day-*.parquet"),
            labels=(*names, BEST),
            features=columns,
            extra=(IntegerColumn("day"), "odds"),
            order="files",
        ),
        tasks=(*map(Task, names), Task(BEST, weight=0.0)),
        batch_size=batch_size,
        optimizer=optimizer,
        dense_optimizer=optax.adam(dense_learning_rate),
        seed=seed,
        callbacks=(TellDays({name: _spec(table, optimizer) for name, table in items.items()}),),
    )


def _hashed(name: str, dynamic: TableConfig, optimizer: Adagrad) -> TableConfig:
    """A table of row numbers with this model's share of the memory of the dynamic one."""
    one_row = TableConfig(1, dynamic.dim, SPREAD, name=f"{name}_items")
    rows = MEMORY[name] * bytes_of(_spec(dynamic, optimizer)) // bytes_of(_spec(one_row, optimizer))
    return TableConfig(rows, dynamic.dim, SPREAD, name=one_row.name)


def _spec(table: TableConfig, optimizer: Adagrad) -> TableSpec:
    return TableSpec.of(table, seed=0, optimizer=optimizer)
