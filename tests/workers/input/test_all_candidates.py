"""In a full ranking each sample has its positive id first, and then every id of the table but those left out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn, Negatives
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.all_candidates import AllCandidates, Exclusions
from podembed.workers.input.interactions import Interactions

NUM_ITEMS = 11
TABLE = TableConfig(NUM_ITEMS, 4)
ITEMS = [[3], [10, 4], [], [0], [7]]
LIKED = [[1, 3, 10], [], [4]]
USERS = [[0], [1], [], [2], [1]]


class Reader:
    """One batch, again and again."""

    num_reads = 0

    def __init__(self, users: list[list[int]]) -> None:
        count = len(ITEMS)
        self._batch = Batch(
            dense=np.zeros((count, 0), np.float32),
            labels=np.ones(count, np.float32),
            weights=np.ones(count, np.float32),
            features={"item": Ragged.of_lists(ITEMS), "user": Ragged.of_lists(users), "bias": Ragged.of_lists(ITEMS)},
            sample_ids=np.arange(count),
        )

    def read(self, step: int) -> Batch:
        self.num_reads += 1
        return self._batch

    def close(self) -> None:
        pass


def known() -> Interactions:
    splits = np.cumsum([0, *map(len, LIKED)])
    counts = np.bincount(list(itertools.chain(*LIKED)), minlength=NUM_ITEMS)
    return Interactions(counts=counts, splits=splits, ids=np.array(list(itertools.chain(*LIKED)), np.int32))


@pytest.mark.parametrize("width", [1, 2, 5, 12, 20])
@pytest.mark.parametrize(
    ("declared", "first_row", "left_out"),
    [
        (Negatives(1, evaluation="all"), 0, lambda at: []),
        (Negatives(1, evaluation="all", without_positives_of="user"), 0, lambda at: LIKED[USERS[at][0]]),
        (Negatives(1, evaluation="all", by="popularity"), 0, lambda at: {*range(NUM_ITEMS)} - {1, 3, 4, 10}),
        (Negatives(1, evaluation="all"), 1, lambda at: [0]),
    ],
)
def test_every_id_is_a_candidate_once(width: int, declared: Negatives, first_row: int, left_out) -> None:
    source = IdColumn("item", "hash" if first_row else "as_is", vocabulary_size=NUM_ITEMS, negatives=declared)
    # More parts than there are candidates do no harm.
    num_parts = -(-(NUM_ITEMS + 1) // width) + 1
    bare = Reader(USERS)
    reader = AllCandidates(
        bare, features=["item", "bias"], source=source, table=TABLE, known=known(), width=width, num_parts=num_parts
    )
    found: list[list[int]] = [[] for _ in ITEMS]
    for step in range(num_parts, 2 * num_parts):
        batch = reader.read(step)
        assert batch.features["bias"] is batch.features["item"]
        for ids, more in zip(found, batch.features["item"].to_lists(), strict=True):
            assert len(more) <= width
            ids += more
    assert bare.num_reads == 1
    for at, (ids, given) in enumerate(zip(found, ITEMS, strict=True)):
        if not given:
            assert ids == []
            continue
        others = [id_ for id_ in range(NUM_ITEMS) if id_ != given[0] and id_ not in left_out(at)]
        assert ids == [given[0], *others]


@pytest.mark.parametrize(("policy", "own"), [("drop", [-1, -1, 3]), ("clip", [10, 0, 3]), ("hash", [7, 3, 3])])
def test_an_id_outside_the_table_is_the_row_that_the_table_says(policy: Any, own: list[int]) -> None:
    batch = replace(Reader(USERS).read(0), features={"item": Ragged.of_lists([[NUM_ITEMS + 4], [-7], [3], [], []])})
    table = TableConfig(NUM_ITEMS, 4, invalid_ids=policy)
    others = Exclusions.of(batch, "item", table=table)
    assert others.own.tolist() == [*own, -1, -1]
    is_other = others.among(np.arange(NUM_ITEMS)) & others.has_own[:, None]
    for marked, row in zip(is_other, others.own, strict=True):
        assert np.flatnonzero(marked).tolist() == [at for at in range(NUM_ITEMS) if row >= 0 and at != row]


def test_any_number_may_be_a_key_that_a_sample_has() -> None:
    keys = [-7, 3, -1, np.iinfo(np.int64).max]
    batch = replace(Reader(USERS).read(0), features={"item": Ragged.of_lists([[key] for key in keys] + [[]])})
    others = Exclusions.of(batch, "item", table=TableConfig(capacity=99, dim=4))
    assert others.own[:4].tolist() == keys
    assert others.has_own.tolist() == [True] * 4 + [False]
    block = np.sort(keys)
    is_other = others.among(block)
    assert [block[~marked].tolist() for marked in is_other] == [[key] for key in keys] + [[]]


def test_a_sample_has_one_owner() -> None:
    source = IdColumn("item", vocabulary_size=NUM_ITEMS, negatives=Negatives(1, without_positives_of="user"))
    reader = AllCandidates(
        Reader([[0], [1, 2], [], [2], [1]]),
        features=["item"],
        source=source,
        table=TABLE,
        known=known(),
        width=4,
        num_parts=3,
    )
    with pytest.raises(InputError, match=r"2 ids of feature 'user' in sample 1"):
        reader.read(0)
