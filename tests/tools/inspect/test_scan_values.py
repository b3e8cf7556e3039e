"""NaN and infinity in commits whose bytes are good."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from podembed.orchestrator.run.reference import open_commit
from podembed.tools.inspect.scan_values import scan_values
from tests.jobs.cli.test_main import run
from tests.orchestrator.committed_tables import commit_tables, create_run, two_tables


def test_rows_that_are_not_finite_are_counted_and_named(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    commit_tables(store, lease, 10, tables)
    assert scan_values(open_commit(str(tmp_path / "run"))) == ()
    users = tables["users"].arrays
    users["rows"][[36, 3, 17], [0, 1, 2]] = [np.nan, np.inf, -np.inf]
    users["accumulator"][:7] = np.nan
    dense = {
        "w": np.array([1, np.nan, np.inf], np.float32),
        "half": np.array([np.nan], ml_dtypes.bfloat16),
        "count": np.array(2**31 - 1, np.int32),
        "good": np.zeros(3, np.float32),
    }
    manifest = commit_tables(store, lease, 20, tables, dense=dense)
    assert [finding.describe() for finding in scan_values(open_commit(str(tmp_path / "run")))] == [
        "table 'users', rows: 3 of 37 rows not finite (row 3, 17, 36)",
        "table 'users', accumulator: 7 of 37 rows not finite (row 0, 1, 2, 3, 4 ...)",
        "dense 'w': 2 of 3 elements not finite",
        "dense 'half': 1 of 1 elements not finite",
    ]
    code, out, _ = run("fsck", str(tmp_path / "run"), "--values")
    assert (code, "No damage found" in out, "accumulator: 7 of 37 rows" in out) == (0, True, True)
    code, out, _ = run("fsck", str(tmp_path / "run"), "--values", "--commit", manifest.parent or "")
    assert (code, "Values of s000000010-g00000001: all finite" in out) == (0, True)
