"""Times as numbers, against the calendar of Python: every type, unit and origin, in Parquet and in CSV."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.serving.predict.kept_columns import KeptColumns
from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn
from podembed.workers.data.config import CsvData, ParquetData
from podembed.workers.data.extra_columns import IntegerColumn, ListColumn
from podembed.workers.data.input_errors import InputError
from podembed.workers.data.times import TimeScale, shown
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan

UNIT_S = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86400,
}
KINDS = [
    pa.date32(),
    pa.date64(),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "Asia/Tokyo")),
]
moments = st.datetimes(min_value=datetime(1700, 1, 1), max_value=datetime(2250, 1, 1))
origins = st.sampled_from(
    [None, "midnight", "monday", "2024-02-29", "2024-02-29T12:00:07", "1999-12-31T23:00:00+09:00"]
)


def exact(moment: datetime, since: str | None) -> Fraction:
    """Seconds from the origin, by the calendar of Python."""
    if since == "midnight":
        origin = datetime.combine(moment.date(), time(), UTC)
    elif since == "monday":
        origin = datetime.combine(moment.date() - timedelta(days=moment.weekday()), time(), UTC)
    else:
        origin = datetime.fromisoformat(since or "1970-01-01")
        origin = origin if origin.tzinfo else origin.replace(tzinfo=UTC)
    return Fraction((moment - origin) // timedelta(microseconds=1), 10**6)


@settings(deadline=None)
@given(st.lists(moments, min_size=1, max_size=8), st.sampled_from(KINDS), st.sampled_from(sorted(UNIT_S)), origins)
def test_numbers_are_those_of_the_calendar(
    found: list[datetime], kind: pa.DataType, unit: Any, since: str | None
) -> None:
    resolution = {"s": 10**6, "ms": 1000}.get(getattr(kind, "unit", ""), 1)
    values = [moment.replace(tzinfo=UTC, microsecond=moment.microsecond // resolution * resolution) for moment in found]
    if pa.types.is_date(kind):
        values = [datetime.combine(moment.date(), time(), UTC) for moment in values]
        column = pa.array([moment.date() for moment in values], kind)
    else:
        column = pa.array(values, pa.timestamp("us", "UTC")).cast(kind)
    scale = TimeScale(unit, since)
    expected = [exact(moment, since) / UNIT_S[unit] for moment in values]
    whole, is_beyond = scale.whole(column)
    for row, number in enumerate(expected):
        floor = number.numerator // number.denominator
        assert is_beyond[row] == (abs(floor) >= 2**63 - 10**10) or abs(floor) > 2**62
        assert is_beyond[row] or whole[row] == floor
    assert scale.numbers(column) == pytest.approx([float(number) for number in expected], rel=1e-15, abs=1e-12)
    assert (
        scale.numbers(column).astype(np.float32) == np.array([float(number) for number in expected], np.float32)
    ).mean() > 0.5


def test_times_of_day_and_durations_count_from_nothing() -> None:
    times = [time(1, 2, 3, 500_000), time(0)]
    for kind in (pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        column = pa.array(times, kind)
        assert TimeScale().numbers(column).tolist() == [3723.5, 0]
        assert TimeScale("h").whole(column)[0].tolist() == [1, 0]
        assert not TimeScale(since="midnight").accepts(kind)
    for unit in ("s", "ms", "us", "ns"):
        column = pa.array([timedelta(minutes=90), timedelta(seconds=-1)], pa.duration(unit))
        assert TimeScale("m").numbers(column) == pytest.approx([90, -1 / 60], rel=1e-14)
        assert TimeScale("m").whole(column)[0].tolist() == [90, -1]


def test_whole_numbers_that_int64_does_not_hold_are_told() -> None:
    column = pa.array([2**60, 5], pa.int64()).cast(pa.timestamp("s"))
    whole, is_beyond = TimeScale("ns").whole(column)
    assert is_beyond.tolist() == [True, False]
    assert whole[1] == 5 * 10**9
    column = pa.array([-(2**63), 2**63 - 1, 5]).cast(pa.timestamp("s"))
    whole, is_beyond = TimeScale("s", "2200-01-01").whole(column)
    assert (is_beyond.tolist(), whole[2]) == ([True, True, False], 5 - 7258118400)


@pytest.mark.parametrize(
    ("kind", "number", "text"),
    [
        (pa.timestamp("us"), 10**15, "2001-09-09 01:46:40"),
        (pa.timestamp("us"), 2**62, f"timestamp[us] of {2**62} since 1970-01-01"),
        (pa.timestamp("s"), 2**62, f"timestamp[s] of {2**62} since 1970-01-01"),
        (pa.timestamp("us", "No/Where"), 10**15, f"timestamp[us, tz=No/Where] of {10**15} since 1970-01-01"),
        (pa.date32(), 2**31 - 1, f"date32[day] of {2**31 - 1} since 1970-01-01"),
        (pa.duration("s"), 2**62, f"duration[s] of {2**62}"),
    ],
)
def test_times_that_python_does_not_have_are_shown(kind: pa.DataType, number: int, text: str) -> None:
    column = pa.array([number], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    assert shown(column[0]) == text


@pytest.mark.parametrize(
    "declared",
    [
        {"features": {"c": IdColumn("c", "hash", 100, unit="ns")}},
        {"extra": (IntegerColumn("c", unit="s"),)},
        {"extra": (ListColumn("l", 2, "int32", unit="s"),)},
    ],
)
def test_a_time_beyond_64_bits_and_the_calendar_is_a_malformed_row(tmp_path: Path, declared: Any) -> None:
    column = pa.array([0, 2**62]).cast(pa.timestamp("us"))
    table = pa.table({"y": [0, 1], "c": column, "l": pa.ListArray.from_arrays([0, 1, 2], column)})
    pq.write_table(table, tmp_path / "a.parquet")
    message = r"Found timestamp\[us\] of 4611686018427387904 since 1970-01-01 in .*row 1, column '[cl]'"
    with pytest.raises(InputError, match=message):
        read(ParquetData(str(tmp_path / "a.parquet"), label="y", **declared))


def test_timestamps_of_96_bits_keep_years_that_nanoseconds_do_not_have(tmp_path: Path) -> None:
    """As Spark writes them; Arrow's default makes 1816-03-29 of the end of 9999."""
    moments = [datetime(9999, 12, 31), datetime(1582, 10, 15), datetime(2024, 5, 1, 12, 30, 0, 123456)]
    column = pa.array(moments, pa.timestamp("us"))
    table = pa.table({"y": [0, 1, 1], "c": column, "l": pa.ListArray.from_arrays([0, 1, 2, 3], column)})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    data = ParquetData(
        str(tmp_path / "a.parquet"),
        label="y",
        dense=(DenseColumn("c", unit="d", since="2024-05-01"),),
        features={"c": IdColumn("c", unit="h", since="1500-01-01", vocabulary_size=10**8)},
        extra=(ListColumn("l", 1, "int64", unit="us"),),
    )
    found = read(data)
    hours = [[(moment - datetime(1500, 1, 1)) // timedelta(hours=1)] for moment in moments]
    assert found.features["c"] == hours
    assert found.dense[:2, 0].tolist() == [float((moment - datetime(2024, 5, 1)).days) for moment in moments[:2]]
    kept = KeptColumns(data, build_index(data), ["c", "l"], taken=[])
    assert kept.schema.field("c").type == pa.timestamp("us")
    assert kept.take(3)[0].to_pylist() == moments


@dataclass(frozen=True)
class Read:
    """In the order of the file."""

    dense: np.ndarray
    features: dict[str, list[list[int]]]


def read(data: ParquetData | CsvData) -> Read:
    index = build_index(data)
    plan = training_plan(index, num_lanes=1, batch_size=index.num_rows, seed=1)
    batch = InputReader(data, index, plan, [0]).read(0)
    order = np.argsort(batch.sample_ids)
    bags = {name: bags.to_lists() for name, bags in batch.features.items()}
    return Read(batch.dense[order], {name: [found[row] for row in order] for name, found in bags.items()})


MOMENTS = [datetime(2024, 5, 1, 12, 30, tzinfo=UTC), datetime(2024, 5, 5, 0, 0, 1, 250_000, tzinfo=UTC)]
DENSE = (
    DenseColumn("when"),
    DenseColumn("when2", unit="s", since="2024-05-01"),
    DenseColumn("when3", unit="h", since="midnight"),
)
FEATURES = {
    "day": IdColumn("day", unit="d", since="2024-05-01", vocabulary_size=100),
    "weekday": IdColumn("weekday", unit="d", since="monday", vocabulary_size=7),
    "hour": IdColumn("hour", "hash", unit="h", since="midnight", vocabulary_size=100),
}
EXPECTED = ([[19844 + 12.5 / 24, 45000, 12.5], [19848 + 1.25 / 86400, 345601.25, 1.25 / 3600]], [[0], [4]], [[2], [6]])


def check(batch: Read) -> None:
    np.testing.assert_array_equal(batch.dense, np.array(EXPECTED[0], np.float32))
    assert (batch.features["day"], batch.features["weekday"]) == EXPECTED[1:]
    assert len({tuple(bag) for bag in batch.features["hour"]}) == 2


NAMES = ("when", "when2", "when3", "day", "weekday", "hour")


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ms", "America/New_York"), pa.timestamp("ns")])
def test_columns_of_parquet_become_numbers_and_ids(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(MOMENTS, pa.timestamp("us", "UTC")).cast(kind)
    pq.write_table(pa.table({"y": [0, 1], **dict.fromkeys(NAMES, column)}), tmp_path / "a.parquet")
    check(read(ParquetData(str(tmp_path / "a.parquet"), label="y", dense=DENSE, features=FEATURES)))


@pytest.mark.parametrize(
    "texts",
    [
        ("2024-05-01 12:30", "2024-05-05T00:00:01.25"),
        ("2024-05-01T12:30Z", "2024-05-05T00:00:01.250000Z"),
        ("2024-05-01T21:30:00+09:00", "2024-05-04 19:00:01.25-0500"),
        ("2024-05-01T12:30:00", "2024-05-05T02:00:01.250+02"),
    ],
)
def test_text_of_csv_becomes_the_same(tmp_path: Path, texts: tuple[str, str]) -> None:
    rows = [",".join([str(at), *[text] * len(NAMES)]) for at, text in enumerate(texts)]
    (tmp_path / "a.csv").write_text("\n".join([",".join(["y", *NAMES]), *rows]) + "\n")
    check(read(CsvData(str(tmp_path / "a.csv"), label="y", dense=DENSE, features=FEATURES, times=("when",))))


def test_dates_are_whole_days_without_being_asked(tmp_path: Path) -> None:
    days = pa.array([date(2024, 5, 1), date(1969, 12, 31)])
    pq.write_table(pa.table({"y": [0, 1], "d": days}), tmp_path / "a.parquet")
    ids = {"d": IdColumn("d", "hash", 50)}
    batch = read(ParquetData(str(tmp_path / "a.parquet"), label="y", dense=("d",), features=ids))
    assert batch.dense.tolist() == [[19844], [-1]]


def test_a_time_that_is_not_there_is_a_malformed_row_and_an_id_that_is_not_there_none(tmp_path: Path) -> None:
    column = pa.array([*MOMENTS, None], pa.timestamp("us"))
    pq.write_table(pa.table({"y": [0, 1, 1], "when": column, "day": column}), tmp_path / "a.parquet")
    ids = ParquetData(str(tmp_path / "a.parquet"), label="y", features={"day": FEATURES["day"]})
    assert read(ids).features["day"] == [[0], [4], []]
    dense = ParquetData(str(tmp_path / "a.parquet"), label="y", dense=("when",))
    with pytest.raises(
        InputError, match=r"Found null in .*a\.parquet, row group 0, row 2, column 'when'\. Times are never null"
    ):
        read(dense)
    (tmp_path / "a.csv").write_text("y,when\n0,2024-05-01\n1,01.05.2024\n")
    with pytest.raises(
        InputError, match=r"Found '01\.05\.2024' in .*row 1, column 'when'\. Expected a date or time in ISO 8601"
    ):
        read(CsvData(str(tmp_path / "a.csv"), label="y", dense=("when",), times=("when",)))


def test_an_id_before_its_origin_is_outside_of_the_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0], "day": [date(2024, 4, 30)]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"Found id -1 in .*column 'day'"):
        read(ParquetData(str(tmp_path / "a.parquet"), label="y", features={"day": FEATURES["day"]}))


@pytest.mark.parametrize(
    ("column", "dense", "message"),
    [
        (pa.array([5]), DenseColumn("c", unit="s"), "type int64 .* Expected a column of dates or timestamps, times of "
                                                    "day or durations, for which"),
        (pa.array([time(1)]), DenseColumn("c", since="midnight"), "type time64.* Expected a column of dates or "
                                                                  "timestamps, for which"),
        (pa.array(["2024-05-01"]), DenseColumn("c"), "type string .* Expected an integer, float or boolean column, or "
                                                     "one of dates or times"),
    ],
)  # fmt: skip
def test_columns_that_are_no_times_are_refused(
    tmp_path: Path, column: pa.Array, dense: DenseColumn, message: str
) -> None:
    pq.write_table(pa.table({"y": [0], "c": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        build_index(ParquetData(str(tmp_path / "a.parquet"), label="y", dense=(dense,)))


def test_a_file_without_a_value_of_a_column_fits_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0], "c": pa.nulls(1)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [0], "c": ["red"]}), tmp_path / "b.parquet")
    data = ParquetData(str(tmp_path / "*.parquet"), label="y", features={"c": IdColumn("c", "hash", 50)})
    assert build_index(data).num_rows == 2
    pq.write_table(pa.table({"y": [0], "c": [1]}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"'c' with text in .*b\.parquet and with integers in .*c\.parquet"):
        build_index(data)


def test_numbers_in_one_file_and_times_in_another_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": [0], "c": [5]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [0], "c": [date(2024, 5, 1)]}), tmp_path / "b.parquet")
    data = ParquetData(str(tmp_path / "*.parquet"), label="y", dense=("c",))
    with pytest.raises(InputError, match=r"'c' with numbers in .*a\.parquet and with times in .*b\.parquet"):
        build_index(data)
    pq.write_table(pa.table({"y": [0], "c": pa.array(MOMENTS[:1])}), tmp_path / "a.parquet")
    assert build_index(data).num_rows == 2, "a date is the moment at which it begins"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: DenseColumn("c", unit="y"), "'y' as unit of dense column 'c'"),  # type: ignore[arg-type]
        (
            lambda: DenseColumn("c", since="May"),
            "since='May' for dense column 'c'. Expected a date or time in ISO 8601",
        ),
        (lambda: IdColumn("c", since="2024-05-01T00:00:00.5"), "whole seconds"),
        (lambda: CsvData("x", label="y", times="c"), "times='c'"),  # type: ignore[arg-type]
        (lambda: CsvData("x", label="y", strings=("c",), times=("c",)), r"columns \['c'\] as times and as strings"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(declare: Any, message: str) -> None:
    with pytest.raises(DataConfigError, match=message):
        declare()
