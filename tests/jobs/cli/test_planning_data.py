"""`podembed plan` with the data of a job: what a step asks of the tables, or what keeps that from being known."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from podembed.workers.input.index import build_index
from podembed.workers.job.reference import JobReference
from tests.jobs.cli.test_main import run
from tests.long_tests import is_long


def plan(folder: str, *more: str) -> tuple[int, str, str]:
    return run("plan", "--job", "tests.small_job:small_job", "--set", f"folder={folder}", *more)


def test_a_plan_counts_what_a_step_asks_of_the_tables(small_data: str) -> None:
    code, out, err = plan(small_data, "--hosts", "2")
    assert (code, err) == (0, "")
    for words in ("ids a sample", "and sends, a step", "Gbit/s", "undo log, when full", "memory of the fullest host"):
        assert words in out
    assert "spread evenly" not in out


@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=is_long)])
def test_a_damaged_data_file_is_named(small_data: str, tmp_path: Path, is_cut: bool) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(small_data, folder)
    job = JobReference(function="tests.small_job:small_job", arguments={"folder": str(folder)}).resolve()

    (first, *_) = (Path(file.path) for file in build_index(job.resolved_data).files)
    data = first.read_bytes()
    # Where the footer stays, only who reads the rows sees the damage.
    kept = b"" if is_cut else data[4 + len(data) // 2 :]
    first.write_bytes(data[:4] + bytes(len(data) // 2) + kept)
    code, out, err = plan(str(folder), "--hosts", "2")
    assert code == 0, err
    assert first.name in out
    assert "the data could not be read" in out
    assert "ids are taken to be spread evenly" in out


SLICES = ("--topology", "4x4", "--accelerator-type", "TPU-V6E")


def test_slices_are_planned(small_data: str) -> None:
    code, out, err = plan(small_data, *SLICES)
    assert (code, err) == (0, "")
    # A host for each of the slice's four machines.
    assert [line.split()[0] for line in out.splitlines() if re.match(r"  \d+ +[\d.]+ [KMG]?i?B ", line)] == list("0123")
    assert "memory of the fullest host" in out


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
def test_slices_that_there_are_not(small_data: str, flags: tuple[str, ...], message: str) -> None:
    code, out, err = plan(small_data, *flags)
    assert (code, out) == (87, "")
    assert message in err
