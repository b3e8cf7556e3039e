"""Neural collaborative filtering: GMF, MLP and NeuMF, on the ratings of MovieLens as likes.

The source is He, Liao, Zhang, Nie, Hu and Chua, Neural collaborative filtering, 2017. Each user's last rating is held
out. Every training sample has 4 negatives, new in each epoch. A user's held-out item is ranked among 99 others that the
user did not rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from podembed import (
    FeatureConfig,
    HitRateAt,
    IdColumn,
    JobConfig,
    ModelBatch,
    ModelSpec,
    NDCGAt,
    Negatives,
    ParquetData,
    StepContext,
    TableConfig,
)
from podembed.embedding import TruncatedNormal
from podembed.jobs.movielens import DEFAULT_CACHE
from podembed.jobs.papers.adam import adam
from podembed.jobs.papers.ratings import RatingsSpec, write_ratings

Kind = Literal["gmf", "mlp", "neumf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuMF:
    """Scores of candidates from the vectors of a user and of items.

    The first `dim` numbers of a vector are those of the product, the others those of the layers.

    Attributes:
      kind: `gmf` is the product alone, `mlp` the layers alone.
      dim: numbers of the product.
      layers: widths of the layers; the first gets the vectors of user and item side by side.
    """

    kind: Kind = "neumf"
    dim: int = 8
    layers: tuple[int, ...] = (64, 32, 16, 8)

    def init(self, key: jax.Array, spec: ModelSpec) -> dict[str, Any]:
        """Layers by Glorot's rule, and the weights of the last one."""
        keys = jax.random.split(key, len(self.layers))
        glorot = jax.nn.initializers.glorot_uniform()
        pairs = zip(self.layers[:-1], self.layers[1:], keys[1:], strict=True)
        hidden = [{"w": glorot(one, (width, after)), "b": jnp.zeros(after)} for width, after, one in pairs]
        width = self.dim * (self.kind != "mlp") + self.layers[-1] * (self.kind != "gmf")
        last = jax.nn.initializers.lecun_uniform()(keys[0], (width, 1))
        return {"hidden": hidden if self.kind != "gmf" else [], "w": last[:, 0], "b": jnp.zeros(())}

    def apply(self, params: Any, batch: ModelBatch, context: StepContext) -> jax.Array:
        """Log odds `[n, c]`."""
        items = batch.activations["item"]
        user = jnp.broadcast_to(batch.activations["user"][:, None], items.shape)
        parts = []
        if self.kind != "mlp":
            parts.append(user[..., : self.dim] * items[..., : self.dim])
        if self.kind != "gmf":
            values = jnp.concatenate([user[..., self.dim :], items[..., self.dim :]], axis=-1)
            for layer in params["hidden"]:
                values = jax.nn.relu(values @ layer["w"] + layer["b"])
            parts.append(values)
        return jnp.concatenate(parts, axis=-1) @ params["w"] + params["b"]


def ncf(
    *,
    data: str,
    cache: str = DEFAULT_CACHE,
    kind: Kind = "neumf",
    dim: int = 8,
    layers: tuple[int, ...] = (64, 32, 16, 8),
    negatives: int = 4,
    candidates: int | str = 99,
    least_ratings: int = 1,
    batch_size: int = 256,
    epochs: int = 20,
    learning_rate: float = 1e-3,
    is_lazy: bool = False,
    seed: int = 0,
) -> JobConfig:
    """NeuMF, GMF or MLP, evaluated by HR@10 and NDCG@10.

    Args:
      data: folder of the ratings, see `write_ratings`.
      cache: folder where the samples are written, or found.
      kind: `neumf`, `gmf` or `mlp`.
      dim: numbers of the product, which the paper calls predictive factors.
      layers: widths of the MLP. Vectors of user and item in it have half the first.
      candidates: items among which the held-out one is ranked, besides itself; `all` ranks it among all that the user
        did not rate.
      least_ratings: users and items with fewer are left out.
      is_lazy: whether Adam leaves rows alone that a batch does not name.
      batch_size: positives of a step.
    """
    samples = write_ratings(data, cache, RatingsSpec(least_ratings=least_ratings))
    layers = tuple(layers)
    width = dim + layers[0] // 2

    def table(name: str, num_rows: int) -> TableConfig:
        return TableConfig(num_rows, width, TruncatedNormal(stddev=0.01), combiner="sum", name=name)

    drawn = Negatives(negatives, without_positives_of="user", evaluation=candidates)
    return JobConfig(
        name="ncf",
        features={
            "user": FeatureConfig(table("users", samples.num_users)),
            "item": FeatureConfig(table("items", samples.num_items), max_sequence_length=1 + negatives),
        },
        model=NeuMF(kind=kind, dim=dim, layers=layers),
        data=ParquetData(
            samples.train,
            eval_paths=samples.evaluation,
            label="label",
            features={"item": IdColumn("item", negatives=drawn)},
        ),
        batch_size=batch_size,
        optimizer=adam(learning_rate, is_lazy=is_lazy),
        dense_optimizer=optax.adam(learning_rate),
        num_epochs=epochs,
        seed=seed,
        candidates="item",
        metrics=(HitRateAt(10), NDCGAt(10)),
    )
