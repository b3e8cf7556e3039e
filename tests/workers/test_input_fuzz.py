"""Files as no writer writes them: whatever the bytes are, reading ends with rows or with an error of ours that names the file."""

from __future__ import annotations

import functools
import gzip
import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.parquet_sets import declaration, table_of
from workers.bad_rows import BadRowLog
from workers.batch import Batch
from workers.criteo_text import convert_criteo
from workers.data_config import CsvData, IdColumn, InputData, NpyData
from workers.input import InputReader, build_index, training_plan
from workers.input_errors import InputError

quick = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def read_or_refuse(data: InputData, path: Path) -> tuple[int, int] | None:
    """(rows read, rows left out), or None after an error that names the file. Any other error fails the test."""
    log, refusal = BadRowLog(data.max_bad_rows), None
    try:
        index = build_index(data)
        plan = training_plan(index, num_lanes=2, batch_size=8, seed=1)
        reader = InputReader(data, index, plan, range(2), bad_rows=log)
        steps = range(min(plan.steps_per_epoch, 60))
        whole = Batch.concatenate([reader.read(step) for step in steps])
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


@functools.cache
def parquet_bytes() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table_of(range(40)), buffer, row_group_size=16)
    return buffer.getvalue()


@quick
@given(damaged(parquet_bytes()), st.sampled_from([0, 5]))
def test_parquet(content: bytes, max_bad_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part-000.parquet")
        path.write_bytes(content)
        data = declaration(str(path))
        data = type(data)(**{name: getattr(data, name) for name in ("paths", "label", "dense", "features")}, max_bad_rows=max_bad_rows)  # fmt: skip
        read_or_refuse(data, path)


CSV = "".join(f'{n},{n % 2},"note {n}",{n / 2},{"|".join("ab"[: n % 3])}\n' for n in range(30)).encode()
csv_bytes = damaged(b"user,label,note,price,tags\n" + CSV) | st.text(
    st.sampled_from('1,2|"\n\r\tab.e-'), max_size=80
).map(lambda text: b"user,label,note,price,tags\n" + text.encode())


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


@quick
@given(csv_bytes, st.booleans(), st.sampled_from([0, 3, 1000]))
def test_csv(content: bytes, is_packed: bool, max_bad_rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        path.write_bytes(gzip.compress(content) if is_packed else content)
        read_or_refuse(declared_csv(path, max_bad_rows), path)


@quick
@given(damaged(gzip.compress(b"user,label,note,price,tags\n" + CSV)))
def test_damaged_gzip(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv.gz")
        path.write_bytes(content)
        read_or_refuse(declared_csv(path, 1000), path)


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


@quick
@given(
    st.sampled_from(["labels", "dense", "sparse"]).flatmap(
        lambda kind: st.tuples(st.just(kind), damaged(npy_bytes(kind)))
    )
)
def test_npy(spoilt: tuple[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("labels", "dense", "sparse"):
            Path(folder, f"a_{kind}.npy").write_bytes(npy_bytes(kind))
        Path(folder, f"a_{spoilt[0]}.npy").write_bytes(spoilt[1])
        features = {"a": IdColumn("cat_0", vocabulary_size=10)}
        data = NpyData(f"{folder}/a_labels.npy", dense=("int_1",), features=features, max_bad_rows=9)
        read_or_refuse(data, Path(folder, "a_"))


LINE = b"\t".join([b"1", *[b"%d" % n for n in range(13)], *[b"%08x" % n for n in range(26)]]) + b"\n"


@quick
@given(damaged(LINE * 3), st.booleans())
def test_criteo_text(content: bytes, is_packed: bool) -> None:
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


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    """The fuzzed files are readable before they are spoilt; otherwise nothing above would show anything."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"user,label,note,price,tags\n" + CSV)
    assert read_or_refuse(declared_csv(path, 0), path) == (30, 0)
    path.write_bytes(b"user,label,note,price,tags\n" + CSV + b"x,1,,,\n")
    assert read_or_refuse(declared_csv(path, 1), path) == (30, 1)
