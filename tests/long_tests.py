"""Tests that are left out of `make test` to keep it short: long ones, and examples of property tests. `make long-tests`
runs them, and so do `make faults` and `make elastic` for the folders that they name. What is left out stands beside
each test, so `make test` runs the same cases each time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

# conftest.py skips what has this mark unless the variable is set.
VARIABLE = "PODEMBED_LONG_TESTS"
is_long = pytest.mark.long


def long_case(*values: Any, id: str | None = None) -> Any:
    """Values of the arguments of a parametrized test that only the long tests have; `make test` has others of their
    kind.
    """
    return pytest.param(*values, marks=is_long, id=id)


def examples(many: int) -> int:
    """How many examples a property test draws: in long tests all that it names, in `make test` a third of them."""
    return many if VARIABLE in os.environ else max(many // 3, min(many, 4))


def skip_long(items: list[pytest.Item]) -> None:
    """Marks long tests as skipped where nobody wants them."""
    if VARIABLE not in os.environ:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long; make long-tests runs it"))
