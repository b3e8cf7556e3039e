"""Random vocabularies beside dictionaries: decisions one step ahead of the updates, undo, cuts over hosts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import RowId, table_seed
from podembed.embedding.optimizers import SGD, Adam
from podembed.embedding.row_index import KeyRequest
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.vocabulary.dynamic_index import DynamicIndex
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import (
    Admit,
    Always,
    Evict,
    LeastFrequent,
    LeastRecent,
    MinCount,
    Never,
    Probability,
    SmallNorm,
    VocabularyCounts,
)
from tests.embedding.vocabulary.reference import ReferenceVocabulary
from tests.long_tests import long_case

RATE = 0.1
ENDS = (-(1 << 63), -1, 0, (1 << 63) - 1)


def spec_of(keys: DynamicKeys, layout: BucketLayout, optimizer: SGD | Adam | None = None) -> TableSpec:
    return TableSpec(
        name="t",
        num_rows=layout.num_rows,
        dim=1,
        layout=layout,
        optimizer=optimizer or SGD(RATE),
        initializer=RowId(),
        combiner="sum",
        seed=3,
        keys=keys,
    )


def table_of(spec: TableSpec, buckets: Sequence[int] | None = None) -> Table:
    table = Table(spec, np.arange(spec.layout.num_buckets) if buckets is None else np.array(buckets))
    table.initialize()
    return table


def first(key: int) -> float:
    return float(np.float32(key))


def ask(table: Table, step: int | None, *ids: Sequence[int]) -> list[KeyRequest]:
    """Requests of several hosts; some of them name each key once and say how often."""
    requests = []
    for host, of_host in enumerate(ids):
        keys, times = np.array(of_host, np.int64), None
        if host % 2:
            keys, times = np.unique(keys, return_counts=True)
        requests.append(KeyRequest(keys, np.empty(len(keys), np.int64), times))
    table.index.accept(requests, step)
    return requests


def index_of(table: Table) -> DynamicIndex:
    assert isinstance(table.index, DynamicIndex)
    return table.index


def state_of(table: Table, prefix: str = "") -> dict[int, tuple[int, int]]:
    arrays = table.spec.stored(table.store.view(0, table.num_rows))
    found = {name: array[:, 0] for name, array in zip(table.spec.widths, arrays, strict=True)}
    keys, last, counts = (found[prefix + name] for name in ("key", "last", "count"))
    return {int(keys[row]): (int(counts[row]), int(last[row]) - 1) for row in np.flatnonzero(last)}


def draw_ids(rng: random.Random, num_rows: int) -> Callable[[], list[int]]:
    keys = [
        *ENDS,
        *(rng.randrange(-50, 50) for _ in range(10)),
        *(rng.randrange(*ENDS[::3]) for _ in range(3 * num_rows)),
    ]

    def draw() -> list[int]:
        # Now and then more keys than there are rows.
        most = 3 * num_rows if rng.random() < 0.1 else max(2, num_rows // 2)
        return [keys[int(len(keys) * rng.random() ** 2)] for _ in range(rng.randrange(most))]

    return draw


def _update(
    table: Table,
    reference: ReferenceVocabulary,
    rows: np.ndarray,
    gradients: np.ndarray,
    by_key: dict[int, float],
    had_row: set[int],
) -> None:
    table.update(rows, gradients[:, None], RATE)
    reference.update(by_key, had_row)


def run_beside_reference(keys: DynamicKeys, layout: BucketLayout, *, seed: int, num_steps: int = 50) -> None:
    rng, table = random.Random(seed), table_of(spec_of(keys, layout))
    reference = ReferenceVocabulary(keys, layout, first, seed=table_seed(3, "t"), rate=RATE)
    draw = draw_ids(rng, layout.num_rows)
    index, update = index_of(table), partial(int)
    for step in range(num_steps):
        ids = draw()
        had_row = reference.begin(step, ids)
        cut = rng.randrange(len(ids) + 1)
        requests = ask(table, step, ids[:cut], ids[cut:])
        # The update of the step before comes after the decisions of this one.
        update()
        named, rows = (np.concatenate([getattr(one, what) for one in requests]) for what in ("keys", "out"))
        np.testing.assert_array_equal(
            table.store.read(rows)["rows"][:, 0], np.float32([reference.read(key) for key in named.tolist()])
        )
        assert state_of(table) == reference.state()
        if keys.waits:
            assert state_of(table, "waiting_") == reference.waiting_state()
        distinct, at = np.unique(named, return_index=True)
        gradients = np.float32([rng.randrange(-8, 9) for _ in distinct])

        by_key = dict(zip(distinct.tolist(), gradients.tolist(), strict=True))
        update = partial(_update, table, reference, rows[at], gradients, by_key, had_row)
        if rng.random() < 0.1:
            index.rebuild()
    found, none = index.take_counts(), index.take_counts()
    told = {name: reference.told[name] for name in ("admitted", "evicted", "refused", "dropped")}
    assert {name: getattr(found, name) for name in told} == told
    assert (found.num_keys, found.num_rows) == (len(reference.state()), layout.num_rows)
    assert none == VocabularyCounts(
        num_keys=found.num_keys, num_rows=found.num_rows, num_buckets=found.num_buckets, num_full=found.num_full
    )


ADMIT, EVICT = (Always(), MinCount(3), Probability(0.3)), (Never(), LeastRecent(), LeastFrequent(5), SmallNorm())


@pytest.mark.parametrize(
    ("admit", "evict", "default"),
    [
        *((admit, evict, "first") for admit in ADMIT for evict in EVICT),
        # What a key without a row has hangs on neither.
        (MinCount(3), LeastFrequent(5), "zeros"),
        *(long_case(admit, evict, "zeros") for admit in ADMIT for evict in EVICT),
    ],
    ids=repr,
)
def test_decisions_are_those_of_dictionaries(admit: Admit, evict: Evict, default: str) -> None:
    """A few keys in one bucket, and more in several; with sweeps at every step, some steps, and never."""
    for number, (per_bucket, num_buckets, waiting, forget_after) in enumerate(
        [(1, 1, 1, None), (5, 4, 3, 1), (5, 1, 0, 40), (40, 4, 40, 40), (40, 2, 3, None)]
    ):
        layout = BucketLayout(num_rows=per_bucket * num_buckets, num_buckets=num_buckets)
        keys = DynamicKeys(
            capacity=layout.num_rows,
            admit=admit,
            evict=evict,
            forget_after=forget_after,
            waiting=waiting * num_buckets,
            default=default,
        )
        run_beside_reference(keys, layout, seed=number)


def test_a_table_that_is_cut_decides_as_a_whole_one() -> None:
    layout = BucketLayout(num_rows=60, num_buckets=4)
    keys = DynamicKeys(capacity=60, admit=MinCount(2), evict=LeastFrequent(3), forget_after=30, default="shared")
    spec = spec_of(keys, layout)
    whole, parts = table_of(spec), [table_of(spec, [0, 3]), table_of(spec, [1, 2])]
    draw = draw_ids(random.Random(7), 60)
    for step in range(60):
        ids = np.array(draw(), np.int64)
        requests = ask(whole, step, ids.tolist())
        buckets = keys.hashes_of(ids) % 4
        for table, own in zip(parts, ([0, 3], [1, 2]), strict=True):
            mine = np.isin(buckets, own)
            found = ask(table, step, ids[mine].tolist())
            # Rows of a bucket have the same values wherever it lies.
            np.testing.assert_array_equal(
                table.store.read(found[0].out)["key"], whole.store.read(requests[0].out[mine])["key"]
            )
    assert {**state_of(parts[0]), **state_of(parts[1])} == state_of(whole)
    for table, own in zip(parts, ([0, 3], [1, 2]), strict=True):
        for bucket in own:
            for name, values in table.bucket(bucket).items():
                assert values.tobytes() == whole.bucket(bucket)[name].tobytes(), name


def test_an_index_is_found_again_in_its_columns() -> None:
    layout = BucketLayout(num_rows=80, num_buckets=2)
    keys = DynamicKeys(capacity=80, admit=MinCount(2), evict=LeastRecent(), forget_after=20)
    table, draw = table_of(spec_of(keys, layout)), draw_ids(random.Random(3), 80)
    for step in range(30):
        ask(table, step, draw())
    other = table_of(table.spec)
    for bucket in range(2):
        for name, values in table.bucket(bucket).items():
            other.bucket(bucket)[name][...] = values
    other.index.rebuild()
    for step in range(30, 60):
        ids = draw()
        for one in (table, other):
            ask(one, step, ids)
    for bucket in range(2):
        for name, values in table.bucket(bucket).items():
            assert values.tobytes() == other.bucket(bucket)[name].tobytes(), name


def test_a_map_is_as_good_after_many_keys_have_gone_as_a_new_one() -> None:
    """How many keys passed each line follows from the keys that are there, not from what was there before."""
    layout = BucketLayout(num_rows=4 * 600, num_buckets=4)
    table = table_of(spec_of(DynamicKeys(capacity=2400, evict=LeastRecent()), layout))
    rng, index = np.random.default_rng(5), index_of(table)
    for step in range(40):
        ask(table, step, rng.integers(*ENDS[::3], 400).tolist())
    keys = [*state_of(table)]
    assert len(keys) > 2_300
    rows = index.rows_of(np.array(keys))
    passed = index._map.arrays[1][:, 31].copy()
    assert passed.any()
    index.rebuild()
    np.testing.assert_array_equal(index._map.arrays[1][:, 31], passed)
    np.testing.assert_array_equal(index.rows_of(np.array(keys)), rows)


def test_what_is_not_trained_decides_nothing() -> None:
    layout = BucketLayout(num_rows=10, num_buckets=1)
    table = table_of(spec_of(DynamicKeys(capacity=10), layout))
    ask(table, 0, [5, 6])
    before = state_of(table)
    (request,) = ask(table, None, [5, 77, 77])
    assert table.store.read(request.out)["rows"][:, 0].tolist() == [5, 77, 77]
    assert state_of(table) == before
    assert index_of(table).dropped == 0


def test_keys_without_a_row_train_the_shared_one_of_their_bucket() -> None:
    layout = BucketLayout(num_rows=2, num_buckets=1)
    table = table_of(spec_of(DynamicKeys(capacity=1, admit=MinCount(2), default="shared"), layout))
    (one,) = ask(table, 0, [5, 6])
    assert one.out.tolist() == [0, 0]
    start = table.rows[0, 0]
    table.update(one.out, np.ones((2, 1), np.float32), RATE)
    (other,) = ask(table, 1, [5, 9])
    assert table.store.read(other.out)["rows"][:, 0].tolist() == [5.0, float(start - np.float32(0.2))]


def test_rules_that_touch_all_rows_touch_those_that_exist() -> None:
    """Momentum moves a row in steps that do not name it. Rows that no key has stay zero with their slots."""
    rule = Adam(RATE, lazy_adam=False)
    assert rule.touches_all_rows
    table = table_of(spec_of(DynamicKeys(capacity=6, admit=MinCount(2)), BucketLayout(num_rows=6, num_buckets=1), rule))
    seen = []
    for step, ids in enumerate([[4, 4, 9], [8, 8, 7], [8]]):
        (request,) = ask(table, step, ids)
        table.update(request.out, np.full((len(ids), 1), 1.0 if step == 0 else 0.0, np.float32), RATE)
        seen.append(table.rows[table.index.rows_of(np.array([4]))[0], 0])
    assert seen[0] > seen[1] > seen[2]
    assert table.rows[table.index.rows_of(np.array([8]))[0], 0] == 8
    assert not any(array[2:].any() for array in (table.rows, *table.slots.values()))


@pytest.mark.parametrize(
    ("optimizer", "evict"),
    [(Adam(RATE, lazy_adam=False, l2=0.1), None), (Adam(RATE, lazy_adam=False), SmallNorm())],
)
def test_rules_whose_updates_would_decide_are_refused(optimizer: Adam, evict: Evict | None) -> None:
    config = TableConfig(capacity=5, dim=1, name="t", evict=evict)
    with pytest.raises(ValueError, match="for table 't' with a capacity, which .* in every step"):
        TableSpec.of(config, seed=0, optimizer=optimizer)


def test_rows_of_keys_are_not_taken_for_shared_ones() -> None:
    """A run that began with another default, and has as many rows."""
    layout = BucketLayout(num_rows=4, num_buckets=1)
    one = table_of(spec_of(DynamicKeys(capacity=4), layout))
    other = table_of(spec_of(DynamicKeys(capacity=3, default="shared"), layout))
    ask(one, 0, [1, 2, 3, 4])
    for name, values in one.bucket(0).items():
        other.bucket(0)[name][...] = values
    with pytest.raises(ValueError, match="Go on with the default that the run began with"):
        other.index.rebuild()


def test_more_waiting_keys_than_there_is_room_for_are_refused() -> None:
    """A run that began with more room for them goes on with less."""
    layout = BucketLayout(num_rows=8, num_buckets=1)
    keys = DynamicKeys(capacity=8, admit=MinCount(9), waiting=8)
    one = table_of(spec_of(keys, layout))
    ask(one, 0, [*range(8)])
    for waiting in (8, 1):
        other = table_of(spec_of(replace(keys, waiting=waiting), layout))
        for name, values in one.bucket(0).items():
            other.bucket(0)[name][...] = values
        if waiting == 8:
            other.index.rebuild()
            continue
        with pytest.raises(ValueError, match="has room for 1. Expected no more"):
            other.index.rebuild()


def test_a_key_of_another_host_is_refused() -> None:
    layout = BucketLayout(num_rows=8, num_buckets=2)
    table = table_of(spec_of(DynamicKeys(capacity=8), layout), [0])
    with pytest.raises(ValueError, match="of a bucket that this host does not hold"):
        ask(table, 0, [*range(20)])


def test_a_step_with_too_many_keys_without_a_row_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podembed.embedding.vocabulary.key_space.MOST_SPARE", 3)
    layout = BucketLayout(num_rows=1, num_buckets=1)
    table = table_of(spec_of(DynamicKeys(capacity=1), layout))
    with pytest.raises(ValueError, match="Found 4 keys without a row .* Expected at most 3"):
        ask(table, 0, [1, 2, 3, 4, 5])
    zeros = table_of(spec_of(replace(table.spec.keys, default="zeros"), layout))
    (request,) = ask(zeros, 0, [1, 2, 3, 4, 5])
    assert table.index.rows_of(np.array([5])).tolist() == [-1]
    assert zeros.store.read(request.out)["rows"][:, 0].tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(("forget_after", "returned"), [(None, 2), (9, 1)])
def test_keys_that_come_back_are_counted(forget_after: int | None, returned: int) -> None:
    layout = BucketLayout(num_rows=2, num_buckets=1)
    keys = DynamicKeys(capacity=2, evict=LeastRecent(), forget_after=forget_after)
    table = table_of(spec_of(keys, layout))
    for step, key in [(0, 1), (2, 2), (4, 3), (6, 1), (20, 4), (21, 5), (22, 6), (30, 3)]:
        ask(table, step, [key])
    index = index_of(table)
    # 1 comes back after two steps. 3 was displaced at step 20 or, without forget_after, at 6 or 20: more than 9 ago.
    assert index.take_counts().returned == returned
    assert index.take_counts().returned == 0


def test_a_step_that_was_decided_before_a_commit_is_not_decided_again() -> None:
    """As with staleness, where a commit nobody had planned comes after the next step was looked up."""
    keys = DynamicKeys(capacity=4, admit=MinCount(2), evict=LeastRecent(), forget_after=3)
    table = table_of(spec_of(keys, BucketLayout(num_rows=4, num_buckets=1)))
    for step, ids in enumerate([[1, 1, 2], [3, 3], [2, 4, 4], [5, 6, 6]]):
        asked = ask(table, step, ids)
    before, waiting = state_of(table), state_of(table, "waiting_")
    index_of(table).rebuild()
    (again,) = ask(table, 3, [5, 6, 6])
    assert (state_of(table), state_of(table, "waiting_")) == (before, waiting)
    assert again.out[1] == asked[0].out[1]
    ask(table, 4, [5])
    assert 5 in state_of(table)


def test_more_keys_without_a_row_than_there_is_room_for_leave_the_index_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podembed.embedding.vocabulary.key_space.MOST_SPARE", 4)
    table = table_of(spec_of(DynamicKeys(capacity=8, admit=MinCount(2)), BucketLayout(num_rows=8, num_buckets=1)))
    ask(table, 0, [1, 1, 2])
    with pytest.raises(ValueError, match="Found 5 keys without a row in one step"):
        ask(table, 1, [3, 4, 5, 6, 7, 1])
    (request,) = ask(table, 1, [1, 3, 3, 9])
    assert request.out[0] == index_of(table).rows_of(np.array([1]))[0] >= 0
    assert request.out[1] == request.out[2] == index_of(table).rows_of(np.array([3]))[0] >= 0
    assert 8 <= request.out[3] < 16


def test_a_step_that_was_decided_before_pins_what_it_names() -> None:
    table = table_of(spec_of(DynamicKeys(capacity=2, evict=LeastRecent()), BucketLayout(num_rows=2, num_buckets=1)))
    for step, key in enumerate([1, 2, 3]):
        ask(table, step, [key])
    index_of(table).rebuild()
    # Other data than what was decided for: 2 is on its way, as 3 is.
    ask(table, 2, [2])
    (request,) = ask(table, 3, [9])
    assert request.out[0] >= 2
    assert (index_of(table).rows_of(np.array([2, 3])) >= 0).all()
