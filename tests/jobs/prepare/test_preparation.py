"""Whole preparations: what they write, and that neither the number of processes nor a kill shows in it."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.jobs.finished_folder import FolderError
from podembed.jobs.prepare.command import Prepare
from podembed.jobs.prepare.command import run as run_command
from podembed.jobs.prepare.preparation import PreparationProgress, PreparedFolder, prepare
from podembed.jobs.prepare.prepared_set import read_prepared
from podembed.jobs.prepare.settings import PrepareError, PrepareSettings, criteo_dense, field_plans
from podembed.jobs.text.blocks import TextError
from podembed.jobs.text.criteo import convert_criteo
from podembed.jobs.text.criteo_lines import CATEGORY_NAMES, INTEGER_NAMES, read_line
from podembed.workers.columns.id_columns import hashed_rows
from podembed.workers.data.columns import DenseColumn
from tests.click_logs import click_lines
from tests.jobs.prepare.prepare_process import run
from tests.jobs.prepare.preparing import contents, criteo_settings
from tests.long_tests import is_long
from tests.processes import wait_for

ROOT = Path(__file__).parents[3]


def write(path: Path, lines: list[bytes]) -> str:
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def prepared(sources: str | list[str], folder: Path, settings: PrepareSettings, **more: int) -> PreparedFolder:
    patterns = [sources] if isinstance(sources, str) else sources
    return prepare(patterns, folder, settings, **{"workers": 1, "max_bad_lines": 10, **more})


def rows_of(folder: Path) -> list[dict[str, float | None]]:
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_click_logs_with_vocabularies_and_a_hash(tmp_path: Path) -> None:
    """Against plain Python over plain and gzip files, with two malformed lines among them."""
    lines = click_lines(500)
    bad = [lines[120].replace(b"\t", b" ", 1), b"2" + lines[300][1:]]
    write(tmp_path / "day_0", [*lines[:120], bad[0], *lines[120:260]])
    write(tmp_path / "day_1.gz", [bad[1], *lines[260:]])
    done = prepared(str(tmp_path / "day_*"), tmp_path / "out", criteo_settings())
    expected = [
        dict(zip(("label", *INTEGER_NAMES, *CATEGORY_NAMES), read_line(line) or [], strict=True)) for line in lines
    ]
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 500
    fields = {field.name: field for field in done.declaration.fields}
    for name in ("label", *INTEGER_NAMES):
        assert [row[name] for row in rows] == [row[name] for row in expected]
    for name in CATEGORY_NAMES:
        values = [row[name] for row in expected]
        counts = Counter(value for value in values if value is not None)
        if name == "c3":
            hashed = hashed_rows(pa.array([v or 0 for v in values]), vocabulary_size=200_000, salt=3).tolist()
            ids = [0 if value is None else row for value, row in zip(values, hashed, strict=True)]
        else:
            kept = sorted((v for v in counts if counts[v] >= 3), key=lambda v: (-counts[v], v))
            lines = (tmp_path / "out" / "vocabulary" / f"{name}.txt").read_text().splitlines()
            assert lines == [str(value) for value in kept]
            assert fields[name].rows == len(kept) + 1
            known = {value: at + 1 for at, value in enumerate(kept)}
            ids = [known.get(value, 0) for value in values]
        assert [row[name] for row in rows] == ids
        report = next(field for field in done.report["fields"] if field["name"] == name)
        missing = values.count(None)
        assert (report["missing"], report["unseen"]) == (missing, ids.count(0) - missing)
        assert report["kept"] == 500 - ids.count(0)
        assert sum(hits for _, _, hits in report["distribution"]) == pytest.approx(report["kept"], abs=120)
        if name != "c3":
            assert (report["values_seen"], report["values_kept"]) == (len(counts), len(kept))
            assert sum(hits for _, _, hits in report["distribution"]) == report["kept"]
    assert (done.report["lines"], done.report["kept"], done.report["malformed"]) == (502, 500, 2)
    letters = [json.loads(line) for line in (tmp_path / "out" / "malformed.jsonl").read_text().splitlines()]
    assert [(Path(x["file"]).name, x["line"], x["field"]) for x in letters] == [
        ("day_0", 121, "line"),
        ("day_1.gz", 1, "label"),
    ]
    assert [letter["text"].encode() for letter in letters] == bad
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The lines are in malformed.jsonl." in page
    assert all(f">{name}<" in page for name in (*INTEGER_NAMES, *CATEGORY_NAMES))


def test_click_logs_as_windows_writes_them_and_without_labels(tmp_path: Path) -> None:
    """A byte order mark, CR LF, and Criteo's test file, whose lines have 39 fields."""
    lines = click_lines(60)
    settings = PrepareSettings(
        form="criteo",
        label="label",
        fields=field_plans(CATEGORY_NAMES, ids="hash", max_rows=100, min_count=1),
        dense=criteo_dense(),
    )
    prepared(write(tmp_path / "plain", lines), tmp_path / "out", settings, max_bad_lines=0)
    (tmp_path / "windows").write_bytes(codecs.BOM_UTF8 + b"\r\n".join(lines) + b"\r\n")
    prepared(str(tmp_path / "windows"), tmp_path / "same", settings, max_bad_lines=0)
    assert rows_of(tmp_path / "same") == rows_of(tmp_path / "out")
    assert convert_criteo([str(tmp_path / "windows")], tmp_path / "cache", max_bad_lines=0).kept == 60
    bare = [line[2:] for line in lines]
    bad = bare[7] + b"\t"
    done = prepared(write(tmp_path / "test", [*bare, bad]), tmp_path / "bare", settings, max_bad_lines=1)
    assert rows_of(tmp_path / "bare") == [row | {"label": None} for row in rows_of(tmp_path / "out")]
    assert done.report["label"]["missing"] == 60
    assert json.loads((tmp_path / "bare" / "malformed.jsonl").read_text())["text"].encode() == bad


