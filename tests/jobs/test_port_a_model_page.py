"""The jobs of docs/port-a-model.md train as they stand there, and give what their programs give elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed import (
    FeatureConfig,
    JobConfig,
    JobError,
    JobFailed,
    Result,
    RunConfig,
    ScalingConfig,
    SilentReporter,
    TableConfig,
    Trainer,
    evaluate,
    export_model,
    predict,
    rank_all,
    recommend,
    vocabulary_size,
)
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.columns.id_columns import hashed_rows
from podembed.workers.device.dense_half import model_spec
from tests.long_tests import is_long
from tests.pages import blocks
from tests.run_state import committed_state

USERS, TITLES = 40, [f"Film {at:02d}, née {at}" for at in range(30)]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the blocks of the page define."""
    found: dict[str, Any] = {}
    for block in blocks("docs/port-a-model.md"):
        block.run(found)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's project, where the files of the page lie."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(job: JobConfig, **fields: Any) -> Result:
    return Trainer(
        job,
        scaling_config=ScalingConfig(in_process=True),
        run_config=RunConfig(storage_path="runs", name="run", **fields),
        reporter=SilentReporter(),
    ).fit()


def write_pairs() -> None:
    """Users see films whose number has the same remainder as theirs."""
    random = np.random.default_rng(0)
    for name, count in (("train", 1024), ("test", 100)):
        users = random.integers(0, USERS, count)
        films = random.integers(0, 6, count) * 5 + users % 5
        table = {"user_id": [f"u{user}" for user in users], "movie_title": [TITLES[film] for film in films]}
        table["place"] = random.integers(0, 9, count)
        pq.write_table(pa.table(table), f"{name}.parquet")
    Path("users.txt").write_text("".join(f"u{user}\n" for user in range(USERS)))
    Path("titles.txt").write_text("".join(f"{title}\n" for title in TITLES), encoding="utf-8")
    pq.write_table(pa.table({"movie_title": [*TITLES[:20], "never seen"]}), "movies.parquet")
    pq.write_table(pa.table({"user_id": ["u3", "u14"]}), "users.parquet")


def test_the_retrieval_tutorial_learns_and_recommends_titles(names: dict[str, Any]) -> None:
    write_pairs()
    assert vocabulary_size("titles.txt") == 1 + len(TITLES)
    job = replace(names["retrieval"](), batch_size=128, num_epochs=12)
    # No score depends on it, so users.parquet does without.
    data = replace(job.data, extra=("place",))
    job = replace(job, features={**job.features, "place": FeatureConfig(TableConfig(9, 2))}, data=data)
    result = trained(job)
    # A sum over the batch, of vectors near 0.
    assert result.losses[0] == pytest.approx(128 * np.log(128), rel=1e-3)
    assert result.evaluations[-1].values == {}, "samples without a label have no AUC"
    found = rank_all("runs/run", job=job, feature="movie", at=(6, 10)).evaluation.values
    assert found["hit_rate@6"] > 0.9, "a fifth by chance"

    fields = {"data": ["users.parquet"], "feature": "movie", "columns": ["user_id"]}
    recommend("runs/run", job=job, top=6, out="best.parquet", **fields)
    best = pq.read_table("best.parquet").to_pylist()
    assert [row["user_id"] for row in best] == ["u3", "u14"]
    assert [sorted(row["movie"]) for row in best] == [[TITLES[at] for at in range(number, 30, 5)] for number in (3, 4)]
    # Of the catalogue alone, whose last value has no row of its own.
    recommend("runs/run", job=job, top=40, out="some.parquet", items=["movies.parquet"], **fields)
    assert [set(row["movie"]) for row in pq.read_table("some.parquet").to_pylist()] == [set(TITLES[:20])] * 2


def test_jobs_that_need_a_label_say_so(names: dict[str, Any]) -> None:
    write_pairs()
    job = replace(names["retrieval"](), batch_size=128)

    class Clicks:
        def init(self, key: jax.Array, spec: Any) -> Any:
            assert spec.example(2).labels == {}
            return {}

        def apply(self, params: Any, batch: Any, context: Any) -> jax.Array:
            return batch.activations["user"].sum(axis=1)

    with pytest.raises(JobError, match=r"no label in the data of the JobConfig 'retrieval'.*Write label='click'"):
        replace(job, model=Clicks())

    class Reading(Clicks):
        def loss(self, outputs: jax.Array, batch: Any, context: Any) -> jax.Array:
            return outputs - batch.label

    with pytest.raises(JobFailed, match=r"Found no label in the data, whose samples are all positive ones"):
        trained(replace(job, model=Reading()), max_steps=1)


