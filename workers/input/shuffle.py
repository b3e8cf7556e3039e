"""`permutation`: the order of an epoch, a function of its seed and nothing else."""

from __future__ import annotations

import numba
import numpy as np

from podembed.embedding.hashing import combine, mix_word


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
