"""Columns that go beside scores, of files in which several columns have one name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.predict.kept_columns import KeptColumns
from podembed.workers.data.config import ParquetData
from podembed.workers.input.index import build_index


@pytest.mark.parametrize("named", [["x y x", "x y z"], ["x y z", "x y x"]])
def test_a_name_of_several_columns_is_refused_and_others_are_kept(tmp_path: Path, named: list[str]) -> None:
    for number, names in enumerate(named):
        table = pa.table([[number], [2.0 * number], [3]], names=names.split())
        pq.write_table(table, tmp_path / f"part-{number}.parquet")
    data = ParquetData(str(tmp_path / "*.parquet"), dense=("y",), has_labels=False).resolved({})
    index = build_index(data)
    kept = KeptColumns(data, index, ["y"], taken=["score"])
    assert kept.take(2)[0].to_pylist() == [0.0, 2.0]
    with pytest.raises(ConfigurationError, match=f"Found 2 columns named 'x' in .*part-{named.index('x y x')}.parquet"):
        KeptColumns(data, index, ["x"], taken=["score"]).take(2)
