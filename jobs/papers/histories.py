"""Ratings in MovieLens' form to the history of each user: one row a user, whose last rating is held out.

Columns are `label` (always 1), `user`, `history`, `times`, `positives` and `item`. In training a history leaves out the
user's last item, and `positives` are the next items of each of its positions. `times` are the seconds at which these
positions were rated. In an evaluation a history has all training items, and `item` is the held-out one with others that
the user did not rate. Users with fewer than three ratings are left out.

The rows are under the terms of the ratings that they are made from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once
from podembed.jobs.papers.ratings import read_ratings
from podembed.workers.data.files import file_version
from podembed.workers.data.input_errors import InputError

FORMAT_VERSION = 2
ROWS_PER_GROUP = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoriesSpec:
    """How rows are made.

    Attributes:
      length: most items of a history, the last ones.
      candidates: items among which the held-out one is ranked, besides itself.
      seed: of these, and of the order of the rows.
    """

    length: int = 50
    candidates: int = 99
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoriesSet:
    """Rows on disk, `train-*.parquet` and `eval-*.parquet`."""

    folder: Path
    num_users: int
    num_items: int

    @property
    def train(self) -> str:
        return str(self.folder / "train-*.parquet")

    @property
    def evaluation(self) -> str:
        return str(self.folder / "eval-*.parquet")


def write_histories(source: str | Path, cache: str | Path, spec: HistoriesSpec) -> HistoriesSet:
    """Makes the rows from a folder of ratings below `cache`, or finds them made.

    Args:
      source: source as for `ratings.write_ratings`.

    Raises:
      InputError: the folder has no ratings, or too few items to draw candidates from.
      FolderError: the rows are damaged.
    """
    file, read = read_ratings(source)
    identity = json.dumps([FORMAT_VERSION, file.name, *file_version(str(file)), asdict(spec)])
    folder = Path(cache) / f"histories-v{FORMAT_VERSION}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    report = create_once(folder, lambda unfinished: _write(unfinished, read(), spec))
    return HistoriesSet(folder=folder, num_users=report["num_users"], num_items=report["num_items"])


def _write(folder: Path, ratings: pa.Table, spec: HistoriesSpec) -> dict[str, Any]:
    ids = {name: ratings[name].to_numpy() for name in ("user", "item", "time")}
    user, item = (np.unique(ids[name], return_inverse=True)[1].astype(np.int64) for name in ("user", "item"))
    num_users, num_items = int(user.max()) + 1, int(item.max()) + 1
    order = np.lexsort((item, ids["time"], user))
    starts = np.flatnonzero(np.diff(user[order])) + 1
    items_of, times_of = np.split(item[order], starts), np.split(ids["time"][order].astype(np.int64), starts)
    rng = np.random.default_rng(spec.seed)
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for number, (items, times) in enumerate(zip(items_of, times_of, strict=True)):
        if len(items) < 3:
            continue
        (*seen, last), when = items.tolist(), times.tolist()[:-1]
        train.append(_row(number, seen[:-1], when[:-1], seen[1:], [seen[-1]], spec.length))
        others = np.setdiff1d(np.arange(num_items), items)
        if len(others) < spec.candidates:
            raise InputError(
                f"Found {len(others)} items that user {number} did not rate. Expected {spec.candidates} to rank the "
                "held-out one among. Use a larger data set, or fewer candidates."
            )
        drawn = rng.choice(others, spec.candidates, replace=False).tolist()
        held_out.append(_row(number, seen, when, [*seen[1:], last], [last, *drawn], spec.length))
    if not train:
        raise InputError("Found no user with three ratings. Expected some. Use a larger data set.")
    for name, rows in (("train", [train[at] for at in rng.permutation(len(train))]), ("eval", held_out)):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}-00000.parquet", row_group_size=ROWS_PER_GROUP)
    return {"spec": asdict(spec), "num_users": num_users, "num_items": num_items, "rows": len(train)}


def _row(
    user: int, history: list[int], times: list[int], positives: list[int], item: list[int], length: int
) -> dict[str, Any]:
    return {
        "label": 1,
        "user": user,
        "history": history[-length:],
        "times": times[-length:],
        "positives": positives[-length:],
        "item": item,
    }
