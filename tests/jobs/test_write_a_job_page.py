"""The job and the models of docs/write-a-job.md train as they stand there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed import (
    RMSE,
    CheckpointConfig,
    ConfigurationError,
    FeatureConfig,
    GroupedAUC,
    Jagged,
    JobConfig,
    Losses,
    ModelSpec,
    Result,
    StepContext,
    TableConfig,
    WithState,
    evaluate,
)
from podembed.embedding import Adagrad
from podembed.workers.device.dense_half import model_spec
from tests.pages import blocks
from tests.training import fit_job


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the blocks of the page define."""
    found: dict[str, Any] = {"WithState": WithState, "Losses": Losses}
    for block in blocks("docs/write-a-job.md", fragments=True):
        # The last one is of a prompt: it has a spec and a model.
        if "spec.example" not in block.code:
            block.run(found)
    return found


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(0)
    columns = {
        "click": (random.random(5000) < 0.3).astype(np.int8),
        "price": random.random(5000, np.float32),
        "age": random.random(5000, np.float32),
        "item": random.integers(0, 100_000, 5000),
    }
    pq.write_table(pa.table(columns), folder / "part.parquet")
    return f"{folder}/*.parquet"


def trained(job: JobConfig, folder: Path, checkpoints: CheckpointConfig | None = None) -> Result:
    result = fit_job(job, folder, name="page", max_steps=3, checkpoint_config=checkpoints or CheckpointConfig())
    assert result.step == 3
    return result


def last_loss(job: JobConfig, folder: Path) -> float:
    losses = trained(job, folder).losses
    return losses[max(losses)]


def on(clicks: str, job: JobConfig) -> JobConfig:
    return replace(job, data=replace(job.data, paths=(clicks,)))


def test_the_smallest_job_trains(names: dict[str, Any], clicks: str, tmp_path: Path) -> None:
    assert 0.3 < last_loss(on(clicks, names["job"]()), tmp_path) < 1.0


def test_the_smallest_job_learns(names: dict[str, Any], tmp_path: Path) -> None:
    """Clicks follow from a bias of the item alone, whose own AUC is 0.81. The job names no optimizer."""
    random = np.random.default_rng(0)
    bias = random.normal(0, 1.5, 400)
    for name, count in (("train", 40_960), ("eval", 8_000)):
        item = random.integers(0, len(bias), count)
        columns = {
            "click": (random.random(count) < 1 / (1 + np.exp(-bias[item]))).astype(np.int8),
            "price": random.random(count, np.float32),
            "age": random.random(count, np.float32),
            "item": item,
        }
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet", row_group_size=4096)
    job = names["job"]()
    files = {"paths": (f"{tmp_path}/train.parquet",), "eval_paths": (f"{tmp_path}/eval.parquet",)}
    result = fit_job(replace(job, data=replace(job.data, **files), num_epochs=3), tmp_path, name="learns")
    assert result.evaluations[-1].values["auc"] > 0.78


def test_the_module_of_flax_trains(names: dict[str, Any], clicks: str, tmp_path: Path) -> None:
    job = replace(on(clicks, names["job"]()), model=names["model"])
    assert 0.3 < last_loss(job, tmp_path) < 1.0


def test_a_model_with_state_and_a_loss_of_its_own_trains(names: dict[str, Any], clicks: str, tmp_path: Path) -> None:
    """The functions `init`, `apply` and `loss` of the page, as methods."""

    class Stateful:
        init, apply = names["init"], names["apply"]

    assert 0.3 < last_loss(replace(on(clicks, names["job"]()), model=Stateful()), tmp_path / "state") < 1.0

    class Towers:
        def init(self, key: jax.Array, spec: Any) -> Any:
            return {"w": jax.random.normal(key, (spec.num_dense, spec.widths["item"]))}

        def apply(self, params: Any, batch: Any, context: StepContext) -> Any:
            user = batch.dense @ params["w"]
            item = batch.activations["item"]
            return {"scores": (user * item).sum(axis=1), "user": user, "item": item}

        loss = names["loss"]

    # What a batch is has no meaning in an evaluation.
    job = replace(on(clicks, names["job"]()), model=Towers(), metrics=(RMSE(), GroupedAUC(group_by="item")))
    job = replace(job, data=replace(job.data, eval_paths=job.data.paths))
    evaluation = trained(job, tmp_path / "evaluated").evaluations[-1]
    assert set(evaluation.values) == {"auc", "rmse", "gauc"}
    with pytest.raises(ConfigurationError, match=r"metric='loss'.*have: auc, rmse, gauc"):
        trained(job, tmp_path / "best", CheckpointConfig(keep_best=1, metric="loss"))

    # As many candidates as samples, and vectors near 0: the logarithm of 1,024.
    assert last_loss(replace(on(clicks, names["job"]()), model=Towers()), tmp_path / "towers") == pytest.approx(
        6.9, abs=1
    )


