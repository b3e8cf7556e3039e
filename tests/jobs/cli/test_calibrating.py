"""`podembed calibrate`, from the command to the file."""

from __future__ import annotations

from pathlib import Path

from podembed.workers.calibration.record import read_calibration, this_machine
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long


@is_long
def test_calibrate_measures_prints_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "here" / "constants.json"
    code, out, err = run("calibrate", "--out", str(path))
    assert (code, err) == (0, "")
    found = read_calibration(path, this_machine())
    assert found is not None
    assert found.threads == 1
    for text in ("pool/pooled", "dense step", "loopback", "reading Parquet", str(path)):
        assert text in out
