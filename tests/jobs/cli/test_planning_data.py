"""`podembed plan` with constants of this machine: predicted times, or a sentence that says what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from podembed.workers.calibration.record import this_machine, write_calibration
from podembed.workers.input.index import build_index
from podembed.workers.job.reference import JobReference
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long
from tests.workers.calibration.constants import CALIBRATION


@pytest.fixture
def constants(tmp_path: Path) -> Path:
    path = tmp_path / "constants.json"
    write_calibration(path, replace(CALIBRATION, machine=this_machine()))
    return path


def plan(folder: str, constants: Path, *more: str) -> tuple[int, str, str]:
    job = ["--job", "tests.small_job:small_job", "--set", f"folder={folder}"]
    return run("plan", *job, "--calibration", str(constants), *more)


def test_a_plan_predicts_the_step_of_a_job(small_data: str, constants: Path) -> None:
    code, out, err = plan(small_data, constants, "--hosts", "2")
    assert (code, err) == (0, "")
    for words in (
        "untouched before",
        "part of a step, host 0",
        "dedup",
        "undo log, when full",
        "against the plan",
        "place='device'",
    ):
        assert words in out
    assert "spread evenly" not in out


def test_without_constants_a_plan_says_how_to_get_them(small_data: str, tmp_path: Path) -> None:
    code, out, _ = plan(small_data, tmp_path / "none.json")
    assert code == 0
    assert "podembed calibrate measures this machine" in out
    assert "predicted ms" not in out


def test_damaged_constants_are_refused(small_data: str, constants: Path) -> None:
    constants.write_bytes(constants.read_bytes()[:-5])
    code, _, err = plan(small_data, constants)
    assert code == 87
    assert "Measure again with podembed calibrate" in err


@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=is_long)])
def test_a_damaged_data_file_is_named(small_data: str, constants: Path, tmp_path: Path, is_cut: bool) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(small_data, folder)
    job = JobReference(function="tests.small_job:small_job", arguments={"folder": str(folder)}).resolve()

    (first, *_) = (Path(file.path) for file in build_index(job.resolved_data).files)
    data = first.read_bytes()
    # Where the footer stays, only who reads the rows sees the damage.
    kept = b"" if is_cut else data[4 + len(data) // 2 :]
    first.write_bytes(data[:4] + bytes(len(data) // 2) + kept)
    code, out, err = plan(str(folder), constants, "--hosts", "2")
    assert code == 0, err
    assert first.name in out
    if not is_cut:
        assert err == ""
        assert "the data could not be read" in out
        assert "ids are taken to be spread evenly" in out


SLICES = ("--topology", "4x4", "--accelerator-type", "TPU-V6E")


def test_slices_are_planned_with_and_without_constants(small_data: str, constants: Path, tmp_path: Path) -> None:
    code, out, err = plan(small_data, tmp_path / "none.json", *SLICES)
    assert (code, err) == (0, "")
    assert "1 slice of 4x4 TPU-V6E" in out
    assert "between hosts here" not in out
    code, out, err = plan(small_data, constants, *SLICES)
    assert (code, err) == (0, "")
    assert "between hosts here" in out
    assert "planned for 4 on machines with 1 of them each" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--topology", "4x5", "--accelerator-type", "TPU-V6E"), "Expected one of 1x1, 2x2"),
        (("--topology", "4x4"), "Give it, such as 'TPU-V6E' (--accelerator-type)"),
        (("--slices", "2"), "without a topology"),
        ((*SLICES, "--slices", "0"), "Found --slices 0"),
        ((*SLICES, "--hosts", "8"), "Leave num_hosts (--hosts) out"),
        ((*SLICES, "--slices", "64"), "Use fewer slices (--slices)"),
    ],
)
def test_slices_that_there_are_not(small_data: str, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    code, out, err = plan(small_data, tmp_path / "none.json", *flags)
    assert (code, out) == (87, "")
    assert message in err