def test_combiners_of_the_page_are_those_of_a_loop_and_have_gradients(names: dict[str, Any]) -> None:
    """Also of samples without ids, and whatever stands on filling."""
    random = np.random.default_rng(0)
    vectors, query = random.standard_normal((5, 4, 3)).astype(np.float32), random.standard_normal(3).astype(np.float32)
    lengths = np.array([0, 1, 4, 2, 3])
    for function, arguments in ((names["strongest"], ()), (names["attended"], (query,))):
        found = function(jnp.array(vectors), lengths, *arguments)
        gradients = jax.grad(lambda x: (function(x, lengths, *arguments) ** 2).sum())(jnp.array(vectors))  # noqa: B023
        for sample, length in enumerate(lengths):
            ids = vectors[sample, :length]
            expected = np.zeros(3)
            if length and not arguments:
                expected = ids.max(axis=0)
            elif length:
                weights = np.exp(ids @ query)
                expected = (weights / weights.sum()) @ ids
            np.testing.assert_allclose(found[sample], expected, rtol=1e-5, atol=1e-6)
            assert np.isfinite(gradients[sample]).all()
            assert not gradients[sample, length:].any()
            assert gradients[sample, :length].any() == (length > 0)


def test_the_job_that_pools_by_itself_learns_what_a_sum_hides(names: dict[str, Any], tmp_path: Path) -> None:
    """A sample is clicked where any of its tags is one of ten rare ones, however many others it has."""
    random = np.random.default_rng(0)
    for name, count in (("train", 40_960), ("eval", 4_096)):
        tags = [random.integers(0, 200, random.integers(0, 20)) for _ in range(count)]
        clicks = [int((bag < 10).any()) for bag in tags]
        pq.write_table(pa.table({"click": clicks, "tags": tags}), tmp_path / f"{name}.parquet", row_group_size=4096)
    job = names["pooled_tags"]()
    files = {"paths": (f"{tmp_path}/train.parquet",), "eval_paths": (f"{tmp_path}/eval.parquet",)}
    result = fit_job(replace(job, data=replace(job.data, **files), num_epochs=4), tmp_path, name="pools")
    assert result.evaluations[-1].values["auc"] > 0.95


def test_the_job_with_candidates_learns_what_users_like(names: dict[str, Any], tmp_path: Path) -> None:
    """Users like items of their own kind, one in twenty."""
    random = np.random.default_rng(0)
    for name, count in (("train", 6000), ("eval", 200)):
        user = random.integers(0, 200, count)
        item = random.integers(0, 50, count) * 20 + user % 20
        columns = {"like": np.ones(count, np.int8), "user": user, "item": item}
        pq.write_table(pa.table(columns), tmp_path / f"{name}-0.parquet")
    job = names["likes"]()
    sizes = {"user": 200, "item": 1000}
    length = job.features["item"].max_sequence_length
    tables = {name: TableConfig(size, 16, combiner="sum") for name, size in sizes.items()}
    job = replace(
        job,
        features={
            "user": FeatureConfig(tables["user"]),
            "item": FeatureConfig(tables["item"], max_sequence_length=length),
        },
        data=replace(job.data, paths=f"{tmp_path}/train-*.parquet", eval_paths=f"{tmp_path}/eval-*.parquet"),
        optimizer=Adagrad(0.3, initial_accumulator_value=1e-6),
        batch_size=256,
        num_epochs=8,
    )
    found = fit_job(job, tmp_path, name="likes")
    evaluation = found.evaluations[-1]
    # One positive and 99 negatives, five at a time.
    assert (job.evaluation_parts, evaluation.num_samples) == (20, 200 * 100)
    assert set(evaluation.values) == {"auc", "hit_rate@10", "ndcg@10"}
    assert evaluation.values["hit_rate@10"] > 0.5, "a tenth by chance"
    assert evaluate(f"{tmp_path}/likes", job=job).evaluation.values == evaluation.values


def test_a_model_is_tried_out_without_a_trainer(names: dict[str, Any]) -> None:
    job = names["job"]()
    spec = model_spec(job)
    batch, context = spec.example(8), StepContext.alone(8)
    assert job.model.apply(job.model.init(jax.random.key(0), spec), batch, context).shape == (8,)


