"""Buckets, crossed values and weights of ids, against plain Python that follows docs/input.md."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, IdColumn, Negatives
from podembed.workers.data.config import CsvData, InputData, ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan, training_plan
from tests.workers.columns.test_decode import decode_block, orders

SIZE = 60
MASK = 2**64 - 1
BOUNDARIES = (-1.5, 0.0, 2.0, 7.0)


def mix(word: int, offset: int = 0) -> int:
    """As docs/input.md writes it."""
    word = ((word + 0x9E3779B97F4A7C15) & MASK) ^ offset
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def key_of(value: int | str) -> int:
    if isinstance(value, int):
        return value & MASK
    text = value.encode()
    key = mix(len(text))
    for start in range(0, len(text), 8):
        key = mix(key ^ int.from_bytes(text[start : start + 8], "little"))
    return key


def crossed_row(values: tuple[Any, ...], *, salt: int = 0) -> int:
    """Of values of which none is missing."""
    key = mix(len(values))
    for value in values:
        key = mix(key ^ key_of(value))
    return 1 + mix(key, mix(salt & MASK) if salt else 0) % (SIZE - 1)


def expected_crossed(columns: list[Any], source: IdColumn) -> list[int]:
    """Of one row; `columns` are values, or lists of them."""
    combinations: list[tuple[Any, ...]] = [()]
    for values in columns:
        items = values if isinstance(values, list) else [values]
        combinations = [(*before, item) for before in combinations for item in items]
    missing = [0] if source.missing == "zero" else []
    rows = []
    for values in combinations:
        rows += missing if None in values or "" in values else [crossed_row(values, salt=source.salt)]
    return rows


def decoded(columns: dict[str, pa.Array], source: IdColumn, order: list[int] | None = None) -> Any:
    table = pa.table({"y": pa.array(np.zeros(len(columns["a"]), np.int8)), **columns})
    data = ParquetData("a", label="y", features={"f": source})
    return decode_block(table, data, order=None if order is None else np.array(order, np.int64)).rows.features["f"]


integers = st.none() | st.integers(-(2**63), 2**63 - 1)
texts = st.none() | st.sampled_from(["", "a", "é", "a longer one", "12"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(integers, texts, st.none() | st.lists(texts, max_size=3)), max_size=8),
    st.sampled_from(
        [
            ("a", "b"),
            ("b", "a"),
            ("a", "l"),
            ("l", "b", "a"),
            ("l", "l"),
        ]
    ),
    st.sampled_from([None, "empty"]),
    st.data(),
)
def test_crossed_values_have_the_row_of_their_key(
    rows: list[tuple[Any, ...]], names: tuple[str, ...], missing: Any, data: st.DataObject
) -> None:
    first, *others = names
    source = IdColumn(first, vocabulary_size=SIZE, missing=missing, salt=3, crossed_with=tuple(others))
    columns = {
        "a": pa.array([row[0] for row in rows], pa.int64()),
        "b": pa.array([row[1] for row in rows], pa.string()),
        "l": pa.array([row[2] for row in rows], pa.list_(pa.string())),
    }
    order = data.draw(orders(len(rows)))
    found = decoded(columns, source, order).to_lists()
    given = {"a": 0, "b": 1, "l": 2}
    assert found == [expected_crossed([rows[at][given[name]] for name in names], source) for at in order]


def test_the_order_of_crossed_columns_counts_and_their_widths_do_not() -> None:
    narrow = {"a": pa.array([1, -2], pa.int8()), "b": pa.array([3, 4], pa.uint16())}
    wide = {name: column.cast(pa.int64()) for name, column in narrow.items()}
    of = IdColumn("a", vocabulary_size=10**6, crossed_with=("b",))
    other = IdColumn("b", vocabulary_size=10**6, crossed_with=("a",))
    assert decoded(narrow, of).to_lists() == decoded(wide, of).to_lists()
    assert decoded(wide, of).to_lists() != decoded(wide, other).to_lists()
    fixed = pa.array([[1, 2], None], pa.list_(pa.int64(), 2))
    assert [len(bag) for bag in decoded({"a": fixed, "b": narrow["b"]}, of).to_lists()] == [2, 1]


def test_times_and_buckets_are_crossed_as_their_numbers() -> None:
    columns = {
        "a": pa.array([datetime(2024, 5, 6, 23), datetime(2024, 5, 7, 1)], pa.timestamp("us")),
        "b": pa.array([1.9, 2.0]),
    }
    hour = IdColumn("a", unit="h", since="midnight")
    source = IdColumn("b", vocabulary_size=SIZE, boundaries=BOUNDARIES, crossed_with=(hour,))
    assert decoded(columns, source).to_lists() == [[crossed_row((2, 23))], [crossed_row((3, 1))]]


@settings(deadline=None)
@given(
    st.lists(st.none() | st.floats(allow_nan=False) | st.sampled_from(BOUNDARIES), max_size=12),
    st.sampled_from(["empty", "zero"]),
    st.data(),
)
def test_a_bucket_begins_at_its_boundary(values: list[float | None], missing: Any, data: st.DataObject) -> None:
    source = IdColumn("a", vocabulary_size=6, boundaries=BOUNDARIES, missing=missing)
    order = data.draw(orders(len(values)))

    def rows(value: float | None) -> list[int]:
        first = int(missing == "zero")
        if value is None:
            return [0] if missing == "zero" else []
        return [first + sum(boundary <= value for boundary in BOUNDARIES)]

    expected = [rows(value) for value in values]
    assert decoded({"a": pa.array(values, pa.float64())}, source, order).to_lists() == [expected[at] for at in order]
    lists = pa.array([values, None, []], pa.list_(pa.float64()))
    at_null = [0] if missing == "zero" else []
    assert decoded({"a": lists}, source).to_lists() == [[row for bag in expected for row in bag], at_null, []]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, False, None]), [[2], [2], []]),
        (pa.array([2**63 + 1, 7, 0], pa.uint64()), [[4], [4], [2]]),
        (pa.array([float("inf"), float("-inf"), -1.5], pa.float32()), [[4], [0], [1]]),
    ],
)
def test_every_kind_of_number_has_a_bucket(column: pa.Array, expected: list[list[int]]) -> None:
    source = IdColumn("a", vocabulary_size=5, boundaries=BOUNDARIES)
    assert decoded({"a": column}, source).to_lists() == expected


def test_hours_of_a_day_have_buckets() -> None:
    source = IdColumn("a", vocabulary_size=4, boundaries=(6, 12, 18), unit="h", since="midnight")
    times = pa.array([datetime(2024, 5, 6, 5, 59), datetime(2024, 5, 6, 6), datetime(2024, 5, 6, 23), None])
    assert decoded({"a": times}, source).to_lists() == [[0], [1], [3], []]


LISTS = [[7, 8, 9], [], None, [5], [1, None], [2, 2]]
WEIGHTS = [[0.5, -1.0, 0.0], [], None, [3.0], [2.0, None], [1.0, 4.0]]


@pytest.mark.parametrize("missing", ["empty", "zero"])
def test_ids_keep_their_weights_in_any_order(missing: Any) -> None:
    columns = {"a": pa.array(LISTS), "w": pa.array(WEIGHTS)}
    source = IdColumn("a", vocabulary_size=10, weights="w", missing=missing)
    bags = decoded(columns, source, [5, 0, 4, 2, 3])
    assert bags.weights.dtype == np.float32
    cut = np.split(bags.weights, bags.row_splits[1:-1])
    if missing == "empty":
        assert bags.to_lists() == [[2, 2], [7, 8, 9], [1], [], [5]]
        assert [part.tolist() for part in cut] == [[1, 4], [0.5, -1, 0], [2], [], [3]]
    else:
        assert bags.to_lists() == [[2, 2], [7, 8, 9], [1, 0], [0], [5]]
        assert [part.tolist() for part in cut] == [[1, 4], [0.5, -1, 0], [2, 1], [1], [3]]


@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=5), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from(["zero", "empty"]),
    st.booleans(),
    st.randoms(),
)
def test_the_last_ids_of_a_list_are_those_of_the_whole_list(
    lists: list[Any], last: int, missing: Any, has_weights: bool, random: Any
) -> None:
    """In any order, with nulls, and with weights; lists that are all long enough share their offsets."""
    columns = {"a": pa.array(lists, pa.list_(pa.int64()))}
    source = IdColumn("a", vocabulary_size=10, missing=missing)
    if has_weights:
        weights = [None if one is None else [float(at + 1) for at in range(len(one))] for one in lists]
        columns["w"] = pa.array(weights, pa.list_(pa.float64()))
        source = replace(source, weights="w")
    order = random.sample(range(len(lists)), len(lists))
    whole, found = decoded(columns, source, order), decoded(columns, replace(source, last=last), order)
    for name in ("values", "weights")[: 1 + has_weights]:
        parts = [np.split(getattr(bags, name), bags.row_splits[1:-1]) for bags in (whole, found)]
        assert [part[-last:].tolist() for part in parts[0]] == [part.tolist() for part in parts[1]]
    assert found.row_splits[-1] == len(found.values)


def test_lists_of_one_length_are_cut_to_another() -> None:
    bags = decoded({"a": pa.array([[1, 2, 3], [4, 5, 6]])}, IdColumn("a", vocabulary_size=10, last=2), [1, 0])
    assert (bags.values.tolist(), bags.row_splits.tolist()) == ([5, 6, 2, 3], [0, 2, 4])
    with pytest.raises(DataConfigError, match=r"Found last=0 for id column 'a'"):
        IdColumn("a", last=0)
    with pytest.raises(DataConfigError, match=r"Found last=2 beside crossed_with"):
        IdColumn("a", crossed_with=("b",), last=2)


def test_single_ids_have_single_weights() -> None:
    columns = {"a": pa.array(["x", None, "y"]), "w": pa.array([2, None, 3], pa.int8())}
    bags = decoded(columns, IdColumn("a", "hash", 10, weights="w"))
    assert np.diff(bags.row_splits).tolist() == [1, 1, 1]
    assert bags.weights.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([[1.0, 2.0], [1.0]], r"Found 2 weights of 1 ids in .*row 100, column 'w'. A row has as many weights as ids"),
        ([[1.0], [None]], r"Found null in .*row 101, column 'w'. Weights of ids are finite, and never null"),
        ([[1.0], [float("nan")]], r"Found nan in .*row 101, column 'w'"),
        ([[1.0], [1e300]], r"Found inf in .*row 101, column 'w'"),
        ([[1.0], None], r"Found 0 weights of 1 ids in .*row 101"),
    ],
)
def test_weights_that_do_not_fit_name_their_row(weights: list[Any], words: str) -> None:
    columns = {"a": pa.array([[1], [2]]), "w": pa.array(weights, pa.list_(pa.float64()))}
    with pytest.raises(InputError, match=words):
        decoded(columns, IdColumn("a", vocabulary_size=10, weights="w"))


def test_a_number_without_a_bucket_names_its_row() -> None:
    source = IdColumn("a", vocabulary_size=10, boundaries=(1,))
    with pytest.raises(InputError, match=r"Found nan in .*row 101, column 'a'.*has no bucket.*Write null"):
        decoded({"a": pa.array([1.0, float("nan")])}, source)


def write(folder: Path, table: pa.Table) -> str:
    pq.write_table(table, folder / "part.parquet", row_group_size=5)
    return str(folder / "part.parquet")


def many_rows(num_rows: int = 23) -> pa.Table:
    random = np.random.default_rng(1)
    # In CSV an empty list is a null.
    sizes = random.integers(1, 4, num_rows).tolist()
    return pa.table(
        {
            "y": pa.array([0.0] * num_rows),
            "age": pa.array(random.normal(size=num_rows) * 5),
            "city": pa.array([f"c{at}" for at in random.integers(0, 5, num_rows)]),
            "tags": pa.array([random.integers(0, 9, size).tolist() for size in sizes], pa.list_(pa.int64())),
            "w": pa.array([np.round(random.normal(size=size), 3).tolist() for size in sizes], pa.list_(pa.float64())),
        }
    )


FEATURES = {
    "bucket": IdColumn("age", boundaries=BOUNDARIES),
    "pair": IdColumn("age", boundaries=BOUNDARIES, crossed_with=("city", "tags")),
    "tags": IdColumn("tags", weights="w"),
    "hashed": IdColumn("tags", "hash", weights="w"),
}
SIZES = {"bucket": 5, "pair": 1000, "tags": 9, "hashed": 50}


def by_sample(batches: list[Batch]) -> dict[int, Any]:
    found = {}
    for batch in batches:
        for at in np.flatnonzero(~batch.is_padding).tolist():
            row = batch.slice(at, at + 1).features
            found[int(batch.sample_ids[at])] = {
                name: (bags.values.tolist(), None if bags.weights is None else bags.weights.tolist())
                for name, bags in row.items()
            }
    return found


def read(data: InputData, lanes: list[list[int]], *, log: BadRowLog | None = None) -> list[Batch]:
    """All rows, by readers of some lanes each."""
    index = build_index(data)
    plan = training_plan(index, num_lanes=sum(map(len, lanes)), batch_size=6, seed=4)
    return [
        InputReader(data, index, plan, some, bad_rows=log).read(step)
        for some in lanes
        for step in range(plan.steps_per_epoch)
    ]


def test_rows_are_the_same_for_any_number_of_hosts_and_from_csv(tmp_path: Path) -> None:
    table = many_rows()
    data = ParquetData(write(tmp_path, table), label="y", features=FEATURES).resolved(SIZES)
    alone = by_sample(read(data, [[0]]))
    assert len(alone) == table.num_rows
    assert by_sample(read(data, [[0], [2, 1]])) == alone
    ages, cities, tags = (table.column(name).to_pylist() for name in ("age", "city", "tags"))
    for at, row in alone.items():
        bucket = sum(boundary <= ages[at] for boundary in BOUNDARIES)
        assert row["bucket"] == ([bucket], None)
        pairs = [1 + (mix(mix(mix(mix(mix(3) ^ bucket) ^ key_of(cities[at])) ^ tag))) % 999 for tag in tags[at]]
        assert row["pair"] == (pairs, None)
        assert row["tags"][1] == np.array(table.column("w")[at].as_py(), np.float32).tolist()
    texts = {name: table.column(name) for name in ("y", "age", "city")}
    for name in ("tags", "w"):
        texts[name] = pa.array(["|".join(map(str, row)) for row in table.column(name).to_pylist()])
    pyarrow.csv.write_csv(pa.table(texts), tmp_path / "part.csv")
    lists = {"tags": "|", "w": "|"}
    csv = CsvData(
        str(tmp_path / "part.csv"), label="y", features=FEATURES, strings=("city",), list_separators=lists
    ).resolved(SIZES)
    assert by_sample(read(csv, [[0]])) == alone


def test_malformed_rows_become_padding_with_their_weights(tmp_path: Path) -> None:
    table = many_rows(7)
    weights = table.column("w").to_pylist()
    weights[3] = [*weights[3], 1.0]
    table = table.set_column(4, "w", pa.array(weights, pa.list_(pa.float64())))
    data = ParquetData(write(tmp_path, table), label="y", features=FEATURES, max_bad_rows=1).resolved(SIZES)
    log = BadRowLog(1)
    found = by_sample(read(data, [[0]], log=log))
    assert sorted(found) == [0, 1, 2, 4, 5, 6]
    assert [(row.row, row.column) for row in log.take()] == [(3, "w")]
    assert all(len(ids) == len(weights) for ids, weights in (row["tags"] for row in found.values()))


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"f": IdColumn("y", weights="w")}, r"column 'w' of type list<.*Expected a column of numbers, one for each id"),
        ({"f": IdColumn("tags", weights="age")}, r"column 'age' of type double.*Expected a column of lists of numbers"),
        ({"f": IdColumn("tags", weights="nothing")}, r"no column named 'nothing'"),
        ({"f": IdColumn("city", boundaries=(1,))}, r"column 'city' of type string.*a column of numbers or times"),
        ({"f": IdColumn("city", crossed_with=("age",))}, r"column 'age' of type double.*integers, strings or times"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path: Path, features: dict[str, IdColumn], words: str) -> None:
    table = many_rows(3)
    table = table.set_column(0, "y", pa.array([0, 1, 0]))
    with pytest.raises(InputError, match=words):
        build_index(ParquetData(write(tmp_path, table), label="y", features=features).resolved({"f": 100}))


def test_files_with_another_kind_of_a_crossed_column_are_named(tmp_path: Path) -> None:
    for number, cities in enumerate((["1", "2"], [1, 2])):
        table = pa.table({"y": [0.0, 1.0], "age": [1.0, 2.0], "city": cities})
        pq.write_table(table, tmp_path / f"part-{number}.parquet")
    source = IdColumn("age", boundaries=(1,), crossed_with=("city",))
    data = ParquetData(str(tmp_path / "part-*.parquet"), label="y", features={"f": source}).resolved({"f": 9})
    with pytest.raises(InputError, match=r"Found column 'city' with text in .*part-0.parquet and with integers in"):
        build_index(data)


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        ({"boundaries": (2, 1)}, r"Found boundaries=\(2, 1\) .*Expected rising finite numbers"),
        ({"boundaries": 7}, "Found boundaries=7 .*Expected rising"),
        ({"boundaries": (1, float("nan"))}, "Expected rising finite numbers"),
        ({"boundaries": (1, 2), "vocabulary_size": 2}, "Expected at least 3. Give the table more rows"),
        ({"boundaries": (1,), "missing": "zero", "vocabulary_size": 2}, "Expected at least 3"),
        ({"boundaries": (1,), "vocabulary": "words.txt"}, "Found vocabulary and boundaries for id column 'a'"),
        ({"boundaries": (1,), "negatives": Negatives(4)}, "Found negatives and boundaries"),
        ({"crossed_with": "b"}, r"Found crossed_with='b' .*Expected a tuple"),
        ({"crossed_with": ("b",), "weights": "w"}, "Found weights and crossed_with"),
        ({"crossed_with": ("b",), "vocabulary": "words.txt"}, "Found vocabulary and crossed_with"),
        ({"crossed_with": (IdColumn("b", salt=2),)}, r"Found IdColumn\(.*the values themselves are crossed"),
        ({"weights": 3}, "Found weights=3 in IdColumn"),
    ],
)
def test_declarations_that_cannot_be_meant_are_refused(declaration: dict[str, Any], words: str) -> None:
    with pytest.raises(DataConfigError, match=words):
        IdColumn("a", **declaration)


def test_an_evaluation_reads_weights_too(tmp_path: Path) -> None:
    data = ParquetData(write(tmp_path, many_rows()), label="y", features=FEATURES).resolved(SIZES)
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=2, batch_size=8)
    reader = InputReader(data, index, plan, [0, 1])
    assert by_sample([reader.read(step) for step in range(plan.steps_per_epoch)]) == by_sample(read(data, [[0]]))
