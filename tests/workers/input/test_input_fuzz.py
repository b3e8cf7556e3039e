"""Files as no writer writes them: whatever the bytes are, reading ends with rows or with an error of ours that names
the file.

The short form of `python -m tests.fuzz`, over the same targets.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import (
    CRITEO_LINE,
    CSV_HEADER,
    CSV_ROWS,
    TARGETS,
    criteo,
    csv,
    csv_records,
    declared_csv,
    npy,
    npy_bytes,
    parquet,
    parquet_bytes,
    prepared_csv,
    read_or_refuse,
    vocabulary,
)
from tests.long_tests import examples

quick = settings(
    deadline=None, max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with some bytes replaced, cut out or put in, or cut off."""
    places = st.integers(0, max(0, len(content) - 1))

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        spoilt = bytearray(content)
        for at, length, new in edits:
            spoilt[at : at + length] = new
        return bytes(spoilt)

    edit = st.tuples(places, st.integers(0, 3), st.binary(max_size=3))
    return st.lists(edit, max_size=4).map(apply) | places.map(lambda at: content[:at]) | st.binary(max_size=60)


csv_text = st.text(st.sampled_from('1,2|"\n\r\tab.e-'), max_size=80).map(str.encode)


@quick
@given(damaged(parquet_bytes()), st.sampled_from([0, 5]))
def test_parquet(content: bytes, max_bad_rows: int) -> None:
    parquet(content, max_bad_rows=max_bad_rows)


@quick
@given(
    damaged(CSV_HEADER + CSV_ROWS) | csv_text.map(lambda text: CSV_HEADER + text),
    st.booleans(),
    st.sampled_from([0, 3, 1000]),
)
def test_csv(content: bytes, is_packed: bool, max_bad_rows: int) -> None:
    csv(content, is_packed=is_packed, max_bad_rows=max_bad_rows)


@quick
@given(damaged(gzip.compress(CSV_HEADER + CSV_ROWS)))
def test_damaged_gzip(content: bytes) -> None:
    csv(content)


@quick
@given(damaged(CSV_ROWS) | csv_text)
def test_csv_that_is_prepared(content: bytes) -> None:
    prepared_csv(content)


@quick
@given(damaged(CSV_ROWS[:120]) | csv_text)
def test_csv_records(content: bytes) -> None:
    csv_records(content)


@quick
@given(
    st.sampled_from(["labels", "dense", "sparse"]).flatmap(
        lambda kind: st.tuples(st.just(kind), damaged(npy_bytes(kind)))
    )
)
def test_npy(spoilt: tuple[str, bytes]) -> None:
    npy(spoilt[1], kind=spoilt[0])


@quick
@given(damaged(CRITEO_LINE * 3), st.booleans())
def test_criteo_text(content: bytes, is_packed: bool) -> None:
    criteo(content, is_packed=is_packed)


@quick
@given(damaged("red\ngrün\n7\n".encode()) | st.text("ab\n\r ", max_size=9).map(str.encode))
def test_vocabulary(content: bytes) -> None:
    vocabulary(content)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_takes_its_seeds(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].call(seed)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    """The fuzzed files are readable before they are spoilt; otherwise nothing above would show anything."""
    path = tmp_path / "rows.csv"
    path.write_bytes(CSV_HEADER + CSV_ROWS)
    assert read_or_refuse(declared_csv(path, 0), path) == (30, 0)
    path.write_bytes(CSV_HEADER + CSV_ROWS + b"x,1,,,\n")
    assert read_or_refuse(declared_csv(path, 1), path) == (30, 1)
