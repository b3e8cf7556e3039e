"""What is fuzzed: functions of bytes that end for every content, with rows or with an error of ours that names the
file.

`tests/workers/input/test_input_fuzz.py` calls them in every test run with content that hypothesis makes, and `python -m
tests.fuzz` with content that atheris finds by what it reaches. A target raises nothing but what is a fault of the code.
"""

from __future__ import annotations

import functools
import gzip
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from podembed.jobs.text.criteo import convert_criteo
from podembed.workers.columns.vocabulary import Vocabulary
from podembed.workers.data.bad_rows import BadRowLog
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import CsvData, InputData, NpyData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.storage.strict_json import DocumentRefused, parse_strictly, seal, unseal
from tests.batches import joined
from tests.workers.formats.parquet_sets import declaration, table_of

MOST_STEPS = 60


def read_or_refuse(data: InputData, path: Path) -> tuple[int, int] | None:
    """(rows read, rows left out), or None after an error that names the file. Any other error is a fault of the
    code.
    """
    log, refusal = BadRowLog(data.max_bad_rows), None
    try:
        index = build_index(data)
        plan = training_plan(index, num_lanes=2, batch_size=8, seed=1)
        reader = InputReader(data, index, plan, range(2), bad_rows=log)
        steps = range(min(plan.steps_per_epoch, MOST_STEPS))
        whole = joined([reader.read(step) for step in steps])
        reader.close()
    except InputError as error:
        refusal = str(error)
    if refusal is not None:
        assert path.name in refusal or str(path.parent) in refusal
        return None
    num_read, num_left_out = int((~whole.is_padding).sum()), len(log.take())
    if len(steps) == plan.steps_per_epoch:
        assert num_read + num_left_out == index.num_rows
    assert np.isfinite(whole.dense).all()
    assert np.isfinite(whole.labels).all()
    for name, source in data.id_columns.items():
        values = whole.features[name].values
        assert len(values) == 0 or 0 <= values.min() <= values.max() < (source.vocabulary_size or 0)
    return num_read, num_left_out


# ---------------------------------------------------------------------- Parquet


@functools.cache
def parquet_bytes() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table_of(range(40)), buffer, row_group_size=16)
    return buffer.getvalue()


