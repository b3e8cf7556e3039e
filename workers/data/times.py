"""Dates, timestamps, times of day and durations as numbers: whole ones for ids, float32 for dense columns.

The number is (moment − origin) / unit. Arithmetic is in whole seconds and whole fractions of them, so nothing is
rounded before the last division. Ids are exact (rounded down), and a dense number is the nearest float32. A moment with
a time zone is the moment it names, one without a zone counts as UTC; midnights and Mondays are those of UTC.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute

# Its functions are made when it is imported, so type checkers do not know them.
pc: Any = pyarrow.compute

Unit = Literal["ns", "us", "ms", "s", "m", "h", "d"]

DAY_S = 86_400
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": DAY_S}
_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Whole seconds from an origin beyond which a time is refused: what is subtracted from twice as many stays in 64 bits.
_MOST_SECONDS = 2**61
# The first of January 1970 was a Thursday.
_PERIODS = {"midnight": (DAY_S, 0), "monday": (7 * DAY_S, 3 * DAY_S)}
# Times of a day in ISO 8601 that end with a zone; a date alone has none.
_WITH_ZONE = r"\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:?\d\d)?)$"


def origin_problem(since: str) -> str | None:
    """What is wrong with an origin, None if nothing is."""
    try:
        is_whole = since in _PERIODS or datetime.fromisoformat(since).microsecond == 0
    except ValueError:
        is_whole = False
    return (
        None
        if is_whole
        else "a date or time in ISO 8601 with whole seconds, such as '2024-01-01', or 'midnight' or 'monday'"
    )


def is_moment(kind: pa.DataType) -> bool:
    """Whether a column holds dates or timestamps."""
    return pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column holds dates, timestamps, times of day or durations."""
    return is_moment(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)


def words_of(kind: pa.DataType) -> str:
    """What such a column holds, in a word. Dates and timestamps become the same numbers, whatever their resolution."""
    return "times" if is_moment(kind) else "durations"


@dataclass(frozen=True, slots=True)
class TimeScale:
    """How times become numbers.

    Attributes:
      unit: None stands for days of dates and timestamps, and for seconds of times of day and durations.
      since: the origin: a date or time in ISO 8601, by default 1970-01-01. `midnight` for the time since the day began,
        `monday` for that since the week began. Of dates and timestamps alone.
    """

    unit: Unit | None = None
    since: str | None = None

    def accepts(self, kind: pa.DataType) -> bool:
        """Whether a column of that type becomes numbers."""
        return is_moment(kind) or (is_time(kind) and self.since is None)

    def whole(self, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Whole numbers of units, rounded down, int64, and a mask of those that int64 cannot hold; 0 for nulls."""
        seconds, rest, a_second = self._parts(column)
        unit = self._unit_of(column.type)
        units = _A_SECOND.get(unit, 1)
        limit = min(np.iinfo(np.int64).max // units - 1, _MOST_SECONDS)
        is_beyond = (seconds > limit) | (seconds < -limit)
        if unit in _SECONDS:
            return seconds // _SECONDS[unit], is_beyond
        return np.where(is_beyond, 0, seconds) * units + _floored(rest, units, a_second), is_beyond

    def numbers(self, column: pa.Array) -> np.ndarray:
        """float64 of units with their fractions; 0 for nulls."""
        seconds, rest, a_second = self._parts(column)
        unit = self._unit_of(column.type)
        if unit in _SECONDS:
            whole, over = np.divmod(seconds, _SECONDS[unit])
            return whole + (over + rest / a_second) / _SECONDS[unit]
        return seconds * float(_A_SECOND[unit]) + rest * (_A_SECOND[unit] / a_second)

    def _unit_of(self, kind: pa.DataType) -> Unit:
        return self.unit or ("d" if is_moment(kind) else "s")

    def _parts(self, column: pa.Array) -> tuple[np.ndarray, np.ndarray, int]:
        """Whole seconds since the origin and what is left, in how many parts of a second."""
        kind = column.type
        stored = pa.int32() if kind.bit_width == 32 else pa.int64()
        raw = column.view(stored).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if pa.types.is_date32(kind):
            seconds, rest, a_second = raw * DAY_S, np.zeros(len(raw), np.int64), 1
        else:
            a_second = 10**3 if pa.types.is_date64(kind) else _A_SECOND[kind.unit]
            seconds, rest = np.divmod(raw, a_second)
        if self.since in _PERIODS:
            period, shift = _PERIODS[self.since]
            seconds = (seconds % period + shift) % period
        elif self.since is not None:
            seconds = np.clip(seconds, -2 * _MOST_SECONDS, 2 * _MOST_SECONDS) - _origin_s(self.since)
        return seconds, rest, a_second


def shown(value: pa.Scalar) -> str:
    """A value as text. Of a time or zone that Python does not have, the number that the file holds."""
    try:
        return str(value)
    except (OverflowError, ValueError):
        number = cast(Any, value).value
        return f"{value.type} of {number}" + (" since 1970-01-01" if is_moment(value.type) else "")


def parse_times(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Text in ISO 8601 as timestamps in microseconds UTC; nulls stay.

    Raises:
      ArrowInvalid: one is something else, or finer than a microsecond.
    """
    has_zone = pc.match_substring_regex(texts, _WITH_ZONE)
    none = pa.scalar(None, texts.type)
    zoned = pc.if_else(has_zone, texts, none).cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us"))
    plain = pc.if_else(has_zone, none, texts).cast(pa.timestamp("us"))
    return pc.coalesce(zoned, plain)


def _floored(rest: np.ndarray, units: int, a_second: int) -> np.ndarray:
    """`rest` parts of a second in whole units, of which there are `units` a second. One of the two numbers divides the
    other.
    """
    return rest * (units // a_second) if units >= a_second else rest // (a_second // units)


def _origin_s(since: str) -> int:
    """Seconds from 1970 to an origin; without a zone it is UTC."""
    moment = datetime.fromisoformat(since)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp())
