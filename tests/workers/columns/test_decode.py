from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.hashing import mix64
from podembed.workers.columns.decode import Decoder, RawRows, check_schema, id_kinds
from podembed.workers.columns.gather import Block
from podembed.workers.columns.string_keys import string_keys
from podembed.workers.columns.vocabulary import Vocabulary, text_of
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn, VectorColumn
from podembed.workers.data.input_errors import InputError

ORIGIN = Origin(path="clicks.parquet", group=2, first_row=100)
SIZE = 50
WORDS = Vocabulary("words.txt", "red\ngrün\n7\n-40\n".encode())
NUMBERS = Vocabulary("numbers.txt", b"7\n0\n-40\n12")


def decode_block(
    table: pa.Table, data: ParquetData, *, first_position: int = 0, order: np.ndarray | None = None
) -> Block:
    decoder = Decoder(data, {"words.txt": WORDS, "numbers.txt": NUMBERS})
    raw = RawRows(columns=table, faults=decoder.faults_of(ORIGIN, table.num_rows))
    block, _ = decoder.decode(raw, first_position=first_position, order=order)
    return block


def decode(table: pa.Table, data: ParquetData, *, first_position: int = 0) -> Batch:
    return decode_block(table, data, first_position=first_position).rows


def hashed_rows(values: np.ndarray, *, vocabulary_size: int, salt: int = 0) -> np.ndarray:
    """The rule of `IdColumn` in numpy; the oracle of the kernel."""
    return (mix64(values, salt=salt) % np.uint64(vocabulary_size - 1)).astype(np.int64) + 1


def decode_one(column: pa.Array | pa.ChunkedArray, source: IdColumn, order: list[int] | None = None) -> list[list[int]]:
    table = pa.table({"y": pa.array(np.zeros(len(column), np.int8)), "c": column})
    data = ParquetData("a", label="y", features={"f": source})
    block = decode_block(table, data, order=None if order is None else np.array(order, np.int64))
    bags = block.rows.features["f"]
    if block.single_names:
        assert (bags.values == block.singles[0]).all()
    return bags.to_lists()


def decode_dense(column: pa.Array, declared: str | DenseColumn) -> Batch:
    table = pa.table({"y": pa.array(np.zeros(len(column), np.int8)), "x": column})
    return decode(table, ParquetData("a", label="y", dense=(declared,)), first_position=7)


scalars = st.lists(st.none() | st.integers(0, SIZE - 1), max_size=12)
lists = st.lists(st.none() | st.lists(st.none() | st.integers(0, SIZE - 1), max_size=4), max_size=12)
modes = st.sampled_from(
    [
        IdColumn("c", "as_is", SIZE),
        IdColumn("c", "as_is", SIZE, missing="zero"),
        IdColumn("c", "hash", SIZE, salt=3),
        # Folded, these salts fill all 64 bits.
        *(IdColumn("c", "hash", SIZE, missing="empty", salt=salt) for salt in (0, 1, 2, -1, 2**70)),
        IdColumn("c", vocabulary_size=SIZE, vocabulary="numbers.txt"),
        IdColumn("c", vocabulary_size=SIZE, vocabulary="numbers.txt", num_reserved=3, missing="zero"),
    ]
)
text_modes = st.sampled_from(
    [
        IdColumn("c", "hash", SIZE, salt=3),
        IdColumn("c", "hash", SIZE, missing="empty"),
        IdColumn("c", vocabulary_size=SIZE, vocabulary="words.txt"),
        IdColumn("c", vocabulary_size=SIZE, vocabulary="words.txt", num_reserved=2, missing="zero"),
    ]
)
texts = st.none() | st.sampled_from(["red", "grün", "gr", "7", "-40", "blue", "", "0"])
TEXT_KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string())]


Value = int | str | None


def orders(num_rows: int) -> st.SearchStrategy[list[int]]:
    """Some of the rows, in any order."""
    return st.permutations(range(num_rows)).flatmap(
        lambda rows: st.integers(0, num_rows).map(lambda count: list(rows)[:count])
    )


def expected_bag(value: Value | list[Value], source: IdColumn) -> list[int]:
    """The table of `workers.columns.id_columns`, value by value."""
    items = value if isinstance(value, list) else [value]
    missing = [] if source.missing == "empty" else [0]
    bag = []
    for item in items:
        if item is None or item == "":
            bag += missing
        elif source.mode == "as_is":
            bag.append(item)
        elif source.vocabulary is not None:
            known = ["red", "grün", "7", "-40"] if source.vocabulary == "words.txt" else ["7", "0", "-40", "12"]
            bag.append(known.index(str(item)) + source.num_reserved if str(item) in known else 0)
        elif isinstance(item, str):
            key = np.empty(1, np.int64)
            string_keys(*text_of(pa.array([item], pa.large_string())), key)
            bag += hashed_rows(key, vocabulary_size=SIZE, salt=source.salt).tolist()
        else:
            bag += hashed_rows(np.array([item]), vocabulary_size=SIZE, salt=source.salt).tolist()
    return bag


