"""What models get to know of drawn ids: the probabilities by which they are drawn, by numpy and by counting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.buckets import split_evenly
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn, Negatives
from podembed.workers.data.config import ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.negative_kernels import MAX_TRIES
from podembed.workers.input.reader import training_plan
from podembed.workers.input.sources import open_reader
from tests.batches import joined

USERS, ITEMS, ROWS, K = 5, 12, 96, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row in six is no like. User 4 likes everything, and item 11 is in no like."""
    folder, random = tmp_path_factory.mktemp("likes"), np.random.default_rng(0)
    users, items = random.integers(0, USERS - 1, ROWS), np.minimum(random.geometric(0.3, ROWS), ITEMS - 1)
    likes = (random.random(ROWS) < 5 / 6).astype(np.int8)
    users[:ITEMS], items[:ITEMS], likes[:ITEMS] = USERS - 1, range(ITEMS), 1
    likes[items == ITEMS - 1] = 0
    users[-1], items[-1], likes[-1] = 0, ITEMS - 1, 0
    lists = [[item, (item + 4) % ITEMS, item][: at % 4] for at, item in enumerate(items.tolist())]
    table = {"like": likes, "user": users, "item": items, "lists": lists}
    pq.write_table(pa.table(table), folder / "likes.parquet", row_group_size=16)
    return folder


def data_of(folder: Path, negatives: Negatives, *, column: str = "item") -> ParquetData:
    features = {"item": IdColumn(column, negatives=negatives)}
    data = ParquetData(str(folder / "*.parquet"), label="like", features=features)
    return data.resolved({"user": USERS, "item": ITEMS})


def read(data: ParquetData, *, room: tuple[int, ...], num_hosts: int = 1, epochs: int = 1, first: int = 0) -> Batch:
    """Samples of epochs in the order of their ids, put together from all hosts."""
    index = build_index(data)
    plan = training_plan(index, num_lanes=6, batch_size=12, seed=3)
    readers = [
        open_reader(data, index, plan, lanes, rooms={"item": room}) for lanes in split_evenly(plan.num_lanes, num_hosts)
    ]
    steps = range(first, epochs * plan.steps_per_epoch)
    whole = joined([reader.read(step) for step in steps for reader in readers])
    rows = np.argsort(whole.sample_ids, kind="stable")[np.count_nonzero(whole.is_padding) :]
    return joined([whole.slice(at, at + 1) for at in rows.tolist()])


def likes(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / "likes.parquet").to_pydict()


def counts_of(folder: Path) -> np.ndarray:
    table = likes(folder)
    liked = [item for item, like in zip(table["item"], table["like"], strict=True) if like]
    return np.bincount(liked, minlength=ITEMS)


def known_to(folder: Path, user: int) -> set[int]:
    table = likes(folder)
    rows = zip(table["user"], table["item"], table["like"], strict=True)
    return {item for owner, item, like in rows if owner == user and like}


def expected(q: np.ndarray, left_out: set[int], id_: int, least: float) -> float:
    """By what a draw is: up to `MAX_TRIES` times until an id is free."""
    free = 1 - sum(q[row] for row in left_out)
    tries = sum((1 - free) ** at for at in range(MAX_TRIES)) if free > 1e-12 else MAX_TRIES
    return math.log(tries * (q[id_] or least))


