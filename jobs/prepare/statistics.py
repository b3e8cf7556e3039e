"""What is counted on the way through the text: per number its range and distribution, per field how often rows of its
table are hit.

Tallies of pieces add up to those of the whole, in the order of the pieces. A report therefore does not depend on which
process counted what when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from podembed.jobs.prepare.rows_of_values import OTHER_ROW

# Hits are counted for at most so many rows of a table, evenly spaced: enough for a distribution, and little to keep for
# every piece.
MAX_TRACKED_ROWS = 1 << 16
MOST_EXAMPLES = 20
_LEAST_EXPONENT, _MOST_EXPONENT = -20, 62


@dataclass(slots=True)
class NumberTally:
    """Numbers of one column. Mutated by `add` and `merge`.

    Attributes:
      bins: bin of `bin_edges` to the count of numbers in it.
    """

    count: int = 0
    missing: int = 0
    total: float = 0.0
    least: float | None = None
    most: float | None = None
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, values: pa.Array) -> None:
        numbers = values.drop_null().to_numpy().astype(np.float64)
        found, counts = np.unique(_bins_of(numbers), return_counts=True)
        self.merge(
            NumberTally(
                count=len(numbers),
                missing=values.null_count,
                total=float(numbers.sum()),
                least=float(numbers.min()) if len(numbers) else None,
                most=float(numbers.max()) if len(numbers) else None,
                bins=dict(zip(found.tolist(), counts.tolist(), strict=True)),
            )
        )

    def merge(self, other: NumberTally) -> None:
        self.count += other.count
        self.missing += other.missing
        self.total += other.total
        self.least = min((x for x in (self.least, other.least) if x is not None), default=None)
        self.most = max((x for x in (self.most, other.most) if x is not None), default=None)
        for at, count in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + count

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "missing": self.missing,
            "total": self.total,
            "least": self.least,
            "most": self.most,
            "bins": sorted(self.bins.items()),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> NumberTally:
        return NumberTally(**{**document, "bins": {int(at): int(count) for at, count in document["bins"]}})


def _bins_of(numbers: np.ndarray) -> np.ndarray:
    """int64: 0 for zero, else the sign times the place of the power of two below, so that bins are ordered as numbers
    are.
    """
    exponents = np.full(len(numbers), _LEAST_EXPONENT, np.int64)
    is_something = numbers != 0
    # frexp is exact where log2 may round up to the next power; it gives a fraction in [0.5, 1).
    exponents[is_something] = np.frexp(np.abs(numbers[is_something]))[1] - 1
    places = np.clip(exponents, _LEAST_EXPONENT, _MOST_EXPONENT) - _LEAST_EXPONENT + 1
    return np.where(is_something, np.sign(numbers) * places, 0).astype(np.int64)


def bin_edges(at: int) -> tuple[float, float]:
    """The two ends of a bin in ascending order; both are 0 for the bin of zeros."""
    if at == 0:
        return 0.0, 0.0
    low = 2.0 ** (abs(at) - 1 + _LEAST_EXPONENT)
    return (low, 2 * low) if at > 0 else (-2 * low, -low)


@dataclass(slots=True)
class FieldTally:
    """Ids of one field. Mutated by `add` and `merge`.

    Attributes:
      num_rows: number of rows of the table.
      missing: samples without a value.
      unseen: samples whose value has no row of its own.
      examples: some of these values.
      hits: int64, how often each tracked row was hit: rows 0, `stride`, 2 · `stride`, ...
    """

    num_rows: int
    missing: int = 0
    unseen: int = 0
    examples: list[str] = field(default_factory=list)
    hits: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.hits = np.zeros(-(-self.num_rows // self.stride), np.int64)

    @property
    def stride(self) -> int:
        return -(-self.num_rows // MAX_TRACKED_ROWS)

    def add(self, rows: np.ndarray, *, missing: int) -> None:
        self.missing += missing
        self.unseen += int(np.count_nonzero(rows == OTHER_ROW)) - missing
        tracked = rows[rows % self.stride == 0] // self.stride
        self.hits += np.bincount(tracked, minlength=len(self.hits))

    def merge(self, *, missing: int, unseen: int, hits: np.ndarray, examples: Sequence[str] = ()) -> None:
        self.missing += missing
        self.examples = [*self.examples, *examples][:MOST_EXAMPLES]
        self.unseen += unseen
        self.hits += hits

    def frequencies(self) -> list[tuple[int, int, int]]:
        """Rows of real values by how often they are hit: (k, rows hit 2^k to 2^(k+1) - 1 times, samples that hit them).

        Estimates where the stride is above 1; then the figures of the tracked rows are multiplied by it.
        """
        hits = self.hits.copy()
        hits[OTHER_ROW] = 0
        hits = hits[hits > 0]
        powers = np.frexp(hits)[1] - 1
        counts = np.bincount(powers)
        samples = np.bincount(powers, weights=hits)
        return [
            (int(k), int(counts[k]) * self.stride, int(samples[k]) * self.stride)
            for k in range(len(counts))
            if counts[k]
        ]


def merged(tallies: Iterable[NumberTally]) -> NumberTally:
    """The sum of all, in their order."""
    total = NumberTally()
    for tally in tallies:
        total.merge(tally)
    return total
