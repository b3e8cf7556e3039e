"""The first steps of a call say what each table is asked for."""

from __future__ import annotations

from pathlib import Path

from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import TablesMeasured
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.workers.job.reference import JobReference
from tests.training import fit_job


class Listening(SilentReporter):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def test_a_run_says_what_its_first_steps_asked_of_each_table(small_data: str, tmp_path: Path) -> None:
    reference = JobReference(function="tests.small_job:small_job", arguments={"folder": small_data})
    heard = Listening()
    result = fit_job(reference, tmp_path, max_steps=4, reporter=heard)
    (event,) = [event for event in heard.events if isinstance(event, TablesMeasured)]
    assert event.tables == result.tables
    job = reference.resolve()
    assert [table.name for table in result.tables] == list(job.table_names)
    for table in result.tables:
        assert 0 < table.distinct_share <= 1
        assert 0 < table.hot_share <= 1
        assert table.ids_per_sample > 0
        assert table.sent_bytes == 0  # there is nobody to send to
        assert table.step_s > 0
