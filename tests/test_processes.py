"""Programs that tests start say what went wrong with them."""

from __future__ import annotations

import psutil
import pytest

from tests.processes import said_by


def test_a_program_that_stands_still_is_ended_and_says_where_it_was() -> None:
    with pytest.raises(AssertionError, match=r"(?s)within 3 s:.*most recent call first.*\.py"):
        said_by("http.server", "0", "--bind", "127.0.0.1", timeout_s=3.0)
    assert not [child for child in psutil.Process().children() if "http.server" in child.cmdline()]


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(AssertionError, match="(?s)http.server ended with 2:.*invalid int value: 'none'"):
        said_by("http.server", "none", timeout_s=60.0)
