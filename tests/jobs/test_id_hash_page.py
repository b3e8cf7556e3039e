"""The section on the hash of ids in `docs/input.md`: every vector of its tables, by our kernels and by a program
written from the page alone.
"""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.hashing import combine, mix64
from podembed.embedding.initializers import RowId
from podembed.embedding.optimizers import SGD
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.jobs.criteo import criteo
from podembed.jobs.prepare.rows_of_values import HashedIds
from podembed.jobs.prepare.settings import field_plans
from podembed.workers.columns.decode import Decoder, RawRows
from podembed.workers.columns.id_columns import hashed_rows
from podembed.workers.columns.string_keys import string_keys
from podembed.workers.columns.vocabulary import text_of
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from tests.long_tests import examples

PAGE = Path(__file__).parents[2] / "docs" / "input.md"
VECTOR = re.compile(
    r'^\| `("[^`]*"|-?\d+)` \| (-?\d+) \| (\d+) \| `([0-9a-f]{16})` \| `([0-9a-f]{16})` \| (\d+) \|$', re.M
)
CROSSED_VECTOR = re.compile(
    r"^\| ((?:`[^`]*`, )+`[^`]*`) \| (-?\d+) \| (\d+) \| `([0-9a-f]{16})` \| `([0-9a-f]{16})` \| (\d+) \|$", re.M
)
POLICY_VECTOR = re.compile(r"^\| `(-?\d+)` \| (\d+) \| (\d+) \|$", re.M)


def section() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.split("## The hash of ids\n", 1)[1].split("\n## ", 1)[0]


# value, salt, size, key, hash, row
VECTORS = [
    (json.loads(value), int(salt), int(size), int(key, 16), int(hashed, 16), int(row))
    for value, salt, size, key, hashed, row in VECTOR.findall(section())
]
# values, salt, size, key, hash, row
CROSSED_VECTORS = [
    (json.loads(f"[{values.replace('`', '')}]"), int(salt), int(size), int(key, 16), int(hashed, 16), int(row))
    for values, salt, size, key, hashed, row in CROSSED_VECTOR.findall(section())
]
POLICY_VECTORS = [tuple(map(int, found)) for found in POLICY_VECTOR.findall(section())]