@pytest.mark.parametrize("owner", [None, "user"])
@pytest.mark.parametrize(("by", "alpha"), [("uniform", 0.75), ("popularity", 1.0), ("popularity", 0.5)])
@pytest.mark.parametrize(("column", "room"), [("item", (1 + K,)), ("lists", (3, 1 + K)), ("lists", (2, 1 + K))])
def test_log_q_is_that_of_the_draws_that_are_kept(
    folder: Path, owner: str | None, by: Any, alpha: float, column: str, room: tuple[int, ...]
) -> None:
    """Also of a user who has everything, and of an id that no draw gives."""
    declared = Negatives(K, by=by, alpha=alpha, without_positives_of=owner, log_q=True, log_frequency=True)
    batch, table = read(data_of(folder, declared, column=column), room=room), likes(folder)
    counts = np.bincount(
        np.concatenate(
            [
                np.array(ids, int)
                for ids, like in zip(
                    [[item] for item in table["item"]] if column == "item" else table["lists"],
                    table["like"],
                    strict=True,
                )
                if like
            ]
        ),
        minlength=ITEMS,
    )
    q = np.where(counts > 0, counts.clip(1) ** alpha, 0.0) if by == "popularity" else np.ones(ITEMS)
    least, q = 1 / q.sum(), q / q.sum()
    log_q, log_frequency = (batch.columns[f"item/{kind}"] for kind in ("log_q", "log_frequency"))
    assert log_q.shape == log_frequency.shape == (ROWS, *room)
    known: dict[int, set[int]] = {user: set() for user in range(USERS)}
    for user, item, ids, like in zip(table["user"], table["item"], table["lists"], table["like"], strict=True):
        if like and owner:
            known[user].update([item] if column == "item" else ids)
    for at, ids in enumerate(batch.features["item"].to_lists()):
        left_out = {*ids[:: 1 + K]} | known[table["user"][at]]
        kept = ids[: math.prod(room)]
        values = [expected(q, left_out, id_, least) for id_ in kept]
        np.testing.assert_allclose(log_q[at].ravel()[: len(kept)], values, rtol=1e-5, atol=1e-5)
        shares = np.log(counts.clip(1) / counts.sum())[kept]
        np.testing.assert_allclose(log_frequency[at].ravel()[: len(kept)], shares, rtol=1e-6)
        assert not log_q[at].ravel()[len(kept) :].any()
        assert not log_frequency[at].ravel()[len(kept) :].any()


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_ids_are_drawn_as_often_as_log_q_says(folder: Path, by: Any) -> None:
    """Of each sample, over many epochs."""
    declared = Negatives(40, by=by, without_positives_of="user", log_q=True)
    epochs = 60
    batch = read(data_of(folder, declared), room=(41,), epochs=epochs)
    ids, log_q = batch.features["item"].values.reshape(-1, 41)[:, 1:], batch.columns["item/log_q"][:, 1:]
    num_draws, is_seen = epochs * 40, 0
    for sample in range(0, ROWS, 7):
        own = batch.sample_ids == sample
        assert np.count_nonzero(own) == epochs
        if known_to(folder, likes(folder)["user"][sample]) >= {*range(ITEMS - 1)}:
            continue
        found, where = np.unique(ids[own].ravel(), return_index=True)
        chances = np.exp(log_q[own].ravel()[where])
        # All that is drawn at all has been seen.
        assert chances.sum() == pytest.approx(1.0, abs=1e-5)
        shares = np.bincount(ids[own].ravel(), minlength=ITEMS)[found] / num_draws
        np.testing.assert_allclose(shares, chances, atol=5 * math.sqrt(0.25 / num_draws))
        is_seen += 1
    assert is_seen > 8


def test_they_are_the_same_on_any_number_of_hosts_and_after_a_restart(folder: Path) -> None:
    declared = Negatives(K, by="popularity", without_positives_of="user", log_q=True, log_frequency=True)
    data = data_of(folder, declared)
    whole = read(data, room=(1 + K,), epochs=2)
    for num_hosts in (2, 3):
        found = read(data, room=(1 + K,), epochs=2, num_hosts=num_hosts)
        for kind in ("log_q", "log_frequency"):
            assert found.columns[f"item/{kind}"].tobytes() == whole.columns[f"item/{kind}"].tobytes()
    restarted = read(data, room=(1 + K,), epochs=2, first=ROWS // 12)
    later = whole.columns["item/log_q"].reshape(ROWS, 2, -1)[:, 1]
    assert restarted.columns["item/log_q"].tobytes() == later.tobytes()


def test_what_nobody_asks_for_is_not_there(folder: Path) -> None:
    declared = Negatives(K, by="popularity", without_positives_of="user")
    assert not read(data_of(folder, declared), room=(1 + K,)).columns
    # The same ids are drawn either way.
    plain, asked = (
        read(data_of(folder, one), room=(1 + K,))
        for one in (declared, Negatives(K, by="popularity", without_positives_of="user", log_q=True))
    )
    np.testing.assert_array_equal(plain.features["item"].values, asked.features["item"].values)
