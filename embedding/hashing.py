"""The one hash of the program: SplitMix64.

It is from Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. Initial values of rows, hashed
ids, the shuffle of an epoch and the digests of buckets come from here. They must be the same on every host, in every
process and after every upgrade of numpy. Numpy's generators promise no such thing, so all of them stand on this
bijection, written out here. It does not resist an adversary.
"""

from __future__ import annotations

import numba
import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


def _finalize(word):
    """The mixing half of SplitMix64: every input bit reaches every output bit."""
    word = (word ^ (word >> _30)) * _FIRST_FACTOR
    word = (word ^ (word >> _27)) * _SECOND_FACTOR
    return word ^ (word >> _31)


# The same for one uint64 in a compiled loop; the plain function takes whole arrays.
finalize = numba.njit(nogil=True, cache=True, inline="always")(_finalize)


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
        return _finalize((values.astype(np.uint64) + GOLDEN_GAMMA) ^ offset)


@numba.njit(nogil=True, cache=True, inline="always")
def mix_word(value: np.uint64, offset: np.uint64) -> np.uint64:
    """`mix64` of one value in a compiled loop; `offset` is `combine(salt)`, or 0 without a salt."""
    return finalize((value + GOLDEN_GAMMA) ^ offset)


def combine(*parts: int) -> int:
    """Folds integers, in their order, into one unsigned 64-bit seed."""
    seed = 0
    for part in parts:
        word = np.array([(seed ^ part) & 0xFFFFFFFFFFFFFFFF], np.uint64)
        seed = int(mix64(word)[0])
    return seed