@is_long
def test_each_tower_is_computed_from_its_own_columns(names: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    lists = [random.integers(0, 20, random.integers(0, 4)).tolist() for _ in range(640)]
    likes = {
        "user_id": random.integers(0, 99, 640),
        "history": pa.array(lists, pa.list_(pa.int64())),
        "movie_id": random.integers(0, 200, 640),
        "genres": pa.array(lists[::-1], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(likes), "likes.parquet")
    pq.write_table(pa.table({name: likes[name] for name in ("movie_id", "genres")}), "movies.parquet")
    job = replace(names["towers"](), batch_size=64, num_epochs=2)
    result = trained(job)
    assert 3 < result.losses[max(result.losses)] < result.losses[0] < 12

    predict("runs/run", job=job, data=["likes.parquet"], out="all.parquet")
    both = pq.read_table("all.parquet")
    assert set(both.column_names) == {"movie", "scores", "user"}
    predict("runs/run", job=job, data=["movies.parquet"], out="movies-only.parquet", outputs=["movie"])
    one = pq.read_table("movies-only.parquet")
    assert one.column_names == ["movie"]
    vectors = np.stack(one["movie"].to_numpy())
    np.testing.assert_allclose(vectors, np.stack(both["movie"].to_numpy()), rtol=1e-5, atol=1e-6)
    products = (np.stack(both["user"].to_numpy()) * vectors).sum(axis=1)
    np.testing.assert_allclose(products, both["scores"].to_numpy(), rtol=1e-4, atol=1e-4)

    exported = export_model("runs/run", job=job, out="user-tower", outputs=["user"])
    assert (set(exported.columns), exported.outputs) == ({"user_id", "history"}, {"user": (32,)})
    with pytest.raises(ConfigurationError, match=r"no output 'film' of the model. Expected one of \['movie', 'scores'"):
        predict("runs/run", job=job, data=["movies.parquet"], out="x.parquet", outputs=["film"])


@is_long
def test_the_next_item_of_a_history_is_learnt(names: dict[str, Any]) -> None:
    """Items follow one another in a circle, so a model that sees the last one knows the next."""
    random, count = np.random.default_rng(0), 120
    Path("items.txt").write_text("".join(f"{10 * item}\n" for item in range(count)))
    starts, lengths = random.integers(0, count, 256), random.integers(3, 12, 256)
    walks = [
        [10 * ((start + at) % count) for at in range(length + 1)] for start, length in zip(starts, lengths, strict=True)
    ]
    others = [random.permutation([10 * item for item in range(count) if 10 * item not in walk]) for walk in walks]
    kind = pa.list_(pa.int64())

    def write(path: str, history: list[Any], following: list[Any], items: list[Any]) -> None:
        columns = {"history": history, "next": following, "item": items}
        table = {name: pa.array(values, kind) for name, values in columns.items()}
        pq.write_table(pa.table({"user": np.arange(256), **table}), path)

    write("users.parquet", [w[:-2] for w in walks], [w[1:-1] for w in walks], [[w[-2]] for w in walks])
    ranked = [[walk[-1], *other[:100].tolist()] for walk, other in zip(walks, others, strict=True)]
    write("held-out.parquet", [walk[:-1] for walk in walks], [[]] * 256, ranked)

    job = replace(names["sasrec"](), num_epochs=25)
    result = trained(job, eval_every_steps=50)
    # Two logarithms of 2 for each position.
    assert result.losses[0] == pytest.approx(2 * np.log(2), rel=0.05)
    figures = result.evaluations[-1].values
    assert figures["hit_rate@10"] > 0.3, "a tenth by chance"
    assert evaluate("runs/run", job=job).evaluation.values == figures


@is_long
def test_a_step_of_dlrm_has_the_numbers_of_equinox_alone(names: dict[str, Any]) -> None:
    """Its loss, and the gradients of all rows and parameters, as the optimizers have them after the step."""
    random, count = np.random.default_rng(0), 128
    columns: dict[str, Any] = {"label": random.integers(0, 2, count)}
    columns |= {f"int_{at}": random.integers(-1, 50, count) for at in range(13)}
    columns |= {f"cat_{at}": [f"{value:08x}" for value in random.integers(0, 99, count)] for at in range(26)}
    pq.write_table(pa.table(columns), "clicks.parquet")
    job: JobConfig = names["dlrm"]()
    first = random.normal(size=(26, 10_000, 16)).astype(np.float32) / 4
    features = {
        name: FeatureConfig(TableConfig(10_000, 16, name=name, initial_rows=rows))
        for name, rows in zip(job.features, first, strict=True)
    }
    job = replace(job, features=features)
    result = trained(job, max_steps=1)

    module = names["DLRM"](model_spec(job), jax.random.key(job.seed))
    ids = [hashed_rows(pa.array(columns[f"cat_{at}"]), vocabulary_size=10_000, salt=at) for at in range(26)]
    dense = np.stack([np.log1p(np.maximum(columns[f"int_{at}"], 0)) for at in range(13)], axis=1).astype(np.float32)
    label = jnp.asarray(columns["label"], jnp.float32)

    def mean_loss(parts: Any) -> jax.Array:
        alone, tables = parts
        vectors = jnp.stack([table.weight[rows] for table, rows in zip(tables, ids, strict=True)], axis=1)
        scores = jax.vmap(alone)(jnp.asarray(dense), vectors)
        return optax.sigmoid_binary_cross_entropy(scores, label).mean()

    tables = [eqx.nn.Embedding(weight=jnp.asarray(rows)) for rows in first]
    loss, (of_module, of_tables) = eqx.filter_value_and_grad(mean_loss)((module, tables))
    assert result.losses[0] == pytest.approx(float(loss), rel=1e-5)
    state = committed_state(result.path)
    for at, table in enumerate(of_tables):
        squares = state[f"cat_{at}/accumulator"] - np.float32(1e-6)
        np.testing.assert_allclose(squares, np.asarray(table.weight) ** 2, rtol=1e-3, atol=1e-9)
        signs = np.sign(first[at] - state[f"cat_{at}/rows"])
        large = np.abs(table.weight) > 1e-5
        np.testing.assert_array_equal(signs[large], np.sign(np.asarray(table.weight)[large]))
    # A tenth of the gradient is the first moment of Adam.
    moments = [values for key, values in sorted(state.items()) if "/mu/" in key]
    expected = [np.asarray(leaf) / 10 for leaf in jax.tree.leaves(eqx.filter(of_module, eqx.is_inexact_array))]
    assert len(moments) == len(expected) == 12
    found, wanted = (
        sorted((one.ravel() for one in those), key=lambda one: (len(one), one.sum())) for those in (moments, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-7)
