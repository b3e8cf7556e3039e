"""Programs of a `TPUEmbedding` with sharded tables, compiled by the TPU's own compiler. What they compute, the
conformance suite says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_tests import is_long

ROOT = Path(__file__).parents[3]


@is_long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu: pip install -e '.[tpu]'")
def test_tables_are_updated_where_they_lie() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.stepwise.compiled_process", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    of_slices = json.loads(done.stdout.splitlines()[-1])
    assert len(of_slices) == 3
    for name, of_rules in of_slices.items():
        for programs in of_rules:
            assert programs["look_up"]["flaws"] == programs["update"]["flaws"] == [], name
            update = programs["update"]
            # Rows and slots are given away for the new ones; ids, gradients and rates are the rest.
            assert update["argument_bytes"] - update["shared_bytes"] < 2 << 20
            assert update["temporary_bytes"] < 8 << 20
