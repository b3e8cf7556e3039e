"""CSV as a source: against Python's csv module, in blocks, plain and gzip; and rows that are malformed."""

from __future__ import annotations

import csv
import gzip
import io
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.workers.data.bad_rows import BadRow, BadRowLog
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import DataConfigError, IdColumn
from podembed.workers.data.config import CsvData
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats import csv as csv_files
from podembed.workers.formats import csv_records
from podembed.workers.formats.csv_records import RecordScanner, record_ends
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan
from tests.batches import joined
from tests.long_tests import examples

SIZES = {"user": 100, "tags": 1000, "places": 50}


def declared(path: Path, **options: object) -> CsvData:
    settings = {"rows_per_block": 3} | options
    return CsvData(
        str(path),
        label="click",
        dense=("price",),
        features={
            "user": IdColumn("user"),
            "tags": IdColumn("tags", "hash", missing="empty"),
            "places": IdColumn("places"),
        },
        strings=("tags",),
        list_separators={"tags": "|", "places": " "},
        **settings,  # type: ignore[arg-type]
    ).resolved(SIZES)


def read_all(data: CsvData, *, lanes: int = 1, log: BadRowLog | None = None) -> Batch:
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=lanes, batch_size=4 * lanes)
    reader = InputReader(data, index, plan, range(lanes), bad_rows=log)
    batches = [reader.read(step) for step in range(plan.steps_per_epoch)]
    reader.close()
    whole = joined(batches)
    order = np.argsort(np.where(whole.is_padding, 2**62, whole.sample_ids), kind="stable")
    rows = [whole.slice(at, at + 1) for at in order]
    return joined(rows)


def write(path: Path, rows: list[str], *, header: str = "user,click,note,price,tags,places", end: str = "\n") -> Path:
    text = "".join(f"{line}{end}" for line in [header, *rows])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