@settings(deadline=None)
@given(scalars, modes, st.sampled_from([pa.int8(), pa.uint16(), pa.int64(), pa.uint64()]), st.data())
def test_scalars_become_bags(values: list, source: IdColumn, kind: pa.DataType, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    column = pa.array(values, kind)[start:]
    order = data.draw(orders(len(column)))
    assert decode_one(column, source, order) == [expected_bag(values[start + row], source) for row in order]


@settings(deadline=None)
@given(lists, modes, st.sampled_from([pa.list_, pa.large_list]), st.data())
def test_lists_become_bags(values: list, source: IdColumn, kind, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    cut = data.draw(st.integers(start, len(values)))
    whole = pa.array(values, kind(pa.int32()))
    column = pa.chunked_array([whole[start:cut], whole[cut:]])
    order = data.draw(orders(len(column)))
    assert decode_one(column, source, order) == [expected_bag(values[start + row], source) for row in order]


@settings(deadline=None)
@given(st.lists(texts, max_size=12), text_modes, st.sampled_from(TEXT_KINDS), st.data())
def test_strings_become_bags(values: list, source: IdColumn, kind: pa.DataType, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    column = pa.array(values, pa.string()).cast(kind)[start:]
    order = data.draw(orders(len(column)))
    assert decode_one(column, source, order) == [expected_bag(values[start + row], source) for row in order]


@settings(deadline=None)
@given(
    st.lists(st.none() | st.lists(texts, max_size=4), max_size=12),
    text_modes,
    st.sampled_from([pa.string(), pa.large_string()]),
    st.data(),
)
def test_lists_of_strings_become_bags(values: list, source: IdColumn, kind: pa.DataType, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    column = pa.array(values, pa.list_(kind))[start:]
    order = data.draw(orders(len(column)))
    assert decode_one(column, source, order) == [expected_bag(values[start + row], source) for row in order]


def test_a_vocabulary_must_fit_its_table() -> None:
    with pytest.raises(InputError, match=r"Found 4 values in words.txt and 2 reserved rows.* Set vocabulary_size=6"):
        decode_one(pa.array(["red"]), IdColumn("c", vocabulary_size=5, vocabulary="words.txt", num_reserved=2))


def test_fixed_size_lists_become_bags() -> None:
    column = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    assert decode_one(column, IdColumn("c", "as_is", SIZE)) == [[1, 2], [], [3]]
    assert decode_one(column, IdColumn("c", "as_is", SIZE, missing="zero")) == [[1, 2], [0], [3, 0]]


def test_what_lies_under_a_null_list_is_not_read() -> None:
    offsets, hidden = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 999, 999, 3])
    column = pa.ListArray.from_arrays(offsets, hidden, mask=pa.array([False, True, False]))
    assert decode_one(column, IdColumn("c", "as_is", SIZE)) == [[1, 2], [], [3]]


def test_hashing_keeps_row_0_free_reaches_every_other_row_and_is_fixed_for_good() -> None:
    rows = hashed_rows(np.arange(10_000), vocabulary_size=SIZE)
    counts = np.bincount(rows, minlength=SIZE)
    assert counts[0] == 0
    assert counts[1:].min() > 120
    assert counts[1:].max() < 300
    # A change here gives every id of a saved table another row.
    assert hashed_rows(np.array([0, 1, -1, 2**40]), vocabulary_size=1000).tolist() == [737, 546, 459, 994]
    assert hashed_rows(np.array([0, 1, -1, 2**40]), vocabulary_size=1000, salt=9).tolist() == [39, 243, 974, 679]


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        (pa.array([1, None, 50, -1]), 102, "50"),
        (pa.array([0, -1]), 101, "-1"),
        (pa.array([0, 2**64 - 1], pa.uint64()), 101, str(2**64 - 1)),
        (pa.array([[1], None, [], [None, 2, 50]]), 103, "50"),
        (pa.array([[1, -7]]), 100, "-7"),
        (pa.array([None, [1], [2, 99]])[1:], 101, "99"),
    ],
)
def test_an_id_outside_the_table_is_named(column: pa.Array, row: int, value: str) -> None:
    expected = f"Found id {value} in clicks.parquet, row group 2, row {row}, column 'c'. Ids are 0 to 49."
    with pytest.raises(InputError) as caught:
        decode_one(column, IdColumn("c", "as_is", SIZE))
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        (pa.array([1, 50, -1, 2**40]), [[1], [50], [-1], [2**40]]),
        (pa.array([1, None, -(2**63)]), [[1], [], [-(2**63)]]),
        (pa.array([[1, 99], [], [-7]]), [[1, 99], [], [-7]]),
        (pa.array([[1, None, 99], None]), [[1, 99], []]),
    ],
)
def test_ids_outside_the_table_are_kept_where_the_table_says_what_becomes_of_them(
    column: pa.Array, ids: list[list[int]]
) -> None:
    bags = decode_one(column, IdColumn("c", "as_is", SIZE, outside="drop"))
    assert bags == ids


