"""Tells one undo log, or one snapshot, of rows that are about to change."""

from __future__ import annotations

import numpy as np

from podembed.embedding.table.stores.ram_kept import RamPreImages, RamSnapshot, RamUndoLog


def preserve(kept: RamUndoLog | RamSnapshot, rows: np.ndarray) -> int:
    """How many rows, from the first, may change now."""
    rows = np.ascontiguousarray(rows, np.int64)
    kinds = (kept, None) if isinstance(kept, RamUndoLog) else (None, kept)
    at, number = RamPreImages([kinds]).keep((0,), RamPreImages.touched(rows))
    return len(rows) if at else number
