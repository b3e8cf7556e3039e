"""Small click logs in Criteo's form, for tests."""

from __future__ import annotations

import numpy as np


def click_lines(count: int, *, seed: int = 1, distinct: int = 60) -> list[bytes]:
    """Well-formed lines without newlines: categories are drawn unevenly from `distinct` values a field; about a tenth
    is empty.
    """
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = ["" if rng.random() < 0.1 else str(rng.integers(-2, 5000)) for _ in range(13)]
        chosen = np.minimum(rng.zipf(1.4, 26), distinct)
        categories = ["" if rng.random() < 0.1 else f"{value * 2654435761 % 2**32:08x}" for value in chosen.tolist()]
        lines.append("\t".join([str(rng.integers(0, 2)), *numbers, *categories]).encode())
    return lines
