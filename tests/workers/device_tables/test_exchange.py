"""Rows and gradients of sharded tables between devices, in `shards_process`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.long_tests import long_case

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=["few", long_case("all")])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.device_tables.shards_process", request.param],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_id_gets_its_row_and_every_row_its_gradients(found: dict[str, Any]) -> None:
    """Beside numpy in float64, whatever the ids: equal ones, all of one device, none, a single one."""
    for case, by_room in found.items():
        for room, kinds in by_room.items():
            for kind, one in kinds.items():
                where = f"{case}, room {room}, {kind}"
                assert one["vectors"] == 0, where
                assert one["rows"] < 2e-6, where
                assert one["accumulator"] < 2e-6, where
                assert one["changed"], where


def test_rooms_that_are_too_small_make_more_rounds_of_the_same_bytes(found: dict[str, Any]) -> None:
    for case, by_room in found.items():
        large, usual, small = (by_room[room] for room in ("all", "usual", "least"))
        assert {one["rounds"] for one in large.values()} == {1}, case
        assert small["mixed"]["rounds"] > 1, case
        for kind, one in large.items():
            assert one["digest"] == usual[kind]["digest"] == small[kind]["digest"], (case, kind)
    eight = found["8 parts, 256 buckets"]["usual"]
    # Equal ids travel once, and ids that are spread fit. Of 125 rows of one owner 48 have room.
    assert {kind: one["rounds"] for kind, one in eight.items()} == {
        "mixed": 1,
        "equal": 1,
        "one part": 3,
        "none": 1,
        "one id": 1,
        "skewed": 1,
    }
