"""`LabelCounts` of chosen scores, by the formula of the compiled step."""

from __future__ import annotations

import numpy as np

from podembed.workers.job.quality import cross_entropies
from podembed.workers.job.window_figures import (
    LARGEST_LOGIT,
    NOT_BINARY,
    NOT_COUNTED,
    NUM_BINS,
    NUM_CODES,
    LabelCounts,
)


def counts(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> LabelCounts:
    weights = np.ones(len(labels)) if weights is None else weights
    # No overflow for scores far below zero.
    chances = np.exp(-np.logaddexp(0, -logits))
    bins = np.clip((logits + LARGEST_LOGIT) * (NUM_BINS / (2 * LARGEST_LOGIT)), 0, NUM_BINS - 1).astype(int)
    codes = np.where((labels == 0) | (labels == 1), 2 * bins + (labels == 1), NOT_BINARY)
    by_code = np.bincount(codes, weights, NUM_CODES)
    found = np.flatnonzero(by_code[:NOT_COUNTED])
    return LabelCounts(
        label="click",
        codes=found.astype(np.int32),
        weights=by_code[found],
        predicted=float((weights * chances).sum()),
        loss=float((weights * cross_entropies(logits, labels)).sum()),
        is_binary=not by_code[NOT_BINARY],
    )
