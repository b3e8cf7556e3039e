"""Numbers as people read them."""

from __future__ import annotations

import pytest

from podembed.orchestrator.api.text import format_bytes, format_duration, format_rate


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (3 << 29, "1.5 GiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_rates() -> None:
    assert (format_rate(1234.4), format_rate(12_345_678)) == ("1,234", "12.3M")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (200, "3:20"),
        (5025, "1:23:45"),
        (47 * 3600, "47:00:00"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
