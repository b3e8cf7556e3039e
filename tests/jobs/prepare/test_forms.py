"""What is read from a line, and what is said of one that is malformed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podembed.jobs.prepare.forms import CriteoForm, CsvForm, open_form
from podembed.jobs.prepare.settings import PrepareError, PrepareSettings, field_plans
from podembed.jobs.text.criteo_lines import FIELD_NAMES, has_labels, read_line
from podembed.workers.data.columns import DenseColumn
from tests.click_logs import click_lines

FORM = CsvForm(("click", "price", "city", "extra"), "click", ("price",), ("city",))


def test_criteo_columns_are_those_of_the_reader_of_lines() -> None:
    lines = [*click_lines(50), b"broken", *click_lines(3, seed=2)]
    parsed = CriteoForm().parse(b"\n".join(lines) + b"\n", max_faults=9)
    expected = [read_line(line) for line in lines if line != b"broken"]
    columns = {"label": parsed.label, **parsed.dense, **parsed.values}
    found = [list(row) for row in zip(*(columns[name].to_pylist() for name in FIELD_NAMES), strict=True)]
    assert found == expected
    assert parsed.num_lines == 54
    assert [(at, fault.field, line) for at, fault, line in parsed.faults] == [(50, "line", b"broken")]


def test_malformed_lines_do_not_tell_whether_there_are_labels() -> None:
    whole, bare = click_lines(2)[0], click_lines(2)[1].split(b"\t", 1)[1]
    assert has_labels(b"\n".join([*[b"broken"] * 9, whole]))
    assert not has_labels(b"\n".join([*[b"broken"] * 9, bare]))
    assert has_labels(b"\n".join([bare + b"\t", whole, bare]))


def test_csv_is_read_with_quotes_and_missing_values() -> None:
    text = '1,2.5,"Washington, ""D.C.""",x\n0,,,y\r\n-3e2,7,Zürich,\n'
    parsed = FORM.parse(text.encode(), max_faults=0)
    assert parsed.faults == []
    assert parsed.label.to_pylist() == [1.0, 0.0, -300.0]
    assert parsed.dense["price"].to_pylist() == [2.5, None, 7.0]
    assert parsed.values["city"].to_pylist() == ['Washington, "D.C."', None, "Zürich"]


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (b"1,2,a", "line", "4 values"),
        (b"1,2,a,b,c", "line", "4 values"),
        (b"", "line", "4 values"),
        (b",2,a,b", "click", "a label is a number"),
        (b"yes,2,a,b", "click", "a label is a number"),
        (b"nan,2,a,b", "click", "a label is a number"),
        (b"1,inf,a,b", "price", "finite number"),
        (b"1,1e999,a,b", "price", "finite number"),
        (b"1,-1e39,a,b", "price", "finite number or empty, at most 3.4e+38"),
        (b"1e39,1,a,b", "click", "a label is a number, at most 3.4e+38"),
        (b"1,1_000,a,b", "price", "finite number"),
        (b'1,2,"a', "line", "quotes are closed"),
        (b'1,2,x","b', "line", "a line"),
        (b"1,2,\xff,b", "city", "UTF-8"),
    ],
)
def test_a_malformed_line_is_named_and_its_neighbours_are_kept(line: bytes, field: str, words: str) -> None:
    parsed = FORM.parse(b"1,2,a,b\n" + line + b"\n0,3,c,d\n", max_faults=1)
    ((at, fault, text),) = parsed.faults
    assert (at, fault.field, text) == (1, field, line)
    assert words in fault.reason
    assert parsed.values["city"].to_pylist() == ["a", "c"]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"])), min_size=1))
def test_any_text_that_csv_can_write_is_read_back(cities: list[str]) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[1, "", city, "x"] for city in cities])
    parsed = FORM.parse(out.getvalue().encode(), max_faults=0)
    assert parsed.faults == []
    assert parsed.values["city"].to_pylist() == [city or None for city in cities]


def csv_settings(label: str = "y", fields: tuple[str, ...] = ("a",)) -> PrepareSettings:
    plans = field_plans(fields, ids="hash", max_rows=None, min_count=1)
    return PrepareSettings(form="csv", label=label, dense=(DenseColumn("x"),), fields=plans)


def test_headers_are_read_and_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfy,"x",a\r\n1,2,3\r\n')
    (tmp_path / "b.csv").write_text("y,x,a\n0,1,2\n")
    (tmp_path / "c.csv").write_text("y,a,x\n0,1,2\n")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]
    form = open_form(csv_settings(), files[:2])
    assert isinstance(form, CsvForm)
    assert form.header == ("y", "x", "a")
    assert form.value_type == pa.string()
    with pytest.raises(PrepareError, match=r"Found header y,a,x in .*c\.csv and y,x,a in .*a\.csv"):
        open_form(csv_settings(), files)
    with pytest.raises(PrepareError, match="Found columns y, x, a. Expected each of z once among them"):
        open_form(csv_settings(label="z"), files[:1])


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n1\n", b'"open\n'])
def test_a_file_without_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(PrepareError, match=r"Found no(thing| header) in .*a\.csv"):
        open_form(csv_settings(), [str(path)])
