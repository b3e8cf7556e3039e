"""docs/faults.md says of each fault what the record of the campaigns says, and names every fault of the list.

The record keeps the last round of each schedule and place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults_page import PAGE, RECORD, by_fault, campaign, cell, keep, read_record, write_record, written
from podembed.jobs.chaos.schedule import RunShape
from podembed.jobs.chaos.selection import curated

ONE = {
    "label": "F3.1",
    "title": "killed 2⁶³ times",
    "injected": 2,
    "detect_s": 0.5,
    "recover_s": None,
    "bytes_equal": True,
    "samples_once": None,
    "is_met": True,
    "why": [],
    "day": "2026-11-22",
    "code": "50a9836",
}


def record(*rounds: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    return {"Ray": {one["label"]: one for one in rounds}, "one process": {}}


def test_the_page_says_what_the_record_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text, read_record(RECORD)), "run: python benchmarks/faults_page.py"


def test_every_fault_of_the_list_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [one.number for one in curated(RunShape()) if f"`chaos --only {one.number}`" not in text] == []


def test_a_cell_tells_what_is_missing_and_what_is_not_met() -> None:
    assert cell("F3", record()) == "Ray: not run; one process: not run"
    assert cell("F3", record(ONE)).startswith("Ray: 1 of 3 met, 2 not run; ")
    failed = ONE | {"label": "F3.2", "is_met": False}
    assert cell("F3", record(ONE, failed)).startswith("Ray: 1 of 3 met, F3.2 not met, 1 not run; ")
    assert cell("F34", record(ONE)) == "its tests"


def test_sums_of_a_fault_count_what_was_asked() -> None:
    other = ONE | {"label": "F3.2", "detect_s": 2.0, "recover_s": 7.0, "bytes_equal": False, "is_met": False}
    assert by_fault([ONE, other]) == [("F3", "1 of 2", "4", "2.0 s", "7.0 s", "1 of 2", "-")]
    assert "| F3 | 1 of 2 | 4 | 2.0 s | 7.0 s | 1 of 2 | - |" in campaign(record(ONE, other))
    assert "F3.2 is not met: killed" in campaign(record(ONE, other))


def test_the_record_is_written_in_order_with_a_line_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_record(path) == {"Ray": {}, "one process": {}}
    found = record(*(ONE | {"label": label} for label in ("seed 17", "seed 9", "F10.1", "F2.2", "F2.10")))
    write_record(path, found)
    assert [*read_record(path)["Ray"]] == ["F2.2", "F2.10", "F10.1", "seed 9", "seed 17"]
    assert read_record(path) == found
    before = path.read_text(encoding="utf-8").splitlines()
    found["Ray"]["F10.1"] = ONE | {"label": "F10.1", "is_met": False, "why": ["O4: late"]}
    write_record(path, found)
    after = path.read_text(encoding="utf-8").splitlines()
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    path.write_text(json.dumps({"format_version": 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="Found format 1"):
        read_record(path)


def test_a_campaign_takes_the_place_of_what_was_said_of_the_same_schedules() -> None:
    said = {
        "label": "F3.1",
        "title": "killed",
        "struck": 2,
        "detect_s": 0.52,
        "recover_s": None,
        "oracles": {"O1": True, "exit code": False},
        "complaints": ["O4: late"],
    }
    found = record(ONE, ONE | {"label": "F4.1"})
    keep(found, {"in_process": False, "rounds": [said]}, day="2026-11-29", code="0")
    assert [*found["Ray"]] == ["F3.1", "F4.1"]
    assert found["Ray"]["F3.1"] == ONE | {
        "title": "killed",
        "is_met": False,
        "why": ["O4: late"],
        "day": "2026-11-29",
        "code": "0",
    }
    keep(found, {"in_process": True, "rounds": [said]}, day="", code="0")
    assert [*found["one process"]] == ["F3.1"]
