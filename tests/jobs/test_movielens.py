"""The job on ratings: samples without a look ahead, and a model that beats popularity."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed import RunConfig, ScalingConfig, Trainer
from podembed.jobs.cli.data_arguments import data_arguments
from podembed.jobs.movielens import movielens
from podembed.jobs.movielens_files import MovieLensSet, MovieLensSpec, write_movielens
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.quality import area_under_curve
from podembed.workers.job.reference import JobReference
from tests.long_tests import is_long

USERS, MOVIES, TASTES = 60, 120, 4
SPEC = MovieLensSpec(history_length=5, train_negatives=2, eval_candidates=30, recall_k=3)
Rating = tuple[int, int, float, int]


def ratings() -> list[Rating]:
    """Users like the movies of their taste and rate them high; movie ids and times have gaps, and some times are
    equal.
    """
    rng = np.random.default_rng(3)
    found = []
    for user in range(USERS):
        own = np.flatnonzero(np.arange(MOVIES) % TASTES == user % TASTES)
        others = np.setdiff1d(np.arange(MOVIES), own)
        watched = np.concatenate([rng.choice(own, 18, replace=False), rng.choice(others, 6, replace=False)])
        for at, movie in enumerate(rng.permutation(watched)):
            stars = 4.5 if movie in own else 2.0
            found.append((user + 1, int(movie) * 7 + 3, stars, 1_000_000 + at // 2 * 10))
    return found


def write_csv(folder: Path, *, packed: bool = False) -> Path:
    """A folder in the form of MovieLens latest-small."""
    folder.mkdir(parents=True, exist_ok=True)
    movies = [(m * 7 + 3, f'A "film", {m} (1999)', f"Drama|T{m % TASTES}") for m in range(MOVIES)]
    tables = {
        "ratings": [("userId", "movieId", "rating", "timestamp"), *ratings()],
        "movies": [("movieId", "title", "genres"), *movies],
    }
    for name, rows in tables.items():
        out = io.StringIO()
        csv.writer(out).writerows(rows)
        content = out.getvalue().encode()
        path = folder / f"{name}.csv{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content) if packed else content)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("ratings"))


@pytest.fixture(scope="module")
def samples(source: Path, tmp_path_factory: pytest.TempPathFactory) -> MovieLensSet:
    return write_movielens(source, tmp_path_factory.mktemp("samples"), SPEC)


def rows_of(samples: MovieLensSet, part: str) -> list[dict]:
    """Samples with the users and movies of the source in place of their numbers."""
    users, movies = ((samples.folder / f"{name}.txt").read_text().split() for name in ("users", "movies"))
    rows = pq.read_table(samples.folder / f"{part}-00000.parquet").to_pylist()
    for row in rows:
        row["user"], row["movie"] = int(users[row["user"]]), int(movies[row["movie"]])
        row["history"] = [int(movies[movie]) for movie in row["history"]]
    return rows


def test_samples_know_nothing_of_what_comes_later(samples: MovieLensSet) -> None:
    rated = {(user, movie): (stars, time) for user, movie, stars, time in ratings()}
    train, held_out = rows_of(samples, "train"), rows_of(samples, "eval")
    likes = {(row["user"], row["movie"]) for row in train if row["label"]}
    later = {(row["user"], row["movie"]) for row in held_out if row["label"]}
    assert not likes & later
    assert likes | later == {key for key, (stars, _) in rated.items() if stars >= 4}
    for user in range(1, USERS + 1):
        before = [rated[key][1] for key in likes if key[0] == user]
        after = [rated[key][1] for key in later if key[0] == user]
        assert max(before) < min(after, default=2_000_000)
        all_times = sorted(time for (rater, _), (_, time) in rated.items() if rater == user)
        assert min(after, default=all_times[-1]) >= all_times[int(len(all_times) * 0.8)] - 10
        for row in (row for row in held_out if row["user"] == user):
            last = sorted((rated[key][1], key[1]) for key in likes if key[0] == user)[-5:]
            assert row["history"] == [movie for _, movie in last]
    for row in train:
        if row["label"]:
            time = rated[row["user"], row["movie"]][1]
            known = sorted((rated[u, m][1], m) for u, m in likes if u == row["user"] and rated[u, m][1] < time)
            assert row["history"] == [movie for _, movie in known[-5:]]


def test_negatives_are_not_rated(samples: MovieLensSet) -> None:
    train, held_out = rows_of(samples, "train"), rows_of(samples, "eval")
    rated = {(user, movie) for user, movie, _, _ in ratings()}
    drawn = [(row["user"], row["movie"]) for row in held_out if not row["label"]]
    assert not rated & set(drawn)
    assert len(set(drawn)) == len(drawn) == 30 * len({row["user"] for row in held_out})
    assert sum(not row["label"] for row in train) == 2 * sum(row["label"] for row in train)
    # What is held out is not known in training, so it may be drawn there; what was rated before may not.
    later = {(row["user"], row["movie"]) for row in held_out if row["label"]}
    first_80 = {(user, movie) for user, movie, _, time in ratings() if time < 1_000_000 + 18 // 2 * 10}
    for row in train:
        if not row["label"]:
            assert (row["user"], row["movie"]) not in first_80 - later


def test_genres_and_their_histories(samples: MovieLensSet) -> None:
    genres = (samples.folder / "genres.txt").read_text().split()
    assert genres == ["Drama", "T0", "T1", "T2", "T3"]
    for row in rows_of(samples, "eval")[:200]:
        tags = lambda movie: ["Drama", f"T{(movie - 3) // 7 % TASTES}"]  # noqa: E731
        assert [genres[tag] for tag in row["genres"]] == tags(row["movie"])
        assert [genres[tag] for tag in row["history_genres"]] == [tag for m in row["history"] for tag in tags(m)]


def test_popularity_is_counted_in_training(samples: MovieLensSet) -> None:
    train, held_out = rows_of(samples, "train"), rows_of(samples, "eval")
    counts: dict[int, int] = {}
    for row in train:
        counts[row["movie"]] = counts.get(row["movie"], 0) + row["label"]
    scores = np.array([counts.get(row["movie"], 0) for row in held_out])
    labels = np.array([row["label"] for row in held_out])
    assert samples.popularity_auc == pytest.approx(area_under_curve(scores, labels))
    assert 0 < samples.popularity_recall < 1


def test_plain_and_packed_files_give_the_same_samples(samples: MovieLensSet, tmp_path: Path) -> None:
    packed = write_movielens(write_csv(tmp_path / "packed", packed=True), tmp_path / "cache", SPEC)
    for part in ("train", "eval"):
        assert rows_of(packed, part) == rows_of(samples, part)
    assert write_movielens(tmp_path / "packed", tmp_path / "cache", SPEC) == packed


def test_ratings_in_parquet(samples: MovieLensSet, tmp_path: Path) -> None:
    users, movies, stars, times = zip(*ratings(), strict=True)
    genres = [[0, 1 + (movie - 3) // 7 % TASTES] for movie in movies]
    table = pa.table({"user_id": users, "movie_id": movies, "rating": stars, "timestamp": times, "genres": genres})
    pq.write_table(table.slice(0, 500), tmp_path / "train-00.parquet")
    pq.write_table(table.slice(500), tmp_path / "test-00.parquet")
    found = write_movielens(tmp_path, tmp_path / "cache", SPEC)
    assert (found.num_users, found.num_movies, found.num_genres) == (USERS, MOVIES, TASTES + 1)
    assert rows_of(found, "train") == rows_of(samples, "train")


def test_who_rated_every_movie_gives_likes_alone(tmp_path: Path) -> None:
    write_csv(tmp_path)
    # In one second, so that none of them is held out.
    everything = "".join(f"{USERS + 1},{movie * 7 + 3},5.0,9\n" for movie in range(MOVIES))
    with open(tmp_path / "ratings.csv", "a") as file:
        file.write(everything)
    found = write_movielens(tmp_path, tmp_path / "cache", SPEC)
    own = [row for row in rows_of(found, "train") if row["user"] == USERS + 1]
    assert [row["label"] for row in own] == [1] * MOVIES


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match=r"Found a.txt in .* Expected ratings.csv and movies.csv"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("user,item\n1,2\n")
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,a,b\n")
    with pytest.raises(InputError, match=r"unreadable as ratings \(.*userId"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,5,7\n")
    with pytest.raises(InputError, match="Found movie 2 in the ratings and not among the movies"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,good,7\n")
    with pytest.raises(InputError, match="Found values of type string as rating"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5,7\n1,1,,8\n")
    with pytest.raises(InputError, match="Found 1 empty values as rating"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,5,7\n")
    with pytest.raises(InputError, match=r"no rating of 4 stars or more among the last \d+% of any user's"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    for ratings, found in (("10", "8 to 10"), ("0", "0 to 8")):
        (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n1,1,8,7\n1,1,{ratings},8\n")
        with pytest.raises(InputError, match=rf"Found ratings from {found}\. Expected up to 5 stars"):
            write_movielens(tmp_path, tmp_path / "cache", SPEC)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,1,7\n1,1,0,8\n")
    with pytest.raises(InputError, match=r"Found ratings from 0 to 1\. .* some of them 4 or more, which are likes"):
        write_movielens(tmp_path, tmp_path / "cache", SPEC)
    with pytest.raises(ConfigurationError, match="Expected the one folder with ratings.csv and movies.csv"):
        data_arguments("movielens", [str(tmp_path / "ratings.csv")], [], max_bad_lines=0, notice=print)


@is_long
@pytest.mark.ray
def test_it_beats_popularity_on_two_hosts(source: Path, tmp_path: Path, ray_cluster: None) -> None:
    arguments = data_arguments("movielens", [str(source)], [], max_bad_lines=0, notice=print)
    arguments |= {"cache": str(tmp_path), "k": 3, "eval_candidates": 30, "batch_size": 128, "epochs": 6, "dim": 8}
    job = JobReference(function="podembed.jobs.movielens:movielens", arguments=arguments).resolve()
    config = RunConfig(name="two-hosts", storage_path=str(tmp_path))
    result = Trainer(job, scaling_config=ScalingConfig(num_hosts=2), run_config=config).fit()
    assert job.baseline is not None
    assert set(job.baseline.figures) == {"AUC", "recall@3"}
    for name, figure in result.evaluations[-1].figures.items():
        assert figure > job.baseline.figures[name] + 0.1


def test_arguments_are_plain_and_defaults_are_those_of_the_files(source: Path, tmp_path: Path) -> None:
    job = movielens(data=str(source), cache=str(tmp_path))
    assert job.group_features == ("user",)
    assert [metric.name for metric in job.metrics] == ["recall@10"]
    assert {table.vocabulary_size for table in job.tables} == {USERS, MOVIES, TASTES + 1}
