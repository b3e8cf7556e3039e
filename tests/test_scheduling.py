"""Files that share a cluster run in one process, and the others beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test(number{fixture}):
    with open({told!r}, "a") as file:
        file.write("{name} " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""
CONFTEST = """
import pytest
from tests.scheduling import pytest_xdist_make_scheduler

@pytest.fixture
def ray_cluster():
    pass
"""


def test_files_that_share_a_cluster_run_in_one_process(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, fixture in (("first", ", ray_cluster"), ("other", ""), ("second", ", ray_cluster")):
        text = TEST.format(name=name, fixture=fixture, told=str(told))
        (tmp_path / f"test_{name}.py").write_text(text)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist", "loadscope", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=True,
    )
    ran = [line.split() for line in told.read_text().splitlines()]
    assert len(ran) == 9
    (shared,) = {worker for name, worker in ran if name in ("first", "second")}
    (other,) = {worker for name, worker in ran if name == "other"}
    assert shared != other
