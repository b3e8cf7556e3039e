"""Tests that are left out of `make test` to keep it short: long ones, examples of property tests, and cases of large
grids. `make long-tests` runs them, and so do `make faults` and `make elastic` for the folders that they name.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

# conftest.py skips what has this mark unless the variable is set.
VARIABLE = "PODEMBED_LONG_TESTS"
is_long = pytest.mark.long
# `make test` sets it. Then a grid of so many cases runs a sixth of them. Each commit draws others.
DRAWS = "PODEMBED_DRAW_CASES"
LARGE_GRID = 8
SHARE = 6
# Those that read the code, where each case is a file or a page, and those that `make long-tests` leaves out.
WHOLE = ("tests/architecture/", "tests/faults/")


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


def draw_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of large grids, for the long tests. Leaves out all but a sixth of them if the variable says so,
    for a commit always the same.
    """
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        # Others do not run in `make test`, or not in this process, so they must not take the place of those that do.
        if not item.get_closest_marker("ray") and (VARIABLE in os.environ or not item.get_closest_marker("long")):
            grids.setdefault(_grid(item), []).append(item)
    commit, left_out = _commit() if DRAWS in os.environ else "", set[pytest.Item]()
    for grid, cases in grids.items():
        if len(cases) < LARGE_GRID or grid.startswith(WHOLE):
            continue
        for item in cases:
            item.add_marker(pytest.mark.grid)
        # By chance and not every third one, which might always be of one kind.
        cases.sort(key=lambda item: zlib.crc32(f"{commit} {item.nodeid}".encode()))
        left_out.update(cases[-(-len(cases) // SHARE) :])
    if DRAWS in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _grid(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _commit() -> str:
    """That of the checkout; empty without git."""
    asked = ("git", "rev-parse", "HEAD")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