@pytest.mark.parametrize("ids", [[0, 2**63], [None, 2**64 - 1]])
def test_an_id_beyond_int64_is_named_in_any_case(ids: list[int | None]) -> None:
    with pytest.raises(InputError, match=f"Found id {ids[1]} in clicks.parquet, row group 2, row 101"):
        decode_one(pa.array(ids, pa.uint64()), IdColumn("c", "as_is", SIZE, outside="drop"))


def test_dense_numbers_are_transformed_and_missing_ones_are_zero() -> None:
    column = pa.array([0, 3, -5, None], pa.int32())
    assert decode_dense(column, "x").dense.tolist() == [[0], [3], [-5], [0]]
    logs = decode_dense(column, DenseColumn("x", "log1p")).dense
    np.testing.assert_array_equal(logs, np.log1p(np.array([[0], [3], [0], [0]], np.float32)))
    assert decode_dense(pa.array([True, None, False]), "x").dense.tolist() == [[1], [0], [0]]
    assert decode_dense(pa.array([1.5], pa.float16()), "x").dense.tolist() == [[1.5]]


@pytest.mark.parametrize("transform", ["identity", "log1p"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_dense_number_that_is_not_finite_is_named(value: float, transform) -> None:
    column = pa.array([0.0, None, value])
    with pytest.raises(InputError, match=r"row group 2, row 102, column 'x'. Dense numbers are finite"):
        decode_dense(column, DenseColumn("x", transform))


def decode_columns(label: list, weight: list, number: list) -> Batch:
    table = pa.table(
        {"y": pa.array(label, pa.float64()), "w": pa.array(weight, pa.float64()), "n": pa.array(number, pa.int64())}
    )
    data = ParquetData("a", label="y", sample_weight="w", sample_id="n")
    return decode(table, data)


def test_labels_weights_and_sample_ids_are_read() -> None:
    batch = decode_columns([0, 1.5], [0, 2], [9, 3])
    assert (batch.labels.tolist(), batch.weights.tolist(), batch.sample_ids.tolist()) == ([0, 1.5], [0, 2], [9, 3])
    assert batch.dense.shape == (2, 0)


@pytest.mark.parametrize(
    ("label", "weight", "number", "message"),
    [
        ([0, None], [1, 1], [0, 1], "Found null in clicks.parquet, row group 2, row 101, column 'y'"),
        ([0, np.nan], [1, 1], [0, 1], "Found nan .* column 'y'"),
        ([0, 0], [None, 1], [0, 1], "Found null .* row 100, column 'w'"),
        ([0, 0], [1, -1], [0, 1], "Found -1.0 .* row 101, column 'w'"),
        ([0, 0], [1, 1], [0, -1], "Found -1 .* column 'n'"),
        ([0, 0], [1, 1], [None, 1], "Found null .* column 'n'"),
    ],
)
def test_rows_without_a_usable_label_weight_or_id_are_named(label, weight, number, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_columns(label, weight, number)


def test_a_nan_hides_no_negative_weight() -> None:
    data = ParquetData("a", label="y", sample_weight="w", max_bad_rows=9)
    table = pa.table({"y": [0.0, 1.0, 1.0], "w": [np.nan, -1.0, 2.0]})
    batch = decode(table, data)
    assert batch.is_padding.tolist() == [True, True, False]
    assert batch.weights.tolist() == [0, 0, 2]


def test_without_an_id_column_rows_are_numbered_by_position() -> None:
    assert decode_dense(pa.array([1.0, 2.0]), "x").sample_ids.tolist() == [7, 8]


def test_an_unresolved_feature_is_refused() -> None:
    with pytest.raises(InputError, match=r"ParquetData\.resolved"):
        decode_one(pa.array([1]), IdColumn("c"))


def test_text_in_chunks_gets_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As more than 2 GiB of it comes; narrow offsets overflow where chunks are put together."""
    real = pa.concat_arrays

    def narrow(arrays: list[pa.Array]) -> pa.Array:
        if any(pa.types.is_string(one.type) or pa.types.is_list(one.type) for one in arrays):
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return real(arrays)

    monkeypatch.setattr(pa, "concat_arrays", narrow)
    source = IdColumn("c", vocabulary="words.txt", vocabulary_size=SIZE)
    assert decode_one(pa.chunked_array([["red"], ["7", None]]), source) == [[1], [3], []]
    lists = pa.chunked_array([[["red", "7"]], [None, []]], pa.list_(pa.string()))
    assert decode_one(lists, source) == [[1, 3], [], []]


@pytest.mark.parametrize("word", [pa.string(), pa.large_string()])
def test_lists_of_dictionaries_are_lists_of_their_values(word: pa.DataType) -> None:
    values = [["red", "7"], None, ["grün", None]]
    column = pa.array(values, pa.list_(pa.dictionary(pa.int8(), word)))
    for source in (
        IdColumn("c", vocabulary="words.txt", vocabulary_size=SIZE),
        IdColumn("c", "hash", vocabulary_size=SIZE),
    ):
        check_schema(
            pa.schema([("y", pa.int8()), ("c", column.type)]),
            ParquetData("a", label="y", features={"f": source}),
            path="a",
        )
        assert decode_one(column, source) == decode_one(pa.array(values), source)


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.null()), pa.large_list(pa.null())])
@pytest.mark.parametrize("missing", ["empty", "zero"])
def test_a_column_without_a_value_has_only_missing_ones(kind: pa.DataType, missing: Any) -> None:
    """Whatever a writer says who knew no type."""
    for source in (
        IdColumn("c", "hash", vocabulary_size=SIZE, missing=missing),
        IdColumn("c", vocabulary="words.txt", vocabulary_size=SIZE, missing=missing),
        IdColumn("c", vocabulary_size=SIZE, missing=missing),
        *([] if kind != pa.null() else [IdColumn("c", vocabulary_size=SIZE, missing=missing, boundaries=(1.0, 2.0))]),
    ):
        schema = pa.schema([("y", pa.int8()), ("c", kind)])
        data = ParquetData("a", label="y", features={"f": source})
        check_schema(schema, data, path="a")
        assert id_kinds(schema, data).endswith("nulls")
        assert decode_one(pa.nulls(3, kind), source) == [[0] if missing == "zero" else []] * 3


def test_dense_and_extra_columns_without_a_value_have_only_missing_ones() -> None:
    extra = (IntegerColumn("i", missing=-1), VectorColumn("v", 2), ListColumn("l", 2), ListColumn("m", 2, "int32"))
    data = ParquetData("a", label="y", dense=("x",), extra=extra)
    table = pa.table({"y": [0, 1], **{name: pa.nulls(2) for name in "xivlm"}})
    check_schema(table.schema, data, path="a")
    rows = decode(table, data)
    assert rows.dense.tolist() == [[0], [0]]
    assert rows.columns["i"].tolist() == [-1, -1]
    assert not any(rows.columns[name].any() for name in ("v", "l", "l/length", "m", "m/length"))
    with pytest.raises(InputError, match="Found null in .*column 'y'"):
        decode(pa.table({"y": pa.nulls(2), "x": [1, 2]}), ParquetData("a", label="y", dense=("x",)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (pa.string(), "type string"),
        (pa.dictionary(pa.int32(), pa.string()), "type dictionary"),
        (pa.float32(), "type float"),
        (pa.list_(pa.string()), "type list"),
        (pa.list_(pa.list_(pa.int64())), "type list"),
    ],
)
def test_columns_that_hold_no_ids_are_refused(kind: pa.DataType, message: str) -> None:
    data = ParquetData("a", label="y", features={"f": IdColumn("c")})
    with pytest.raises(InputError, match=rf"column 'c' of {message}.* in a.parquet"):
        check_schema(pa.schema([("y", pa.int8()), ("c", kind)]), data, path="a.parquet")


def test_missing_and_repeated_columns_are_refused_with_those_that_are_there() -> None:
    data = ParquetData("a", label="y", dense=("x",))
    with pytest.raises(InputError, match=r"no column named 'x' in a.parquet.*\['y', 'z'\]"):
        check_schema(pa.schema([("y", pa.int8()), ("z", pa.int8())]), data, path="a.parquet")
    with pytest.raises(InputError, match="2 columns named 'y'"):
        check_schema(pa.schema([("y", pa.int8()), ("y", pa.int8())]), data, path="a.parquet")
    with pytest.raises(InputError, match="column 'x' of type string"):
        check_schema(pa.schema([("y", pa.int8()), ("x", pa.string())]), data, path="a.parquet")
