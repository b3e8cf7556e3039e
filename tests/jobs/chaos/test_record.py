"""The record of what was seen keeps the last round of each schedule and place, and is read back as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podembed.jobs.chaos.record import Seen, keep, read_record
from podembed.workers.storage.strict_json import DocumentRefused

ONE = Seen(
    label="F10.1",
    title="2⁶³ frozen",
    injected=1,
    detect_s=1.5,
    recover_s=None,
    bytes_equal=None,
    samples_once=True,
    is_met=False,
    why=("O4: late",),
    day="2026-11-22",
    code="50a9836",
)


def test_what_was_kept_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_record(path) == {"Ray": {}, "one process": {}}
    rounds = [replace(ONE, label=label) for label in ("seed 17", "seed 9", "F10.1", "F2.2", "F2.10")]
    for one in rounds:
        keep(path, "Ray", one)
    keep(path, "one process", ONE)
    found = read_record(path)
    assert [*found["Ray"]] == ["F2.2", "F2.10", "F10.1", "seed 9", "seed 17"]
    assert found["Ray"]["F10.1"] == ONE
    assert found["one process"] == {"F10.1": ONE}


def test_a_later_round_takes_the_place_of_an_earlier_one_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    keep(path, "Ray", replace(ONE, label="F1.1"))
    keep(path, "Ray", ONE)
    before = path.read_text(encoding="utf-8").splitlines()
    keep(path, "Ray", replace(ONE, is_met=True, why=()))
    after = path.read_text(encoding="utf-8").splitlines()
    assert read_record(path)["Ray"]["F10.1"].is_met
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(DocumentRefused):
        read_record(path)
    path.write_text('{"format_version": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match="Found format 1"):
        read_record(path)
