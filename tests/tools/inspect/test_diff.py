"""Differences of two committed states against a plain comparison of whole arrays, whatever the number of buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podembed.orchestrator.run.reference import open_commit
from podembed.tools.inspect.diff import RunDifference, diff, render
from podembed.tools.inspect.row_difference import RowDifference
from podembed.workers.checkpoint.bucket_overlap import Cut, describe_rows, overlap, partners
from podembed.workers.storage.store import Store
from tests.long_tests import examples
from tests.orchestrator.committed_tables import (
    SampleTable,
    commit_tables,
    create_run,
    keyed_table,
    run_with,
    two_tables,
)


def recut(table: SampleTable, num_buckets: int) -> SampleTable:
    return dataclasses.replace(table, num_buckets=num_buckets)


def changed(table: SampleTable, array: str, rows: list[int], by: float) -> SampleTable:
    values = table.arrays[array].copy()
    values[rows, 0] += np.float32(by)
    return dataclasses.replace(table, arrays={**table.arrays, array: values})


def diff_of(
    tmp_path: Path, one: Mapping[str, SampleTable], other: Mapping[str, SampleTable], *, step: int = 10, **options
) -> RunDifference:
    """Commits both, as two runs, and compares them."""
    first, _ = run_with(tmp_path / "one", one, 10)
    second, lease = create_run(tmp_path / "other", other)
    commit_tables(second, lease, step, other, **options)
    return diff(open_commit(first.location), open_commit(second.location))


@pytest.mark.parametrize(("num_rows", "one", "other"), [(37, 4, 16), (37, 16, 4), (5, 8, 1), (8, 1, 1), (3, 2, 8)])
def test_overlaps_of_two_cuts_cover_each_row_once(num_rows: int, one: int, other: int) -> None:
    seen: list[int] = []
    for bucket in range(one):
        for other_bucket in partners(Cut(one, bucket), other):
            shared = overlap(Cut(one, bucket), Cut(other, other_bucket), num_rows=num_rows)
            rows = [shared.first_row + at * shared.row_stride for at in range(shared.num_rows)]
            one_positions = range(-(-num_rows // one))[shared.one]
            other_positions = range(-(-num_rows // other))[shared.other]
            assert [position * one + bucket for position in one_positions] == rows
            assert [position * other + other_bucket for position in other_positions] == rows
            seen += rows
    assert sorted(seen) == list(range(num_rows))


def test_buckets_that_share_no_row_are_refused() -> None:
    with pytest.raises(ValueError, match="share no row"):
        overlap(Cut(8, 3), Cut(4, 1), num_rows=100)


def test_rows_of_a_bucket_in_words() -> None:
    texts = [describe_rows(Cut(4, 1), num_rows=num_rows) for num_rows in (1, 2, 6, 10, 14, 30)]
    assert texts == [
        "no rows",
        "1 row: 1",
        "2 rows: 1, 5",
        "3 rows: 1, 5, 9",
        "4 rows: 1, 5, 9, 13",
        "8 rows: 1, 5, 9 ... 29",
    ]


def test_equal_states_are_equal_whatever_their_run(tmp_path: Path) -> None:
    difference = diff_of(tmp_path, two_tables(), two_tables())
    assert difference.is_equal
    assert not difference.information
    assert "The states are equal" in render(difference)


@pytest.mark.parametrize("buckets", [(4, 4), (4, 16), (16, 4), (1, 8), (8, 1)])
def test_changed_rows_are_counted_and_the_largest_change_is_found(tmp_path: Path, buckets: tuple[int, int]) -> None:
    users = two_tables()["users"]
    other = changed(changed(users, "rows", [3, 36], 0.5), "rows", [17], -8.0)
    other = changed(other, "accumulator", [3, 4], 1.0)
    difference = diff_of(tmp_path, {"users": recut(users, buckets[0])}, {"users": recut(other, buckets[1])})
    (table,) = difference.tables
    assert not difference.is_equal
    assert not table.shapes
    assert table.num_changed == 4
    rows, accumulator = table.arrays
    assert (rows.array, rows.num_rows, rows.num_changed, rows.max_row, rows.first_row) == ("rows", 37, 3, 17, 3)
    expected = np.abs(users.arrays["rows"].astype(np.float64) - other.arrays["rows"]).max()
    assert rows.max_abs == expected
    assert (accumulator.num_changed, accumulator.first_row) == (2, 3)
    text = render(difference)
    assert "3 of 37" in text
    assert "The states differ" in text


@pytest.mark.parametrize("buckets", [(4, 4), (2, 8), (8, 1)])
@pytest.mark.parametrize("last", [7, -3])
def test_keys_that_come_and_go_are_compared_wherever_they_lie(
    tmp_path: Path, buckets: tuple[int, int], last: int
) -> None:
    values = {key: 0.5 * key for key in (-5, -1, 0, 3, 2**62, *range(10, 22))}
    one = keyed_table(values, num_buckets=buckets[0], seed=1, last=last)
    same = keyed_table(values, num_buckets=buckets[1], seed=2, last=last)
    assert diff_of(tmp_path / "same", {"t": one}, {"t": same}).is_equal
    other = {key: value for key, value in values.items() if key > 0} | {3: 2.5, 15: 9.5, 99: 1.0}
    moved = keyed_table(other, num_buckets=buckets[1], seed=2, last=last)
    difference = diff_of(tmp_path / "other", {"t": one}, {"t": moved})
    (table,) = difference.tables
    assert table.keys is not None
    assert (table.keys.removed, table.keys.added, table.num_changed) == (3, 1, 2)
    rows, *numbers = table.arrays
    assert (rows.array, rows.num_changed, rows.max_abs, rows.max_row, rows.first_row) == ("rows", 2, 2.0, 15, 3)
    assert [(array.array, array.num_changed) for array in numbers] == [("last", 0), ("count", 0)]
    text = render(difference)
    assert "3 removed, 1 added" in text
    assert any(line.split()[:2] == ["t", "rows"] and line.endswith("key 15  key 3") for line in text.splitlines())


def test_keys_are_not_compared_with_row_numbers(tmp_path: Path) -> None:
    keyed = keyed_table(dict.fromkeys(range(20), 1.0), num_buckets=8, seed=1)
    numbered = dataclasses.replace(keyed, arrays={"rows": keyed.arrays["rows"] + 1})
    difference = diff_of(tmp_path, {"t": keyed}, {"t": numbered})
    (table,) = difference.tables
    assert (table.arrays, table.is_equal) == ((), False)
    assert "slot key" in table.shapes
    assert not any("at row" in line for line in render(difference).splitlines())


def test_tables_with_other_shapes_and_slots(tmp_path: Path) -> None:
    tables = two_tables()
    users = tables["users"].arrays
    longer = SampleTable(
        num_buckets=8,
        arrays={"rows": np.vstack([users["rows"], np.ones((4, 3), np.float32)]), "m": np.zeros((41, 3), np.float32)},
    )
    wider = SampleTable(num_buckets=8, arrays={"rows": np.zeros((5, 6), np.float32)})
    difference = diff_of(tmp_path, tables, {"users": longer, "items": wider})
    by_name = {table.table: table for table in difference.tables}
    assert by_name["users"].shapes == {
        "number of rows": (37, 41),
        "slot accumulator": ("float32[1]", None),
        "slot m": (None, "float32[3]"),
    }
    # The rows that both have are the same ones.
    assert [(array.array, array.num_rows, array.num_changed) for array in by_name["users"].arrays] == [("rows", 37, 0)]
    assert by_name["items"].shapes["row"] == ("float32[2]", "float32[6]")
    assert by_name["items"].arrays == ()
    assert not difference.is_equal
    text = render(difference)
    for line in ("37 -> 41", "none -> float32[3]", "buckets of 'users'  4 -> 8"):
        assert line in text


def test_other_element_types_are_compared_by_value(tmp_path: Path) -> None:
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    other = rows.astype(np.float64)
    other[7, 1] += 0.25
    difference = diff_of(
        tmp_path,
        {"t": SampleTable(num_buckets=2, arrays={"rows": rows})},
        {"t": SampleTable(num_buckets=2, arrays={"rows": other})},
    )
    (table,) = difference.tables
    assert table.shapes == {"row": ("float32[2]", "float64[2]")}
    assert (table.arrays[0].num_changed, table.arrays[0].max_abs, table.arrays[0].max_row) == (1, 0.25, 7)


def test_equal_bytes_of_other_element_types_are_no_equal_rows(tmp_path: Path) -> None:
    """The digest covers bytes, so it may only stand for values of one type."""
    rows = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    one, other = ({"t": SampleTable(num_buckets=2, arrays={"rows": values})} for values in (rows, rows.view(np.int32)))
    difference = diff_of(tmp_path, one, other)
    assert difference.tables[0].num_changed == 4


def test_tables_dense_leaves_step_and_counters(tmp_path: Path) -> None:
    tables = two_tables()
    others = {"users": tables["users"], "ads": tables["items"]}
    dense = {
        "w": np.array([[10, 10, 10], [10, 13, 10]], np.float32),
        "count": np.array([1, 2], np.int32),
        "bias": np.zeros(3, np.float32),
    }
    difference = diff_of(tmp_path, tables, others, step=20, dense=dense)
    assert difference.values == {"step": (10, 20), "counter samples": (80, 160), "cursor step": (10, 20)}
    assert (difference.removed_tables, difference.added_tables) == (("items",), ("ads",))
    assert (difference.removed_dense, difference.added_dense) == ((), ("bias",))
    leaf, count = difference.dense
    assert (leaf.key, leaf.num_changed, leaf.num_elements, leaf.max_abs) == ("w", 1, 6, 3.0)
    assert count.shapes == ("int32[]", "int32[2]")
    text = render(difference)
    for line in ("Tables removed: items", "Tables added: ads", "Dense leaves added: bias", "int32[] -> int32[2]"):
        assert line in text


def test_commits_of_one_run_and_buckets_that_are_equal_are_not_read(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    first = commit_tables(store, lease, 10, tables)
    second = commit_tables(store, lease, 20, {**tables, "users": changed(tables["users"], "rows", [6], 1.0)})
    opened: list[str] = []

    class Watching(Store):
        def read_into(self, name, buffers, **where) -> None:
            opened.append(name)
            super().read_into(name, buffers, **where)

    one, other = (open_commit(f"{store.location}@{manifest.name}") for manifest in (first, second))
    watching = Watching(store.url)
    difference = diff(dataclasses.replace(one, store=watching), dataclasses.replace(other, store=watching))
    assert [table.num_changed for table in difference.tables] == [1, 0]
    read = sorted(name.split("/", 2)[2] for name in opened if "/tables/" in name)
    assert read == ["tables/users/accumulator/c.2.0.0"] * 2 + ["tables/users/rows/c.2.0.0"] * 2


def test_each_bucket_of_a_coarser_cut_is_read_once(tmp_path: Path) -> None:
    users = two_tables()["users"]
    one, _ = run_with(tmp_path / "one", {"users": recut(users, 2)}, 10)
    other, _ = run_with(tmp_path / "other", {"users": recut(users, 16)}, 10)
    opened: list[str] = []

    class Watching(Store):
        def read_into(self, name, buffers, **where) -> None:
            opened.append(f"{self.url}/{name}")
            super().read_into(name, buffers, **where)

    states = [dataclasses.replace(open_commit(store.location), store=Watching(store.url)) for store in (one, other)]
    assert diff(*states).is_equal
    tables = [name for name in opened if "/tables/" in name]
    assert len(tables) == len(set(tables)) == 2 * (2 + 16)


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40), pieces=st.integers(1, 4))
def test_row_differences_are_those_of_the_whole_arrays(pairs: list[tuple[float, float]], pieces: int) -> None:
    one, other = (np.array(side, np.float32)[:, None] for side in zip(*pairs, strict=True))
    sums = RowDifference()
    for piece in range(pieces):
        sums.add(one[piece::pieces], other[piece::pieces], first_row=piece, row_stride=pieces)
    is_changed = [a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True)]
    assert (sums.num_rows, sums.num_changed) == (len(pairs), sum(is_changed))
    largest = 0.0
    for (a,), (b,), different in zip(one.tolist(), other.tolist(), is_changed, strict=True):
        apart = abs(a - b) if different else 0.0
        largest = max(largest, np.inf if np.isnan(apart) else apart)
    assert sums.max_abs == largest
    if any(is_changed):
        assert sums.first_row == is_changed.index(True)
        assert sums.max_row is not None
        assert is_changed[sums.max_row]


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    one = rng.standard_normal((101, 3), np.float32)
    other = np.where(rng.random((101, 3)) < 0.2, one + 1, one).astype(np.float32)
    whole, cut = RowDifference(), RowDifference()
    whole.add(one, other, first_row=2, row_stride=4)
    monkeypatch.setattr("podembed.tools.inspect.row_difference._BLOCK_ELEMENTS", 21)
    cut.add(one, other, first_row=2, row_stride=4)
    assert cut == whole
