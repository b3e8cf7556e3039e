"""Ratings in MovieLens' form to samples of "will this user like this movie?", split by time without a look ahead.

A sample of label 1 is a rating of at least 4 stars. Samples of label 0 are movies drawn evenly from those that the user
did not rate. Each user's last ratings are held out. What a sample knows of its user is older than the sample. These are
the movies liked strictly before it, and for held-out samples those liked before the split. Popularity is counted in the
training ratings alone. Training samples of one user may be younger than held-out ones of another, as always when users
are split one by one.

The samples are under the terms of the ratings that they are made from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once
from podembed.workers.data.files import file_version
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.quality import area_under_curve
from podembed.workers.job.ranking import recall_at

FORMAT_VERSION = 1
LIKED_STARS, MOST_STARS = 4.0, 5.0
ROWS_PER_GROUP = 8_192
_RATING_COLUMNS = ("user", "movie", "rating", "timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLensSpec:
    """How samples are made.

    Attributes:
      held_out_share: of each user's ratings, the last ones.
      history_length: most movies of a history, the last liked ones.
      train_negatives: samples of label 0 for each of label 1.
      eval_candidates: samples of label 0 for each user with a held-out like; all movies, if there are fewer.
    """

    held_out_share: float = 0.2
    history_length: int = 50
    train_negatives: int = 4
    eval_candidates: int = 200
    recall_k: int = 10
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MovieLensSet:
    """Samples on disk, `train-*.parquet` and `eval-*.parquet`, with columns `label`, `user`, `history`,
    `history_genres`, `movie`, `genres`.

    Attributes:
      folder: also has `users.txt`, `movies.txt` and `genres.txt`: line n, from 0, is what the id n stands for.
      popularity_auc, popularity_recall: popularity auc and popularity recall of ranking by the number of training
        likes, on the evaluation samples.
    """

    folder: Path
    num_users: int
    num_movies: int
    num_genres: int
    popularity_auc: float
    popularity_recall: float


@dataclass(frozen=True, slots=True, eq=False)
class _Ratings:
    """All ratings, by user and then by time; ids are positions in `users`, `movies` and `genres`.

    Attributes:
      movie_genres: the genre ids of each movie.
    """

    user: np.ndarray
    movie: np.ndarray
    is_liked: np.ndarray
    timestamp: np.ndarray
    users: np.ndarray
    movies: np.ndarray
    genres: list[str]
    movie_genres: list[np.ndarray]


def write_movielens(source: str | Path, cache: str | Path, spec: MovieLensSpec) -> MovieLensSet:
    """Makes the samples from a folder of ratings below `cache`, or finds them made.

    Args:
      source: folder with `ratings.csv` and `movies.csv`, plain or `.gz`; or with Parquet files of `user_id`,
        `movie_id`, `rating`, `timestamp` and `genres`, a list of numbers.

    Raises:
      InputError: the folder has neither, or a file or a column is not of that form.
      FolderError: the samples are damaged.
    """
    files = _files(Path(source))
    versions = [(path.name, *file_version(str(path))) for path in files]
    identity = json.dumps([FORMAT_VERSION, versions, asdict(spec)])
    folder = Path(cache) / f"movielens-v{FORMAT_VERSION}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    report = create_once(folder, lambda unfinished: _write(unfinished, _read(files), spec))
    return MovieLensSet(folder=folder, **{name: report[name] for name in _REPORTED})


_REPORTED = ("num_users", "num_movies", "num_genres", "popularity_auc", "popularity_recall")


# ---------------------------------------------------------------------- reading


def _files(source: Path) -> list[Path]:
    """`[ratings, movies]` in CSV, or all Parquet files."""
    found = {name: next((p for p in (source / name, source / f"{name}.gz") if p.is_file()), None) for name in _CSV}
    if all(found.values()):
        return [path for path in found.values() if path is not None]
    parquet = sorted(source.glob("*.parquet"))
    if not parquet:
        names = (
            ", ".join(sorted(path.name for path in source.iterdir())) or "no file" if source.is_dir() else "no folder"
        )
        raise InputError(
            f"Found {names} in {source}. Expected ratings.csv and movies.csv, plain or .gz, or Parquet files. "
            "Unpack a data set of MovieLens and give its folder."
        )
    return parquet


_CSV = ("ratings.csv", "movies.csv")


def _read(files: list[Path]) -> _Ratings:
    try:
        if files[0].suffix == ".parquet":
            return _from_parquet(files)
        ratings = pacsv.read_csv(files[0]).select(["userId", "movieId", "rating", "timestamp"])
        movies = pacsv.read_csv(files[1])
        tags = [str(text).split("|") for text in movies["genres"].to_pylist()]
        return _ordered(ratings.rename_columns(list(_RATING_COLUMNS)), movies["movieId"].to_numpy(), tags)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(
            f"Found {files[0].parent} unreadable as ratings ({error}). Expected userId, movieId, rating and timestamp "
            "in ratings.csv, movieId and genres between '|' in movies.csv; or in Parquet user_id, movie_id, rating, "
            "timestamp and genres. Correct the files."
        ) from error


def _from_parquet(files: list[Path]) -> _Ratings:
    columns = ["user_id", "movie_id", "rating", "timestamp", "genres"]
    table = pa.concat_tables((pq.ParquetFile(path).read(columns) for path in files), promote_options="permissive")
    movies, first = np.unique(table["movie_id"].to_numpy(), return_index=True)
    tags = [[str(tag) for tag in found] for found in table["genres"].take(first).to_pylist()]
    return _ordered(table.drop_columns(["genres"]).rename_columns(list(_RATING_COLUMNS)), movies, tags)


def _ordered(ratings: pa.Table, movie_ids: np.ndarray, tags: list[list[str]]) -> _Ratings:
    """Renumbers users, movies and genres from 0 and sorts the ratings. Movies without a rating are candidates, too."""
    for name in _RATING_COLUMNS:
        kind, num_nulls = ratings[name].type, ratings[name].null_count
        is_number = (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or (pa.types.is_temporal(kind) and name == "timestamp")
        )
        if num_nulls or not (is_number or name in ("user", "movie")):
            raise InputError(
                f"Found {f'{num_nulls} empty values' if num_nulls else f'values of type {kind}'} as {name} of the "
                "ratings. Expected a value in every row, and numbers as ratings and timestamps. Correct the files."
            )
    user, movie, stars, timestamp = (ratings[name].to_numpy() for name in _RATING_COLUMNS)
    lowest, highest = (float(stars.min()), float(stars.max())) if len(stars) else (0.0, 0.0)
    if not lowest >= 0 or highest > MOST_STARS or highest < LIKED_STARS:
        raise InputError(
            f"Found ratings from {lowest:g} to {highest:g}. Expected up to {MOST_STARS:g} stars, some of them "
            f"{LIKED_STARS:g} or more, which are likes. Write them on that scale: of ten points the half, of "
            "likes 5 and of dislikes 1."
        )
    users, user = np.unique(user, return_inverse=True)
    unknown = np.setdiff1d(movie, movie_ids)
    if len(unknown):
        raise InputError(
            f"Found movie {unknown[0]} in the ratings and not among the movies. Expected every movie there. Complete "
            "movies.csv."
        )
    order = np.argsort(movie_ids)
    movies = movie_ids[order]
    genres = sorted({tag for found in tags for tag in found})
    number = {tag: at for at, tag in enumerate(genres)}
    in_time = np.lexsort((movie, timestamp, user))
    return _Ratings(
        user=user[in_time].astype(np.int64),
        movie=np.searchsorted(movies, movie)[in_time].astype(np.int64),
        is_liked=(stars >= LIKED_STARS)[in_time],
        timestamp=timestamp[in_time],
        users=users,
        movies=movies,
        genres=genres,
        movie_genres=[np.array([number[tag] for tag in tags[at]], np.int64) for at in order],
    )


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Columns of samples. The history of sample n is `histories[history[n]]`."""

    label: np.ndarray
    user: np.ndarray
    movie: np.ndarray
    history: np.ndarray
    histories: list[np.ndarray]


