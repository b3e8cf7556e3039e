"""What benchmarks share that let two contenders train in turns: their options, the spread of ratios, and the check that
both compute the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.workload import NAMES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which workload and how long, and what `benchmarks.dlrm` asks of a job beside that."""
    parser.add_argument("--bench", default="A10", choices=NAMES)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--pairs", type=int, default=10, help="of windows, one of each contender")
    parser.add_argument("--window", type=int, default=10, help="steps of a window")
    parser.add_argument(
        "--tcp", dest="shared_memory", action="store_false", help="hosts exchange everything as between machines"
    )
    parser.set_defaults(placement="tables", overlap="on", staleness=0, wire_dtype="float32", device_ms=None)


def spread(ratios: Sequence[float] | np.ndarray, digits: int = 3) -> dict[str, float]:
    """The median of ratios, and their 10th and 90th percentile."""
    low, middle, high = (round(float(one), digits) for one in np.quantile(ratios, [0.1, 0.5, 0.9]))
    return {"median": middle, "p10": low, "p90": high}


def largest_difference(
    ours: Sequence[float], theirs: Sequence[float], num_checked: int, tolerance: float, names: tuple[str, str]
) -> float:
    """The largest difference of two losses of the same step, over theirs, in the steps that are checked.

    Args:
      names: of both contenders, as a sentence has them.

    Raises:
      SystemExit: a difference is larger than the tolerance, or a loss is no number.
    """
    both = np.array(ours[:num_checked]), np.array(theirs[:num_checked])
    largest = float((np.abs(both[0] - both[1]) / np.abs(both[1])).max())
    if not largest <= tolerance:
        raise SystemExit(
            f"Found losses {both[0].tolist()} {names[0]} and {both[1].tolist()} {names[1]}. Expected the same within "
            f"{tolerance}."
        )
    return float(f"{largest:.2e}")