ROWS = ['1,1,"a, ""b""\n c",0.5,x|y,1 2 3', "2,0,,,x,", "3,1,é,-2e3,,7", "99,0,n,1,y|x|y,4 4", "5,1,n,1,z,"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_fields_become_columns(tmp_path: Path, name: str, end: str) -> None:
    data = declared(write(tmp_path / name, ROWS, end=end))
    assert build_index(data).row_group_rows == (3, 2)
    batch = read_all(data)
    assert batch.sample_ids.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert batch.labels[:5].tolist() == [1, 0, 1, 0, 1]
    assert batch.dense[:5, 0].tolist() == [0.5, 0, -2000, 1, 1]
    assert batch.features["user"].to_lists()[:5] == [[1], [2], [3], [99], [5]]
    assert batch.features["places"].to_lists()[:5] == [[1, 2, 3], [], [7], [4, 4], []]
    x, y = batch.features["tags"].to_lists()[0]
    assert x != y
    assert batch.features["tags"].to_lists()[1:4] == [[x], [], [y, x, y]]


fields = st.text(st.sampled_from('ab,"\n\r; é'), max_size=6)


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.tuples(fields, fields), min_size=1, max_size=12), st.integers(1, 7), st.sampled_from(["\n", "\r\n"]))
def test_records_end_where_the_csv_module_ends_them(rows: list[tuple[str, str]], cut: int, end: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    ends = []
    for row in rows:
        writer.writerow(row)
        ends.append(len(text.getvalue().encode()))
    content = text.getvalue().encode()
    assert record_ends(content, "f", delimiter=",").tolist() == ends
    scanner = RecordScanner("f", delimiter=",")
    pieces = [scanner.feed(content[at : at + cut]) for at in range(0, len(content), cut)]
    assert np.concatenate([*pieces, scanner.finish()]).tolist() == ends


def test_blocks_end_by_bytes_too(tmp_path: Path) -> None:
    data = declared(write(tmp_path / "rows.csv", ROWS * 4), rows_per_block=100)
    with patch.object(csv_files, "BLOCK_BYTES", 30):
        index = build_index(data)
        assert index.num_rows == 20
        assert max(index.row_group_rows) < 4
        batch = read_all(data)
    assert batch.features["user"].to_lists() == [[1], [2], [3], [99], [5]] * 4


# Titles that begin or end with a quote, as in the dumps of film and book databases.
UNQUOTED = ['1,1,"Them",1,,', '2,0,"Up,1,x,1', "3,1,Ran,1,,", '4,0,M",1,y,', "5,1,Z,1,,"]


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_without_quoting_keep_all_their_lines(tmp_path: Path, name: str, end: str, caplog) -> None:
    path = write(
        tmp_path / name,
        [row.replace(",", "\t") for row in UNQUOTED],
        header="user\tclick\tnote\tprice\ttags\tplaces",
        end=end,
    )
    data = declared(path, delimiter="\t", quoting=False)
    assert build_index(data).row_group_rows == (3, 2)
    batch = read_all(data)
    assert batch.features["user"].to_lists()[:5] == [[1], [2], [3], [4], [5]]
    assert batch.features["places"].to_lists()[:5] == [[], [1], [], [], []]
    assert not caplog.records
    # With quoting the second title takes the lines up to the next quote at an end of a field. That is said.
    assert build_index(declared(path, delimiter="\t")).num_rows == 3
    assert re.search(
        r"line ends within quotes in 1 of 4 rows of .*rows.tsv.*, first in row 3 .*quoting=False", caplog.text
    )


def test_line_ends_in_most_rows_are_no_surprise(tmp_path: Path, caplog) -> None:
    rows = [f'{user},1,"a\nb",1,,' for user in range(6)]
    for piece_bytes in (7, 1 << 20):
        scanner = RecordScanner("f", delimiter=",")
        text = write(tmp_path / "rows.csv", rows).read_bytes()[:-1]
        for at in range(0, len(text), piece_bytes):
            scanner.feed(text[at : at + piece_bytes])
        scanner.finish()
        assert (scanner.num_records, scanner.num_with_line_ends, scanner.first_with_line_ends) == (7, 6, 1)
    build_index(declared(tmp_path / "rows.csv"))
    assert not caplog.records


def test_sample_ids_beyond_64_bits_are_not_told_to_become_text(tmp_path: Path) -> None:
    data = declared(write(tmp_path / "rows.csv", [f"{2**63},1,n,1,,"]), sample_id="user")
    data = replace(data, features={name: source for name, source in data.features.items() if name != "user"})
    with pytest.raises(InputError, match=r"integers of 64 bits\. Repair it\.") as caught:
        read_all(data)
    assert "strings=" not in str(caught.value)


def test_where_keys_come_and_go_any_integer_is_one_and_text_is_told_to_be_declared(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [f"{2**64 - 1},1,n,1,,", f"{-(2**63)},1,n,1,,"])
    plain = declared(path)
    data = plain.resolved(SIZES, {"user": "any"})
    assert read_all(data).features["user"].values.tolist() == [-1, -(2**63)]
    write(tmp_path / "rows.csv", ["x,1,n,1,,"])
    with pytest.raises(InputError, match=r"or say that the column is text: CsvData\(strings=\('user',\)\)") as caught:
        read_all(data)
    assert "mode='hash'" not in str(caught.value)
    with pytest.raises(InputError, match="ids that are text need mode='hash'"):
        read_all(plain)


BAD = [
    ("x,1,n,1,,", "user", "'x'", "integers of 64 bits"),
    ("1,yes,n,1,,", "click", "'yes'", "numbers"),
    ("1,1,n,1,,2 two", "places", "'2 two'", "a list of integers of 64 bits"),
    ("1,1,n,1,", "row", "'1,1,n,1,'", "6 fields"),
    ("1,1,n,1,,,", "row", "'1,1,n,1,,,'", "6 fields"),
    ('1,1,"n"x,1,,', "row", "'1,1,\"n\"x,1,,'", "nothing behind a closing quote"),
    ('1,1,"n" ,1,,', "row", "'1,1,\"n\" ,1,,'", "nothing behind a closing quote"),
    ("100,1,n,1,,", "user", "id 100", "Ids are 0 to 99"),
    ("1,,n,1,,", "click", "null", "never null"),
    ("1,1,n,nan,,", "price", "nan", "finite"),
    ("1,inf,n,1,,", "click", "inf", "finite"),
    ("1,1,n,1,,50", "places", "id 50", "Ids are 0 to 49"),
]


@pytest.mark.parametrize(("line", "column", "found", "reason"), BAD)
def test_a_malformed_row_is_named_or_left_out(tmp_path: Path, line: str, column: str, found: str, reason: str) -> None:
    path = write(tmp_path / "rows.csv", [*ROWS[:4], line, *ROWS[4:]])
    with pytest.raises(InputError) as caught:
        read_all(declared(path))
    message = str(caught.value)
    assert f"Found {found} in {path}, row group 1, row 4, column '{column}'" in message
    assert reason in message
    log = BadRowLog(1)
    batch = read_all(declared(path, max_bad_rows=1), log=log)
    assert batch.sample_ids.tolist() == [0, 1, 2, 3, 5, -1, -1, -1]
    (bad,) = log.take()
    assert (bad.file, bad.row, bad.column, bad.found) == (str(path), 4, column, found)
    assert reason in bad.reason
    assert log.take() == ()


def test_a_quote_too_many_swallows_no_row_in_silence(tmp_path: Path) -> None:
    # Up to the next quote all is one value, in which the rows of users 7 and 8 are; the number of fields comes out
    # right.
    path = write(tmp_path / "rows.csv", [ROWS[0], '6,1,"n,1,,', "7,1,n,1,,", '8,1,"n",1,,', ROWS[4]])
    log = BadRowLog(1)
    assert read_all(declared(path, max_bad_rows=1), log=log).features["user"].to_lists()[:2] == [[1], [5]]
    (bad,) = log.take()
    assert (bad.row, bad.column) == (1, "row")
    assert "7,1,n,1" in bad.found


def test_text_that_is_not_utf_8_is_malformed_only_where_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xe9") + b"7,1,n,1,\xff\xfe,\n")
    log = BadRowLog(1)
    assert read_all(declared(path, max_bad_rows=1), log=log).sample_ids.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert [(bad.row, bad.column) for bad in log.take()] == [(5, "tags")]


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_the_same_rows_are_left_out_for_any_lanes_and_each_is_told_once(tmp_path: Path, lanes: int) -> None:
    lines = [line for bad, *_ in BAD for line in (ROWS[0], bad)]
    data = declared(write(tmp_path / "rows.csv", lines), max_bad_rows=len(BAD))
    log = BadRowLog(data.max_bad_rows)
    ids = read_all(data, lanes=lanes, log=log).sample_ids
    assert ids[ids >= 0].tolist() == list(range(0, 2 * len(BAD), 2))
    assert sorted(bad.row for bad in log.take()) == list(range(1, 2 * len(BAD), 2))


def test_one_row_more_than_tolerated_ends_it(tmp_path: Path) -> None:
    lines = [line for bad, *_ in BAD for line in (ROWS[0], bad)]
    data = declared(write(tmp_path / "rows.csv", lines), max_bad_rows=len(BAD) - 1)
    with pytest.raises(InputError, match=r"more than 11 malformed rows: .*raise max_bad_rows"):
        read_all(data)
    # In one block, before all of it has been looked at.
    with pytest.raises(InputError, match=r"more than 2 malformed rows"):
        read_all(declared(tmp_path / "rows.csv", max_bad_rows=2, rows_per_block=100))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no line"),
        (b"\n\r\n\n", "no line"),
        (b"user,click\n1,1\n", r"no column named 'price' .*\['user', 'click'\]"),
        (b"user,click,user,price,tags,places\n", "2 columns named 'user'"),
        (b"user,click,price,tags,places\n", "no rows"),
        (b'user,click,price,tags,places\n1,1,1,1,"x\n', "within the quotes of line 2"),
        (b"us\xffer,click,price,tags,places\n1,1,1,1,1\n", "no column named 'user'|header does not parse"),
        (gzip.compress(b"user,click,price,tags,places\n" * 999)[:-9], "damaged gzip stream"),
        (b"\x1f\x8b and no gzip", "damaged gzip stream"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        build_index(declared(path))
    assert str(path) in str(caught.value)


def test_a_row_without_end_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [*ROWS, '1,1,"never closed', *ROWS[1:3] * 20])
    with (
        patch.object(csv_records, "LONGEST_ROW_BYTES", 200),
        pytest.raises(InputError, match=r"line 7 of .*rows.csv .* longer than 200 bytes"),
    ):
        build_index(declared(path))


def test_a_header_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_all(declared(path)).features["user"].to_lists()[:2] == [[1], [2]]


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    data = declared(path)
    index = build_index(data)
    path.write_bytes(path.read_bytes()[:-8])
    reader = InputReader(data, index, evaluation_plan(index, num_lanes=1, batch_size=5), [0])
    with pytest.raises(InputError, match=r"Found .*rows.csv with .* as when the run began"):
        reader.read(0)


def test_other_delimiters(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.tsv", ["1\t1\t0.5\t\t"], header="user\tclick\tprice\ttags\tplaces")
    assert read_all(declared(path, delimiter="\t")).dense[0, 0] == 0.5
    for delimiter in ("", ",,", '"', "\n", "é"):
        with pytest.raises(DataConfigError, match="Expected one ASCII character"):
            declared(path, delimiter=delimiter)


def test_names_of_columns_are_not_taken_apart(tmp_path: Path) -> None:
    with pytest.raises(DataConfigError, match=r"Found strings='tags'\. .*strings=\('tags',\)"):
        CsvData("a.csv", label="y", strings="tags")  # type: ignore[arg-type]
    with pytest.raises(DataConfigError, match=r"list_separators \{'tags': ''\}"):
        CsvData("a.csv", label="y", list_separators={"tags": ""})


def test_bad_rows_read_well() -> None:
    row = BadRow(file="a.csv", row=3, column="user", found="'x'", reason="Expected integers. Repair it.")
    assert str(row) == "'x' in a.csv, row 3, column 'user'. Expected integers. Repair it."