def parquet(content: bytes, *, max_bad_rows: int = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-000.parquet")
        path.write_bytes(content)
        read_or_refuse(
            replace(declaration(str(path)), sample_weight=None, sample_id=None, max_bad_rows=max_bad_rows), path
        )


# ---------------------------------------------------------------------- CSV

CSV_HEADER = b"user,label,note,price,tags\n"
CSV_ROWS = "".join(f'{n},{n % 2},"note {n}",{n / 2},{"|".join("ab"[: n % 3])}\n' for n in range(30)).encode()


def declared_csv(path: Path, max_bad_rows: int) -> CsvData:
    return CsvData(
        str(path),
        label="label",
        dense=("price",),
        features={"user": IdColumn("user", vocabulary_size=40), "tags": IdColumn("tags", "hash", 10)},
        strings=("tags",),
        list_separators={"tags": "|"},
        max_bad_rows=max_bad_rows,
        rows_per_block=7,
    )


def csv(content: bytes, *, is_packed: bool = False, max_bad_rows: int = 1000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        path.write_bytes(gzip.compress(content) if is_packed else content)
        read_or_refuse(declared_csv(path, max_bad_rows), path)


def prepared_csv(content: bytes) -> None:
    """Every line is a row or a fault, and rows have the columns that were asked for."""
    from podembed.jobs.prepare.forms import CsvForm

    form = CsvForm(("user", "label", "note", "price", "tags"), "label", ("price",), ("user", "tags"))
    block = content if content.endswith(b"\n") else content + b"\n"
    parsed = form.parse(block, max_faults=len(block))
    assert parsed.num_lines == block.count(b"\n")
    assert len(parsed.label) + len(parsed.faults) == parsed.num_lines
    columns = [parsed.label, *parsed.dense.values(), *parsed.values.values()]
    assert {len(column) for column in columns} == {len(parsed.label)}
    assert parsed.label.null_count == 0
    assert [text for _, _, text in parsed.faults] == [block.split(b"\n")[at] for at, _, _ in parsed.faults]


def csv_records(content: bytes) -> None:
    """Where records end does not depend on how the text comes in pieces."""
    from podembed.workers.formats.csv_records import RecordScanner, record_ends

    cut = 1 + content[0] % 16 if content else 1
    scanner = RecordScanner("text", delimiter=",")
    try:
        whole = record_ends(content, "text", delimiter=",")
    except InputError:
        return
    pieces = [scanner.feed(content[at : at + cut]) for at in range(0, len(content), cut)]
    assert np.concatenate([*pieces, scanner.finish()]).tolist() == whole.tolist()
    assert (np.diff(whole) > 0).all()
    assert len(whole) == 0 or 0 < whole[0] <= whole[-1] <= len(content)


# ---------------------------------------------------------------------- npy


@functools.cache
def npy_bytes(kind: str) -> bytes:
    arrays = {
        "labels": np.zeros((9, 1), np.int32),
        "dense": np.ones((9, 3), np.float32),
        "sparse": np.full((9, 2), 3, np.int32),
    }
    buffer = io.BytesIO()
    np.save(buffer, arrays[kind])
    return buffer.getvalue()


def npy(content: bytes, *, kind: str) -> None:
    """One of the three files has that content, the others are whole."""
    with tempfile.TemporaryDirectory() as folder:
        for whole in ("labels", "dense", "sparse"):
            Path(folder, f"a_{whole}.npy").write_bytes(npy_bytes(whole))
        Path(folder, f"a_{kind}.npy").write_bytes(content)
        features = {"a": IdColumn("cat_0", vocabulary_size=10)}
        data = NpyData(f"{folder}/a_labels.npy", dense=("int_1",), features=features, max_bad_rows=9)
        read_or_refuse(data, Path(folder, "a_"))


# ---------------------------------------------------------------------- click logs

CRITEO_LINE = b"\t".join([b"1", *[b"%d" % n for n in range(13)], *[b"%08x" % n for n in range(26)]]) + b"\n"


def criteo(content: bytes, *, is_packed: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "day_0")
        path.write_bytes(gzip.compress(content) if is_packed else content)
        report, refusal = None, ""
        try:
            report = convert_criteo([str(path)], Path(folder, "converted"), max_bad_lines=5)
        except InputError as error:
            refusal = str(error)
        if report is None:
            assert "day_0" in refusal
            return
        assert report.kept + report.malformed == report.lines
        parts = Path(report.folder).glob("part-*.parquet")
        assert sum(pq.ParquetFile(part).metadata.num_rows for part in parts) == report.kept


def criteo_lines(content: bytes) -> None:
    """The fast reader of lines agrees with the plain one."""
    from podembed.jobs.text.criteo_lines import LineFault, parse_lines, read_line

    block = content if content.endswith(b"\n") else content + b"\n"
    parsed = parse_lines(block)
    for at, line in enumerate(block.split(b"\n")[:-1]):
        expected = read_line(line)
        assert bool(parsed.is_good[at]) == (not isinstance(expected, LineFault))
        if isinstance(expected, LineFault):
            continue
        integers = zip(parsed.integers[:, at].tolist(), parsed.integer_is_empty[:, at].tolist(), strict=True)
        categories = zip(parsed.categories[:, at].tolist(), parsed.category_is_empty[:, at].tolist(), strict=True)
        found = [int(parsed.labels[at]), *(None if empty else value for value, empty in [*integers, *categories])]
        assert found == expected


# ---------------------------------------------------------------------- small documents


def vocabulary(content: bytes) -> None:
    """A file that is accepted gives every line a row of its own, and no other."""
    import pyarrow as pa

    try:
        words = Vocabulary("words.txt", content)
    except InputError as error:
        assert "words.txt" in str(error)  # noqa: PT017 - no test but a target
        return
    lines = [words.line(at) for at in range(words.num_values)]
    text = content.decode("utf-8-sig")
    end = "\r" if "\n" not in text else "\r\n" if text.count("\r\n") == text.count("\n") else "\n"
    assert lines == text.removesuffix(end).split(end)
    rows = words.rows_of_strings(pa.array([*lines, "\n"], pa.large_string()), num_reserved=2)
    assert rows.tolist() == [*range(2, len(lines) + 2), 0]


def json_documents(content: bytes) -> None:
    """What is accepted can be written again; nothing but a refusal is raised."""
    for read in (parse_strictly, unseal):
        try:
            document = read("document.json", content)
        except DocumentRefused as error:
            assert "document.json" in str(error)  # noqa: PT017
            continue
        if isinstance(document, dict) and document and "sha256" not in document:
            assert unseal("document.json", seal(document)) == document
    try:
        InputIndex.from_json(content.decode("utf-8", "replace"))
    except InputError as error:
        assert "does not parse" in str(error)  # noqa: PT017


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing to fuzz.

    Attributes:
      call: takes the bytes.
      seeds: content to begin from.
      is_compiled: False for kernels that are better looked into as Python, where it can be seen what a content reaches.
    """

    call: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    is_compiled: bool = True


TARGETS = {
    "parquet": Target(call=parquet, seeds=(parquet_bytes(),)),
    "csv": Target(call=csv, seeds=(CSV_HEADER + CSV_ROWS, CSV_HEADER + b'1,1,"a\n""b",2,a|b\r\n\n')),
    "csv-gzip": Target(call=csv, seeds=(gzip.compress(CSV_HEADER + CSV_ROWS),)),
    "csv-prepared": Target(call=prepared_csv, seeds=(CSV_ROWS, b'1,1,"a",,\n1,x,a,2,"b\n')),
    "csv-records": Target(call=csv_records, seeds=(CSV_ROWS[:200], b'a,"b""\n",c\r\n\n"x"y\n'), is_compiled=False),
    "npy-labels": Target(call=functools.partial(npy, kind="labels"), seeds=(npy_bytes("labels"),)),
    "npy-sparse": Target(call=functools.partial(npy, kind="sparse"), seeds=(npy_bytes("sparse"),)),
    "criteo": Target(call=criteo, seeds=(CRITEO_LINE * 3, gzip.compress(CRITEO_LINE * 3))),
    "criteo-lines": Target(call=criteo_lines, seeds=(CRITEO_LINE * 2, b"0" + b"\t" * 39 + b"\n"), is_compiled=False),
    "vocabulary": Target(call=vocabulary, seeds=("red\ngrün\n7\n".encode(), b"a")),
    "json": Target(
        call=json_documents, seeds=(seal({"a": [1, {"b": None}], "c": 0.5}), b'{"files":[],"vocabularies":[]}')
    ),
}
