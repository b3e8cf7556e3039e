"""docs/faults.md says of each fault what the record of the campaigns says, and names every fault of the list."""

from __future__ import annotations

from dataclasses import replace

from podembed.jobs.chaos.record import Place, Seen, by_fault, read_record
from podembed.jobs.chaos.schedule import RunShape
from podembed.jobs.chaos.selection import curated
from tests.jobs.chaos.faults_page import PAGE, RECORD, campaign, cell, written

ONE = Seen(
    label="F3.1",
    title="killed",
    injected=2,
    detect_s=0.5,
    recover_s=None,
    bytes_equal=True,
    samples_once=None,
    is_met=True,
    why=(),
    day="2026-11-22",
    code="50a9836",
)


def record(*rounds: Seen) -> dict[Place, dict[str, Seen]]:
    return {"Ray": {one.label: one for one in rounds}, "one process": {}}


def test_the_page_says_what_the_record_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(text, read_record(RECORD)), "run: python -m tests.jobs.chaos.faults_page"


def test_every_fault_of_the_list_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [one.number for one in curated(RunShape()) if f"`chaos --only {one.number}`" not in text] == []


def test_a_cell_tells_what_is_missing_and_what_is_not_met() -> None:
    assert cell("F3", record()) == "Ray: not run; one process: not run"
    assert cell("F3", record(ONE)).startswith("Ray: 1 of 3 met, 2 not run; ")
    failed = replace(ONE, label="F3.2", is_met=False)
    assert cell("F3", record(ONE, failed)).startswith("Ray: 1 of 3 met, F3.2 not met, 1 not run; ")
    assert cell("F34", record(ONE)) == "its tests"


def test_sums_of_a_fault_count_what_was_asked() -> None:
    other = replace(ONE, label="F3.2", detect_s=2.0, recover_s=7.0, bytes_equal=False, is_met=False)
    (total,) = by_fault([ONE, other])
    assert total.cells() == ("F3", "1 of 2", "4", "2.0 s", "7.0 s", "1 of 2", "-")
    assert "| F3 | 1 of 2 | 4 | 2.0 s | 7.0 s | 1 of 2 | - |" in campaign(record(ONE, other))
    assert "F3.2 is not met: killed" in campaign(record(ONE, other))
