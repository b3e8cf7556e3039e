"""Digest of a bucket: 128 bits that two holders of the same rows agree on, in whatever order they look at them.

The digest is the sum over rows of a hash of (row number, bytes of the row, bytes of its slots). It has two lanes of 64
bits that add without carry between them. A sum can be maintained: subtract a row's old hash, add its new one. It finds
damage and disagreement, not an adversary: whoever can choose rows can construct equal sums. `docs/checkpoint-format.md`
gives the function for other languages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numba
import numpy as np

from podembed.embedding.hashing import finalize

# Odd constants: the golden ratio and the multipliers of the MurmurHash3 finalizer (public domain).
_ROW_A = 0x9E3779B97F4A7C15
_ROW_B = 0xD1B54A32D192ED03
_WORD_A = 0xFF51AFD7ED558CCD
_WORD_B = 0xC4CEB9FE1A85EC53


def bucket_digest(arrays: Sequence[np.ndarray], *, first_row: int, row_stride: int, num_rows: int) -> str:
    """Digest of the first `num_rows` positions of a bucket.

    Args:
      arrays: rows, then slots in their declared order; each `[positions, ...]` of any element type, at least `num_rows`
        positions.
      first_row: row number at position 0, which is the bucket's number.
      row_stride: row numbers between positions, which is the number of buckets.
      num_rows: positions that hold a row of the table; padding behind them does not count.

    Returns:
      32 hexadecimal digits: lane a, then lane b. A bucket without rows has 32 zeros.
    """
    return format_digest(row_hashes(arrays, first_row=first_row, row_stride=row_stride, num_rows=num_rows))


def row_hashes(arrays: Sequence[np.ndarray], *, first_row: int, row_stride: int, num_rows: int) -> np.ndarray:
    """Hash of each row, uint64 `[num_rows, 2]`. Arguments as `bucket_digest`."""
    numbers = np.uint64(first_row) + np.arange(num_rows, dtype=np.uint64) * np.uint64(row_stride)
    state = np.empty((num_rows, 2), np.uint64)
    _start(numbers, state)
    for array in arrays:
        _absorb(_words(array[:num_rows]), state)
    _finish(state)
    return state


def format_digest(hashes: np.ndarray) -> str:
    """Sum of row hashes, uint64 `[rows, 2]`, as 32 hexadecimal digits."""
    lane_a, lane_b = _sums(hashes)
    return f"{int(lane_a):016x}{int(lane_b):016x}"


def _words(array: np.ndarray) -> np.ndarray:
    """Bytes of each row as 64-bit words, uint64 `[rows, words]`; the last word is filled up with zeros."""
    flat = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
    row_bytes = flat.shape[1] * flat.dtype.itemsize
    if row_bytes % 8 == 0 and row_bytes:
        return flat.view(np.uint64)
    padded = np.zeros((len(flat), -(-row_bytes // 8) * 8), np.uint8)
    padded[:, :row_bytes] = flat.view(np.uint8).reshape(len(flat), row_bytes)
    return padded.view(np.uint64)


@numba.njit(cache=True, nogil=True)
def _start(numbers, state):
    for row in range(len(numbers)):
        state[row, 0] = finalize(numbers[row] + np.uint64(_ROW_A))
        state[row, 1] = finalize(numbers[row] + np.uint64(_ROW_B))


@numba.njit(cache=True, nogil=True)
def _absorb(words, state):
    """Feeds the words of one array into each row's state, in place.

    Each word waits for the multiplication of the word before. So four rows go side by side, which keeps the processor
    busy meanwhile.
    """
    in_fours = len(words) - len(words) % 4
    for row in range(0, in_fours, 4):
        a0, a1, a2, a3 = state[row, 0], state[row + 1, 0], state[row + 2, 0], state[row + 3, 0]
        b0, b1, b2, b3 = state[row, 1], state[row + 1, 1], state[row + 2, 1], state[row + 3, 1]
        for at in range(words.shape[1]):
            a0, b0 = _fed(a0, b0, words[row, at])
            a1, b1 = _fed(a1, b1, words[row + 1, at])
            a2, b2 = _fed(a2, b2, words[row + 2, at])
            a3, b3 = _fed(a3, b3, words[row + 3, at])
        _close(state, row, a0, b0, words.shape[1])
        _close(state, row + 1, a1, b1, words.shape[1])
        _close(state, row + 2, a2, b2, words.shape[1])
        _close(state, row + 3, a3, b3, words.shape[1])
    for row in range(in_fours, len(words)):
        a, b = state[row, 0], state[row, 1]
        for at in range(words.shape[1]):
            a, b = _fed(a, b, words[row, at])
        _close(state, row, a, b, words.shape[1])


@numba.njit(cache=True, nogil=True)
def _fed(a, b, word):
    """The two lanes of a row after one more word."""
    a = (a ^ word) * np.uint64(_WORD_A)
    b = (b + word) * np.uint64(_WORD_B)
    return a ^ (a >> np.uint64(32)), b ^ (b >> np.uint64(29))


@numba.njit(cache=True, nogil=True)
def _close(state, row, a, b, num_words):
    """Ends an array of a row. The number of words separates it from the next."""
    state[row, 0] = finalize(a + np.uint64(num_words))
    state[row, 1] = finalize(b + np.uint64(num_words))


@numba.njit(cache=True, nogil=True)
def _finish(state):
    for row in range(len(state)):
        state[row, 0] = finalize(state[row, 0])
        state[row, 1] = finalize(state[row, 1])


@numba.njit(cache=True, nogil=True)
def _sums(hashes):
    """The sum of each lane. numpy takes as long for these columns as all else of a digest does."""
    a = b = np.uint64(0)
    for row in range(len(hashes)):
        a += hashes[row, 0]
        b += hashes[row, 1]
    return a, b


DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Digests(Sequence[str]):
    """The digests of many buckets, each as 32 hexadecimal digits. They are held as bytes: a text of Python takes five
    times as much, and a commit may have a million.
    """

    data: bytes

    @staticmethod
    def of(texts: Iterable[str]) -> Digests:
        return texts if isinstance(texts, Digests) else Digests(bytes.fromhex("".join(texts)))

    def __len__(self) -> int:
        return len(self.data) // DIGEST_BYTES

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        if isinstance(at, slice):
            return tuple(self[one] for one in range(len(self))[at])
        start = range(len(self))[at] * DIGEST_BYTES
        return self.data[start : start + DIGEST_BYTES].hex()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digests):
            return self.data == other.data
        return NotImplemented if not isinstance(other, tuple) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))