def mix(x: int, s: int) -> int:
    """Step 1 of the page. This and the two below use nothing but Python, and nothing but what the page says."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64 ^ s
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_of(value: int | str) -> int:
    """Steps 2 and 3."""
    if isinstance(value, int):
        return value % 2**64
    data = value.encode("utf-8")
    key = mix(len(data), 0)
    for start in range(0, len(data), 8):
        word = sum(byte << 8 * at for at, byte in enumerate(data[start : start + 8]))
        key = mix(key ^ word, 0)
    return key


def row_of(value: int | str, salt: int, size: int) -> int:
    """Steps 4 to 6."""
    s = mix(salt % 2**64, 0) if salt else 0
    return 1 + mix(key_of(value), s) % (size - 1)


def column_of(values: list) -> pa.Array:
    return pa.array(values, pa.large_string() if isinstance(values[0], str) else pa.int64())


def trained_rows(column: pa.Array, *, salt: int, size: int) -> list[int]:
    """The rows that a run finds when it reads the column."""
    return rows_in_training({"f": column}, IdColumn("f", mode="hash", salt=salt), size=size)


def rows_in_training(columns: dict[str, pa.Array], source: IdColumn, *, size: int) -> list[int]:
    data = ParquetData("x", label="y", features={"f": source}).resolved({"f": size})
    decoder, num_rows = Decoder(data, {}), len(columns[source.column])
    table = pa.table({**columns, "y": pa.array(np.zeros(num_rows, np.int8))})
    raw = RawRows(columns=table, faults=decoder.faults_of(Origin(path="x", group=0, first_row=0), num_rows))
    block, _ = decoder.decode(raw, first_position=0, order=None)
    return block.rows.features["f"].values.tolist()


def test_the_page_has_vectors_of_every_kind() -> None:
    tables = [line for line in section().splitlines() if re.match(r'\| `("|-?\d)', line)]
    assert len(VECTORS) + len(CROSSED_VECTORS) + len(POLICY_VECTORS) == len(tables)
    assert len(VECTORS) >= 19
    assert {type(value) for value, *_ in VECTORS} == {int, str}
    assert len(POLICY_VECTORS) >= 6


@pytest.mark.parametrize(("value", "salt", "size", "key", "hashed", "row"), VECTORS)
def test_a_program_written_from_the_page_computes_its_vectors(
    value: int | str, salt: int, size: int, key: int, hashed: int, row: int
) -> None:
    assert key_of(value) == key
    assert mix(key, mix(salt % 2**64, 0) if salt else 0) == hashed
    assert row_of(value, salt, size) == row


@pytest.mark.parametrize(("value", "salt", "size", "key", "hashed", "row"), VECTORS)
def test_our_kernels_compute_its_vectors(
    value: int | str, salt: int, size: int, key: int, hashed: int, row: int
) -> None:
    column = column_of([value])
    if isinstance(value, str):
        keys = np.empty(1, np.int64)
        string_keys(*text_of(column), keys)
        assert int(keys.view(np.uint64)[0]) == key
    assert int(mix64(np.array([key], np.uint64), salt=salt)[0]) == hashed
    assert combine(salt) == mix(salt % 2**64, 0)
    # In training, in its shared function, and in `podembed prepare`.
    assert trained_rows(column, salt=salt, size=size) == [row]
    assert hashed_rows(column, vocabulary_size=size, salt=salt).tolist() == [row]
    assert HashedIds(num_rows=size, salt=salt).rows(column).tolist() == [row]


@pytest.mark.parametrize(("values", "salt", "size", "key", "hashed", "row"), CROSSED_VECTORS)
def test_crossed_values_have_the_row_of_the_page(
    values: list, salt: int, size: int, key: int, hashed: int, row: int
) -> None:
    folded = mix(len(values), 0)
    for value in values:
        folded = mix(folded ^ key_of(value), 0)
    assert folded == key
    assert mix(folded, mix(salt % 2**64, 0) if salt else 0) == hashed
    assert 1 + hashed % (size - 1) == row
    names = [f"c{at}" for at in range(len(values))]
    source = IdColumn(names[0], salt=salt, crossed_with=tuple(names[1:]))
    table = {name: column_of([value]) for name, value in zip(names, values, strict=True)}
    assert rows_in_training(table, source, size=size) == [row]


@given(
    st.one_of(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8),
        st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=8),
    ),
    st.integers(-(2**70), 2**70),
    st.integers(2, 2**40),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_page_and_the_kernels_agree_on_any_value(values: list, salt: int, size: int) -> None:
    expected = [row_of(value, salt, size) for value in values]
    assert HashedIds(num_rows=size, salt=salt).rows(column_of(values)).tolist() == expected


def test_missing_values_are_never_hashed() -> None:
    assert trained_rows(pa.array(["a", "", None]), salt=0, size=1000) == [row_of("a", 0, 1000), 0, 0]
    assert HashedIds(num_rows=1000, salt=0).rows(pa.array([5, None])).tolist() == [row_of(5, 0, 1000), 0]


def test_salts_are_the_numbers_of_the_fields() -> None:
    features = criteo(data=["x.parquet"]).data.features
    assert [column.salt for column in features.values()] == list(range(len(features)))
    plans = field_plans(["a", "b", "c"], ids="vocabulary", hashed=["b", "c"], max_rows=None, min_count=1)
    assert [plan.salt for plan in plans] == [0, 1, 2]


@pytest.mark.parametrize(("number", "size", "row"), POLICY_VECTORS)
def test_the_policy_for_ids_that_do_not_fit(number: int, size: int, row: int) -> None:
    assert row == (number if 0 <= number < size else mix(number % 2**64, 0) % size)
    if size > 10_000:
        return
    table = TableConfig(size, 1, RowId(), invalid_ids="hash")
    with LocalStrategy().scope():
        embedding = TPUEmbedding(FeatureConfig(table), 1, SGD(0.1))
    embedding.enqueue(np.array([number]), training=False)
    assert float(embedding.dequeue()[0, 0]) == row
