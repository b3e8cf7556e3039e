from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.jobs.finished_folder import FolderError
from podembed.jobs.text import blocks as text_lines
from podembed.jobs.text import criteo as criteo_text
from podembed.jobs.text.blocks import TextError
from podembed.jobs.text.criteo import ConversionReport, CriteoTextError, convert_criteo
from podembed.jobs.text.criteo_lines import CATEGORY_NAMES, FIELD_NAMES, INTEGER_NAMES, read_line
from podembed.workers.data.columns import DenseColumn, IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.jobs.text.test_criteo_lines import line_with


def good_lines(count: int, *, seed: int = 0) -> list[bytes]:
    """Lines as the logs have them: many empty fields, a few negative numbers, rows that end in tabs."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        integers = [b"" if rng.random() < 0.3 else str(rng.integers(-2, 70_000)).encode() for _ in range(13)]
        categories = [b"" if rng.random() < 0.2 else f"{rng.integers(0, 2**32):08x}".encode() for _ in range(26)]
        if number % 3 == 0:
            categories[20:] = [b""] * 6
        lines.append(b"\t".join([str(rng.integers(0, 2)).encode(), *integers, *categories]))
    return lines


def rows_of(report: ConversionReport) -> list[list[int | None]]:
    """Label, integers, categories and sample id of every converted row."""
    tables = [pq.read_table(path) for path in sorted(report.folder.glob("part-*.parquet"))]
    return [list(row.values()) for table in tables for row in table.to_pylist()]


def expected_rows(lines: list[bytes], *, first: int = 0) -> list[list[int | None]]:
    rows = []
    for number, line in enumerate(lines):
        values = read_line(line)
        assert isinstance(values, list)
        rows.append([*values, first + number])
    return rows


def declaration(report: ConversionReport) -> ParquetData:
    return ParquetData(
        report.paths,
        label="label",
        dense=tuple(DenseColumn(name, "log1p") for name in INTEGER_NAMES),
        features={name: IdColumn(name, mode="hash", vocabulary_size=97) for name in CATEGORY_NAMES},
        sample_id="sample_id",
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "day_0.tsv"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_every_value_arrives(source: Path, cache: Path) -> None:
    lines = good_lines(200)
    source.write_bytes(b"\n".join(lines) + b"\n")
    report = convert_criteo([str(source)], cache, rows_per_group=64)
    assert (report.lines, report.kept, report.malformed, report.bad_lines) == (200, 200, 0, ())
    assert rows_of(report) == expected_rows(lines)
    assert pq.read_schema(report.folder / "part-00000.parquet").names == [*FIELD_NAMES, "sample_id"]
    assert build_index(declaration(report)).row_group_rows == (64, 64, 64, 8)
    assert not (report.folder / criteo_text.DEAD_LETTER_NAME).exists()


@pytest.mark.parametrize("block_bytes", [250, 1000, 8 << 20])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_sources_are_cut_anywhere_and_end_in_any_way(tmp_path: Path, cache: Path, block_bytes: int, end: bytes) -> None:
    lines = good_lines(90)
    (tmp_path / "day_0.tsv").write_bytes(b"\n".join(lines[:40]) + end)
    # Several members, as concatenated archives have, and no .gz in the name: content decides.
    packed = gzip.compress(b"\n".join(lines[40:70]) + b"\n") + gzip.compress(b"\n".join(lines[70:]) + end)
    (tmp_path / "day_1.tsv").write_bytes(packed)
    with patch.object(text_lines, "BLOCK_BYTES", block_bytes), patch.object(criteo_text, "ROW_GROUPS_PER_FILE", 3):
        report = convert_criteo([str(tmp_path / "day_*.tsv")], cache, rows_per_group=16)
    assert (report.lines, report.kept) == (90, 90)
    assert rows_of(report) == expected_rows(lines)
    assert len(list(report.folder.glob("part-*.parquet"))) == 2


def test_malformed_lines_are_counted_named_and_kept_aside(source: Path, cache: Path) -> None:
    lines = good_lines(20)
    lines[3] = line_with(label=b"2")
    lines[4] = b""
    lines[11] = line_with(c7=b"123456789")
    lines[19] = b"\xff\xfe nonsense"
    source.write_bytes(b"\n".join(lines) + b"\n")
    with patch.object(text_lines, "BLOCK_BYTES", 700):
        report = convert_criteo([str(source)], cache)
    assert (report.lines, report.kept, report.malformed) == (20, 16, 4)
    assert [(bad.file, bad.line, bad.field) for bad in report.bad_lines] == [
        (str(source), 4, "label"), (str(source), 5, "line"), (str(source), 12, "c7"), (str(source), 20, "line"),
    ]  # fmt: skip
    letters = [json.loads(text) for text in (report.folder / criteo_text.DEAD_LETTER_NAME).read_text().splitlines()]
    assert letters[0]["text"] == lines[3].decode()
    assert letters[0]["reason"] == "a label is 0 or 1"
    assert letters[3]["text"] == r"\xff\xfe nonsense"
    good = [number for number in range(20) if number not in (3, 4, 11, 19)]
    assert [row[-1] for row in rows_of(report)] == good


def test_line_numbers_start_anew_in_each_file_and_sample_ids_do_not(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a").write_bytes(b"\n".join(good_lines(5)))
    (tmp_path / "b").write_bytes(b"oops\n" + b"\n".join(good_lines(2)))
    report = convert_criteo([str(tmp_path / "b"), str(tmp_path / "a")], cache)
    assert [(Path(bad.file).name, bad.line) for bad in report.bad_lines] == [("b", 1)]
    assert [row[-1] for row in rows_of(report)] == [0, 1, 2, 3, 4, 6, 7]


def test_too_many_malformed_lines_stop_the_conversion(source: Path, cache: Path) -> None:
    lines = [*good_lines(5), line_with(label=b"2"), line_with(i0=b"x"), line_with(c0=b"y"), *good_lines(5)]
    source.write_bytes(b"\n".join(lines))
    with pytest.raises(CriteoTextError) as caught:
        convert_criteo([str(source)], cache, max_bad_lines=2)
    message = str(caught.value)
    assert message.startswith(f"Found more than 2 malformed lines among the first 8: {source}:6, label: found '2'")
    assert f"{source}:8, c0: found 'y'" in message
    assert list(cache.iterdir()) == []
    assert convert_criteo([str(source)], cache, max_bad_lines=3).malformed == 3
    # What is converted already does not get around the limit.
    with pytest.raises(CriteoTextError, match="more than 2 malformed lines"):
        convert_criteo([str(source)], cache, max_bad_lines=2)


def test_a_converted_set_is_found_until_a_source_changes(source: Path, cache: Path) -> None:
    source.write_bytes(b"\n".join(good_lines(5)))
    first = convert_criteo([str(source)], cache)
    with patch.object(criteo_text, "parse_lines", side_effect=AssertionError("read again")):
        assert convert_criteo([str(source)], cache) == first
    os.utime(source, (0, source.stat().st_mtime + 5))
    assert convert_criteo([str(source)], cache).folder != first.folder


def test_a_damaged_cache_is_refused(source: Path, cache: Path) -> None:
    source.write_bytes(b"\n".join(good_lines(5)))
    report = convert_criteo([str(source)], cache)
    (report.folder / "part-00000.parquet").unlink()
    with pytest.raises(FolderError, match=r"Remove .* to have it prepared again"):
        convert_criteo([str(source)], cache)


def damaged_sources() -> list[tuple[str, bytes, str]]:
    packed = gzip.compress(b"\n".join(good_lines(300)))
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x10
    return [
        ("cut short", packed[:-9], "damaged gzip stream"),
        ("cut in the middle", packed[: len(packed) // 2], "damaged gzip stream"),
        ("flipped bit", bytes(flipped), "damaged gzip stream"),
        ("garbage behind", packed + b"garbage", "damaged gzip stream"),
        ("second member cut", packed + packed[:40], "damaged gzip stream"),
        ("empty", b"", "no line in"),
        ("blank line alone", b"\n", "no line in"),
        ("no lines", b"x" * 5000, "no line end within"),
        ("another format", b"a,b,c\n" * 50, "more than 10 malformed lines among the first 11"),
    ]


@pytest.mark.parametrize(
    ("content", "message"), [case[1:] for case in damaged_sources()], ids=[c[0] for c in damaged_sources()]
)
def test_damaged_sources_are_refused_and_leave_nothing(source: Path, cache: Path, content: bytes, message: str) -> None:
    source.write_bytes(content)
    with (
        patch.object(text_lines, "BLOCK_BYTES", 1024),
        patch.object(text_lines, "_LONGEST_LINE_BYTES", 2048),
        pytest.raises(TextError, match=message),
    ):
        convert_criteo([str(source)], cache)
    assert list(cache.iterdir()) == []


def test_sources_that_are_not_there_are_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match=r"no file that matches .*day_\*"):
        convert_criteo([str(tmp_path / "day_*")], cache)


def test_a_converted_set_can_be_trained_from(source: Path, cache: Path) -> None:
    lines = good_lines(50)
    source.write_bytes(b"\n".join(lines))
    report = convert_criteo([str(source)], cache, rows_per_group=8)
    data = declaration(report)
    index = build_index(data)
    plan = training_plan(index, num_lanes=2, batch_size=10, seed=0)
    reader = InputReader(data, index, plan, [0, 1])
    batches = [reader.read(step) for step in range(plan.steps_per_epoch)]
    numbers = np.concatenate([batch.sample_ids for batch in batches])
    assert sorted(numbers[numbers >= 0].tolist()) == list(range(50))
    row = int(np.flatnonzero(batches[0].sample_ids >= 0)[0])
    values = read_line(lines[batches[0].sample_ids[row]])
    assert isinstance(values, list)
    expected = [np.log1p(np.float32(max(value or 0, 0))) for value in values[1:14]]
    np.testing.assert_array_equal(batches[0].dense[row], expected)
    for value, ragged in zip(values[14:], batches[0].features.values(), strict=True):
        (found,) = ragged.to_lists()[row]
        assert (found == 0) == (value is None)
        assert found < 97


def test_lines_that_are_all_malformed_are_shown_however_few(source: Path, cache: Path) -> None:
    """They are below the limit, and there is nothing to train on."""
    source.write_bytes(b"a,b\nc,d\n")
    for _ in range(2):
        with pytest.raises(
            CriteoTextError, match=rf"no good line among the 2 of {source}: {source}:1, .*'a,b'.*these are the files"
        ):
            convert_criteo([str(source)], cache)
