"""Negatives are a function of seed, epoch and sample alone, follow their distribution, and leave out what they must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.buckets import split_evenly
from podembed.embedding.config import TableConfig
from podembed.embedding.features.id_policies import rows_of
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, Distribution, IdColumn, Negatives, Outside
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input import candidates
from podembed.workers.input.candidates import InParts, NegativeSampler, cut_bags, samplers_of
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.interactions import read_interactions
from podembed.workers.input.reader import training_plan
from podembed.workers.input.sources import open_reader
from tests.batches import joined

NUM_USERS, NUM_ITEMS, NUM_ROWS = 7, 40, 300


def write_likes(folder: Path) -> ParquetData:
    """Users who have items of their own kinds, low numbers being popular; one row in six is no like."""
    random = np.random.default_rng(0)
    columns = {
        "like": (random.random(NUM_ROWS) < 5 / 6).astype(np.int8),
        "user": random.integers(0, NUM_USERS, NUM_ROWS),
        "item": np.minimum(random.geometric(0.12, NUM_ROWS) - 1, NUM_ITEMS - 1),
    }
    columns["item"][0], columns["like"][0] = 0, 1
    pq.write_table(pa.table(columns), folder / "likes.parquet", row_group_size=64)
    return ParquetData(str(folder / "*.parquet"), label="like")


def ratings(folder: Path) -> list[tuple[int, int, int]]:
    columns = pq.read_table(folder / "likes.parquet").to_pydict()
    return list(zip(columns["user"], columns["item"], columns["like"], strict=True))


def resolved(data: ParquetData, negatives: Negatives) -> ParquetData:
    data = replace(data, features={"item": IdColumn("item", negatives=negatives)})
    return data.resolved({"user": NUM_USERS, "item": NUM_ITEMS})


def epochs(data: ParquetData, index: InputIndex, *, num_hosts: int, count: int = 2) -> list[Batch]:
    """Each epoch as one batch of its samples in the order of their ids, put together from all hosts."""
    plan = training_plan(index, num_lanes=4, batch_size=16, seed=3)
    readers = [open_reader(data, index, plan, lanes) for lanes in split_evenly(plan.num_lanes, num_hosts)]
    found = []
    for epoch in range(count):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        whole = joined([reader.read(step) for step in steps for reader in readers])
        order = np.argsort(whole.sample_ids)[np.count_nonzero(whole.is_padding) :]
        found.append([whole.slice(at, at + 1) for at in order.tolist()])
    return [joined(rows) for rows in found]


def ids_of(batch: Batch, width: int) -> np.ndarray:
    assert set(np.diff(batch.features["item"].row_splits).tolist()) == {width}
    return batch.features["item"].values.reshape(-1, width)


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_negatives_depend_on_seed_epoch_and_sample_alone(tmp_path: Path, by: Distribution) -> None:
    likes = write_likes(tmp_path)
    data = resolved(likes, Negatives(4, by=by, without_positives_of="user"))
    index = build_index(data)
    first, second = (ids_of(batch, 5) for batch in epochs(data, index, num_hosts=1))
    for num_hosts in (2, 3):
        for batch, expected in zip(epochs(data, index, num_hosts=num_hosts), (first, second), strict=True):
            np.testing.assert_array_equal(ids_of(batch, 5), expected)
    plain = resolved(likes, Negatives(0))
    positives = ids_of(epochs(plain, index, num_hosts=1, count=1)[0], 1)
    np.testing.assert_array_equal(first[:, :1], positives)
    np.testing.assert_array_equal(second[:, :1], positives)
    assert np.mean(first[:, 1:] != second[:, 1:]) > 0.5, "the same negatives in every epoch"


def test_no_positive_of_the_user_is_drawn(tmp_path: Path) -> None:
    data = resolved(write_likes(tmp_path), Negatives(6, without_positives_of="user"))
    rated = ratings(tmp_path)
    liked = {user: {i for u, i, like in rated if u == user and like} for user in range(NUM_USERS)}
    not_liked = {user: {i for u, i, like in rated if u == user and not like} - liked[user] for user in liked}
    drawn: dict[int, set[int]] = {}
    index = build_index(data)
    for batch in epochs(data, index, num_hosts=1, count=4):
        users, items = batch.features["user"].values.tolist(), ids_of(batch, 7).tolist()
        for user, (own, *negatives) in zip(users, items, strict=True):
            assert not set(negatives) & (liked[user] | {own})
            drawn.setdefault(user, set()).update(negatives)
    # Everything else is: also what the user saw and did not like.
    for user, found in drawn.items():
        assert found >= set(range(NUM_ITEMS)) - liked[user] - not_liked[user]
    assert any(drawn[user] & not_liked[user] for user in drawn)


def sampler(known_counts: np.ndarray | None, negatives: Negatives, **options: bool) -> NegativeSampler:
    from podembed.workers.input.interactions import Interactions

    none = np.zeros(0, np.int64)
    known = None if known_counts is None else Interactions(counts=known_counts, splits=none, ids=none)
    source = IdColumn("item", vocabulary_size=NUM_ITEMS, negatives=negatives)
    return NegativeSampler("item", source, known, seed=1, **options)


def batch_of(items: Ragged) -> Batch:
    count = items.num_samples
    ones = np.ones(count, np.float32)
    return Batch(
        dense=np.zeros((count, 0), np.float32),
        labels=ones,
        weights=ones,
        features={"item": items},
        sample_ids=np.arange(count),
    )


@pytest.mark.parametrize(("by", "alpha"), [("uniform", 0.75), ("popularity", 0.75), ("popularity", 0.0)])
def test_negatives_follow_their_distribution(by: Distribution, alpha: float) -> None:
    counts = np.where(np.arange(NUM_ITEMS) < 10, 0, np.arange(NUM_ITEMS) ** 2)
    expected = np.ones(NUM_ITEMS) if by == "uniform" else np.where(counts > 0, np.maximum(counts, 1.0) ** alpha, 0.0)
    # The own id of all samples is no candidate, and the others share its chance.
    expected[39] = 0
    expected /= expected.sum()
    made = sampler(counts, Negatives(8, by=by, alpha=alpha)).extend(batch_of(Ragged.of_dense(np.full(20_000, 39))))
    drawn = made.values.reshape(-1, 9)[:, 1:]
    share = np.bincount(drawn.ravel(), minlength=NUM_ITEMS) / drawn.size
    np.testing.assert_allclose(share, expected, atol=5 * np.sqrt(expected.max() / drawn.size))


def test_lists_have_negatives_of_each_id_and_none_of_their_own_ids() -> None:
    lists = [list(range(20)), [], [5], [7, 8, 9]]
    for only in (False, True):
        made = sampler(None, Negatives(2, only=only)).extend(batch_of(Ragged.of_lists(lists))).to_lists()
        assert [len(ids) for ids in made] == [len(ids) * (2 if only else 3) for ids in lists]
        for ids, own in zip(made, lists, strict=True):
            if not only:
                assert ids[::3] == own
                del ids[::3]
            assert not set(ids) & set(own)


def test_an_evaluation_draws_others_that_all_differ() -> None:
    batch = batch_of(Ragged.of_dense(np.arange(NUM_ITEMS)))
    declared = Negatives(3, evaluation=NUM_ITEMS - 1)
    made = sampler(None, declared, is_evaluation=True).extend(batch).values.reshape(NUM_ITEMS, -1)
    short = sampler(None, replace(declared, evaluation=20), is_evaluation=True).extend(batch).values.reshape(-1, 21)
    assert all(len(set(ids)) == 21 for ids in short.tolist())
    assert all(len(set(ids)) == NUM_ITEMS for ids in made.tolist()), "with as many as there are, none is left out"
    trained = sampler(None, declared).extend(batch).values.reshape(NUM_ITEMS, -1)
    assert (trained[:, 1:] != made[:, 1:4]).mean() > 0.5


def test_popularity_counts_the_positive_samples_of_the_training_files(tmp_path: Path) -> None:
    data = resolved(write_likes(tmp_path), Negatives(1, by="popularity"))
    liked = [(user, item) for user, item, like in ratings(tmp_path) if like]
    found = read_interactions(data, build_index(data), feature="item", owner="user")
    np.testing.assert_array_equal(found.counts, np.bincount([item for _, item in liked], minlength=NUM_ITEMS))
    for user in range(NUM_USERS):
        own = found.ids[found.splits[user] : found.splits[user + 1]]
        assert own.tolist() == sorted({item for owner, item in liked if owner == user})


def test_training_files_are_read_once_for_training_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = resolved(write_likes(tmp_path), Negatives(1, by="popularity", without_positives_of="user"))
    index, known = build_index(data), {}
    samplers_of(data, index, seed=0, known=known)
    monkeypatch.setattr(candidates, "read_interactions", lambda *_, **__: pytest.fail("read again"))
    assert [*samplers_of(data, index, seed=0, is_evaluation=True, known=known)] == ["item"]


def test_parts_have_all_candidates_in_turn() -> None:
    lists = [[*range(10)], [3], [], [*range(7)]]
    bags = Ragged.of_lists(lists)

    class Reader:
        closed = False

        def read(self, step: int) -> Batch:
            return batch_of(bags)

        def close(self) -> None:
            self.closed = True

    parts = InParts(Reader(), features=["item"], width=4, num_parts=3)
    joined: list[list[int]] = [[] for _ in lists]
    for step in range(3, 6):
        for ids, more in zip(joined, parts.read(step).features["item"].to_lists(), strict=True):
            assert len(more) <= 4
            ids += more
    assert joined == lists
    assert cut_bags(bags, first=20, length=3).to_lists() == [[], [], [], []]
    with pytest.raises(InputError, match=r"with 10 candidates of feature 'item'.*at most 8.*given=10"):
        InParts(Reader(), features=["item"], width=4, num_parts=2).read(0)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"count": -1}, "count=-1"),
        ({"count": 0, "only": True}, "some ids in all"),
        ({"count": 1, "by": "chance"}, "'chance' as the distribution"),
        ({"count": 1, "evaluation": 5, "given": 5}, "Expected one of them"),
        ({"count": 1, "alpha": -1.0}, "alpha=-1.0"),
        ({"count": "4"}, "Found count='4'"),
    ]
    for wrong, message in refused:
        with pytest.raises(DataConfigError, match=message):
            Negatives(**wrong)
    with pytest.raises(DataConfigError, match=r"negatives=4.*Write negatives=Negatives\(4\)"):
        IdColumn("item", negatives=4)  # pyright: ignore[reportArgumentType]
    data = write_likes(tmp_path)
    with pytest.raises(DataConfigError, match=r"without_positives_of='item'.*one of \['user'\]"):
        resolved(data, Negatives(1, without_positives_of="item"))
    nobody = resolved(data, Negatives(1, by="popularity"))
    nobody = replace(nobody, label="none")
    pq.write_table(
        pa.table({"none": [0, 0], "user": [0, 1], "item": [1, 2]}), tmp_path / "likes.parquet", row_group_size=1
    )
    with pytest.raises(InputError, match="no id of feature 'item' in a training sample whose label is above 0"):
        samplers_of(nobody, build_index(nobody), seed=0)


@pytest.mark.parametrize("policy", ["drop", "clip", "hash"])
def test_ids_outside_of_their_tables_count_as_the_rows_that_the_tables_make_of_them(
    tmp_path: Path, policy: Outside
) -> None:
    """What a user has under such an id is not drawn for that user, nor for a sample that has such an id."""
    num_users, num_items = 3, 6
    users = np.array([0, 1, 2, 2, 5, -4, 1, 5], np.int64)
    items = np.array([1, 9, 3, -7, 4, 0, 25, 2], np.int64)
    pq.write_table(pa.table({"like": np.ones(8, np.int8), "user": users, "item": items}), tmp_path / "likes.parquet")
    declared = Negatives(3, without_positives_of="user")
    data = ParquetData(
        str(tmp_path / "*.parquet"), label="like", features={"item": IdColumn("item", negatives=declared)}
    )
    data = data.resolved({"user": num_users, "item": num_items}, outside={"user": policy, "item": policy})
    user_rows = rows_of(users, TableConfig(num_users, 4, invalid_ids=policy)).tolist()
    item_rows = rows_of(items, TableConfig(num_items, 4, invalid_ids=policy)).tolist()
    liked = {
        user: {item for owner, item in zip(user_rows, item_rows, strict=True) if owner == user and item >= 0}
        for user in range(num_users)
    }
    index = build_index(data)
    found = read_interactions(data, index, feature="item", owner="user")
    assert found.counts.tolist() == [item_rows.count(item) for item in range(num_items)]
    for user in range(num_users):
        assert found.ids[found.splits[user] : found.splits[user + 1]].tolist() == sorted(liked[user])
    plan = training_plan(index, num_lanes=1, batch_size=8, seed=3)
    reader = open_reader(data, index, plan, range(1))
    drawn: set[int] = set()
    for epoch in range(20):
        batch = reader.read(epoch)
        assert sorted(batch.features["item"].values.reshape(-1, 4)[:, 0].tolist()) == sorted(items.tolist())
        for sample, (own, *negatives) in zip(batch.sample_ids, batch.features["item"].to_lists(), strict=True):
            assert own == items[sample], "the lookup alters ids, and counts them"
            known = {item_rows[sample]} | liked.get(user_rows[sample], set())
            # Who knows all gets some of these.
            assert not set(negatives) & known or len(known - {-1}) == num_items
            drawn.update(negatives)
    assert drawn == {*range(num_items)}


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_an_evaluation_of_more_negatives_than_are_left_has_all_of_them_once(tmp_path: Path, by: Distribution) -> None:
    """The ids that are left for a user; a list has some twice, so that its ids stay in their places."""
    likes = write_likes(tmp_path)
    rated = [(user, item) for user, item, like in ratings(tmp_path) if like]
    declared = Negatives(2, by=by, evaluation=NUM_ITEMS, without_positives_of="user")
    data = resolved(likes, declared)
    (one,) = samplers_of(data, build_index(data), seed=1, is_evaluation=True).values()
    users = np.arange(NUM_USERS)
    batch = batch_of(Ragged.of_lists([[int(3 * user)] for user in users] + [[]]))
    batch = replace(batch, features={**batch.features, "user": Ragged.of_lists([[int(user)] for user in users] + [[]])})
    found = one.extend(batch).to_lists()
    assert found == one.extend(batch).to_lists()
    everything = {item for _, item in rated} if by == "popularity" else {*range(NUM_ITEMS)}
    assert found.pop() == []
    for user, (own, *negatives) in enumerate(found):
        assert own == 3 * user
        expected = everything - {own} - {item for owner, item in rated if owner == user}
        assert len(negatives) == len(set(negatives))
        assert set(negatives) == expected
    lists = sampler(None, Negatives(2, evaluation=50), is_evaluation=True).extend(batch_of(Ragged.of_lists([[1, 2]])))
    first, second = lists.values[:51].tolist(), lists.values[51:].tolist()
    assert (first[0], second[0], len(second)) == (1, 2, 51)
    assert {*first[1:]} == {*second[1:]} == {*range(NUM_ITEMS)} - {1, 2}


def test_what_is_hard_to_find_by_chance_is_drawn_by_popularity_too() -> None:
    """One id is nearly all that is drawn, so others are taken from a list."""
    counts = np.zeros(NUM_ITEMS, np.int64)
    counts[:4] = 10**12, 1, 2, 4
    made = sampler(counts, Negatives(0, by="popularity", alpha=1.0, evaluation=2), is_evaluation=True)
    drawn = made.extend(batch_of(Ragged.of_dense(np.full(7_000, 39)))).values.reshape(-1, 3)
    assert (drawn[:, 1] == 0).all()
    np.testing.assert_allclose(np.bincount(drawn[:, 2]) / len(drawn), [0, 1 / 7, 2 / 7, 4 / 7], atol=0.03)
