"""The file of constants: read back as written, and refused with a sentence where it cannot be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.workers.calibration.record import (
    FORMAT,
    CalibrationRefused,
    Machine,
    read_calibration,
    this_machine,
    write_calibration,
)
from podembed.workers.storage.strict_json import seal
from tests.workers.calibration.constants import CALIBRATION, CORRECTIONS, MACHINE


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    assert read_calibration(path, MACHINE) is None
    for found in (CALIBRATION, replace(CALIBRATION, pods=(CORRECTIONS,))):
        write_calibration(path, found)
        assert read_calibration(path, MACHINE) == found


@pytest.mark.parametrize("change", ["cut", "one byte", "empty", "other JSON"])
def test_a_damaged_file_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    data = path.read_bytes()
    digit = data.index(b"1")
    damaged = {
        "cut": data[:-9],
        "one byte": data[:digit] + b"2" + data[digit + 1 :],
        "empty": b"",
        "other JSON": b'{"format": 1}',
    }
    path.write_bytes(damaged[change])
    with pytest.raises(CalibrationRefused, match="Measure again with podembed calibrate"):
        read_calibration(path, MACHINE)


def test_constants_of_another_machine_or_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    with pytest.raises(CalibrationRefused, match="another machine.*2 x testing"):
        read_calibration(path, Machine(processor="testing", cpus=3))
    write_calibration(path, replace(CALIBRATION, format=0))
    with pytest.raises(CalibrationRefused, match="Found format 0 of .*, of another version"):
        read_calibration(path, MACHINE)


def test_an_older_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    """Its members are not those of today, so it cannot be read as a whole."""
    path = tmp_path / "calibration.json"
    path.write_bytes(seal({"format": 4, "kernels": []}))
    with pytest.raises(CalibrationRefused, match="Found format 4 .* Measure again with podembed calibrate"):
        read_calibration(path, MACHINE)
    path.write_bytes(seal({"format": FORMAT, "kernels": []}))
    with pytest.raises(CalibrationRefused, match="missing or unknown members"):
        read_calibration(path, MACHINE)


def test_constants_of_few_processes_serve_where_more_share_the_machine() -> None:
    alone, crowded = CALIBRATION.kernels
    assert CALIBRATION.kernels_for(1) is alone
    assert CALIBRATION.kernels_for(2) is CALIBRATION.kernels_for(64) is crowded
    assert CALIBRATION.dense_for(1) is CALIBRATION.dense["1"]
    assert CALIBRATION.dense_for(9) is CALIBRATION.dense["2"]


def test_this_machine_is_known() -> None:
    assert this_machine().cpus >= 1
    assert this_machine().processor
