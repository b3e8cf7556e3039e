"""Values to rows: the same hash as training's own, and vocabularies against plain Python."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.prepare.ids import HashedIds, VocabularyIds, choose_vocabulary, counts_of, summed
from workers.columns import Origin, decode, hashed_rows
from workers.data_config import IdColumn, ParquetData

VALUES = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(0, 2**32 - 1))).map(lambda found: pa.array(found, pa.int64())),
    st.lists(st.one_of(st.none(), st.text(min_size=1, max_size=3))).map(lambda found: pa.array(found, pa.string())),
)


def test_hashed_numbers_are_those_that_training_would_hash() -> None:
    values = pa.array([5, None, 2**32 - 1, 5, 0], pa.int64())
    data = ParquetData("x", label="y", features={"f": IdColumn("f", mode="hash", salt=3)}).resolved({"f": 1000})
    table = pa.table({"f": values, "y": pa.array([0] * 5)})
    batch = decode(table, data, origin=Origin(path="x", row_group=0, first_row=0), first_position=0)
    np.testing.assert_array_equal(HashedIds(1000, 3).rows(values), batch.features["f"].values)


@given(st.lists(st.one_of(st.none(), st.text(min_size=1))))
def test_hashed_text(words: list[str | None]) -> None:
    rows = HashedIds(97, 2).rows(pa.array(words, pa.string()))
    for word, row in zip(words, rows, strict=True):
        if word is None:
            assert row == 0
        else:
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            number = np.array([int.from_bytes(digest, "little")], np.uint64)
            assert row == hashed_rows(number, vocabulary_size=97, salt=2)[0] >= 1


@given(parts=st.lists(VALUES, min_size=1), min_count=st.integers(1, 4), max_rows=st.sampled_from([None, 3, 5]))
def test_vocabulary_against_a_counter(parts: list[pa.Array], min_count: int, max_rows: int | None) -> None:
    parts = [part for part in parts if part.type == parts[0].type]
    counts = Counter(value for part in parts for value in part.to_pylist() if value is not None)
    # Arrow orders text by its UTF-8 bytes, which is the order of its code points, as Python's.
    frequent = sorted((value for value in counts if counts[value] >= min_count), key=lambda v: (-counts[v], v))
    expected = frequent if max_rows is None else frequent[: max_rows - 1]
    chosen = choose_vocabulary(
        summed(pa.concat_tables([counts_of([part]) for part in parts])), min_count=min_count, max_rows=max_rows
    )
    assert chosen.values.to_pylist() == expected
    assert chosen.counts.tolist() == [counts[value] for value in expected]
    assert chosen.num_seen == len(counts)
    rows = {value: at + 1 for at, value in enumerate(expected)}
    ids = VocabularyIds(chosen.values)
    for part in parts:
        assert ids.rows(part).tolist() == [rows.get(value, 0) for value in part.to_pylist()]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_an_empty_vocabulary_knows_nothing(kind: pa.DataType) -> None:
    values = pa.array(["7", None] if kind == pa.string() else [7, None], kind)
    assert VocabularyIds(pa.array([], kind)).rows(values).tolist() == [0, 0]
