"""Data files of a store that fails, answers late or gives too little; the store is fsspec's own in memory, with
faults.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from typing import ClassVar
from unittest.mock import patch

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from podembed.jobs.text.blocks import blocks_of_lines
from podembed.workers.data import files
from podembed.workers.data.files import RangedFile, file_version, locate, open_ranges, read_whole
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.storage.retry import RetryPolicy
from podembed.workers.storage.storage_errors import StoreUnavailable
from tests.workers.formats.parquet_sets import check_rows, declaration, table_of


class FlakyFileSystem(MemoryFileSystem):
    """Every request fails as often as `failures` says before it is answered; ranges come short by `missing_bytes`."""

    protocol = "flaky"
    failures = 0
    missing_bytes = 0
    asked: ClassVar[dict[str, int]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    def unstrip_protocol(self, name):
        return f"flaky://{self._strip_protocol(name)[1:]}"

    def _fail(self, path: str) -> None:
        self.asked[path] = asked = self.asked.get(path, 0) + 1
        if asked % (self.failures + 1):
            raise OSError("503 Slow Down") if asked % 2 else ConnectionResetError("reset by peer")

    def ls(self, path, detail=True, **kwargs):
        self._fail(path)
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path, **kwargs):
        self._fail(path)
        return super().info(path, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._fail(path)
        return MemoryFileSystem().cat_file(path, start=start, end=end)[: -self.missing_bytes or None]


@pytest.fixture(autouse=True)
def flaky() -> Iterator[type[FlakyFileSystem]]:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.failures = FlakyFileSystem.missing_bytes = 0
    FlakyFileSystem.asked.clear()
    memory = MemoryFileSystem()
    for part in range(3):
        buffer = io.BytesIO()
        pq.write_table(table_of(range(part * 10, part * 10 + 10)), buffer, row_group_size=4)
        memory.pipe(f"/flaky/part-{part}.parquet", buffer.getvalue())
    with patch.object(files, "DATA_RETRIES", RetryPolicy(max_attempts=4, first_wait_s=0.001, max_wait_s=0.002)):
        yield FlakyFileSystem
    memory.rm("/flaky", recursive=True)


def test_a_store_that_fails_now_and_then_is_asked_again(flaky: type[FlakyFileSystem]) -> None:
    flaky.failures = 2
    data = declaration("flaky://flaky/part-*.parquet")
    index = build_index(data)
    assert index.num_rows == 30
    plan = training_plan(index, num_lanes=2, batch_size=6, seed=0)
    reader = InputReader(data, index, plan, range(2))
    seen = []
    for step in range(plan.steps_per_epoch):
        batch = reader.read(step)
        check_rows(batch)
        seen += batch.sample_ids[batch.sample_ids >= 0].tolist()
    assert sorted(seen) == list(range(30))


def test_text_is_asked_for_again_too(flaky: type[FlakyFileSystem]) -> None:
    flaky.failures = 2
    MemoryFileSystem().pipe("/flaky/lines.txt", b"one\ntwo\n")
    assert list(blocks_of_lines("flaky://flaky/lines.txt", start=4)) == [b"two\n"]
    flaky.failures = 10**9
    with pytest.raises(StoreUnavailable, match=r"flaky/lines.txt"):
        list(blocks_of_lines("flaky://flaky/lines.txt"))


def test_a_store_that_keeps_failing_is_named(flaky: type[FlakyFileSystem]) -> None:
    flaky.failures = 10**9
    with pytest.raises(StoreUnavailable, match=r"flaky/part-0.parquet"):
        file_version("flaky://flaky/part-0.parquet")
    for pattern in ("part-0.parquet", "*.parquet", "**"):
        with pytest.raises(StoreUnavailable):
            build_index(declaration(f"flaky://flaky/{pattern}"))


def test_a_range_that_comes_short_is_refused(flaky: type[FlakyFileSystem]) -> None:
    flaky.missing_bytes = 3
    with pytest.raises(InputError, match=r"bytes at 0 of flaky://flaky/part-0.parquet. Expected"):
        read_whole("flaky://flaky/part-0.parquet")
    with pytest.raises(InputError, match="part-0.parquet"):
        build_index(declaration("flaky://flaky/part-0.parquet"))


def test_ranges_are_read_as_from_a_file() -> None:
    whole = MemoryFileSystem().cat_file("/flaky/part-1.parquet")
    file = RangedFile("flaky://flaky/part-1.parquet")
    assert file.read() == whole
    assert (file.seek(-4, io.SEEK_END), file.read(10), file.read(10)) == (len(whole) - 4, b"PAR1", b"")
    file.seek(2)
    file.seek(2, io.SEEK_CUR)
    assert (file.tell(), file.read(3), file.tell()) == (4, whole[4:7], 7)
    assert pq.read_table(pa.PythonFile(RangedFile("flaky://flaky/part-1.parquet"), mode="r")).num_rows == 10


def test_files_that_are_not_there_are_named(tmp_path) -> None:
    for path in ("flaky://flaky/none", str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(InputError, match=rf"Found (no file|the folder) {path}"):
            open_ranges(path)
    with pytest.raises(InputError, match=r"no file that matches flaky://flaky/\*.csv"):
        locate(["flaky://flaky/*.csv"])


@pytest.mark.parametrize("root", ["memory://locate", "{folder}"])
def test_patterns_match_segment_by_segment(tmp_path, root: str) -> None:
    root = root.format(folder=tmp_path)
    filesystem, location = fsspec.url_to_fs(root)
    names = ("day_0/a.csv", "day_0/b.csv", "day_1/a.csv", "day_1/sub/a.csv", "other/a.csv", "day_2")
    for name in names:
        filesystem.makedirs(f"{location}/{name.rpartition('/')[0]}", exist_ok=True)
        filesystem.pipe(f"{location}/{name}", b"x")

    def found(*patterns: str) -> list[str]:
        return [path.partition(f"{location}/")[2] for path in locate([f"{root}/{pattern}" for pattern in patterns])]

    assert found("day_*/*.csv") == ["day_0/a.csv", "day_0/b.csv", "day_1/a.csv"]
    assert found("day_[12]/?.csv", "other/a.csv", "day_1/a.csv") == ["day_1/a.csv", "other/a.csv"]
    assert found("**/a.csv") == ["day_0/a.csv", "day_1/a.csv", "day_1/sub/a.csv", "other/a.csv"]
    assert found("day_2*") == ["day_2"]
    for pattern in ("day_3/*", "day_2/*", "*/none", "[x"):
        with pytest.raises(InputError, match="no file that matches"):
            found(pattern)
    with pytest.raises(InputError, match="Found the folder"):
        found("oth*")


@pytest.mark.parametrize("root", ["memory://hidden", "{folder}", "{folder}/.cache/_data"])
def test_hidden_and_unfinished_files_are_no_data(tmp_path, root: str, caplog) -> None:
    """What Spark, Arrow, Jupyter and copying programs leave beside data, and patterns that name it."""
    root = root.format(folder=tmp_path)
    filesystem, location = fsspec.url_to_fs(root)
    data = ("a/_day=1/part-0.csv", "a/part-1.csv")
    others = ("a/.part-2.csv", "a/_tmp-3.csv", "a/.ipynb_checkpoints/part-1.csv", "a/_temporary/0/part-4.csv")
    for name in (*data, *others):
        filesystem.makedirs(f"{location}/{name.rpartition('/')[0]}", exist_ok=True)
        filesystem.pipe(f"{location}/{name}", b"x")

    def found(pattern: str) -> list[str]:
        caplog.clear()
        return [path.partition(f"{location}/")[2] for path in locate([f"{root}/{pattern}"])]

    assert found("**/*.csv") == list(data)
    assert re.search(r"Left out 4 of 6 files .* A pattern that writes this character takes them", caplog.text)
    assert found("*/*.csv") == ["a/part-1.csv"]
    assert "Left out 2 of 3 files" in caplog.text
    # What is written with the character, in any part, is meant.
    assert found("a/_temporary/*/*.csv") == ["a/_temporary/0/part-4.csv"]
    assert found("*/.part*.csv") == ["a/.part-2.csv"]
    assert found("**/_tmp*") == ["a/_tmp-3.csv"]
    assert found("a/.part-2.csv") == ["a/.part-2.csv"]
    assert not caplog.records
    with pytest.raises(InputError, match=r"no file that matches .* but 1 whose names begin with _ or \., such as"):
        found("a/?tmp*")


def test_files_are_found_by_names_that_look_like_patterns_or_chains(tmp_path) -> None:
    for name in ("a[1].csv", "a1.csv", "b::c.csv", "d::1/e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for pattern, names in (
        ("a[1].csv", ["a[1].csv"]),
        ("a[12].csv", ["a1.csv"]),
        ("b::c.csv", ["b::c.csv"]),
        ("d::1/*.csv", ["d::1/e.csv"]),
    ):
        paths = locate([f"{tmp_path}/{pattern}"])
        assert paths == [str(tmp_path / name) for name in names]
        assert file_version(paths[0])[0] == 1
        assert read_whole(paths[0]) == b"x"


@pytest.mark.parametrize(("url", "extra"), [("gs://bucket/a.csv", "gcs"), ("gcs://b/a", "gcs"), ("s3://b/*.npy", "s3")])
def test_a_store_whose_extra_is_not_installed_names_it(url: str, extra: str) -> None:
    with (
        patch.object(fsspec, "url_to_fs", side_effect=ImportError("Please install it")),
        pytest.raises(InputError, match=rf"Found {url[:2]}.*Install podembed\[{extra}\]"),
    ):
        locate([url])


def test_a_url_of_no_known_kind_is_named() -> None:
    with pytest.raises(InputError, match=r"Found nosuch://a, which nothing .*Correct the URL"):
        read_whole("nosuch://a")


def test_files_that_ray_unpacks_anew_are_told_by_their_content(tmp_path) -> None:
    """As on a machine that joins a job: equal bytes with a time of its own."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    for place, stays in ((folder, True), (tmp_path, False)):
        file = place / "clicks.parquet"
        file.write_bytes(b"clicks")
        os.utime(file, (1, 1))
        before = file_version(str(file))
        os.utime(file, (2, 2))
        assert (file_version(str(file)) == before) == stays
        file.write_bytes(b"CLICKS")
        assert file_version(str(file)) != before


def test_a_file_behind_a_link_that_is_rewritten_is_another_file(tmp_path) -> None:
    (tmp_path / "data").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    before = file_version(str(tmp_path / "link"))
    os.utime(tmp_path / "data", (1, 1))
    assert file_version(str(tmp_path / "link")) != before
