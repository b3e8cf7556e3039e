"""Tests that are left out of `make test` to keep it short. `make long-tests` runs them, and so do `make faults` and
`make elastic` for the folders that they name.
"""

from __future__ import annotations

import os

import pytest

# conftest.py skips what has this mark unless the variable is set.
VARIABLE = "PODEMBED_LONG_TESTS"
is_long = pytest.mark.long


def skip_long(items: list[pytest.Item]) -> None:
    """Marks long tests as skipped where nobody wants them."""
    if VARIABLE not in os.environ:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long; make long-tests runs it"))
