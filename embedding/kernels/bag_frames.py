"""The kernel that reads what another host asks of an owner that pools, before any other kernel follows its numbers.

The form of such a frame is in `lookup.pooled_frames`.
"""

from __future__ import annotations

import numpy as np

from podembed.embedding.kernels.arrays import plain
from podembed.embedding.kernels.row_vectors import jit

IS_FRAME, NO_FRAME, BAD_SPLITS, BAD_ROW = 0, 1, 2, 3
WEIGHTED, DIVIDED = 1, 2
HEAD_WORDS = 3
"""Of each feature: the numbers of bags and of ids, and flags."""
BAGS = 6
"""Numbers of what a host asks for a feature.

The address of its rows (int32) and how many they are. The address of its row splits (int64) and how many bags it has.
The addresses of its weights and of its divisors (float32), 0 where there are none.
"""
ROWS, NUM_IDS, SPLITS, NUM_BAGS, WEIGHTS, DIVISORS = 0, 1, 2, 3, 4, 5


def find_pieces(frame: np.ndarray, limits: np.ndarray, lines: np.ndarray) -> int:
    """Finds where the parts of each feature lie in a frame, and whether they can be trusted.

    Args:
      frame: int64 `[words]`, as it came.
      limits: int64 `[num_features]`; rows must be below. Below 0 where rows need no look.
      lines: int64 `[num_features, BAGS]`; receives where the parts of each feature lie. Line 0 receives the bad feature
        and its bad row if there is one.

    Returns:
      `IS_FRAME`, or what is wrong.
    """
    words = plain(frame, np.int64)
    return _find_pieces(words, words.view(np.int32), words.ctypes.data, limits, lines)


@jit
def _find_pieces(words, halves, start, limits, lines):
    num_features = limits.shape[0]
    total = words.shape[0]
    if total < HEAD_WORDS * num_features:
        return NO_FRAME
    num_bags, num_ids, num_weights, num_divisors = 0, 0, 0, 0
    for at in range(num_features):
        bags, ids, flags = words[HEAD_WORDS * at], words[HEAD_WORDS * at + 1], words[HEAD_WORDS * at + 2]
        if bags < 0 or ids < 0 or bags > total or ids > 2 * total or flags < 0 or flags > WEIGHTED + DIVIDED:
            return NO_FRAME
        num_bags += bags
        num_ids += ids
        num_weights += ids if flags & WEIGHTED else 0
        num_divisors += bags if flags & DIVIDED else 0
    splits_at = HEAD_WORDS * num_features
    rows_at = splits_at + num_features + num_bags
    weights_at = rows_at + (num_ids + 1) // 2
    divisors_at = weights_at + (num_weights + 1) // 2
    if total != divisors_at + (num_divisors + 1) // 2:
        return NO_FRAME
    rows_at, weights_at, divisors_at = 2 * rows_at, 2 * weights_at, 2 * divisors_at
    for at in range(num_features):
        bags, ids, flags = words[HEAD_WORDS * at], words[HEAD_WORDS * at + 1], words[HEAD_WORDS * at + 2]
        if words[splits_at] != 0 or words[splits_at + bags] != ids:
            return BAD_SPLITS
        falls = False
        for bag in range(splits_at, splits_at + bags):
            falls |= words[bag + 1] < words[bag]
        if falls:
            return BAD_SPLITS
        if limits[at] >= 0:
            # Seen as unsigned, a row below 0 is a large one.
            worst = np.uint32(0)
            for j in range(rows_at, rows_at + ids):
                worst = max(worst, np.uint32(halves[j]))
            if ids > 0 and np.int64(worst) >= limits[at]:
                lines[0, 0], lines[0, 1] = at, np.int64(np.int32(worst))
                return BAD_ROW
        lines[at, ROWS], lines[at, NUM_IDS] = start + 4 * rows_at, ids
        lines[at, SPLITS], lines[at, NUM_BAGS] = start + 8 * splits_at, bags
        lines[at, WEIGHTS] = start + 4 * weights_at if flags & WEIGHTED else 0
        lines[at, DIVISORS] = start + 4 * divisors_at if flags & DIVIDED else 0
        splits_at += bags + 1
        rows_at += ids
        weights_at += ids if flags & WEIGHTED else 0
        divisors_at += bags if flags & DIVIDED else 0
    return IS_FRAME
