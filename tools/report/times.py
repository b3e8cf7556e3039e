"""Moments as text, in UTC: a report is read elsewhere than where it was made."""

from __future__ import annotations

from datetime import UTC, datetime


def date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")


def date_and_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
