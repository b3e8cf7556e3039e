"""Ratings in MovieLens' form to the samples of a paper: one row a rating, some of which are held out.

Columns are `label` (always 1), `user`, `item`, `rating`, `liked` (1 from four stars on) and, where it is wanted,
`history`. Users and items are numbered from 0 in the order of their ids.

The samples are under the terms of the ratings that they are made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once
from podembed.workers.data.files import file_version
from podembed.workers.data.input_errors import InputError

FORMAT_VERSION = 3
ROWS_PER_GROUP = 8_192
LIKED_FROM = 4.0
_NAMES = ("user", "item", "rating", "time")
# Of each data set of MovieLens: the file, the columns where it has no header, and what stands between them.
_FILES: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("ratings.csv", None, ","),
    ("ratings.csv.gz", None, ","),
    ("ratings.dat", _NAMES, ":"),
    ("u.data", _NAMES, "\t"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingsSpec:
    """How samples are made.

    Attributes:
      held_out: `last`: of each user with at least two ratings the last one in time. Of those of one second it is that
        with the highest item number. `random`: a share of all ratings.
      held_out_share: share of `random`.
      least_ratings: users and items with fewer ratings are left out, as long as there are any (the k-core).
      history_length: most items of `history`, the last ones of the user's training ratings; 0 for no such column.
      history_of: `others`: all but that of the row. `before`: those before it in time.
      seed: seed of what is held out at random, and of the order of the rows.
    """

    held_out: Literal["last", "random"] = "last"
    held_out_share: float = 0.1
    least_ratings: int = 1
    history_length: int = 0
    history_of: Literal["others", "before"] = "others"
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingsSet:
    """Samples on disk, `train-*.parquet` and `eval-*.parquet`.

    Attributes:
      mean_rating: mean rating of the training ratings.
    """

    folder: Path
    num_users: int
    num_items: int
    mean_rating: float

    @property
    def train(self) -> str:
        return str(self.folder / "train-*.parquet")

    @property
    def evaluation(self) -> str:
        return str(self.folder / "eval-*.parquet")


def write_ratings(source: str | Path, cache: str | Path, spec: RatingsSpec) -> RatingsSet:
    """Makes the samples from a folder of ratings below `cache`, or finds them made.

    Args:
      source: folder with `ratings.csv`, plain or `.gz`, `ratings.dat` or `u.data`, as MovieLens has them.

    Raises:
      InputError: the folder has none of these, or the file is not of that form.
      FolderError: the samples are damaged.
    """
    file, read = read_ratings(source)
    identity = json.dumps([FORMAT_VERSION, file.name, *file_version(str(file)), asdict(spec)])
    folder = Path(cache) / f"ratings-v{FORMAT_VERSION}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    report = create_once(folder, lambda unfinished: _write(unfinished, read(), spec))
    return RatingsSet(folder=folder, **{name: report[name] for name in ("num_users", "num_items", "mean_rating")})


def read_ratings(source: str | Path) -> tuple[Path, Callable[[], pa.Table]]:
    """The file of ratings in a folder, and what reads its columns `user`, `item`, `rating` and `time`.

    Raises:
      InputError: as `write_ratings`.
    """
    file, names, between = _file(Path(source))
    return file, lambda: _read(file, names, between)


def _file(source: Path) -> tuple[Path, tuple[str, ...] | None, str]:
    for name, names, between in _FILES:
        if (source / name).is_file():
            return source / name, names, between
    raise InputError(
        f"Found none of {', '.join(name for name, _, _ in _FILES)} in {source}. Expected one of them. Unpack a data "
        "set of MovieLens, and give its folder."
    )


def _read(file: Path, names: tuple[str, ...] | None, between: str) -> pa.Table:
    """Columns `user`, `item`, `rating` and `time`."""
    # Two characters stand between the columns of ratings.dat: every second column is empty.
    given = (
        None if names is None else [n for name in names for n in (name, f"_{name}")][:-1] if between == ":" else names
    )
    try:
        options = pacsv.ReadOptions(column_names=given)
        table = pacsv.read_csv(file, read_options=options, parse_options=pacsv.ParseOptions(delimiter=between))
        table = table.select(_NAMES if names else ["userId", "movieId", "rating", "timestamp"])
        table = table.rename_columns(list(_NAMES)).cast(pa.schema([(name, pa.float64()) for name in _NAMES]))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(
            f"Found {file} unreadable as ratings ({error}). Expected a user, a movie, a rating and a time in each "
            "line, as MovieLens has them. Unpack the data set again."
        ) from error
    if any(table[name].null_count for name in _NAMES) or not len(table):
        raise InputError(
            f"Found {file} without ratings, or with empty values. Expected some. Unpack the data set again."
        )
    return table


def _write(folder: Path, ratings: pa.Table, spec: RatingsSpec) -> dict[str, Any]:
    user, item, rating, time = (ratings[name].to_numpy() for name in _NAMES)
    kept = _core(user, item, spec.least_ratings)
    user, item = (np.unique(ids[kept], return_inverse=True)[1].astype(np.int64) for ids in (user, item))
    order = np.lexsort((item, time[kept], user))
    user, item, rating = user[order], item[order], rating[kept][order].astype(np.float32)
    rng = np.random.default_rng(spec.seed)
    if spec.held_out == "random":
        is_held_out = rng.random(len(user)) < spec.held_out_share
    else:
        is_last = np.append(user[1:] != user[:-1], True)
        is_held_out = is_last & np.append(False, user[1:] == user[:-1])
    if not is_held_out.any() or is_held_out.all():
        raise InputError(
            f"Found {len(user)} ratings of {len(np.unique(user))} users to divide. Expected some for training and some "
            "for evaluation. Use a larger data set, or another share."
        )
    train = np.flatnonzero(~is_held_out)
    for name, rows in (("train", rng.permutation(train)), ("eval", np.flatnonzero(is_held_out))):
        columns = {
            "label": np.ones(len(rows), np.int8),
            "user": user[rows],
            "item": item[rows],
            "rating": rating[rows],
            "liked": (rating[rows] >= LIKED_FROM).astype(np.int8),
        }
        table = pa.table(columns)
        if spec.history_length:
            table = table.append_column("history", _histories(user, item, train, rows, spec))
        pq.write_table(table, folder / f"{name}-00000.parquet", row_group_size=ROWS_PER_GROUP)
    return {
        "spec": asdict(spec),
        "num_users": int(user.max()) + 1,
        "num_items": int(item.max()) + 1,
        "mean_rating": float(rating[train].mean(dtype=np.float64)),
        "train_samples": len(train),
        "eval_samples": int(is_held_out.sum()),
    }


def _core(user: np.ndarray, item: np.ndarray, least: int) -> np.ndarray:
    """Rows of users and items that have so many ratings among these rows."""
    kept = np.arange(len(user))
    while True:
        is_kept = np.ones(len(kept), bool)
        for ids in (user[kept], item[kept]):
            _, number, counts = np.unique(ids, return_inverse=True, return_counts=True)
            is_kept &= counts[number] >= least
        if is_kept.all():
            return kept
        kept = kept[is_kept]


def _histories(user: np.ndarray, item: np.ndarray, train: np.ndarray, rows: np.ndarray, spec: RatingsSpec) -> pa.Array:
    """Per row the last items of its user's training ratings. `train` rises, and users follow each other in it."""
    starts = np.searchsorted(user[train], np.arange(user.max() + 2))
    found = []
    for row in rows.tolist():
        own = train[starts[user[row]] : starts[user[row] + 1]]
        kept = own[own < row] if spec.history_of == "before" else own[own != row]
        found.append(item[kept[-spec.history_length :]])
    return pa.array(found, pa.list_(pa.int64()))
