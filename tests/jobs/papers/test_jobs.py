"""Each job of a paper learns, on ratings of users with tastes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed import JobConfig, Result, evaluate, predict, rank_all
from podembed.jobs.papers.din import din
from podembed.jobs.papers.fism import fism
from podembed.jobs.papers.fm import deepfm, fm
from podembed.jobs.papers.hstu import hstu
from podembed.jobs.papers.mf import bpr, mf
from podembed.jobs.papers.ncf import ncf
from podembed.jobs.papers.sasrec import sasrec
from podembed.jobs.papers.two_tower import two_tower
from tests.long_tests import is_long, long_case
from tests.training import fit_job

USERS, MOVIES, TASTES, EACH = 100, 200, 5, 20


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Users rate movies of their taste, and rate those of even numbers high."""
    folder = tmp_path_factory.mktemp("ratings")
    random = np.random.default_rng(0)
    lines = []
    for user in range(USERS):
        movies = random.choice(MOVIES // TASTES, EACH, replace=False) * TASTES + user % TASTES
        lines += [f"{user}\t{movie}\t{5 - 3 * (movie % 2)}\t{at}\n" for at, movie in enumerate(movies.tolist())]
    (folder / "u.data").write_text("".join(lines))
    return str(folder)


def trained(job: JobConfig, folder: Path, *, max_steps: int | None = None) -> Result:
    return fit_job(job, folder, name=job.name, max_steps=max_steps)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        pytest.param(ncf, {"kind": "gmf", "epochs": 8}, marks=is_long),
        pytest.param(bpr, {"epochs": 8, "learning_rate": 0.1}, marks=is_long),
        # Rows of all jobs here are of one width, so that they share kernels.
        (two_tower, {"epochs": 8, "history_length": 10, "dim": 16}),
        pytest.param(fism, {"epochs": 6, "history_length": 20}, marks=is_long),
        pytest.param(din, {"epochs": 6, "length": 6, "negatives": 4, "learning_rate": 0.02}, marks=is_long),
    ],
)
def test_a_user_s_held_out_movie_is_found(ratings: str, tmp_path: Path, make: Any, arguments: dict[str, Any]) -> None:
    given = {"batch_size": 256, "candidates": 49, "learning_rate": 0.05} | arguments
    job = make(data=ratings, cache=str(tmp_path), **given)
    result = trained(job, tmp_path)
    (evaluation,) = result.evaluations[-1:]
    assert evaluation.num_samples == USERS * 50
    # A fifth by chance; of 50 candidates about 8 are of the right taste.
    assert evaluation.values["hit_rate@10"] > 0.6
    # Of the 181 movies that the user did not rate, 21 are.
    everything = rank_all(result.path, job=job, at=(10, 21)).evaluation
    assert everything.num_samples == USERS
    assert everything.values["hit_rate@21"] > 0.4
    # The job's own evaluation of all movies, in blocks of a few, finds the same.
    declared = make(data=ratings, cache=str(tmp_path), **(given | {"candidates": "all"}))
    found = evaluate(result.path, job=declared).evaluation
    assert found.num_samples == USERS
    assert {*found.values} >= {"hit_rate@10", "ndcg@10"}
    assert found.values == {name: pytest.approx(everything.values[name]) for name in found.values}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (sasrec, {"epochs": 20, "dropout": 0.1}),
        # What its layers compute is tested beside the model.
        pytest.param(hstu, {"epochs": 20, "negatives": 4, "dropout": 0.1}, marks=is_long),
    ],
)
def test_the_next_item_of_a_history_is_found(
    ratings: str, tmp_path: Path, make: Any, arguments: dict[str, Any]
) -> None:
    """All of a user's movies are of one taste, so a model that reads the history finds the last one."""
    given = {"batch_size": 32, "length": 10, "dim": 16, "blocks": 1, "candidates": 49, "learning_rate": 0.02}
    job = make(data=ratings, cache=str(tmp_path), **(given | arguments))
    result = trained(job, tmp_path)
    (evaluation,) = result.evaluations[-1:]
    assert evaluation.num_samples == USERS * 50
    assert evaluation.values["hit_rate@10"] > 0.6
    # Scores need neither the items that a loss reads nor the user, and states of positions are no scores.
    rows = pq.read_table(job.data.eval_paths[0].replace("*", "00000"))
    pq.write_table(rows.select(["history", "times", "item"]), tmp_path / "new.parquet")
    found = predict(result.path, job=job, data=[str(tmp_path / "new.parquet")], out=str(tmp_path / "scores.parquet"))
    assert (found.columns, found.num_rows) == (("scores",), USERS)
    scores = np.array(pq.read_table(found.path)["scores"].to_pylist())
    is_own = np.array(rows["item"].to_pylist())[:, :25] % TASTES == np.array(rows["user"])[:, None] % TASTES
    assert scores[is_own].mean() > scores[~is_own].mean() + 0.3
    # Of its taste there are 30 besides those of its history.
    found = rank_all(result.path, job=job, at=(31,), without=("history",)).evaluation
    assert found.num_samples == USERS
    assert found.values["hit_rate@31"] > 0.6


@pytest.mark.parametrize("make", [long_case(mf), fm])
def test_ratings_are_predicted(ratings: str, tmp_path: Path, make: Any) -> None:
    widths = {"dim": 15} if make is fm else {}
    job = make(data=ratings, cache=str(tmp_path), batch_size=128, epochs=12, learning_rate=0.03, **widths)
    # By the mean alone it is 1.5.
    assert trained(job, tmp_path).evaluations[-1].values["rmse"] < 0.6


# Layers with normalization are tested beside the model, and other jobs learn in make test.
@is_long
def test_likes_are_predicted_with_normalization_and_dropout(ratings: str, tmp_path: Path) -> None:
    job = deepfm(data=ratings, cache=str(tmp_path), batch_size=256, epochs=12, learning_rate=0.03, history_length=5)
    found = trained(job, tmp_path).evaluations[-1].values
    assert found["auc"] > 0.95
    assert found["log_loss"] < 0.4


@pytest.mark.parametrize("kind", [long_case("mlp"), "neumf"])
def test_a_step_with_layers(ratings: str, tmp_path: Path, kind: Any) -> None:
    job = ncf(data=ratings, cache=str(tmp_path), kind=kind, layers=(16, 8), batch_size=64, candidates=9)
    found = trained(job, tmp_path, max_steps=1)
    assert found.losses[max(found.losses)] == pytest.approx(np.log(2), abs=0.05)