def _write(folder: Path, ratings: _Ratings, spec: MovieLensSpec) -> dict[str, Any]:
    rng = np.random.default_rng(spec.seed)
    train, held_out = _samples(ratings, spec, rng)
    if not held_out.label.any():
        raise InputError(
            f"Found no rating of {LIKED_STARS:g} stars or more among the last {spec.held_out_share:.0%} of any user's. "
            "Expected some to evaluate on. Use a data set with more ratings a user, or a larger held_out_share."
        )
    order = rng.permutation(len(train.label))
    pq.write_table(_table(train, order, ratings), folder / "train-00000.parquet", row_group_size=ROWS_PER_GROUP)
    in_order = np.arange(len(held_out.label))
    pq.write_table(_table(held_out, in_order, ratings), folder / "eval-00000.parquet", row_group_size=ROWS_PER_GROUP)
    for name, words in (("users", ratings.users), ("movies", ratings.movies), ("genres", ratings.genres)):
        (folder / f"{name}.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    is_train_like = train.label == 1
    likes = np.bincount(train.movie[is_train_like], minlength=len(ratings.movies)).astype(np.float64)
    popularity = likes[held_out.movie]
    return {
        "spec": asdict(spec),
        "num_users": len(ratings.users),
        "num_movies": len(ratings.movies),
        "num_genres": len(ratings.genres),
        "train_samples": len(train.label),
        "eval_samples": len(held_out.label),
        "popularity_auc": area_under_curve(popularity, held_out.label),
        "popularity_recall": recall_at(spec.recall_k, popularity, held_out.label, held_out.user),
    }


def _samples(ratings: _Ratings, spec: MovieLensSpec, rng: np.random.Generator) -> tuple[_Samples, _Samples]:
    """Training and held-out samples, user after user."""
    train, held_out = _Collector(), _Collector()
    bounds = np.searchsorted(ratings.user, np.arange(len(ratings.users) + 1))
    for user, (start, stop) in enumerate(pairwise(bounds)):
        rated, is_liked = ratings.movie[start:stop], ratings.is_liked[start:stop]
        times = ratings.timestamp[start:stop]
        # Ratings of one second stay together: those at the split are held out, and none is in the history of another.
        first_of_second = np.searchsorted(times, times)
        cut = int(first_of_second[min(stop - start - 1, int((stop - start) * (1 - spec.held_out_share)))])
        if cut == 0:
            cut = int(stop - start)
        unrated = np.ones(len(ratings.movies), bool)
        unrated[rated[:cut]] = False
        candidates = np.flatnonzero(unrated)
        likes = np.flatnonzero(is_liked[:cut])
        for at in likes:
            before = likes[likes < first_of_second[at]][-spec.history_length :]
            # Who rated every movie leaves none to draw.
            drawn = rng.choice(candidates, spec.train_negatives if len(candidates) else 0)
            train.add(user, rated[before], liked=rated[at : at + 1], others=drawn)
        liked_later = rated[cut:][is_liked[cut:]]
        if len(liked_later):
            unrated[rated[cut:]] = False
            others = np.flatnonzero(unrated)
            drawn = rng.choice(others, min(spec.eval_candidates, len(others)), replace=False)
            held_out.add(user, rated[likes[-spec.history_length :]], liked=liked_later, others=drawn)
    return train.samples(), held_out.samples()


class _Collector:
    """Gathers samples that share a user and a history. Mutated by `add`."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._histories: list[np.ndarray] = []

    def add(self, user: int, history: np.ndarray, *, liked: np.ndarray, others: np.ndarray) -> None:
        count = len(liked) + len(others)
        label = np.zeros(count, np.int8)
        label[: len(liked)] = 1
        same = np.full(count, len(self._histories))
        self._parts.append((label, np.full(count, user), np.concatenate([liked, others]), same))
        self._histories.append(history)

    def samples(self) -> _Samples:
        # No samples, where there are no parts.
        columns = zip(*self._parts, strict=True) if self._parts else [()] * 4
        label, user, movie, history = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
        return _Samples(label, user, movie, history, self._histories)


def _table(samples: _Samples, order: np.ndarray, ratings: _Ratings) -> pa.Table:
    histories = _lists(samples.histories)
    tastes = _lists([_genres_of(ratings, history) for history in samples.histories])
    of_movies = _lists(ratings.movie_genres)
    return pa.table(
        {
            "label": pa.array(samples.label[order].astype(np.int8)),
            "user": pa.array(samples.user[order]),
            "history": histories.take(pa.array(samples.history[order])),
            "history_genres": tastes.take(pa.array(samples.history[order])),
            "movie": pa.array(samples.movie[order]),
            "genres": of_movies.take(pa.array(samples.movie[order])),
        }
    )


def _genres_of(ratings: _Ratings, movies: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(ratings.movie_genres[movie] for movie in movies)])


def _lists(bags: list[np.ndarray]) -> pa.Array:
    offsets = np.zeros(len(bags) + 1, np.int64)
    np.cumsum([len(bag) for bag in bags], out=offsets[1:])
    values = np.concatenate([np.zeros(0, np.int64), *bags])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