def test_row_groups_have_one_size_but_for_the_last_of_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "day", click_lines(700))
    done = prepared(source, tmp_path / "out", criteo_settings(piece_bytes=60_000))
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    assert len(parts) == done.report["parts"] > 1
    for part in parts:
        metadata = pq.read_metadata(part)
        sizes = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        assert set(sizes[:-1]) <= {64}
        assert 0 < sizes[-1] <= 64


def test_csv_with_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('click,price,city\n1,2.5,"Bern, CH"\n0,,Bonn\nx,1,Bonn\n1,3,\n')
    (tmp_path / "b.csv").write_text("click,price,city\n0,4,Bonn\n1,5,Paris")
    settings = PrepareSettings(
        form="csv",
        label="click",
        dense=(DenseColumn("price"),),
        fields=field_plans(("city",), ids="vocabulary", max_rows=None, min_count=2),
    )
    done = prepared(str(tmp_path / "*.csv"), tmp_path / "out", settings)
    assert rows_of(tmp_path / "out") == [
        {"click": 1, "price": 2.5, "city": 0},
        {"click": 0, "price": None, "city": 1},
        {"click": 1, "price": 3, "city": 0},
        {"click": 0, "price": 4, "city": 1},
        {"click": 1, "price": 5, "city": 0},
    ]
    assert done.report["malformed_by_column"] == {"click": 1}
    assert "a.csv" in (tmp_path / "out" / "malformed.jsonl").read_text()
    assert json.loads((tmp_path / "out" / "malformed.jsonl").read_text())["line"] == 4


def test_other_text_takes_over_tables_and_vocabularies(tmp_path: Path) -> None:
    first = prepared(write(tmp_path / "train", click_lines(400)), tmp_path / "out", criteo_settings())
    other = PrepareSettings(
        form="criteo",
        label="label",
        dense=first.declaration.dense,
        fields=first.declaration.plans(),
        like_sha256=first.declaration.sha256,
    )
    source = write(tmp_path / "test", click_lines(200, seed=9, distinct=500))
    second = prepare([source], tmp_path / "eval", other, workers=1, max_bad_lines=0, like=tmp_path / "out")
    assert second.declaration == first.declaration == read_prepared(str(tmp_path / "eval" / "prepared.json"))
    assert sum(field["unseen"] for field in second.report["fields"]) > 0
    assert not any(field["nothing_known"] for field in second.report["fields"])


