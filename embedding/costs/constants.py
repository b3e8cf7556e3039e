"""Constants of a machine, and how counts of work become seconds.

A phase costs a sum: so many nanoseconds for each call, id, bag, row and float, with factors of its own. The factors are
found by a fit of measured steps that allows no negative one. What a cache does not hold has factors of its own. How
much that is follows from the sizes of the caches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

_SHORTEST_S = 2e-6
"""Phases below this have errors of the clock that should not decide the fit."""
_ROUNDS = 8
_HALF_COLD = 4
"""Among made-up runs, this predicts those that were left out best: 1, 2 and 4 were tried."""
_SMALL_ERROR = 0.05
"""Errors below this weigh alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Nanoseconds of reading one random row of one cache line, by the size of the memory that it lies in.

    Attributes:
      size_bytes: rising.
      row_ns: one for each size.
    """

    size_bytes: tuple[int, ...]
    row_ns: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The second cache of a processor, and its last one."""

    l2_bytes: int = 1 << 20
    l3_bytes: int = 32 << 20

    def beyond_l2(self, size_bytes: float) -> float:
        """The share of a memory that the second cache does not hold: 0 up to its size, 1 from twice as much on."""
        return _share(size_bytes, self.l2_bytes)

    def beyond_l3(self, size_bytes: float) -> float:
        """The same of the last one. Half of it counts, since other processes use it, too."""
        return _share(size_bytes, self.l3_bytes / 2)

    def cold_share(self, step_bytes: float) -> float:
        """How much of code and books the caches have lost when their turn comes again, after a step that touched so
        many bytes. From 0 to 1, and half where the step touched `_HALF_COLD` times the second cache.
        """
        return step_bytes / (step_bytes + _HALF_COLD * self.l2_bytes)


def _share(size_bytes: float, held_bytes: float) -> float:
    return min(1.0, max(0.0, math.log2(size_bytes / held_bytes))) if size_bytes > held_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much of everything a phase does in one step. They add up and can be multiplied.

    A line is one of the cache. Those "from L3" are what the second cache does not hold, and those "from memory" what
    the last one does not hold.

    Attributes:
      steps: 1 where a phase takes place at all.
      peers: other hosts, once a phase.
      calls: of kernels, and what Python does around each.
      ids, ids_from_memory: entries of the batch that are walked through.
      id_lines, id_lines_from_l3: of the vector that each of them names.
      hashed_ids, marked_ids, counted_ids: those that are grouped by row in one of three ways.
      bags: that are walked through.
      bag_lines_from_l3, bag_lines_from_memory: of their vectors.
      divided_bags, divided_lines: those whose sum is divided.
      floats: written or read one after another.
      shared_floats: of vectors that another process wrote, or will read.
      rows, rows_from_memory: distinct rows.
      hashed_rows, counted_rows: those that are found while ids are grouped.
      held_rows: all rows of tables whose ids are counted by row.
      row_lines, row_lines_from_l3, row_lines_from_memory: of distinct rows.
      wide_lines: of rows whose optimizer has a state for each number.
    """

    steps: float = 0.0
    peers: float = 0.0
    calls: float = 0.0
    ids: float = 0.0
    ids_from_memory: float = 0.0
    id_lines: float = 0.0
    id_lines_from_l3: float = 0.0
    hashed_ids: float = 0.0
    marked_ids: float = 0.0
    counted_ids: float = 0.0
    bags: float = 0.0
    bag_lines_from_l3: float = 0.0
    bag_lines_from_memory: float = 0.0
    divided_bags: float = 0.0
    divided_lines: float = 0.0
    floats: float = 0.0
    shared_floats: float = 0.0
    rows: float = 0.0
    rows_from_memory: float = 0.0
    hashed_rows: float = 0.0
    counted_rows: float = 0.0
    held_rows: float = 0.0
    row_lines: float = 0.0
    row_lines_from_l3: float = 0.0
    row_lines_from_memory: float = 0.0
    wide_lines: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Counts:
        return Counts(**dict(zip(KINDS, map(float, values), strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `KINDS`."""
        return _values_of(self)

    def __add__(self, other: Counts) -> Counts:
        return Counts(**dict(zip(KINDS, map(operator.add, self.values, other.values), strict=True)))

    def __mul__(self, factor: float) -> Counts:
        return Counts.of([factor * value for value in self.values])


KINDS = tuple(field.name for field in fields(Counts))
_values_of: Callable[[Counts], tuple[float, ...]] = operator.attrgetter(*KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What one host's lookups cost while so many processes of its machine work alike.

    Attributes:
      num_processes: that worked alike while this was measured.
      memory: read by one of them.
      caches: of the processor.
      factors_ns: by phase and way, such as `pool/pooled`, nanoseconds for one of each of `KINDS`.
      errors: by phase and way, how far the fit was off in the middle of the measured steps; 0.1 is a tenth.
    """

    num_processes: int
    memory: MemoryCurve
    factors_ns: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, float]
    caches: Caches = Caches()

    def seconds(self, key: str, counts: Counts) -> float:
        """Of a phase that does so much; 0 for one that was not measured."""
        factors = self.factors_ns.get(key)
        if factors is None:
            return 0.0
        return 1e-9 * sum(map(operator.mul, factors, counts.values))


def fitted(samples: Sequence[tuple[Counts, float]]) -> tuple[tuple[float, ...], float]:
    """Nanoseconds for one of each of `KINDS`, from steps that did so much in so many seconds.

    Relative errors count, so that a phase of microseconds weighs as much as one of milliseconds.

    Returns:
      The factors, none below 0, and the median of the relative errors.
    """
    seconds = np.array([spent for _, spent in samples])
    found, errors = fitted_columns(np.array([counts.values for counts, _ in samples]), seconds, least=_SHORTEST_S)
    return tuple(float(1e9 * factor) for factor in found), float(np.median(errors))


def fitted_columns(columns: np.ndarray, wanted: np.ndarray, *, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Factors of columns whose sum comes near to what is wanted, none below 0.

    Least squares are repeated with less weight for what is far off. So the sum of errors gets small, and not that of
    their squares: a few odd samples do not decide the fit (iteratively reweighted least squares).

    Args:
      columns: `[samples, columns]`.
      wanted: `[samples]`.
      least: smaller ones have errors of their own that should not decide.

    Returns:
      The factors `[columns]`, and the relative error of each sample.
    """
    from scipy.optimize import nnls  # late: whoever only predicts needs no scipy

    weights = 1 / np.maximum(wanted, least)
    columns, wanted = columns * weights[:, None], wanted * weights
    scale = np.maximum(columns.max(axis=0), 1e-30)
    columns = columns / scale
    trust = errors = np.ones(len(wanted))
    found = np.zeros(len(scale))
    for _ in range(_ROUNDS):
        found, _ = nnls(columns * trust[:, None], wanted * trust)
        errors = np.abs(columns @ found - wanted)
        trust = 1 / np.sqrt(np.maximum(errors, _SMALL_ERROR))
    return found / scale, errors
