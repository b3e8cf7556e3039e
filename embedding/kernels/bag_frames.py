"""The kernel that reads what another host asks of an owner that pools, before any other kernel follows its numbers.

The form of such a frame is in `lookup.pooled_frames`.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import jit

IS_FRAME, NO_FRAME, BAD_SPLITS = 0, 1, 2
WEIGHTED, DIVIDED, WIDE = 1, 2, 4
HEAD_WORDS = 3
"""Of each feature: the numbers of bags and of ids, and flags."""
BAGS = 6
"""Numbers of what a host asks for a feature.

The address of its keys (int64 for a wide feature, else int32), where later the int32 rows are, and how many they are.
The address of its row splits (int64) and how many bags it has. The addresses of its weights and of its divisors
(float32), 0 where there are none.
"""
ROWS, NUM_IDS, SPLITS, NUM_BAGS, WEIGHTS, DIVISORS = 0, 1, 2, 3, 4, 5


def find_pieces(frame: np.ndarray, lines: np.ndarray) -> int:
    """Finds where the parts of each feature lie in a frame, and whether they can be trusted.

    Args:
      frame: int64 `[words]`, as it came.
      lines: int64 `[num_features, BAGS]`; receives where the parts of each feature lie.

    Returns:
      `IS_FRAME`, or what is wrong.
    """
    words = plain(frame, np.int64)
    return _find_pieces(words, words.ctypes.data, lines)


@jit
def _find_pieces(words, start, lines):
    num_features = lines.shape[0]
    total = words.shape[0]
    if total < HEAD_WORDS * num_features:
        return NO_FRAME
    num_bags, num_wide, num_narrow, num_weights, num_divisors = 0, 0, 0, 0, 0
    for at in range(num_features):
        bags, ids, flags = words[HEAD_WORDS * at], words[HEAD_WORDS * at + 1], words[HEAD_WORDS * at + 2]
        is_odd = flags < 0 or flags > WEIGHTED + DIVIDED + WIDE
        if bags < 0 or ids < 0 or bags > total or ids > 2 * total or is_odd:
            return NO_FRAME
        num_bags += bags
        num_wide += ids if flags & WIDE else 0
        num_narrow += 0 if flags & WIDE else ids
        num_weights += ids if flags & WEIGHTED else 0
        num_divisors += bags if flags & DIVIDED else 0
    splits_at = HEAD_WORDS * num_features
    wide_at = splits_at + num_features + num_bags
    narrow_at = wide_at + num_wide
    weights_at = narrow_at + (num_narrow + 1) // 2
    divisors_at = weights_at + (num_weights + 1) // 2
    if total != divisors_at + (num_divisors + 1) // 2:
        return NO_FRAME
    narrow_at, weights_at, divisors_at = 2 * narrow_at, 2 * weights_at, 2 * divisors_at
    for at in range(num_features):
        bags, ids, flags = words[HEAD_WORDS * at], words[HEAD_WORDS * at + 1], words[HEAD_WORDS * at + 2]
        if words[splits_at] != 0 or words[splits_at + bags] != ids:
            return BAD_SPLITS
        falls = False
        for bag in range(splits_at, splits_at + bags):
            falls |= words[bag + 1] < words[bag]
        if falls:
            return BAD_SPLITS
        lines[at, ROWS], lines[at, NUM_IDS] = start + (8 * wide_at if flags & WIDE else 4 * narrow_at), ids
        lines[at, SPLITS], lines[at, NUM_BAGS] = start + 8 * splits_at, bags
        lines[at, WEIGHTS] = start + 4 * weights_at if flags & WEIGHTED else 0
        lines[at, DIVISORS] = start + 4 * divisors_at if flags & DIVIDED else 0
        splits_at += bags + 1
        wide_at += ids if flags & WIDE else 0
        narrow_at += 0 if flags & WIDE else ids
        weights_at += ids if flags & WEIGHTED else 0
        divisors_at += bags if flags & DIVIDED else 0
    return IS_FRAME
