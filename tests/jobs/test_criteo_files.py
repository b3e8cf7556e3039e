"""Which files `--data` names: text, gzip and Parquet told apart by content, and clear words for everything else."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.jobs.criteo import COLUMN_NAMES, criteo
from podembed.jobs.criteo_files import prepare_files
from podembed.jobs.text.criteo import CriteoTextError
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan


def text_lines(count: int, *, num_integers: int = 13) -> list[str]:
    rng = np.random.default_rng(1)
    return [
        "\t".join(
            [
                str(rng.integers(0, 2)),
                *(str(rng.integers(0, 99)) for _ in range(num_integers)),
                *(f"{rng.integers(0, 2**32):08x}" for _ in range(26)),
            ]
        )
        for _ in range(count)
    ]


class Prepared:
    """Calls `prepare_files` and keeps what it said."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "cache"
        self.said: list[str] = []

    def __call__(self, *patterns: Path | str, max_bad_lines: int = 10) -> tuple[list[str], str]:
        return prepare_files(
            [str(pattern) for pattern in patterns],
            cache_folder=self.cache,
            max_bad_lines=max_bad_lines,
            notice=self.said.append,
        )


@pytest.fixture
def prepare(tmp_path: Path) -> Prepared:
    return Prepared(tmp_path)


def write_parquet(path: Path, names: list[str]) -> None:
    pq.write_table(pa.table({name: pa.array([1, 2, 3]) for name in names}), path)


def names_of(writer: str) -> list[str]:
    numbers, fields = COLUMN_NAMES[writer]
    return ["label", *numbers, *fields]


@pytest.mark.parametrize("suffix", ["day_0.txt", "day_0.gz", "no_suffix"])
def test_text_is_known_by_its_content_and_converted_once(prepare: Prepared, tmp_path: Path, suffix: str) -> None:
    content = ("\n".join(text_lines(20)) + "\n").encode()
    path = tmp_path / suffix
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    first = prepare(path)
    assert first[1] == "podembed"
    assert "20 lines in 1 files, 20 kept, 0 malformed" in prepare.said[0]
    job = criteo(data=first[0], columns=first[1], vocabulary_size=50, batch_size=16)
    index = build_index(job.resolved_data)
    assert index.num_rows == 20
    plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=0)
    batch = InputReader(job.resolved_data, index, plan, range(16)).read(0)
    assert all((ragged.values < 50).all() and (ragged.values >= 0).all() for ragged in batch.features.values())
    written = {file: file.stat().st_mtime_ns for file in prepare.cache.rglob("*.parquet")}
    assert prepare(path) == first
    assert {file: file.stat().st_mtime_ns for file in prepare.cache.rglob("*.parquet")} == written


@pytest.mark.parametrize("writer", COLUMN_NAMES)
def test_parquet_is_used_as_it_is(prepare: Prepared, tmp_path: Path, writer: str) -> None:
    write_parquet(tmp_path / "part-0.parquet", [*names_of(writer), "something_else"])
    patterns, columns = prepare(tmp_path / "part-*.parquet")
    assert (patterns, columns) == ([str(tmp_path / "part-*.parquet")], writer)
    assert not prepare.cache.exists()
    assert build_index(criteo(data=patterns, columns=columns).resolved_data).num_rows == 3


def test_parquet_with_other_columns_is_refused_with_both_lists(prepare: Prepared, tmp_path: Path) -> None:
    write_parquet(tmp_path / "clicks.parquet", ["label", "user", "item"])
    with pytest.raises(ConfigurationError) as caught:
        prepare(tmp_path / "clicks.parquet")
    for words in (
        "Found columns label, user, item",
        "label, i0..i12, c0..c25",
        "int_0..int_12, cat_0..cat_25",
        "jobs/criteo.py",
    ):
        assert words in str(caught.value)


def test_a_relative_path_and_the_home_become_absolute(
    prepare: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in other folders."""
    write_parquet(tmp_path / "a b.parquet", names_of("podembed"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare("a b.parquet")[0] == prepare("~/a b.parquet")[0] == [str(tmp_path / "a b.parquet")]


@pytest.mark.parametrize("pattern", ["missing.gz", "missing-*.parquet"])
def test_nothing_there(prepare: Prepared, tmp_path: Path, pattern: str) -> None:
    with pytest.raises(InputError, match=r"Found no file that matches .*missing.* Check the path and the wildcard"):
        prepare(tmp_path / pattern)


def test_one_pattern_of_two_without_files_is_refused(prepare: Prepared, tmp_path: Path) -> None:
    """Training on half of what was asked would go unnoticed."""
    write_parquet(tmp_path / "there.parquet", names_of("podembed"))
    with pytest.raises(InputError, match=r"Found no file that matches .*missing-\*\.parquet"):
        prepare(tmp_path / "there.parquet", tmp_path / "missing-*.parquet")


def test_text_beside_parquet_is_refused(prepare: Prepared, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", names_of("podembed"))
    (tmp_path / "b.txt").write_text("\n".join(text_lines(3)) + "\n")
    with pytest.raises(ConfigurationError, match=r"Found Parquet .*a\.parquet.* and text .*b\.txt"):
        prepare(tmp_path / "a.parquet", tmp_path / "b.txt")
    with pytest.raises(ConfigurationError, match=r"Found Parquet .*a\.parquet.* and text .*b\.txt"):
        prepare(tmp_path / "b.txt", tmp_path / "a.parquet")


def test_a_folder_is_refused(prepare: Prepared, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Found the folder .*Write .*/\*"):
        prepare(tmp_path)


def test_an_empty_file_is_refused(prepare: Prepared, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises((ConfigurationError, CriteoTextError), match=r"empty\.txt|no line"):
        prepare(tmp_path / "empty.txt")


def test_bad_lines_are_named_and_counted_against_the_limit(prepare: Prepared, tmp_path: Path) -> None:
    lines = text_lines(30)
    lines[4] = "not\ta\tline"
    lines[17] = lines[17].replace("\t", " ")
    path = tmp_path / "day.txt"
    path.write_text("\n".join(lines) + "\n")
    prepare(path, max_bad_lines=2)
    assert "30 lines in 1 files, 28 kept, 2 malformed" in prepare.said[0]
    named = [words for words in prepare.said if "put aside" in words]
    assert len(named) == 2
    assert "5" in named[0]
    assert "18" in named[1]
    assert all("day.txt" in words for words in named)
    with pytest.raises(CriteoTextError, match=r"day\.txt"):
        Prepared(tmp_path / "other")(path, max_bad_lines=1)


def test_lines_of_another_width_are_refused(prepare: Prepared, tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("\n".join(text_lines(20, num_integers=14)) + "\n")
    with pytest.raises(CriteoTextError):
        prepare(tmp_path / "wide.txt")
