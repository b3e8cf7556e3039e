"""Constants of a machine, and how counts of work become seconds.

A phase costs a sum: so many nanoseconds for each call, id, bag, row and float, with factors of its own. The factors are
found by a least squares fit of measured steps that allows no negative one. Rows that no cache holds have a factor of
their own. How much of a memory is out of the caches follows from a measured curve (`MemoryCurve`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

_SHORTEST_S = 2e-6
"""Phases below this have errors of the clock that should not decide the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Nanoseconds of reading one random row of one cache line, by the size of the memory that it lies in.

    Attributes:
      size_bytes: rising.
      row_ns: one for each size.
    """

    size_bytes: tuple[int, ...]
    row_ns: tuple[float, ...]

    def far_share(self, size_bytes: float) -> float:
        """How far a memory of some size lies out of the caches: 0 as the smallest one measured, 1 as the largest."""
        nearest, farthest = self.row_ns[0], self.row_ns[-1]
        if farthest <= nearest or size_bytes <= self.size_bytes[0]:
            return 0.0
        found = np.interp(math.log(size_bytes), np.log(self.size_bytes), self.row_ns)
        return min(1.0, max(0.0, (float(found) - nearest) / (farthest - nearest)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much of everything a phase does in one step. They add up and can be multiplied.

    Attributes:
      steps: 1 where a phase takes place at all.
      peers: other hosts, once a phase.
      calls: of kernels, and what Python does around each.
      ids: entries of the batch that are walked through.
      bags: that are walked through.
      floats: written or read one after another.
      shared_floats: of vectors that another process wrote, or will read.
      near_floats: of rows that the same pass has touched before.
      rows: distinct rows, wherever they lie.
      far_rows, far_floats: as far as no cache has them.
    """

    steps: float = 0.0
    peers: float = 0.0
    calls: float = 0.0
    ids: float = 0.0
    bags: float = 0.0
    floats: float = 0.0
    shared_floats: float = 0.0
    near_floats: float = 0.0
    rows: float = 0.0
    far_rows: float = 0.0
    far_floats: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Counts:
        return Counts(**dict(zip(KINDS, map(float, values), strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `KINDS`."""
        return tuple(getattr(self, kind) for kind in KINDS)

    def __add__(self, other: Counts) -> Counts:
        return Counts.of([one + two for one, two in zip(self.values, other.values, strict=True)])

    def __mul__(self, factor: float) -> Counts:
        return Counts.of([factor * value for value in self.values])


KINDS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What one host's lookups cost while so many processes of its machine work alike.

    Attributes:
      num_processes: that worked alike while this was measured.
      memory: read by one of them.
      factors_ns: by phase and way, such as `pool/pooled`, nanoseconds for one of each of `KINDS`.
      errors: by phase and way, how far the fit was off in the middle of the measured steps; 0.1 is a tenth.
    """

    num_processes: int
    memory: MemoryCurve
    factors_ns: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, float]

    def seconds(self, key: str, counts: Counts) -> float:
        """Of a phase that does so much; 0 for one that was not measured."""
        factors = self.factors_ns.get(key)
        if factors is None:
            return 0.0
        return 1e-9 * sum(factor * value for factor, value in zip(factors, counts.values, strict=True))


def fitted(samples: Sequence[tuple[Counts, float]]) -> tuple[tuple[float, ...], float]:
    """Nanoseconds for one of each of `KINDS`, from steps that did so much in so many seconds.

    Relative errors count, so that a phase of microseconds weighs as much as one of milliseconds.

    Returns:
      The factors, none below 0, and the median of the relative errors.
    """
    from scipy.optimize import nnls  # late: whoever only predicts needs no scipy

    seconds = np.array([spent for _, spent in samples])
    weights = 1 / np.maximum(seconds, _SHORTEST_S)
    counts = np.array([counts.values for counts, _ in samples]) * weights[:, None]
    scale = np.maximum(counts.max(axis=0), 1e-30)
    found, _ = nnls(counts / scale, seconds * weights)
    factors = found / scale
    errors = np.abs(counts @ factors - seconds * weights)
    return tuple(float(1e9 * factor) for factor in factors), float(np.median(errors))
