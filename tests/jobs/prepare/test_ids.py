"""Values to rows: the same hash as training's own, and vocabularies against plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.jobs.prepare.rows_of_values import (
    HashedIds,
    VocabularyIds,
    choose_vocabulary,
    counts_of,
    read_vocabulary,
    summed,
)
from podembed.workers.columns.decode import Decoder, RawRows
from podembed.workers.columns.vocabulary import Vocabulary
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData

# A value is a line of its vocabulary file; prepared text has no line end within a value.
WORDS = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), min_size=1, max_size=3)
VALUES = st.one_of(
    st.lists(st.one_of(st.none(), st.integers(0, 2**32 - 1))).map(lambda found: pa.array(found, pa.int64())),
    st.lists(st.one_of(st.none(), WORDS)).map(lambda found: pa.array(found, pa.string())),
)


def trained(values: pa.Array, source: IdColumn, *, num_rows: int, vocabulary: Vocabulary | None = None) -> list[int]:
    """The rows that a run finds for a column whose values become rows while it is read."""
    data = ParquetData("x", label="y", features={"f": source}).resolved({"f": num_rows})
    decoder = Decoder(data, {} if vocabulary is None else {vocabulary.path: vocabulary})
    table = pa.table({"f": values, "y": pa.array(np.zeros(len(values), np.int8))})
    raw = RawRows(columns=table, faults=decoder.faults_of(Origin(path="x", group=0, first_row=0), len(values)))
    block, _ = decoder.decode(raw, first_position=0, order=None)
    return block.rows.features["f"].values.tolist()


@settings(deadline=None)  # the first example compiles
@given(VALUES)
def test_hashed_values_have_the_rows_that_training_would_find(values: pa.Array) -> None:
    rows = HashedIds(97, 3).rows(values)
    assert rows.tolist() == trained(values, IdColumn("f", mode="hash", salt=3), num_rows=97)
    for value, row in zip(values.to_pylist(), rows, strict=True):
        assert row == 0 if value is None else 1 <= row < 97


@settings(deadline=None)
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
    if not expected:
        return
    vocabulary = Vocabulary("v", "".join(f"{value}\n" for value in expected).encode())
    source = IdColumn("f", vocabulary="v", missing="zero")
    for part in parts:
        found = VocabularyIds(vocabulary).rows(part).tolist()
        assert found == [rows.get(value, 0) for value in part.to_pylist()]
        assert found == trained(part, source, num_rows=len(expected) + 1, vocabulary=vocabulary)


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_an_empty_vocabulary_knows_nothing(tmp_path: Path, kind: pa.DataType) -> None:
    (tmp_path / "none.txt").touch()
    values = pa.array(["7", None] if kind == pa.string() else [7, None], kind)
    assert VocabularyIds(read_vocabulary(tmp_path / "none.txt")).rows(values).tolist() == [0, 0]
