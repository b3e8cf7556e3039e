"""Grouping of entries by row, by each of its ways, against a sort in numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from podembed.embedding.kernels import grouped
from podembed.embedding.kernels.grouped import group_by_row, select_part
from podembed.embedding.kernels.many_tables import BagLists, group_bags

# Rows of a table for some entries: as many as are counted, marked and hashed.
WAYS = {"counted": 4, "marked": 6, "hashed": 50}
STRIDE_BYTES = 128


def entries_of(
    random: np.random.Generator, num_rows: int, num_bags: tuple[int, ...], *, is_weighted: bool = False
) -> tuple[BagLists, np.ndarray, np.ndarray]:
    """Lists of bags of 0 to 5 ids, of which every other has weights if any has. The rows and what belongs to them, bag
    by bag in Python.
    """
    rows, splits, gradients = [], [], []
    for number, count in enumerate(num_bags):
        lengths = random.integers(0, 6, count)
        rows.append(random.integers(0, num_rows, int(lengths.sum())).astype(np.int32))
        splits.append(np.concatenate([[0], np.cumsum(lengths)]))
        gradients.append((1_000_000 * (number + 1), STRIDE_BYTES))
    weights = [
        random.random(len(own), np.float32) if is_weighted and at % 2 == 0 else None for at, own in enumerate(rows)
    ]
    found = []
    for of_list, factors, (start, stride) in zip(splits, weights, gradients, strict=True):
        bags = np.repeat(np.arange(len(of_list) - 1), np.diff(of_list))
        bits = (np.ones(len(bags), np.float32) if factors is None else factors).view(np.int32)
        found.append(np.stack([start + bags * stride, bits], axis=1))
    entries = np.concatenate(found)
    return (
        BagLists.of(rows, splits, gradients, weights),
        np.concatenate(rows),
        entries if is_weighted else entries[:, 0],
    )


def expected_of(rows: np.ndarray, addresses: np.ndarray) -> dict[int, list[object]]:
    """By row the addresses, in the order of the entries."""
    found: dict[int, list[object]] = {}
    for at in np.argsort(rows, kind="stable"):
        found.setdefault(int(rows[at]), []).append(addresses[at].tolist())
    return found


def as_dict(rows: np.ndarray, starts: np.ndarray, addresses: np.ndarray) -> dict[int, list[object]]:
    assert starts[0] == 0
    assert starts[-1] == len(addresses)
    assert len(set(rows.tolist())) == len(rows)
    bounds = pairwise(starts.tolist())
    return {
        int(row): addresses[begin:end].tolist() for row, (begin, end) in zip(rows, bounds, strict=True) if end > begin
    }


@pytest.mark.parametrize("num_bags", [(1,), (40,), (40, 0, 3), (7, 300)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_row_has_its_addresses_in_the_order_of_the_entries(
    way: str, num_bags: tuple[int, ...], is_weighted: bool
) -> None:
    random = np.random.default_rng(len(num_bags))
    for _ in range(5):
        num_rows = max(1, WAYS[way] * 5 * sum(num_bags) // 2)
        entries, rows, addresses = entries_of(random, num_rows, num_bags, is_weighted=is_weighted)
        marks = np.zeros(num_rows, np.int32)
        for found, expected in zip(entries.entries(), (rows, addresses), strict=True):
            assert np.array_equal(found, expected)
        expected = expected_of(rows, addresses)
        assert as_dict(*group_bags(entries, marks).of(0)) == expected
        assert as_dict(*group_by_row(rows, addresses, marks)) == expected
        assert not marks.any()
        parts = [select(rows, addresses, part) for part in range(2)]
        assert {row: own for part in parts for row, own in as_dict(*group_by_row(*part, marks)).items()} == expected


def select(rows: np.ndarray, addresses: np.ndarray, part: int) -> tuple[np.ndarray, np.ndarray]:
    """One of two parts."""
    own_rows, own_addresses = np.empty_like(rows), np.empty_like(addresses)
    count = select_part(rows, addresses, part, 2, own_rows, own_addresses)
    return own_rows[:count], own_addresses[:count]


def test_rows_that_collide_in_the_hash_table_stay_apart() -> None:
    """All probe from the same slots, the last ones, and go on at the first."""
    hashes = (np.arange(1 << 20, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(60)
    rows = np.flatnonzero(hashes == 15)[:9].astype(np.int32)
    rows = np.concatenate([rows, rows[::-1]])
    entries = BagLists.of([rows], [np.arange(len(rows) + 1)], [(64, 8)])
    marks = np.zeros(1 << 20, np.int32)
    assert as_dict(*group_bags(entries, marks).of(0)) == expected_of(*entries.entries())


@pytest.mark.parametrize("num_rows", [4, 30, 1000], ids=["counted", "marked", "hashed"])
@pytest.mark.parametrize("bad", [-1, "end", np.iinfo(np.int32).max, np.iinfo(np.int32).min])
def test_a_row_that_is_not_there_is_refused_and_leaves_no_mark(num_rows: int, bad: int | str) -> None:
    rows = np.array([1, 2, num_rows if bad == "end" else bad, 3, 1], np.int32)
    marks = np.zeros(num_rows, np.int32)
    entries = BagLists.of([rows], [np.array([0, 5])], [(64, 8)])
    with pytest.raises(ValueError, match=f"Found local row {rows[2]} on a host that holds {num_rows} rows"):
        group_bags(entries, marks)
    with pytest.raises(ValueError, match=f"Found local row {rows[2]} "):
        group_by_row(rows, entries.entries()[1], marks)
    assert not marks.any()


@pytest.mark.parametrize("num_ids", [3, 6])
def test_bags_that_do_not_fit_the_rows_are_refused(num_ids: int) -> None:
    with pytest.raises(ValueError, match=f"Found 5 rows in bags of {num_ids}"):
        BagLists.of([np.zeros(5, np.int32)], [np.array([0, num_ids])], [(64, 8)])


def test_nothing_is_grouped_to_nothing() -> None:
    for num_rows in (0, 1, 100):
        marks = np.zeros(num_rows, np.int32)
        rows, starts, addresses = group_bags(BagLists.of([], [], []), marks).of(0)
        assert (len(rows), starts.tolist(), len(addresses)) == (0, [0], 0)


def test_each_way_was_meant() -> None:
    """So that a change of the limits does not leave one untested."""
    assert WAYS["counted"] <= grouped.ROWS_PER_COUNTED < WAYS["marked"] < grouped.ROWS_PER_HASHED < WAYS["hashed"]
