"""Strings and ids of 64 bits in every source, local and remote: one value has one row everywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.workers.columns.id_columns import hashed_rows
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData, InputData, NpyData, ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan

SIZE = 10_000
INTEGERS = [0, -1, 7, 2**40, 2**63 - 1, -(2**63)]
LARGE = [*INTEGERS[:1], 2**63, 2**64 - 1, 2**63 + 5, 3, 4]
WORDS = ["a", "", "é", "12", "a longer string", "a"]
HASHED = {name: IdColumn(name, "hash") for name in ("signed", "large", "word")}


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path)
    else:
        yield "memory://raw-ids"
        fsspec.filesystem("memory").rm("/raw-ids", recursive=True)


def written(path: str, content: bytes) -> str:
    with fsspec.open(path, "wb") as file:
        file.write(content)  # type: ignore[union-attr]
    return path


def table() -> pa.Table:
    return pa.table(
        {
            "y": [0, 1] * 3,
            "signed": pa.array(INTEGERS, pa.int64()),
            "large": pa.array(LARGE, pa.uint64()),
            "word": WORDS,
            "maybe": pa.array([None, 1, None, 2, 3, 4]),
        }
    )


def parquet(folder: str, **options: Any) -> ParquetData:
    buffer = io.BytesIO()
    pq.write_table(table(), buffer)
    return ParquetData(written(f"{folder}/part.parquet", buffer.getvalue()), label="y", **options)


def csv(folder: str, **options: Any) -> CsvData:
    rows = ["y,signed,large,word,maybe"]
    for row in table().to_pylist():
        rows.append(",".join("" if value is None else str(value) for value in row.values()))
    path = written(f"{folder}/part.csv", "\n".join(rows).encode())
    return CsvData(path, label="y", strings=("word",), **options)


def read(data: InputData, sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    data = data.resolved(sizes)
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=1, batch_size=index.num_rows)
    reader = InputReader(data, index, plan, [0])
    found = {name: bags.to_lists() for name, bags in reader.read(0).features.items()}
    reader.close()
    return found


def expected(values: list[Any], kind: pa.DataType) -> list[list[int]]:
    rows = hashed_rows(pa.array(values, kind), vocabulary_size=SIZE, salt=0).tolist()
    return [[0 if value == "" else row] for value, row in zip(values, rows, strict=True)]


@pytest.mark.parametrize("source", [parquet, csv])
def test_hashed_values_have_one_row_in_every_source(folder: str, source: Any) -> None:
    found = read(
        source(folder, features={**HASHED, "maybe": IdColumn("maybe", "hash")}), dict.fromkeys([*HASHED, "maybe"], SIZE)
    )
    assert found["signed"] == expected(INTEGERS, pa.int64())
    assert found["large"] == expected(LARGE, pa.uint64())
    assert found["word"] == expected(WORDS, pa.string())
    assert [bag == [0] for bag in found["maybe"]] == [True, False, True, False, False, False]


def test_npy_files_have_the_rows_of_their_integers(folder: str) -> None:
    names = {
        "labels": np.array([0, 1] * 3),
        "dense": np.zeros((6, 1), np.float32),
        "sparse": np.array([LARGE], np.uint64),
    }
    for name, values in names.items():
        buffer = io.BytesIO()
        np.save(buffer, values.T if name == "sparse" else values)
        written(f"{folder}/day_0_{name}.npy", buffer.getvalue())
    data = NpyData(f"{folder}/day_*_labels.npy", features={"large": IdColumn("cat_0", "hash")})
    assert read(data, {"large": SIZE})["large"] == expected(LARGE, pa.uint64())


def test_lists_in_csv_hold_large_ids(tmp_path: Path) -> None:
    path = written(f"{tmp_path}/part.csv", b"y,ids\n0,18446744073709551615|-1\n1,\n0,9223372036854775808\n")
    data = CsvData(path, label="y", features={"ids": IdColumn("ids", "hash")}, list_separators={"ids": "|"})
    found = read(data, {"ids": SIZE})["ids"]
    (largest,), (above,) = expected([2**64 - 1], pa.uint64()), expected([2**63], pa.uint64())
    # A negative integer is its two's complement.
    assert found == [[*largest, *largest], [0], above]


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        (parquet, "signed", r"Found id -1 in .*column 'signed'. Ids are 0 to 9999.*IdColumn\(mode='hash'\) hashes"),
        (parquet, "large", r"Found id 9223372036854775808 in .*column 'large'. Ids are 0 to 9999.*mode='hash'"),
        (parquet, "word", r"Found column 'word' of type string.*Expected a column of integers.*mode='hash' or a voc"),
        (csv, "signed", r"Found id -1 in .*column 'signed'"),
        (csv, "large", r"Found '9223372036854775808' in .*column 'large'. Expected integers of 64 bits"),
        (csv, "word", r"Found column 'word' of type .*string.*strings need mode='hash' or a vocabulary"),
    ],
)
def test_what_is_no_row_is_refused_with_the_remedy(tmp_path: Path, source: Any, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(source(str(tmp_path), features={name: name}), {name: SIZE})


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        ("hash", "x", r"Found 'x' in .*column 'user'.*CsvData\(strings=\('user',\)\)"),
        ("hash", "18446744073709551616", "Expected integers of 64 bits"),
        ("hash", "-9223372036854775809", "Expected integers of 64 bits"),
        ("as_is", "x", r"text need mode='hash' and CsvData\(strings=\('user',\)\)"),
    ],
)
def test_text_where_integers_are_declared_names_the_remedy(tmp_path: Path, mode: Any, text: str, words: str) -> None:
    path = written(f"{tmp_path}/part.csv", f"y,user\n0,5\n1,{text}\n".encode())
    with pytest.raises(InputError, match=words):
        read(CsvData(path, label="y", features={"user": IdColumn("user", mode)}), {"user": SIZE})


@pytest.mark.parametrize("kind", [pa.float64(), pa.binary(), pa.bool_(), pa.decimal128(20, 0)])
def test_columns_of_other_types_name_what_was_found(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array([b"1", b"0"], pa.binary()) if kind == pa.binary() else pa.array([1, 0]).cast(kind)
    pq.write_table(pa.table({"y": [0, 1], "user": column}), tmp_path / "part.parquet")
    data = ParquetData(str(tmp_path / "part.parquet"), label="y", features={"user": IdColumn("user", "hash")})
    with pytest.raises(InputError, match=re.escape(f"Found column 'user' of type {kind}")):
        read(data, {"user": SIZE})
