"""Strings as 64-bit keys, the same on every host and for good; and the hash table of a vocabulary over such keys.

A key is the UTF-8 bytes, eight at a time as little-endian words with zeros behind the last. They are folded with the
mixing function of `embedding.hashing`: key = mix(key xor word), beginning with mix(number of bytes). Different strings
may share a key, with the chance of 64-bit hashes; where that would matter (`find_strings`) the bytes themselves are
compared.
"""

from __future__ import annotations

import numba
import numpy as np

from podembed.embedding.hashing import mix_word

_NO_OFFSET = np.uint64(0)


@numba.njit(nogil=True, cache=True)
def string_keys(text: np.ndarray, offsets: np.ndarray, keys: np.ndarray) -> None:
    """keys[i] = key of the bytes `text[offsets[i]:offsets[i + 1]]`, as int64."""
    for i in range(len(keys)):
        start, stop = np.int64(offsets[i]), np.int64(offsets[i + 1])
        key = mix_word(np.uint64(stop - start), _NO_OFFSET)
        for word_start in range(start, stop, 8):
            word = np.uint64(0)
            for k in range(min(8, stop - word_start)):
                word |= np.uint64(text[word_start + k]) << np.uint64(8 * k)
            key = mix_word(key ^ word, _NO_OFFSET)
        keys[i] = np.int64(key)


def num_hash_slots(num_entries: int) -> int:
    """A power of two with room for every entry twice."""
    return 1 << max(4, (2 * num_entries - 1).bit_length())


@numba.njit(nogil=True, cache=True)
def insert_keys(keys: np.ndarray, hash_slots: np.ndarray) -> None:
    """Puts every entry into a hash table of `num_hash_slots` int64, all -1 at first. Equal keys get a slot each, in
    their order.
    """
    last = np.uint64(len(hash_slots) - 1)
    for entry in range(len(keys)):
        slot = mix_word(np.uint64(keys[entry]), _NO_OFFSET) & last
        while hash_slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & last
        hash_slots[slot] = entry


@numba.njit(nogil=True, cache=True)
def find_integers(wanted: np.ndarray, keys: np.ndarray, hash_slots: np.ndarray, found: np.ndarray) -> None:
    """found[i] = the first entry whose key is wanted[i], or -1."""
    last = np.uint64(len(hash_slots) - 1)
    for i in range(len(wanted)):
        slot = mix_word(np.uint64(wanted[i]), _NO_OFFSET) & last
        while hash_slots[slot] >= 0 and keys[hash_slots[slot]] != wanted[i]:
            slot = (slot + np.uint64(1)) & last
        found[i] = hash_slots[slot]


@numba.njit(nogil=True, cache=True)
def find_strings(
    text: np.ndarray,
    offsets: np.ndarray,
    wanted: np.ndarray,
    entry_text: np.ndarray,
    entry_offsets: np.ndarray,
    keys: np.ndarray,
    hash_slots: np.ndarray,
    found: np.ndarray,
) -> None:
    """found[i] = the first entry with the bytes of string i, whose key is wanted[i], or -1."""
    last = np.uint64(len(hash_slots) - 1)
    for i in range(len(wanted)):
        slot = mix_word(np.uint64(wanted[i]), _NO_OFFSET) & last
        found[i] = -1
        while hash_slots[slot] >= 0:
            entry = hash_slots[slot]
            if keys[entry] == wanted[i] and _is_equal(text, offsets, i, entry_text, entry_offsets, entry):
                found[i] = entry
                break
            slot = (slot + np.uint64(1)) & last


@numba.njit(nogil=True, cache=True)
def _is_equal(
    left: np.ndarray, left_offsets: np.ndarray, i: int, right: np.ndarray, right_offsets: np.ndarray, k: int
) -> bool:
    start, other = np.int64(left_offsets[i]), np.int64(right_offsets[k])
    length = np.int64(left_offsets[i + 1]) - start
    if np.int64(right_offsets[k + 1]) - other != length:
        return False
    for at in range(length):  # noqa: SIM110 - numba compiles no generators
        if left[start + at] != right[other + at]:
            return False
    return True
