"""Files of the data that the system does not give, or that are no files: refused by name, and nobody waits for them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.workers.data.config import CsvData, ParquetData
from podembed.workers.data.files import locate, open_ranges, read_whole
from podembed.workers.data.input_errors import InputError
from podembed.workers.formats.parquet import parquet_names
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from tests.workers.formats.parquet_sets import write_set

NOBODY = 65534


@contextmanager
def without_rights() -> Iterator[None]:
    """Permissions do not bind root, so it becomes somebody else for a while."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter, unlike those of pytest."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    made.chmod(0o755)
    shutil.rmtree(made)


def declared(folder: Path) -> ParquetData:
    return write_set(folder, [40, 40], rows_per_group=10)


def test_a_file_without_the_right_to_read_says_so(folder: Path) -> None:
    data = declared(folder)
    (folder / "part-001.parquet").chmod(0)
    with (
        without_rights(),
        pytest.raises(
            InputError, match=r"part-001\.parquet, which cannot be read \(Permission denied\).*Give the user"
        ),
    ):
        build_index(data)
    with without_rights(), pytest.raises(InputError, match="Permission denied"):
        parquet_names(str(folder / "part-001.parquet"))
    with without_rights(), pytest.raises(InputError, match="Permission denied"):
        read_whole(str(folder / "part-001.parquet"))


@pytest.mark.parametrize("mode", [0o000, 0o644])
def test_a_folder_that_loses_its_rights_under_a_run_is_a_fault_of_the_data(folder: Path, mode: int) -> None:
    data = declared(folder)
    index = build_index(data)
    reader = InputReader(data, index, training_plan(index, num_lanes=1, batch_size=10, seed=1), [0])
    reader.read(0)
    folder.chmod(mode)
    with without_rights(), pytest.raises(InputError, match=r"part-00\d\.parquet, which cannot be read \(Permission"):
        reader.read(8)
    with without_rights(), pytest.raises(InputError, match=r"cannot be read \(Permission denied\)"):
        build_index(data)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("pattern", ["odd.parquet", "*.parquet"])
def test_what_is_no_plain_file_is_refused_and_not_waited_for(folder: Path, kind: str, pattern: str) -> None:
    declared(folder)
    odd = folder / "odd.parquet"
    listener = socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "socket":
        listener.bind(str(odd))
    elif kind == "device":
        odd.symlink_to("/dev/null")
    else:
        odd.symlink_to(folder)
    for data in (ParquetData(str(folder / pattern), label="label"), CsvData(str(folder / pattern), label="label")):
        if isinstance(data, CsvData) and pattern == "*.parquet":
            continue
        with pytest.raises(
            InputError, match=rf"Found the {kind} .*odd\.parquet as a (file|path) of the data\. Expected"
        ):
            build_index(data)
    if pattern == "odd.parquet" and kind != "socket":
        with pytest.raises(InputError, match=rf"Found the {kind} "):
            open_ranges(str(odd))
    listener.close()


def test_a_vocabulary_is_a_plain_file_too(folder: Path) -> None:
    data = declared(folder)
    os.mkfifo(folder / "words.txt")
    source = replace(data.id_columns["item"], mode="vocabulary", vocabulary=str(folder / "words.txt"))
    with pytest.raises(InputError, match=r"Found the pipe .*words\.txt"):
        build_index(replace(data, features={**data.features, "item": source}))


def test_a_file_as_a_folder_of_the_path_matches_nothing(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(InputError, match="Found no file that matches"):
        locate([str(folder / "file" / "a.parquet")])


@pytest.mark.parametrize("damage", ["cut", "tail", "footer", "empty footer"])
def test_parquet_that_is_damaged_is_told_from_text(folder: Path, damage: str) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1]}), path)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    damaged = {
        "cut": whole[: len(whole) // 2],
        "tail": whole[:-4] + b"XXXX",
        "footer": whole[: -8 - footer] + bytes(footer) + whole[-8:],
        "empty footer": b"PAR1" + bytes(4) + b"PAR1",
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(
        InputError, match=r"a\.parquet, which does not open as Parquet.*Write it again, or leave it out"
    ):
        parquet_names(str(path))
    path.write_bytes(whole)
    assert parquet_names(str(path)) == ["label"]
    path.write_text("label\n1\n")
    assert parquet_names(str(path)) is None


@pytest.mark.parametrize("claimed", [1 << 30, (1 << 32) - 1])
def test_a_footer_that_claims_more_than_there_is_costs_nothing(folder: Path, claimed: int) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1]}), path)
    path.write_bytes(path.read_bytes()[:-8] + claimed.to_bytes(4, "little") + b"PAR1")
    with pytest.raises(InputError, match=r"a\.parquet, which does not open as Parquet.*smaller than the size reported"):
        parquet_names(str(path))


def test_a_footer_of_very_many_bytes_is_refused_before_it_is_read(folder: Path) -> None:
    """A hole of a gigabyte as its footer: Arrow would read it all."""
    path = folder / "part-000.parquet"
    with path.open("wb") as file:
        file.write(b"PAR1")
        file.seek(1 << 30, os.SEEK_CUR)
        file.write((1 << 30).to_bytes(4, "little") + b"PAR1")
    before = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(
        InputError, match=r"part-000\.parquet with a footer of 1,073,741,824 bytes\. Expected at most 134,"
    ):
        build_index(ParquetData(str(path), label="label"))
    assert (pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()) == before
