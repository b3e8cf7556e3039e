"""Malformed rows of a whole run: left out, counted once, listed in its folder, and left out again at every replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.jobs.outcomes import exit_code
from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import EXIT_CONFIGURATION, JobFailed
from podembed.orchestrator.run.dead_letters import FOLDER, DeadLetters
from podembed.tools.fsck.check import check_run
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.data.input_errors import InputError
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import DocumentRefused
from tests.small_job import small_job, write_small_data
from tests.training import fit_job

BAD_ROWS = (3, 250, 251, 599)


def spoil(path: Path, rows: tuple[int, ...]) -> None:
    """Nulls in the label column of a file of 300 rows."""
    table = pq.read_table(path)
    labels = table.column("label").to_pylist()
    for row in rows:
        labels[row] = None
    at = table.column_names.index("label")
    pq.write_table(table.set_column(at, "label", pa.array(labels, pa.float32())), path, row_group_size=90)


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    write_small_data(tmp_path / "data", num_rows=600)
    files = sorted((tmp_path / "data").glob("*.parquet"))
    counts = [pq.read_metadata(path).num_rows for path in files]
    first = 0
    for path, count in zip(files, counts, strict=True):
        spoil(path, tuple(row - first for row in BAD_ROWS if first <= row < first + count))
        first += count
    return small_job(folder=str(tmp_path / "data"), audit=False)


def train(job: JobConfig, path: Path, *, max_bad_rows: int, max_steps: int | None = None) -> Result:
    return fit_job(
        replace(job, data=replace(job.data, max_bad_rows=max_bad_rows)),
        path,
        checkpoint_config=CheckpointConfig(every_steps=3),
        max_steps=max_steps,
    )


def listed(path: Path) -> list[dict[str, object]]:
    files = sorted((path / "run" / FOLDER).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_malformed_rows_are_left_out_and_listed_once(job: JobConfig, tmp_path: Path) -> None:
    result = train(job, tmp_path, max_bad_rows=len(BAD_ROWS))
    assert result.num_samples == (600 - len(BAD_ROWS)) * job.num_epochs
    rows = listed(tmp_path)
    assert len(rows) == len({(row["file"], row["row"]) for row in rows}) == len(BAD_ROWS)
    assert {row["column"] for row in rows} == {"label"}
    assert {row["found"] for row in rows} == {"null"}
    assert check_run(result.path).is_intact


def test_a_run_in_two_parts_is_the_run_in_one(job: JobConfig, tmp_path: Path) -> None:
    whole = train(job, tmp_path / "whole", max_bad_rows=9)
    first = train(job, tmp_path / "cut", max_bad_rows=9, max_steps=4)
    second = train(job, tmp_path / "cut", max_bad_rows=9)
    assert first.losses | second.losses == whole.losses
    key = lambda row: (row["file"], row["row"])  # noqa: E731
    assert sorted(listed(tmp_path / "cut"), key=key) == sorted(listed(tmp_path / "whole"), key=key)


def test_one_row_too_many_ends_the_run(job: JobConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"more than 2 malformed rows: null in .*part-.*column 'label'"):
        train(job, tmp_path / "some", max_bad_rows=2)


def test_a_run_of_nothing_but_malformed_rows_ends_with_the_code_of_data(
    job: JobConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "data").glob("*.parquet"):
        spoil(path, tuple(range(pq.read_metadata(path).num_rows)))

    def command() -> int:
        train(job, tmp_path, max_bad_rows=10_000)
        return 0

    assert exit_code(command) == EXIT_CONFIGURATION
    assert "all 600 rows of the training data malformed, listed in" in capsys.readouterr().err
    assert len(listed(tmp_path)) == 600
    assert not Store(str(tmp_path / "run")).children("commit")


def bad_row(row: int) -> BadRow:
    return BadRow(file="part-0.parquet", row=row, column="user", found="id -1", reason="Ids are 0 to 9.")


def test_letters_are_counted_over_hosts_windows_and_drivers(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    letters = DeadLetters(store, max_bad_rows=4)
    assert letters.add([bad_row(1), bad_row(2), bad_row(1)], generation=1) == 2
    assert letters.add([bad_row(2)], generation=1) == 0
    assert letters.add([bad_row(3)], generation=1) == 1
    again = DeadLetters(store, max_bad_rows=4)
    assert again.num_rows == 3
    assert again.add([bad_row(3), bad_row(4)], generation=2) == 1
    with pytest.raises(JobFailed, match=rf"more than 4 malformed rows: .*row 7.* listed in {tmp_path}/{FOLDER}"):
        again.add([bad_row(7)], generation=2)
    assert sorted(store.children(FOLDER)) == [
        "g00000001-00000.jsonl",
        "g00000001-00001.jsonl",
        "g00000002-00000.jsonl",
        "g00000002-00001.jsonl",
    ]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"file": "a"}', b'{"file": "a", "row": "1"}'])
def test_damaged_letters_are_named(tmp_path: Path, line: bytes) -> None:
    store = Store(str(tmp_path))
    store.write_new(f"{FOLDER}/g00000001-00000.jsonl", [line])
    with pytest.raises(DocumentRefused, match="g00000001-00000.jsonl"):
        DeadLetters(store, max_bad_rows=1)
