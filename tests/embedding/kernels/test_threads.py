"""Cutting work into parts: nothing is left out, nothing is done twice, and no part is far from the others in size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.kernels import threads
from tests.long_tests import examples


@settings(deadline=None, max_examples=examples(50))
@given(
    items=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1 << 20)), max_size=12),
    num_threads=st.integers(1, 100),
)
def test_parts_are_all_of_the_work_once(items: list[tuple[int, int]], num_threads: int) -> None:
    lengths, sizes = [length for length, _ in items], [size for _, size in items]
    done = [np.zeros(length, int) for length in lengths]
    for item, first, stop in threads.cut(lengths, sizes, num_threads):
        done[item][first:stop] += 1
    assert all((counts == 1).all() for counts in done)


@settings(deadline=None, max_examples=examples(50))
@given(
    items=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1 << 20)), max_size=40),
    num_threads=st.integers(1, 100),
)
def test_runs_are_the_same_parts_in_fewer_calls(items: list[tuple[int, int]], num_threads: int) -> None:
    lengths, sizes = (np.array([item[at] for item in items], np.int64) for at in range(2))
    runs = threads.cut_into_runs(lengths, sizes, num_threads)
    found = [part for run in runs for part in zip(*(array.tolist() for array in run), strict=True)]
    assert found == threads.cut(lengths.tolist(), sizes.tolist(), num_threads)
    is_shared = num_threads > 1 and threads.is_worth_sharing(int(sizes.sum()))
    assert len(runs) <= (5 * num_threads if is_shared else 1)


def test_small_items_go_together_and_large_ones_are_cut() -> None:
    lengths, sizes = np.full(201, 64), np.array([1 << 22, *[1 << 12] * 200], np.int64)
    runs = threads.cut_into_runs(lengths, sizes, 2)
    assert 4 <= len(runs) <= 10
    of_runs = [(sizes[items] * (stops - firsts) / lengths[items]).sum() for items, firsts, stops in runs]
    assert max(of_runs) <= 2 * sizes.sum() / 8


def test_many_small_calls_are_not_shared() -> None:
    assert threads.is_worth_sharing(1 << 20)
    assert threads.is_worth_sharing(1 << 22, 26)
    assert not threads.is_worth_sharing(1 << 21, 26)


def test_one_large_item_is_cut_and_small_ones_are_not() -> None:
    parts = threads.cut([10, 4096, 10], [1 << 10, 1 << 22, 1 << 10], 2)
    assert len(parts) == 10
    assert parts[-2:] == [(0, 0, 10), (2, 0, 10)]
    assert {stop - first for item, first, stop in parts if item == 1} == {512}


@pytest.mark.parametrize(("num_threads", "size"), [(1, 1 << 30), (64, 1000)])
def test_one_thread_and_little_work_keep_items_whole(num_threads: int, size: int) -> None:
    assert threads.cut([7, 9], [size // 4, size], num_threads) == [(0, 0, 7), (1, 0, 9)]


@pytest.mark.parametrize(
    ("dim", "num_threads", "widths"), [(128, 1, [128]), (128, 3, [64, 64]), (24, 8, [24]), (64, 8, [16] * 4)]
)
def test_columns_are_cut_at_cache_lines(dim: int, num_threads: int, widths: list[int]) -> None:
    parts = threads.column_parts(dim, num_threads)
    assert [part.stop - part.start for part in parts] == widths
    assert [part.start for part in parts] == list(range(0, dim, widths[0]))
