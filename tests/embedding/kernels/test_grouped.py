"""Grouping of entries by row, by each of its ways, against a sort in numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from podembed.embedding.kernels import grouped
from podembed.embedding.kernels.grouped import group_by_row
from podembed.embedding.kernels.many_tables import BagLists, group_bags

# Rows of a table for some entries: as many as are counted, marked and hashed.
WAYS = {"counted": 4, "marked": 6, "hashed": 50}
STRIDE_BYTES = 128


def entries_of(random: np.random.Generator, num_rows: int, num_bags: tuple[int, ...]) -> BagLists:
    """Lists of bags of 0 to 5 ids."""
    rows, splits, gradients = [], [], []
    for number, count in enumerate(num_bags):
        lengths = random.integers(0, 6, count)
        rows.append(random.integers(0, num_rows, int(lengths.sum())).astype(np.int32))
        splits.append(np.concatenate([[0], np.cumsum(lengths)]))
        gradients.append((1_000_000 * (number + 1), STRIDE_BYTES))
    return BagLists.of(rows, splits, gradients)


def expected_of(entries: BagLists, addresses: np.ndarray) -> dict[int, list[int]]:
    """By row the addresses, in the order of the entries."""
    rows, _ = entries.entries()
    found: dict[int, list[int]] = {}
    for at in np.argsort(rows, kind="stable"):
        found.setdefault(int(rows[at]), []).append(int(addresses[at]))
    return found


def as_dict(rows: np.ndarray, starts: np.ndarray, addresses: np.ndarray) -> dict[int, list[int]]:
    assert starts[0] == 0
    assert starts[-1] == len(addresses)
    assert len(set(rows.tolist())) == len(rows)
    bounds = pairwise(starts.tolist())
    return {
        int(row): addresses[begin:end].tolist() for row, (begin, end) in zip(rows, bounds, strict=True) if end > begin
    }


def addresses_of(entries: BagLists) -> np.ndarray:
    """Bag by bag in Python."""
    found = []
    for splits, (start, stride) in zip(entries.kept[1::2], entries.lines[:, 4:].tolist(), strict=True):
        found += [start + bag * stride for bag, length in enumerate(np.diff(splits)) for _ in range(length)]
    return np.array(found, np.int64)


@pytest.mark.parametrize("num_bags", [(1,), (40,), (40, 0, 3), (7, 300)])
@pytest.mark.parametrize("way", WAYS)
def test_every_row_has_its_addresses_in_the_order_of_the_entries(way: str, num_bags: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(num_bags))
    for _ in range(5):
        num_rows = max(1, WAYS[way] * 5 * sum(num_bags) // 2)
        entries = entries_of(random, num_rows, num_bags)
        marks = np.zeros(num_rows, np.int32)
        addresses = addresses_of(entries)
        rows, given = entries.entries()
        assert np.array_equal(given, addresses)
        assert np.array_equal(rows, np.concatenate(entries.kept[::2]))
        expected = expected_of(entries, addresses)
        assert as_dict(*group_bags(entries, marks).of(0)) == expected
        assert as_dict(*group_by_row(rows, addresses, marks)) == expected
        assert not marks.any()


def test_rows_that_collide_in_the_hash_table_stay_apart() -> None:
    """All probe from the same slots, the last ones, and go on at the first."""
    hashes = (np.arange(1 << 20, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(60)
    rows = np.flatnonzero(hashes == 15)[:9].astype(np.int32)
    rows = np.concatenate([rows, rows[::-1]])
    entries = BagLists.of([rows], [np.arange(len(rows) + 1)], [(64, 8)])
    marks = np.zeros(1 << 20, np.int32)
    assert as_dict(*group_bags(entries, marks).of(0)) == expected_of(entries, entries.entries()[1])


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
