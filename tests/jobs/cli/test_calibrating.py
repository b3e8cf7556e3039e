"""`podembed calibrate`, from the command to the file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from podembed.workers.calibration.record import read_calibration, this_machine
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long
from tests.processes import wait_for

PATIENCE_S = 60.0


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


def test_sigterm_ends_the_processes_that_measure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "podembed", "calibrate", "--out", str(tmp_path / "constants.json")]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    try:
        found = psutil.Process(program.pid)
        wait_for("measuring processes", lambda: bool(found.children()), seconds=PATIENCE_S)
        children = found.children()
        program.terminate()
        _, err = program.communicate(timeout=PATIENCE_S)
        assert (program.returncode, err.count("SIGTERM")) == (128 + signal.SIGTERM, 1), err
        assert [child for child in children if child.is_running()] == []
    finally:
        program.kill()
        program.wait()
        psutil.wait_procs(children, timeout=PATIENCE_S)
