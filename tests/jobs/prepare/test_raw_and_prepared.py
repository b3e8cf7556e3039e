"""Text read as it is and the set prepared from it: the same samples, whichever a run reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.prepare.preparation import PreparedFolder, prepare
from podembed.jobs.prepare.settings import IdKind, PrepareSettings, field_plans
from podembed.jobs.text.criteo import convert_criteo
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import CsvData, InputData, ParquetData
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan
from tests.click_logs import click_lines
from tests.jobs.prepare.preparing import criteo_settings

FIELDS = ("city", "shop")
ROWS = [
    '1,2.5,"Köln, ""Dom""",7',
    "0,,,8",
    "1,-3e2,'x',007",
    '0,1,"",',
    "1,4,Köln,7",
    "0,7, Köln,7",
    '1,0,"Köln",8',
]


def read_all(data: InputData, sizes: dict[str, int]) -> Batch:
    data = data.resolved(sizes)
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=1, batch_size=index.num_rows)
    return InputReader(data, index, plan, [0]).read(0)


def source_of(done: PreparedFolder, name: str) -> IdColumn:
    """What a run declares to get the prepared rows from the raw values."""
    field = next(field for field in done.declaration.fields if field.name == name)
    if field.vocabulary is None:
        return IdColumn(name, mode="hash", salt=field.salt)
    return IdColumn(name, vocabulary=str(done.folder / field.vocabulary), missing="zero")


def check_equal(raw: Batch, done: PreparedFolder) -> None:
    sizes = {field.name: field.rows for field in done.declaration.fields}
    finished = ParquetData(
        str(done.folder / "*.parquet"),
        label=done.declaration.label,
        dense=done.declaration.dense,
        features={name: IdColumn(name) for name in sizes},
    )
    prepared = read_all(finished, sizes)
    assert np.array_equal(raw.labels, prepared.labels)
    assert np.array_equal(raw.dense, prepared.dense)
    for name in sizes:
        assert raw.features[name].to_lists() == prepared.features[name].to_lists()


@pytest.mark.parametrize("ids", ["hash", "vocabulary"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, ids: IdKind, end: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(end.join(["y,price,city,shop", *ROWS, ""]).encode())
    settings = PrepareSettings(
        form="csv",
        label="y",
        dense=(DenseColumn("price", "log1p"),),
        fields=field_plans(FIELDS, ids=ids, max_rows=None if ids == "vocabulary" else 50, min_count=2),
    )
    done = prepare([str(path)], tmp_path / "out", settings, workers=1, max_bad_lines=0)
    declared = CsvData(
        str(path),
        label="y",
        dense=settings.dense,
        features={name: source_of(done, name) for name in FIELDS},
        strings=FIELDS,
    )
    check_equal(read_all(declared, {field.name: field.rows for field in done.declaration.fields}), done)


@pytest.mark.parametrize("ids", ["hash", "vocabulary"])
def test_click_logs(tmp_path: Path, ids: IdKind) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_bytes(b"\n".join([*click_lines(60), b"bad", *click_lines(40, seed=2)]) + b"\n")
    settings = replace(criteo_settings(ids=ids, max_rows=80), piece_bytes=4_000)
    done = prepare([str(path)], tmp_path / "out", settings, workers=1, max_bad_lines=1)
    converted = convert_criteo([str(path)], tmp_path / "cache", max_bad_lines=1)
    names = [field.name for field in done.declaration.fields]
    declared = ParquetData(
        converted.paths,
        label="label",
        dense=done.declaration.dense,
        features={name: source_of(done, name) for name in names},
    )
    check_equal(read_all(declared, {field.name: field.rows for field in done.declaration.fields}), done)
