"""The key map: which row of its bucket a key has. Kernels over lines of one cache line each.

A bucket has a run of lines. A line holds up to six keys (int64 0 to 5), their rows within the bucket (uint16 24 to 29),
how many there are (uint16 30), and how many keys passed it by since it was full (uint16 31). A key lies in its home
line, which its hash says, or in one of the next lines of its bucket. A search ends at the first line that no key
passed. So any 64-bit number may be a key, and removal leaves no marks behind.

The map is derived from the columns of a table and never saved. Whoever changes this file counts up `_MAP_FORM` in
`kernels.vocabulary`.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.hashing import mix_word
from podembed.embedding.kernels.row_vectors import inlined, jit

KEYS_PER_LINE = 6
WORDS = 8
MOST_ROWS = 65_535
"""Of a bucket, since rows are counted in 16 bits."""
_ROWS, _COUNT, _PASSED = 24, 30, 31
# Share of the seats that are taken when all rows are. A search looks at 1.12 lines then.
_LOAD = 0.75
_NO_OFFSET = np.uint64(0)
_8, _32, _SEATS = np.uint64(8), np.uint64(32), np.uint64(KEYS_PER_LINE)


def lines_per_bucket(num_rows: int) -> int:
    """Lines for so many keys."""
    return max(1, int(-(-num_rows // (KEYS_PER_LINE * _LOAD))))


def new_lines(num_buckets: int, per_bucket: int) -> np.ndarray:
    """int64 `[num_buckets * per_bucket, WORDS]`, empty, each line in one cache line."""
    size = num_buckets * per_bucket * WORDS
    memory = np.zeros(size + WORDS, np.int64)
    start = -memory.ctypes.data // 8 % WORDS
    return memory[start : start + size].reshape(-1, WORDS)


def keys_in(lines: np.ndarray) -> np.ndarray:
    """int64, all keys that a map has, rising."""
    counts = lines.view(np.uint16)[:, _COUNT]
    return np.sort(lines[:, :KEYS_PER_LINE][np.arange(KEYS_PER_LINE) < counts[:, None]])


@inlined
def hash_of(key):
    """uint64; the low bits say the bucket, the high half the home line."""
    return mix_word(np.uint64(key), _NO_OFFSET)


@inlined
def home_line(hashed, per_bucket):
    """The line of a bucket in which a key lies, if there was room."""
    return np.int64(((hashed >> _32) * np.uint64(per_bucket)) >> _32)


@inlined
def _after(at, per_bucket):
    """The line behind one, of the same bucket."""
    return at + 1 if at + 1 < per_bucket else np.int64(0)


@inlined
def find_key(lines, small, first, per_bucket, hashed, key):
    """The row of a key in its bucket, or -1.

    Args:
      lines, small: `new_lines`, and the same memory as uint16 `[n, 32]`.
      first: first line of the bucket.
    """
    at = home_line(hashed, per_bucket)
    for _ in range(per_bucket):
        line = first + at
        # All seats without a branch, since which one it is cannot be predicted. Of those that are not taken any more,
        # which come last, one may have the same key.
        found = np.int64(KEYS_PER_LINE)
        for back in range(KEYS_PER_LINE):
            seat = KEYS_PER_LINE - 1 - back
            found = seat if lines[line, seat] == key else found
        if found < small[line, _COUNT]:
            return np.int64(small[line, _ROWS + found])
        if not small[line, _PASSED]:
            break
        at += 1
        if at == per_bucket:
            at = 0
    return np.int64(-1)


@inlined
def insert_key(lines, small, first, per_bucket, hashed, key, row):
    """Adds a key that the map does not have. There must be room.

    It lies in its home line. If that is full, another key gives way, since one that lies there was named less recently.
    """
    at = home_line(hashed, per_bucket)
    while small[first + at, _COUNT] == KEYS_PER_LINE:
        line, seat = first + at, np.int64((hashed >> _8) % _SEATS)
        small[line, _PASSED] += 1
        key, lines[line, seat] = lines[line, seat], key
        row, small[line, _ROWS + seat] = np.int64(small[line, _ROWS + seat]), row
        at = _after(at, per_bucket)
    line = first + at
    seat = np.int64(small[line, _COUNT])
    lines[line, seat] = key
    small[line, _ROWS + seat] = row
    small[line, _COUNT] = seat + 1


@inlined
def remove_key(lines, small, first, per_bucket, hashed, key):
    """Takes out a key that the map has. Keys that passed its line by move up, so that keys lie as near to their home
    lines as if it had never been there.
    """
    at, seat = home_line(hashed, per_bucket), np.int64(-1)
    while seat < 0:
        line = first + at
        for one in range(np.int64(small[line, _COUNT])):
            if lines[line, one] == key:
                seat = np.int64(one)
        if seat < 0:
            small[line, _PASSED] -= 1
            at = _after(at, per_bucket)
    line = first + at
    while small[line, _PASSED]:
        # The nearest key that passed this line takes the seat, and leaves one.
        distance, other_at, found = np.int64(0), at, np.int64(-1)
        while found < 0:
            small[first + other_at, _PASSED] -= 1
            distance += 1
            other_at = _after(other_at, per_bucket)
            for one in range(np.int64(small[first + other_at, _COUNT])):
                past_home = other_at - home_line(hash_of(lines[first + other_at, one]), per_bucket)
                past_home += per_bucket if past_home < 0 else 0
                found = np.int64(one) if past_home >= distance else found
        lines[line, seat] = lines[first + other_at, found]
        small[line, _ROWS + seat] = small[first + other_at, _ROWS + found]
        at, seat, line = other_at, found, first + other_at
    last = np.int64(small[line, _COUNT]) - 1
    lines[line, seat] = lines[line, last]
    small[line, _ROWS + seat] = small[line, _ROWS + last]
    small[line, _COUNT] = last


@jit
def rebuild_map(lines, small, per_bucket, keys, is_held, rows_per_bucket, place):
    """Empties a bucket of the map and adds the keys of its rows.

    Args:
      keys: int64 `[num_rows]`, of all rows held here.
      is_held: uint32 `[num_rows]`, not 0 where the row has a key.
      place: of the bucket among those held here.
    """
    first = place * per_bucket
    lines[first : first + per_bucket] = 0
    for position in range(rows_per_bucket):
        row = place * rows_per_bucket + position
        if is_held[row]:
            insert_key(lines, small, first, per_bucket, hash_of(keys[row]), keys[row], position)


@jit
def find_rows(lines, small, per_bucket, num_buckets, keys, out):
    """The row of each key, its position in its bucket times `num_buckets` plus the bucket; `-1 - bucket` of a key that
    has none.

    Args:
      lines, small: of all buckets of a table, as `find_key` takes them.
      num_buckets: a power of two.
      keys: int64 `[n]`.
      out: int64 `[n]`.
    """
    for i in range(keys.shape[0]):
        hashed = hash_of(keys[i])
        bucket = np.int64(hashed & np.uint64(num_buckets - 1))
        position = find_key(lines, small, bucket * per_bucket, per_bucket, hashed, keys[i])
        out[i] = -1 - bucket if position < 0 else position * num_buckets + bucket
