"""Columns of which no value is in their vocabulary: how they are found, and what the likely cause is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.orchestrator.driver.journal import UnknownColumns
from podembed.serving.predict.batches import log_of
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.unknown_values import LEAST_VALUES, UnknownColumn, likely_cause
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan


@pytest.mark.parametrize(
    ("values", "lines", "cause"),
    [
        (["red", "blue"], ["red\t12", "blue\t7"], "end with a number, such as a count"),
        (["red", "blue"], ["red 12", "blue 7"], "end with a number, such as a count"),
        (["a 1", "b 2"], ["red 12", "blue 7"], "another column"),
        (["red", "blue"], ['"red"', '"blue"'], "Its lines are in quotes"),
        (["'red'", "'blue'"], ["red", "blue"], "data's values are in quotes"),
        (["red ", "blue"], ["red", " blue"], "differ in spaces"),
        (["Red", "Grün"], ["red", "GRÜN"], "differ in upper and lower case"),
        (["7", "8"], ["1007", "1008"], "another column or of other data"),
    ],
)
def test_the_likely_cause(values: list[str], lines: list[str], cause: str) -> None:
    assert cause in likely_cause(values, lines)


def test_a_column_is_told_when_all_hosts_have_found_no_known_value_of_it() -> None:
    one = UnknownColumn(column="c", file="a", vocabulary="w", num_values=40, value="red", line="blue", cause="")
    other = replace(one, column="d")
    columns = UnknownColumns()
    assert not columns.take([[one], []]), "host 1 may have found one"
    assert columns.take([[other], [one, other]]) == [one, other]
    assert not columns.take([[one], [one]])
    columns = UnknownColumns()
    assert not columns.take([[one], []])
    columns.begin()
    assert not columns.take([[], [one]]), "another generation's hosts read other rows"
    assert columns.take([[one], []]) == [one]


def test_commands_on_a_commit_warn(caplog: pytest.LogCaptureFixture) -> None:
    one = UnknownColumn(column="c", file="a", vocabulary="w", num_values=40, value="red", line="blue", cause="Why.")
    log_of(ParquetData("a", label="y")).tell([one])
    assert "None of the first 40 values of column 'c' is in its vocabulary w" in caplog.text


def told(folder: Path, column: pa.Array, vocabulary: str, *, steps: int = 1) -> list[UnknownColumn]:
    (folder / "words.txt").write_text(vocabulary)
    pq.write_table(pa.table({"y": [0] * len(column), "c": column}), folder / "a.parquet", row_group_size=30)
    ids = {name: IdColumn("c", vocabulary=str(folder / "words.txt")) for name in "fg"}
    data = ParquetData(str(folder / "a.parquet"), label="y", features=ids).resolved(dict.fromkeys("fg", 100))
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=10, seed=1)
    found: list[UnknownColumn] = []
    reader = InputReader(data, index, plan, [0], bad_rows=BadRowLog(0, tell=found.append))
    for step in range(steps):
        reader.read(step)
    reader.close()
    return found


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["red", "blue", None] * 10),
        pa.array([["red", "blue"], None, []] * 10),
        pa.array([7, 8] * 15),
        pa.array([[7, 8], [7]] * 15),
        pa.array([7, None] * 20),
    ],
)
def test_a_column_without_a_known_value_is_told_once(tmp_path: Path, column: pa.Array) -> None:
    lines = "1007\n1008\n" if "int" in str(column.type) else "red 12\nblue 7\n"
    found = told(tmp_path, column, lines, steps=9)
    # Two features have it, each its own table.
    assert len(found) == 2
    assert (found[0].column, found[0].line) == ("c", lines.split("\n")[0])
    assert found[0].value in ("red", "blue", "7", "8")
    assert f"None of the first {found[0].num_values} values of column 'c' is in its vocabulary" in str(found[0])


def test_few_values_or_a_known_one_are_not_told(tmp_path: Path) -> None:
    few = pa.array(["red"] * (LEAST_VALUES - 1) + [None] * 9)
    assert not told(tmp_path, few, "blue\n")
    assert len(told(tmp_path, few, "blue\n", steps=12)) == 2, "by then they were read twice"
    assert not told(tmp_path, pa.array(["red"] * 29 + ["blue"]), "blue\n", steps=9)
