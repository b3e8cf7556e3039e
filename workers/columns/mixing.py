"""`mix64`: one fixed 64-bit mixing function for the input side.

Hashed ids and the shuffle of an epoch must come out the same on every host, in every process and after every upgrade of
numpy, whose generators promise no such thing. So both are built on this bijection, written out here: the finalizer of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). Nothing here is meant to
resist an adversary.
"""

from __future__ import annotations

import numba
import numpy as np

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def mix64(values: np.ndarray, *, salt: int = 0) -> np.ndarray:
    """Mixes integers so that every output bit depends on every input bit.

    Args:
      values: any shape, an integer dtype; 64-bit values are taken bit for bit, so -1 and 2**64 - 1 mix alike.
      salt: any Python integer; different salts give unrelated mixes.

    Returns:
      uint64 of the same shape. For one salt, different inputs give different outputs.
    """
    offset = np.uint64(combine(salt) if salt else 0)
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64)
        mixed += _GOLDEN_GAMMA
        mixed ^= offset
        mixed ^= mixed >> np.uint64(30)
        mixed *= _FIRST_FACTOR
        mixed ^= mixed >> np.uint64(27)
        mixed *= _SECOND_FACTOR
        mixed ^= mixed >> np.uint64(31)
    return mixed


@numba.njit(nogil=True, cache=True, inline="always")
def mix_word(value: np.uint64, offset: np.uint64) -> np.uint64:
    """`mix64` of one value in a compiled loop; `offset` is `combine(salt)`, or 0 without a salt."""
    mixed = (value + _GOLDEN_GAMMA) ^ offset
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


def combine(*parts: int) -> int:
    """Folds integers, in their order, into one unsigned 64-bit seed."""
    seed = 0
    for part in parts:
        word = np.array([(seed ^ part) & 0xFFFFFFFFFFFFFFFF], np.uint64)
        seed = int(mix64(word)[0])
    return seed


def permutation(count: int, *, seed: int) -> np.ndarray:
    """A shuffled `arange(count)`, int64, that depends on the two arguments alone.

    It is the order that sorts the mixed positions. They are a bijection of the positions, so there are no ties and
    every sort algorithm gives the same order.
    """
    order = np.empty(count, np.int64)
    _sort_mixed(np.uint64(combine(seed) if seed else 0), order)
    return order


@numba.njit(nogil=True, cache=True)
def _sort_mixed(offset: np.uint64, order: np.ndarray) -> None:
    """Writes the order that sorts `mix_word` of the positions: by their first bits into about as many buckets as there
    are positions, then by insertion within each. Mixed bits are evenly spread, so a bucket has few.
    """
    count = len(order)
    num_bits = 1
    while num_bits < 24 and (1 << num_bits) < count:
        num_bits += 1
    shift = np.uint64(64 - num_bits)
    ends = np.zeros((1 << num_bits) + 1, np.int64)
    for i in range(count):
        ends[np.int64(mix_word(np.uint64(i), offset) >> shift) + 1] += 1
    for i in range(1, len(ends)):
        ends[i] += ends[i - 1]
    keys = np.empty(count, np.uint64)
    for i in range(count):
        key = mix_word(np.uint64(i), offset)
        bucket = np.int64(key >> shift)
        # Where the next one of the bucket goes; it ends up where the bucket ends.
        keys[ends[bucket]] = key
        order[ends[bucket]] = i
        ends[bucket] += 1
    for i in range(1, count):
        key, position = keys[i], order[i]
        at = i
        while at > 0 and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            order[at] = order[at - 1]
            at -= 1
        keys[at] = key
        order[at] = position