def test_the_tasks_of_the_page_train_and_are_evaluated(names: dict[str, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = {
        "item": random.integers(0, 100_000, 2000),
        "click": random.integers(0, 2, 2000),
        "buy": pa.array(random.integers(0, 2, 2000), mask=random.random(2000) < 0.5),
        "price": random.random(2000),
        # Nobody has given any.
        "stars": pa.array([None] * 2000, pa.float32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    job = names["shop"]()
    path = f"{tmp_path}/*.parquet"
    job = replace(job, data=replace(job.data, paths=path, eval_paths=path), num_epochs=2)
    result = trained(job, tmp_path)
    # All scores are 0 at first.
    share = np.mean([one is not None for one in columns["buy"].to_pylist()])
    first = np.log(2) * (1 + 0.5 * share) + np.mean(columns["price"] ** 2)
    assert result.losses[0] == pytest.approx(first, rel=0.05)
    assert set(result.evaluations[-1].values) == {
        "click/auc",
        "click/log_loss",
        "buy/auc",
        "buy/log_loss",
        "price/loss",
        "price/rmse",
        "loss",
    }


def test_a_list_stands_beside_its_history(names: dict[str, Any]) -> None:
    lengths = jnp.asarray([2, 0, 3], jnp.int32)
    times = jnp.asarray([[4, 5, 0, 0], [0, 0, 0, 0], [7, 8, 9, 0]])
    batch = replace(
        ModelSpec(num_dense=0, activation_shapes={}, batch_size=3).example(3),
        sequences={"history": Jagged.of(jnp.zeros((8, 1)), lengths, longest=3)},
        columns={"times": times},
        lengths={"times": lengths},
    )
    padded, by_row, counts = names["times_of"](batch)
    assert padded.tolist() == times[:, :3].tolist()
    assert by_row.tolist() == [4, 5, 7, 8, 9, 0, 0, 0]
    assert counts.tolist() == (times > 0).tolist()


def test_extra_columns_reach_the_model(names: dict[str, Any], tmp_path: Path) -> None:
    """The columns of the page, in steps with padding and in evaluations."""
    random = np.random.default_rng(0)
    count = 1500
    all_lengths = random.integers(0, 70, count)
    columns = {
        "click": random.integers(0, 2, count),
        "item": random.integers(0, 100_000, count),
        "age": random.random(count),
        "item_id": np.arange(count),
        "image": random.random((count, 128)).tolist(),
        "times": [[row] * length for row, length in enumerate(all_lengths.tolist())],
    }
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")

    class Checking:
        """Its loss is the number of values that are not where they should be."""

        def init(self, key: jax.Array, spec: Any) -> Any:
            assert spec.columns["image"].inner == (128,)
            assert spec.example(2).lengths["times"].shape == (2,)
            return {"w": jnp.zeros(())}

        def apply(self, params: Any, batch: Any, context: StepContext) -> jax.Array:
            rows, times, lengths = batch.columns["item_id"], batch.columns["times"], batch.lengths["times"]
            assert times.dtype == rows.dtype == lengths.dtype == jnp.int32
            age, image = (jnp.asarray(columns[name], jnp.float32)[rows] for name in ("age", "image"))
            expected = jnp.where(jnp.arange(50) < lengths[:, None], rows[:, None], 0)
            wrong = jnp.sum(times != expected, axis=1) + (lengths != jnp.minimum(jnp.asarray(all_lengths)[rows], 50))
            wrong += (batch.columns["age"] != age) + jnp.sum(batch.columns["image"] != image, axis=1)
            # Row 0 has values, and padding has none.
            return jnp.where(batch.weights > 0, wrong, lengths) + 0 * params["w"]

        def loss(self, outputs: jax.Array, batch: Any, context: StepContext) -> jax.Array:
            return outputs

    job = names["job"]()
    path = f"{tmp_path}/*.parquet"
    data = replace(job.data, paths=path, eval_paths=path, dense=(), extra=names["extra"])
    result = trained(replace(job, model=Checking(), data=data, num_epochs=2, metrics=(RMSE(),)), tmp_path)
    assert list(result.losses.values()) == [0.0] * 3
    # The scores are 0, so the root of the mean square is that of the labels.
    assert result.evaluations[-1].metrics["rmse"] == pytest.approx(np.sqrt(np.mean(columns["click"])), rel=1e-6)
