"""Histories of users: what a row holds, and that nothing held out is trained."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from podembed import InputError
from podembed.jobs.papers.histories import HistoriesSpec, write_histories

# User 1 rates 11 to 15 in the order of time, user 2 two movies.
LINES = ["userId,movieId,rating,timestamp", "1,12,4,20", "1,11,4,10", "1,13,1,30", "1,15,4,50", "1,14,4,40"]
OTHERS = ["2,21,4,10", "2,22,4,20"]


def written(folder: Path, lines: list[str], spec: HistoriesSpec) -> tuple[list[dict[str, object]], ...]:
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    rows = write_histories(folder, folder, spec)
    assert (rows.num_users, rows.num_items) == (2, 7)
    return tuple(pq.read_table(rows.folder / f"{name}-00000.parquet").to_pylist() for name in ("train", "eval"))


def test_a_row_has_the_last_items_and_the_next_of_each(tmp_path: Path) -> None:
    train, held_out = written(tmp_path, LINES + OTHERS, HistoriesSpec(length=3, candidates=2))
    # Items are numbered in the order of their ids; the last one is of the evaluation alone.
    expected = {"history": [0, 1, 2], "times": [10, 20, 30], "positives": [1, 2, 3], "item": [3]}
    assert train == [{"label": 1, "user": 0} | expected]
    (row,) = held_out
    assert (row["history"], row["times"], row["positives"]) == ([1, 2, 3], [20, 30, 40], [2, 3, 4])
    assert row["item"][0] == 4  # type: ignore[index]
    assert sorted(row["item"][1:]) == [5, 6]  # type: ignore[index]


def test_short_histories_and_few_items(tmp_path: Path) -> None:
    train, held_out = written(tmp_path, LINES[:4] + OTHERS + ["1,30,1,60", "1,31,1,61"], HistoriesSpec(candidates=2))
    assert [len(row["history"]) for row in (*train, *held_out)] == [3, 4]  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 items that user 0 did not rate. Expected 99"):
        write_histories(tmp_path, tmp_path, HistoriesSpec())
    (tmp_path / "ratings.csv").write_text("\n".join([LINES[0], *OTHERS]) + "\n")
    with pytest.raises(InputError, match="no user with three ratings"):
        write_histories(tmp_path, tmp_path, HistoriesSpec(candidates=0))