def test_a_field_without_a_known_value_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As upper case gives, and a least count that nothing reaches."""
    (tmp_path / "train.csv").write_text("y,city,town\n" + "1,bern,a\n0,bonn,a\n" * 20)
    (tmp_path / "eval.csv").write_text("y,city,town\n" + "1,Bern,a\n0,Bonn,b\n" * 20)
    flags = {"form": "csv", "label": "y", "fields": ("city", "town"), "ids": "vocabulary", "workers": 1}
    assert run_command(Prepare(sources=(str(tmp_path / "train.csv"),), out=str(tmp_path / "out"), **flags)) == 0
    assert "WARNING" not in capsys.readouterr().out
    like = Prepare(sources=(f"{tmp_path}/eval.csv",), out=f"{tmp_path}/eval", form="csv", like=f"{tmp_path}/out")
    for _ in range(2):
        assert run_command(like) == 0
        warned = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
        assert len(warned) == 1
        assert "none of the 40 values of field 'city'" in warned[0]
        assert "the text has 'Bern', and the vocabulary begins with 'bern'. They differ in upper and" in warned[0]
    rare = Prepare(sources=(f"{tmp_path}/train.csv",), out=f"{tmp_path}/rare", **{**flags, "min_count": 30})
    assert run_command(rare) == 0
    shown = capsys.readouterr().out
    assert "vocabulary is empty. None occurs 30 times. Lower --min-count." in shown
    assert shown.count("WARNING") == 1


@is_long
def test_a_kill_does_not_show(tmp_path: Path) -> None:
    """kill -9 once in the middle of counting and once in the middle of writing."""
    lines = click_lines(1500)
    lines[900] = b"broken"
    source = write(tmp_path / "day", lines)
    undisturbed = run(source, tmp_path / "undisturbed", workers=1)
    unfinished = tmp_path / ".out.unfinished"
    kill_when_there(source, tmp_path / "out", unfinished / "records" / "counts-00002.json")
    assert not (tmp_path / "out").exists()
    assert not (unfinished / "records" / "vocabulary-0.json").exists()
    kill_when_there(source, tmp_path / "out", unfinished / "records" / "part-00002.json")
    assert not (tmp_path / "out").exists()
    finished = {path: path.stat().st_mtime_ns for path in (unfinished / "set").glob("part-*.parquet")}
    recorded = len(list((unfinished / "records").glob("part-*.json")))
    assert 0 < recorded < undisturbed.report["parts"]
    # What a killed process left behind: a part cut short, and one that is not even named.
    (unfinished / "set" / "part-00012.parquet").write_bytes(b"PAR1 cut short")
    (unfinished / "set" / ".part-00013.parquet.0123456789ab").write_bytes(b"PAR1")
    restarted = run(source, tmp_path / "out", workers=2)
    assert restarted.resumed_pieces == recorded
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    kept = [path for path in finished if (unfinished / "records" / path.with_suffix(".json").name).exists()]
    assert all((tmp_path / "out" / path.name).stat().st_mtime_ns == finished[path] for path in kept)
    assert not unfinished.exists()


def kill_when_there(source: str, folder: Path, awaited: Path) -> None:
    """Starts a preparation and kills it in the middle, once a file is there; its children must end with it."""
    command = [sys.executable, "-m", "tests.jobs.prepare.prepare_process", source, str(folder), str(awaited)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        stopped = lambda: awaited.exists() and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED  # noqa: E731
        wait_for(awaited.name, stopped, seconds=300)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    assert gone


def test_sources_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "train", click_lines(300))

    def grow(progress: PreparationProgress) -> None:
        if progress.stage == "write" and progress.lines == 300:
            with open(source, "ab") as file:
                file.write(click_lines(1)[0] + b"\n")

    with pytest.raises(PrepareError, match=rf"while it was read, source {source} was added, removed or changed"):
        prepare([source], tmp_path / "out", criteo_settings(), workers=1, max_bad_lines=0, on_progress=grow)
    assert not (tmp_path / "out").exists()


def test_a_finished_set_is_found_and_not_read_again(tmp_path: Path) -> None:
    source = write(tmp_path / "day", click_lines(200))
    first = prepared(source, tmp_path / "out", criteo_settings())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepared(source, tmp_path / "out", criteo_settings())
    assert (again.was_there, first.was_there) == (True, False)
    assert again.report == json.loads(json.dumps(first.report))
    assert again.declaration == first.declaration
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day", "out"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_another_preparation_in_the_same_place_is_refused(tmp_path: Path, is_finished: bool) -> None:
    lines = click_lines(200)
    source = write(tmp_path / "day", lines if is_finished else [*lines, b"bad"])
    if is_finished:
        prepared(source, tmp_path / "out", criteo_settings())
    else:
        with pytest.raises(TextError):
            prepared(source, tmp_path / "out", criteo_settings(), max_bad_lines=0)
    with pytest.raises(PrepareError, match="other settings: piece_bytes was 20000 and is 30000"):
        prepared(source, tmp_path / "out", criteo_settings(piece_bytes=30_000))
    with pytest.raises(PrepareError, match=r"other settings: \w+ of c0 was \w+ and is \w+\."):
        prepared(source, tmp_path / "out", criteo_settings(min_count=4))
    write(tmp_path / "day", lines[:-1])
    with pytest.raises(PrepareError, match=r"other settings: source .*day was added, removed or changed"):
        prepared(source, tmp_path / "out", criteo_settings())


def test_something_else_in_the_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FolderError, match=r"without a readable COMPLETE\.json"):
        prepared(write(tmp_path / "day", click_lines(5)), tmp_path / "out", criteo_settings())
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("ids", ["hash", "vocabulary"])
def test_too_many_malformed_lines_stop_it_and_a_higher_limit_goes_on(tmp_path: Path, ids: str) -> None:
    lines = click_lines(600)
    for at in (3, 410, 411, 599):
        lines[at] = b"not a click"
    source = write(tmp_path / "day", lines)
    settings = criteo_settings(ids="hash" if ids == "hash" else "vocabulary")
    with pytest.raises(
        TextError, match=r"more than 2 malformed lines among \d+: .*day:4, line: found .*; .*day:411, "
    ) as caught:
        prepared(source, tmp_path / "out", settings, max_bad_lines=2)
    (letters,) = re.findall(r"All that were met are in (\S+)\. Expected", str(caught.value))
    assert [json.loads(line)["line"] for line in Path(letters).read_text().splitlines()] == [4, 411, 412]
    done = prepared(source, tmp_path / "out", settings, max_bad_lines=4)
    assert (done.report["kept"], done.report["malformed"]) == (596, 4)
    assert done.resumed_pieces > 0 if ids == "hash" else done.resumed_pieces == 0
    again = prepared(source, tmp_path / "other", settings, max_bad_lines=1000)
    assert contents(tmp_path / "out") == contents(again.folder)


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_no_line_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "day").write_bytes(content)
    with pytest.raises(TextError, match="no line in the sources"):
        prepared(str(tmp_path / "day"), tmp_path / "out", criteo_settings())


def test_damaged_gzip_is_refused_by_name(tmp_path: Path) -> None:
    source = Path(write(tmp_path / "day.gz", click_lines(100)))
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(TextError, match=r"damaged gzip stream .*day\.gz"):
        prepared(str(source), tmp_path / "out", criteo_settings())


def test_two_at_once_in_one_place_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "day", click_lines(300))
    met: list[str] = []

    def meddle(progress: PreparationProgress) -> None:
        with pytest.raises(PrepareError, match="another process preparing"):
            prepared(source, tmp_path / "out", criteo_settings())
        met.append(progress.stage)

    prepare([source], tmp_path / "out", criteo_settings(), workers=1, max_bad_lines=0, on_progress=meddle)
    assert {"count", "write"} <= set(met)


def test_progress_ends_with_everything(tmp_path: Path) -> None:
    source = write(tmp_path / "day", click_lines(300))
    seen: list[PreparationProgress] = []
    prepare([source], tmp_path / "out", criteo_settings(), workers=1, max_bad_lines=0, on_progress=seen.append)
    for stage in ("count", "write"):
        done = [progress.done_bytes for progress in seen if progress.stage == stage]
        assert done == sorted(done)
        assert done[-1] == Path(source).stat().st_size
    assert seen[-1].lines == 300


def test_the_page_needs_nothing_else_and_escapes_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('y,x<b>,f&g\n1,2,"<script>alert(1)</script>"\n0,1,ok\n')
    settings = PrepareSettings(
        form="csv",
        label="y",
        dense=(DenseColumn("x<b>"),),
        fields=field_plans(("f&g",), ids="vocabulary", max_rows=None, min_count=1),
    )
    prepared(str(tmp_path / "a.csv"), tmp_path / "out", settings)
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"<script|https?:|src=|@import|url\(", page)
    assert "x&lt;b&gt;" in page
    assert "f&amp;g" in page
    assert page.count("<svg") >= 4


def test_lines_that_are_all_malformed_are_no_set(tmp_path: Path) -> None:
    source = write(tmp_path / "day", [b"a,b", b"c,d"])
    with pytest.raises(TextError, match=r"no good line among the 2 of the sources: .*day:1, "):
        prepared(source, tmp_path / "out", criteo_settings())
    assert not (tmp_path / "out").exists()
