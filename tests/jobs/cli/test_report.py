"""`podembed report`: the file that it writes, and what it refuses with which words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.orchestrator.committed_tables import run_with, two_tables


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_with(tmp_path / "run", two_tables())
    return tmp_path / "run"


def test_a_run_without_measurements_is_reported_and_says_so(podembed, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    code, printed, complained = podembed("report", run, "--out", out)
    assert (code, printed.split(":")[0]) == (0, str(out))
    assert "run: This run has no measurements" in complained
    assert out.read_text().startswith("<!doctype html>")


def test_a_file_that_is_there_stays(podembed, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine")
    code, _, complained = podembed("report", run, "--out", out)
    assert code == 87
    assert f"Found a file at {out}" in complained
    assert out.read_text() == "mine"


def test_a_place_that_cannot_be_written(podembed, run: Path, tmp_path: Path) -> None:
    code, _, complained = podembed("report", run, "--out", tmp_path / "none" / "report.html")
    assert (code, "Found no folder" in complained) == (87, True)
    code, _, complained = podembed("report", run, "--out", "/proc/report.html")
    assert (code, "Found no way to write to /proc" in complained) == (87, True)


def test_no_run(podembed, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    code, _, complained = podembed("report", run, tmp_path / "other", "--out", out)
    assert (code, f"Found no run in {tmp_path / 'other'}" in complained) == (87, True)
    code, _, complained = podembed("report", "--out", out)
    assert (code, "Found no run." in complained) == (87, True)
    assert os.listdir(tmp_path) == ["run"]


def test_without_the_extra(podembed, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, complained = podembed("report", run, "--out", tmp_path / "report.html")
    assert (code, "pip install 'podembed[report]'" in complained) == (87, True)
    assert os.listdir(tmp_path) == ["run"]
