"""What may go before an update: marks and bags against numpy, masks there and back, and splits of both lookups against
sets of ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels import pool as kernels
from podembed.embedding.kernels.requests import find_marked_bags, find_marked_rows, mark_rows
from podembed.embedding.lookup import prefetch
from podembed.embedding.lookup.prefetch import Part, Split, mask_bytes
from podembed.embedding.lookup.streams import RowsRequest
from podembed.embedding.optimizers import SGD, Adam
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.embedding import reference
from tests.embedding.lookup import test_pooled_way as test_pooled_lookup
from tests.embedding.lookup import test_rows_way as test_lookup
from tests.embedding.lookup.test_pooled_way import COMBINERS
from tests.long_tests import examples

lengths_of_blocks = st.lists(st.integers(0, 70), max_size=4)


@settings(deadline=None)
@given(lengths=lengths_of_blocks, seed=st.integers(0, 999))
def test_a_mask_says_what_its_split_says(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    flags = [random.random(length) < 0.5 for length in lengths]
    split = Split.of(flags)
    mask = split.mask()
    assert len(mask) == mask_bytes(lengths)
    again = Split.of_mask(np.concatenate([mask, np.full(5, 255, np.uint8)]), lengths)
    for found in (split, again):
        for at, late in enumerate(flags):
            assert found.positions(Part.REST)[at].tolist() == np.flatnonzero(late).tolist()
            assert found.positions(Part.PREFETCHED)[at].tolist() == np.flatnonzero(~late).tolist()


def test_little_is_not_worth_packing() -> None:
    """One prefetched vector of eight wide ones counts an eighth; narrow ones beside wide ones count less."""
    wide = np.array([True] * 7 + [False])
    assert Split.worthwhile([wide], [4]) is not None
    assert Split.worthwhile([wide, np.ones(8, bool)], [4, 4]) is None
    assert Split.worthwhile([wide, np.ones(1, bool)], [4, 1]) is None
    assert Split.worthwhile([np.ones(3, bool)], [4]) is None
    assert Split.worthwhile([], []) is None


def test_packed_parts_are_the_two_ends_of_a_block() -> None:
    split = Split.of([np.array([True, False, True]), np.array([False])])
    blocks = [np.arange(6).reshape(3, 2), np.array([[7]])]
    assert [part.tolist() for part in split.packed(Part.PREFETCHED, blocks)] == [[[0, 1]], [[7]]]
    assert [part.tolist() for part in split.packed(Part.REST, blocks)] == [[[2, 3], [4, 5]], []]


@settings(deadline=None)
@given(seed=st.integers(0, 999))
def test_marks_are_found_and_taken_away(seed: int) -> None:
    random = np.random.default_rng(seed)
    marks, rows = np.zeros(60, np.int32), random.integers(0, 60, 20)
    wanted, splits = random.integers(0, 60, 50), np.sort(np.append(random.integers(0, 51, 9), [0, 50]))
    mark_rows(rows, marks, 1)
    of_rows, of_bags = np.empty(50, bool), np.empty(10, bool)
    find_marked_rows(wanted, marks, of_rows)
    find_marked_bags(wanted.astype(np.int32), splits, marks, of_bags)
    assert of_rows.tolist() == np.isin(wanted, rows).tolist()
    assert of_bags.tolist() == [bool(of_rows[a:b].any()) for a, b in itertools.pairwise(splits)]
    mark_rows(rows, marks, 0)
    assert not marks.any()


@pytest.mark.parametrize("row", [-1, 60])
def test_a_row_that_is_not_held_is_refused(row: int) -> None:
    marks, rows = np.zeros(60, np.int32), np.array([3, row])
    with pytest.raises(ValueError, match=f"Found local row {row} on a host that holds 60 rows"):
        mark_rows(rows, marks, 1)
    with pytest.raises(ValueError, match=f"Found local row {row} on a host that holds 60 rows"):
        find_marked_rows(rows, marks, np.empty(2, bool))


@pytest.mark.parametrize("dim", [3, 16, 256])
@pytest.mark.parametrize("combiner", COMBINERS[:3])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_some_bags_are_pooled_as_all_are(dim: int, combiner: str, is_weighted: bool) -> None:
    random = np.random.default_rng(dim)
    rows = random.standard_normal((30, dim), np.float32)
    index = random.integers(0, 30, 40).astype(np.int32)
    splits = np.sort(np.append(random.integers(0, 41, 14), [0, 40]))
    weights = random.random(40, np.float32) if is_weighted else None
    expected = reference.pool(rows, index, splits, weights, combiner)
    some = np.array([0, 3, 4, 9, 14])
    in_place = np.full((15, dim), 7.0, np.float32)
    kernels.pool(rows, index, splits, weights, combiner, in_place, bags=some)
    assert (in_place[some] == expected[some]).all()
    assert (np.delete(in_place, some, axis=0) == 7.0).all()
    packed = np.full((6, dim), 7.0, np.float32)
    kernels.pool(rows, index, splits, weights, combiner, packed, bags=some, is_packed=True)
    assert (packed[:5] == expected[some]).all()
    assert (packed[5] == 7.0).all()
    with pytest.raises(ValueError, match="Found bags 0 to 15 of 15"):
        kernels.pool(rows, index, splits, weights, combiner, in_place, bags=np.array([0, 15]))
    with pytest.raises(ValueError, match="with room for 4"):
        kernels.pool(rows, index, splits, weights, combiner, packed[:4], bags=some, is_packed=True)


@pytest.mark.parametrize("dim", [3, 16, 256])
def test_rows_are_gathered_to_addresses(dim: int) -> None:
    table = np.random.default_rng(dim).standard_normal((30, dim)).astype(np.float32)
    rows, places, out = np.array([4, 29, 4]), np.array([5, 0, 3]), np.full((6, dim), 7.0, np.float32)
    addresses = out.ctypes.data + out.strides[0] * places
    kernels.gather_to(table, rows, addresses)
    assert (out[places] == table[rows]).all()
    assert (np.delete(out, places, axis=0) == 7.0).all()
    with pytest.raises(ValueError, match="Found local row 30"):
        kernels.gather_to(table, np.array([4, 30, 4]), addresses)
    with pytest.raises(ValueError, match="Found 2 addresses for 3 rows"):
        kernels.gather_to(table, rows, addresses[:2])


@settings(deadline=None, max_examples=examples(15))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 3))
def test_bags_without_a_touched_row_are_early(seed: int, num_hosts: int) -> None:
    random = np.random.default_rng(seed)
    pod = test_pooled_lookup.Pod(num_hosts, [int(owner) for owner in random.integers(0, num_hosts, 3)])
    batches = [[test_pooled_lookup.draw_batch(random, weighted=False) for _ in range(num_hosts)] for _ in range(2)]
    requests = [pod.accepted(batch) for batch in batches]
    tables = test_pooled_lookup.TABLE_OF
    touched: list[set[int]] = [set(), set(), set()]
    for batch in batches[0]:
        for at, table in enumerate(tables):
            touched[table].update(batch[f"f{at}"].values.tolist())
    for owner, lookup in enumerate(pod.lookups):
        lookup.split(requests[1][owner], requests[0][owner])
        order = [at for at in pod.layout.order if pod.layout.owners[at] == owner]
        for host, split in enumerate(requests[1][owner].splits):
            late = []
            for at in order:
                bags = batches[1][host][f"f{at}"].padded(pod.layout.num_samples)
                ends = zip(bags.row_splits[:-1], bags.row_splits[1:], strict=True)
                late.append([not touched[tables[at]].isdisjoint(bags.values[a:b].tolist()) for a, b in ends])
            widths = [pod.layout.widths[at] for at in order]
            share = sum(w * flags.count(False) for w, flags in zip(widths, late, strict=True))
            if share == 0 or share < prefetch.MIN_PREFETCH_SHARE * sum(
                w * len(f) for w, f in zip(widths, late, strict=True)
            ):
                assert split is None
            else:
                assert split is not None
                assert [part.tolist() for part in split.rest] == [np.flatnonzero(flags).tolist() for flags in late]


@settings(deadline=None, max_examples=examples(15))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 3))
def test_rows_that_nobody_touched_are_early(seed: int, num_hosts: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random.standard_normal((spec.num_rows, spec.dim)).astype(np.float32) for spec in test_lookup.SPECS]
    pod = test_lookup.Pod.of(num_hosts, rows)
    batches = [
        [test_lookup.random_batch(random, test_lookup.FEATURES, 3, longest=2, weighted=False) for _ in range(num_hosts)]
        for _ in range(2)
    ]
    before, _ = pod.forward(batches[0])
    after, _ = pod.forward(batches[1])
    num_early = 0
    for owner, lookup in enumerate(pod.lookups):
        lookup.split(after[owner], before[owner])
        for host, split in enumerate(after[owner].splits):
            for number, group in enumerate(lookup.groups):
                order = [at for one in lookup.groups for at in one.streams]
                wanted, touched, first = rows_asked(after[host], owner, order), [], 0
                for at in group.streams:
                    asked = [rows_asked(one, owner, order)[at] for one in before]
                    late = np.flatnonzero(np.isin(wanted[at], np.concatenate(asked)))
                    touched += (first + late).tolist()
                    first += len(wanted[at])
                if split is not None:
                    assert split.rest[number].tolist() == touched
                    num_early += len(split.prefetched[number])
                    assert sorted([*split.prefetched[number], *touched]) == list(range(first))
    assert num_early > 0 or all(split is None for one in after for split in one.splits)


def test_a_rule_that_touches_all_rows_leaves_none_early() -> None:
    spec = test_lookup.table_spec("t", num_rows=20, dim=4, num_buckets=1, optimizer=Adam(0.1, lazy_adam=False))
    lookup = test_lookup.RowsWay(
        [spec],
        [test_lookup.FeatureBinding(name="f0", table=0, combiner="sum", column=0)],
        [np.zeros(1, np.int32)],
        host=0,
        num_hosts=1,
    )
    found = np.zeros(3, bool)
    lookup._find_late(np.array([1]), np.array([1, 2, 3]), 0, found)
    assert found.tolist() == [True, True, True]


def test_seats_are_clean_after_marking() -> None:
    spec = TableSpec.of(test_pooled_lookup.TableConfig(10, 4, name="t", optimizer=SGD(0.1)), seed=0)
    table = Table(spec, np.arange(spec.layout.num_buckets))
    with table.marked([np.array([1, 2]), np.array([2, 5])]) as marks:
        assert np.flatnonzero(marks).tolist() == [1, 2, 5]
    assert not marks.any()


def rows_asked(prepared: RowsRequest, owner: int, order: Sequence[int]) -> dict[int, np.ndarray]:
    """By stream, the rows that a host asks of an owner; streams lie in this order."""
    pieces = np.split(prepared.asked[owner], np.cumsum(prepared.asked_counts[owner, order])[:-1])
    return dict(zip(order, pieces, strict=True))


def test_nothing_goes_before_a_step_whose_rows_are_not_known() -> None:
    random = np.random.default_rng(1)
    pod = test_pooled_lookup.Pod(2, [0, 1, 1])
    batches = [[test_pooled_lookup.draw_batch(random, weighted=False) for _ in range(2)] for _ in range(2)]
    first, second = (pod.accepted(batch) for batch in batches)
    first[0].grouped = None
    pod.lookups[0].split(second[0], first[0])
    assert second[0].splits == [None, None]
