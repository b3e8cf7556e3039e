"""Sharded tables and awkward ids, in `adversaries_process`: what hosts make of them, to the order of sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_tests import is_long

ROOT = Path(__file__).parents[3]


# In make test, test_exchange.py has such ids without runs, and test_runs.py runs without them.
@is_long
@pytest.mark.parametrize("kinds", ["few", "all"])
def test_no_id_is_lost_whatever_the_ids(kinds: str, tmp_path: Path) -> None:
    """Equal ones, those of one device, a sample of 10,000, none, and a batch smaller than the number of devices."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.device_tables.adversaries_process", str(tmp_path), kinds],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == (1 if kinds == "few" else 5)
    for kind, one in found.items():
        # After ten steps, each of which adds in another order.
        assert one["losses"] < 1e-5, kind
        assert one["arrays"] < 1e-5, kind
        assert one["rounds"] >= 1, kind
    if kinds == "all":
        # Messages have room for four times the spread of chance, and these ids have no spread.
        assert found["all ids on one device"]["rounds"] > 1
