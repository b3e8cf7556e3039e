"""A stream of clicks whose items come and go, with planted tastes: a file of samples for each day.

Users stay. Each day brings new items, and a fixed share of its samples name them. Of the others the items of the day
before have that share, and so on, so what was popular fades. Items came and went so before the first day, too. Those of
one day are popular by Zipf's law. Their ids are 64-bit numbers without any order.

A user and an item have a vector of tastes and a bias each. These give the probability with which the label is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.embedding.hashing import mix64
from podembed.jobs.finished_folder import create_once

GENERATOR_VERSION = 1
DEFAULT_CACHE = Path(".data/drift")
ROWS_PER_GROUP = 10_000
DAYS_BEFORE = 40
"""Days before the first one of which items are named; with a share of 0.1 older ones would have 1 % of it."""
RANK = 4
TASTE_SCALE, BIAS_SCALE, MEAN_ODDS = 1.0, 0.7, -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSpec:
    """What is generated.

    Attributes:
      items_per_day: new items of each day.
      share_of_new: share of a day's samples that name them.
    """

    days: int = 10
    samples_per_day: int = 100_000
    users: int = 1_000
    items_per_day: int = 1_000
    share_of_new: float = 0.1
    seed: int = 54


class Day(NamedTuple):
    """Samples of a day, `[samples_per_day]` each.

    Attributes:
      odds: the true log odds.
    """

    user: np.ndarray
    item: np.ndarray
    odds: np.ndarray
    label: np.ndarray


def write_drift(cache: Path, spec: DriftSpec, labels: tuple[str, ...]) -> Path:
    """Writes `day-000.parquet` and so on into a folder below `cache`, or finds them written. Returns that folder.

    Columns are `day` (from 0), `user`, `item`, `odds`, and the label under each name of `labels`.

    Raises:
      FolderError: the files are damaged.
    """
    identity = json.dumps([GENERATOR_VERSION, asdict(spec), labels])
    folder = cache / f"drift-v{GENERATOR_VERSION}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    create_once(folder, lambda unfinished: _write(unfinished, spec, labels))
    return folder


def _write(folder: Path, spec: DriftSpec, labels: tuple[str, ...]) -> dict[str, Any]:
    for number, day in enumerate(days_of(spec)):
        columns = {
            "day": pa.array(np.full(len(day.user), number, np.int32)),
            "user": pa.array(day.user),
            "item": pa.array(day.item),
            "odds": pa.array(day.odds.astype(np.float32)),
        }
        columns |= {name: pa.array(day.label) for name in labels}
        pq.write_table(pa.table(columns), folder / f"day-{number:03d}.parquet", row_group_size=ROWS_PER_GROUP)
    return {"generator": "drift", "spec": asdict(spec)}


def days_of(spec: DriftSpec) -> Iterator[Day]:
    """All days, a function of the spec alone."""
    rng = np.random.default_rng(spec.seed)
    num_items = (DAYS_BEFORE + spec.days) * spec.items_per_day
    ids = mix64(np.arange(num_items), salt=spec.seed).view(np.int64)
    user_tastes, item_tastes = rng.normal(size=(spec.users, RANK)), rng.normal(size=(num_items, RANK)) / np.sqrt(RANK)
    user_bias, item_bias = rng.normal(size=spec.users), rng.normal(size=num_items)
    by_age = (1 - spec.share_of_new) ** np.arange(DAYS_BEFORE + 1)
    by_rank = 1 / np.arange(1, spec.items_per_day + 1)
    for number in range(spec.days):
        user = rng.integers(0, spec.users, spec.samples_per_day)
        age = rng.choice(len(by_age), spec.samples_per_day, p=by_age / by_age.sum())
        rank = rng.choice(spec.items_per_day, spec.samples_per_day, p=by_rank / by_rank.sum())
        item = (DAYS_BEFORE + number - age) * spec.items_per_day + rank
        taste = (user_tastes[user] * item_tastes[item]).sum(axis=1)
        odds = MEAN_ODDS + TASTE_SCALE * taste + BIAS_SCALE * (user_bias[user] + item_bias[item])
        label = rng.random(spec.samples_per_day) < 1 / (1 + np.exp(-odds))
        yield Day(user=user, item=ids[item], odds=odds, label=label.astype(np.int8))
