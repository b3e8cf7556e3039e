"""Files written past the page cache: the same bytes as ordinary ones, and ordinary writes where the disk refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from podembed.workers.storage import direct
from podembed.workers.storage.direct import BLOCK_BYTES, SMALLEST_BYTES, DirectWrites
from podembed.workers.storage.local import LocalFiles, Unsynced

# Every filesystem takes it and does nothing with it, so blocks go the way of direct writes.
ANY_FLAG = os.O_NONBLOCK


def write(writes: DirectWrites, path: Path, buffers: list[bytes], *, is_hurried: bool = False) -> bytes:
    with open(path, "xb", buffering=0) as file:
        writes.write(file.fileno(), buffers, is_hurried=is_hurried)
    return path.read_bytes()


def is_in_cache(path: Path) -> bool:
    """Whether the kernel has the first page of a file in its memory. Asking reads nothing: a read would bring it in."""
    found = ctypes.c_ubyte()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ) as page:
        start = ctypes.c_void_p(np.frombuffer(page, np.uint8).ctypes.data)
        if ctypes.CDLL(None, use_errno=True).mincore(start, ctypes.c_size_t(1), ctypes.byref(found)):
            raise OSError(ctypes.get_errno(), "mincore")
    return bool(found.value & 1)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where other programs have theirs: `make test` keeps files of tests in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def needs_a_disk(folder: Path) -> None:
    """Skips where files lie in memory, as in a tmpfs: that takes any block, and drops none."""
    try:
        handle = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("the filesystem of temporary files refuses direct writes")
    try:
        os.pwrite(handle, b"x", 0)
    except OSError:
        return
    finally:
        os.close(handle)
    pytest.skip("the filesystem of temporary files lies in memory")


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


@pytest.mark.parametrize(
    "sizes",
    [
        [SMALLEST_BYTES],
        [SMALLEST_BYTES, 4],
        [BLOCK_BYTES - 1, 1, 5 * BLOCK_BYTES, 4],
        [3, 4 * BLOCK_BYTES, 0, 4093],
        [1] * 5 + [SMALLEST_BYTES + 4095],
    ],
)
def test_a_file_has_the_bytes_of_its_buffers(tmp_path, sizes):
    buffers = [some_bytes(size) for size in sizes]
    assert write(DirectWrites(), tmp_path / "file", buffers) == b"".join(buffers)


def test_arrays_are_written_as_well_as_bytes(tmp_path):
    values = np.arange(1 << 19, dtype=np.float32)
    assert write(DirectWrites(), tmp_path / "file", [values.reshape(-1).view(np.uint8).data]) == values.tobytes()


def test_a_thread_writes_file_after_file_with_one_buffer(tmp_path):
    writes = DirectWrites()
    for number, size in enumerate([SMALLEST_BYTES + 777, SMALLEST_BYTES, 2 * SMALLEST_BYTES - 1]):
        assert write(writes, tmp_path / str(number), [some_bytes(size)]) == some_bytes(size)


def test_large_files_go_past_the_page_cache_and_small_ones_through_it(tmp_path):
    needs_a_disk(tmp_path)
    writes = DirectWrites()
    for name, size in [("large", SMALLEST_BYTES), ("small", SMALLEST_BYTES - 1)]:
        with open(tmp_path / name, "xb", buffering=0) as file:
            writes.write(file.fileno(), [bytes(size)])
    assert not is_in_cache(tmp_path / "large")
    assert is_in_cache(tmp_path / "small")


def test_hurried_files_go_through_the_cache_once_the_disk_was_slow(tmp_path):
    needs_a_disk(tmp_path)
    writes = DirectWrites(least_bytes_s=float("inf"))
    found = []
    for name, is_hurried in [("first", True), ("hurried", True), ("calm", False)]:
        with open(tmp_path / name, "xb", buffering=0) as file:
            writes.write(file.fileno(), [bytes(SMALLEST_BYTES)], is_hurried=is_hurried)
        found.append(is_in_cache(tmp_path / name))
    assert found == [False, True, False]


def test_a_refused_block_becomes_an_ordinary_write_and_is_not_tried_again(tmp_path, monkeypatch):
    needs_a_disk(tmp_path)
    # Blocks that no disk takes: the kernel itself refuses them.
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK_BYTES + 1)
    monkeypatch.setattr(direct, "_ALIGNED_BYTES", 1)
    writes, data = DirectWrites(), some_bytes(SMALLEST_BYTES + 5)
    assert write(writes, tmp_path / "refused", [data]) == data
    assert not writes.is_possible
    assert write(writes, tmp_path / "next", [data]) == data


def test_a_disk_that_takes_less_at_a_time_gets_the_rest(tmp_path, monkeypatch):
    taken, real = [], os.pwrite

    def pwrite(handle: int, block: memoryview, at: int) -> int:
        taken.append(real(handle, block[: 3 * 4096], at))
        return taken[-1]

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = some_bytes(SMALLEST_BYTES + 5)
    assert write(DirectWrites(flag=ANY_FLAG), tmp_path / "file", [data]) == data
    assert max(taken) <= 3 * 4096


def test_a_disk_that_takes_part_of_a_block_gets_an_ordinary_write(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, block, at: real(handle, block, at) if at < BLOCK_BYTES else 512)
    writes, data = DirectWrites(flag=ANY_FLAG), some_bytes(SMALLEST_BYTES + 5)
    assert write(writes, tmp_path / "file", [data]) == data
    assert not writes.is_possible


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def pwrite(handle: int, block: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    files = LocalFiles(str(tmp_path), direct=DirectWrites(flag=ANY_FLAG))
    with pytest.raises(OSError, match="No space left"):
        files.write_new("a/file", [some_bytes(SMALLEST_BYTES)])
    assert files.sizes("") == {}


def test_a_platform_without_direct_writes_writes_as_ever(tmp_path):
    data = some_bytes(SMALLEST_BYTES)
    assert write(DirectWrites(flag=0), tmp_path / "file", [data]) == data


def test_other_errors_are_raised_and_leave_no_file(tmp_path):
    files = LocalFiles(str(tmp_path))
    with pytest.raises(BufferError):
        files.write_new("a/file", [some_bytes(SMALLEST_BYTES), memoryview(bytes(8))[::2]])
    assert files.sizes("") == {}


def test_local_files_are_direct_and_durable_in_batches(tmp_path):
    files, unsynced = LocalFiles(str(tmp_path)), Unsynced()
    data = some_bytes(SMALLEST_BYTES + 4)
    with files.sync_later(unsynced):
        files.write_new("a/file", [data])
    assert unsynced.size_bytes == len(data)
    files.sync(unsynced)
    assert (tmp_path / "a" / "file").read_bytes() == data


def test_it_rests_after_each_block_and_counts_no_rest_as_slowness(tmp_path: Path) -> None:
    """A disk is slow by what it takes itself: a hurried write would avoid it otherwise."""
    now, rested = [0.0], []

    def rest(num_bytes: int) -> None:
        now[0] += 1000.0
        rested.append(num_bytes)

    writes = DirectWrites(flag=ANY_FLAG, now_s=lambda: now[0])
    data = some_bytes(SMALLEST_BYTES + BLOCK_BYTES // 2)
    with open(tmp_path / "a", "xb", buffering=0) as file:
        writes.write(file.fileno(), [data], rest=rest)
    assert (tmp_path / "a").read_bytes() == data
    assert rested == [BLOCK_BYTES] * (SMALLEST_BYTES // BLOCK_BYTES)
    assert not writes._is_slow()
