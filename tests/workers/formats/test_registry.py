"""A kind of data is one file and one line of the table: what a user declares, and how it is read."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import podembed
import podembed.workers.formats
from podembed.workers.columns.decode import Decoder, RawRows, check_schema
from podembed.workers.data.bad_rows import Origin
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, IdColumn
from podembed.workers.data.config import InputData, ParquetData
from podembed.workers.data.files import read_whole
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.input_files import FileLayout, InputFile, RowGroup
from podembed.workers.formats import registry
from podembed.workers.formats.registry import SOURCES, version_of
from podembed.workers.formats.source import Source
from podembed.workers.input.index import build_index, check_unchanged
from podembed.workers.input.reader import InputReader, training_plan
from tests.batches import joined
from tests.workers.formats.parquet_sets import assert_same

# What follows, down to the line `SOURCE`, is all that a file of a new kind has.


@dataclass(frozen=True, slots=True)
class JsonLinesData(InputData):
    """A JSON object a line, a file as one block."""


def _table(path: str) -> pa.Table:
    try:
        lines = read_whole(path).splitlines()
        return pa.Table.from_pylist([json.loads(line) for line in lines])
    except ValueError as error:
        raise InputError(
            f"Found {path}, which is no JSON a line ({error}). Expected objects. Write it again."
        ) from None


def _layout(path: str, data: InputData) -> FileLayout:
    table = _table(path)
    check_schema(table.schema, data, path=path)
    return FileLayout(row_group_rows=(table.num_rows,))


class _Opened:
    def __init__(self, file: InputFile, data: InputData) -> None:
        self._table = _table(file.path).select(list(data.columns))

    def read(self, group: RowGroup, decoder: Decoder) -> RawRows:
        origin = Origin(path=group.file.path, group=group.group_in_file, first_row=group.first_row)
        return RawRows(columns=self._table, faults=decoder.faults_of(origin, group.num_rows))

    def close(self) -> None: ...


SOURCE = Source(declared=JsonLinesData, layout=_layout, open=_Opened)


@pytest.fixture
def new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the table."""
    monkeypatch.setattr(registry, "SOURCES", (*SOURCES, SOURCE))


def rows(part: int) -> list[dict[str, Any]]:
    return [
        {"click": n % 2, "price": n / 4, "user": n * 3, "likes": [n + k for k in range(n % 3)]}
        for n in range(20 * part, 20 * part + 20)
    ]


def declared(kind: type[InputData], paths: str) -> Any:
    features = {"user": IdColumn("user"), "likes": IdColumn("likes", mode="hash")}
    data = kind(paths, label="click", dense=("price",), features=features)
    return data.resolved({"user": 1000, "likes": 64})


def read_all(data: InputData) -> Batch:
    index = build_index(data)
    plan = training_plan(index, num_lanes=2, batch_size=8, seed=4)
    reader = InputReader(data, index, plan, range(2))
    batches = [reader.read(step) for step in range(plan.steps_per_epoch)]
    reader.close()
    return joined(batches)


def test_a_new_kind_of_data_needs_nothing_outside_its_file_and_its_line(new_kind: None, tmp_path: Path) -> None:
    for part in range(3):
        lines = "".join(json.dumps(row) + "\n" for row in rows(part))
        (tmp_path / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        pq.write_table(pa.Table.from_pylist(rows(part)), tmp_path / f"{part}.parquet")
    data = declared(JsonLinesData, f"{tmp_path}/*.jsonl")
    found, expected = read_all(data), read_all(declared(ParquetData, f"{tmp_path}/*.parquet"))
    assert_same(found, expected)
    assert sorted(found.sample_ids[~found.is_padding].tolist()) == list(range(60))
    np.testing.assert_array_equal(found.labels[~found.is_padding], found.sample_ids[~found.is_padding] % 2)
    assert registry.is_readable(data)

    # A file that changes is noticed, and a damaged one named, without a word about this kind elsewhere.
    index = build_index(data)
    (tmp_path / "1.jsonl").write_text("{]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"1\.jsonl"):
        check_unchanged(index.files[1], data)
    with pytest.raises(InputError, match=r"1\.jsonl, which is no JSON a line"):
        build_index(data)


def test_data_of_no_kind_is_refused(tmp_path: Path) -> None:
    data = declared(JsonLinesData, f"{tmp_path}/*.jsonl")
    assert not registry.is_readable(data)
    with pytest.raises(DataConfigError, match="JsonLinesData, which nothing reads. Expected ParquetData, CsvData or"):
        version_of("x.jsonl", data)


def test_the_table_has_every_kind_and_users_can_import_it() -> None:
    ours = {kind.__name__ for kind in InputData.__subclasses__() if kind.__module__.startswith("podembed.")}
    assert {source.declared.__name__ for source in SOURCES} == ours >= {"ParquetData", "CsvData", "NpyData"}
    assert all(getattr(podembed, source.declared.__name__) is source.declared for source in SOURCES)


def test_no_other_module_tells_the_kinds_apart() -> None:
    """By their classes: a question of that sort elsewhere would be another place to change for a new kind."""
    root = Path(podembed.workers.formats.__file__).parents[2]
    names = {source.declared.__name__ for source in SOURCES}
    asking = []
    for path in [path for floor in ("workers", "orchestrator", "embedding") for path in (root / floor).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "type", "issubclass")
            if is_asked and names & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}:
                asking.append(str(path.relative_to(root)))
    assert asking == []
