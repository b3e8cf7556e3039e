"""`DirectWrites`: large files go to a local disk past the kernel's page cache.

A save that goes through the page cache costs the kernel a new page for every 4 KiB. That takes more processor time than
all that podembed does with these bytes. It also fills memory that tables want. With `O_DIRECT` the disk takes the
bytes from a small buffer of the thread that writes.

The disk and the filesystem decide whether that works, so a file is opened as ever and the flag is set afterwards. What
refuses it gets ordinary writes from then on.

A direct write waits for the disk, while the page cache takes bytes at once. So while training waits for a save, a disk
that showed itself slow gets ordinary writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from podembed.workers.storage.transfer import Buffer, write_all

# A multiple of every block size in use. Small enough for a core's own cache, and larger ones were not faster.
BLOCK_BYTES = 256 << 10
_ALIGNED_BYTES = 4096
# Below, what is rounded up to whole blocks is too much of the file.
SMALLEST_BYTES = 1 << 20
# What the page cache takes of one thread: a slower disk would make training wait for longer.
CACHE_BYTES_S = 400e6
# Share of the newest file in the rate.
_NEWEST = 0.25
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class DirectWrites:
    """Direct writes to one filesystem. Mutated: whether it takes direct writes, and how fast; by any thread.

    Args:
      flag: `O_DIRECT` of the platform; 0 where it has none.
      least_bytes_s: a disk that takes fewer is not used directly for hurried writes.
    """

    def __init__(
        self,
        *,
        flag: int = getattr(os, "O_DIRECT", 0),
        least_bytes_s: float = CACHE_BYTES_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flag = flag
        self._now_s = now_s
        self._least_bytes_s = least_bytes_s
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._num_writers = 0
        self._bytes_s: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether no file has been refused so far."""
        return self._flag != 0

    def write(
        self,
        handle: int,
        buffers: Sequence[Buffer],
        *,
        is_hurried: bool = False,
        rest: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Writes all buffers to an empty file, and leaves it as long as they are. Not durable yet.

        Args:
          handle: descriptor of a file that is open for writing, at its start.
          is_hurried: whether somebody waits for the bytes to be taken, and not for them to be durable.
          rest: called after each block with its bytes, and may pause.
        """
        size_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size_bytes < SMALLEST_BYTES or not self.is_possible or (is_hurried and self._is_slow()):
            write_all(handle, buffers)
            return
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | self._flag)
            self._write_blocks(handle, buffers, size_bytes, rest)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            # Some filesystems take the flag and refuse the first block.
            self._flag = 0
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            write_all(handle, buffers)

    def _write_blocks(
        self, handle: int, buffers: Sequence[Buffer], size_bytes: int, rest: Callable[[int], None]
    ) -> None:
        with self._lock:
            self._num_writers += 1
            num_writers = self._num_writers
        began_s, rested_s = self._now_s(), 0.0
        try:
            block, filled, at = self._block(), 0, 0
            for buffer in buffers:
                left = np.frombuffer(buffer, np.uint8)
                while len(left):
                    count = min(len(left), len(block) - filled)
                    # Other threads go on meanwhile, as they would not beside a copy between memoryviews.
                    np.copyto(block[filled : filled + count], left[:count])
                    left, filled = left[count:], filled + count
                    if filled == len(block):
                        _write_at(handle, block, at)
                        rested_s += self._rest(rest, filled)
                        at, filled = at + filled, 0
            if filled:
                whole = -(-filled // _ALIGNED_BYTES) * _ALIGNED_BYTES
                block[filled:whole] = 0
                _write_at(handle, block[:whole], at)
                os.ftruncate(handle, size_bytes)
        finally:
            with self._lock:
                self._num_writers -= 1
        # Writers share the disk.
        bytes_s = num_writers * size_bytes / max(self._now_s() - began_s - rested_s, 1e-6)
        before = self._bytes_s
        self._bytes_s = bytes_s if before is None else (1 - _NEWEST) * before + _NEWEST * bytes_s

    def _rest(self, rest: Callable[[int], None], num_bytes: int) -> float:
        """Seconds of it. Meanwhile the other writers have the disk for themselves."""
        began_s = self._now_s()
        with self._lock:
            self._num_writers -= 1
        try:
            rest(num_bytes)
        finally:
            with self._lock:
                self._num_writers += 1
        return self._now_s() - began_s

    def _is_slow(self) -> bool:
        bytes_s = self._bytes_s
        return bytes_s is not None and bytes_s < self._least_bytes_s

    def _block(self) -> np.ndarray:
        """uint8 `[BLOCK_BYTES]` of this thread, from the start of a page."""
        if not hasattr(self._thread, "block"):
            self._thread.block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
        return self._thread.block


def _write_at(handle: int, block: np.ndarray, at: int) -> None:
    """Writes whole blocks. A rest that the disk did not take begins at a block again."""
    while len(block):
        written = os.pwrite(handle, block.data, at)
        whole = written - written % _ALIGNED_BYTES
        if not whole:
            # An ordinary write takes the rest, or says what is wrong.
            raise OSError(errno.EINVAL, "the disk took less than a block")
        block, at = block[whole:], at + whole
