"""`TableLook`: what a host saw of its part of a table's sample; and `TableFigures`, what all hosts' looks come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

QUANTILES = (0.1, 0.5, 0.9)
LEAST_ROWS = 32
"""Fewer trained rows have no effective rank."""
LEAST_WIDTH = 8
"""The rank of narrower rows says little. Weights of linear models are narrow, too, and have no usual size."""
LEAST_SCALE = 0.2
"""Root mean square of a row's numbers, from which on growth counts. Where rates are right, rows that began near zero
grow as far as that, or a few times as far.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableLook:
    """A host's part of a table's sample.

    Attributes:
      table: its name.
      num_rows: rows of the sample that this host owns.
      num_trained: those that are not as they began; None where nothing tells. Then all count as trained.
      num_updated: different rows of the table that the last step updated here; None where each step updates all.
      norms: float32 `[num_trained]`, Euclidean, of trained rows of the sample.
      factor: float32 `[k, dim]`, with `factor^T factor = V^T V` for their values `V`; `k` is at most `dim`. None for
        rows narrower than 8.
      changes: float32 `[c]`, of some rows that the last step updated: norm of the change over that of the row. Rows
        that changed for the first time, as far as slots tell, are left out.
      growth: float32 `[num_trained]`, `growth_of` the same rows as `norms`; empty where first values cannot be had, and
        for rows narrower than 8.
    """

    table: str
    num_rows: int
    num_trained: int | None
    num_updated: int | None
    norms: np.ndarray
    factor: np.ndarray | None
    changes: np.ndarray
    growth: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    """Of one table, over all hosts.

    Attributes:
      table: its name.
      num_rows, num_trained: of the sample, and those that are not as they began; the latter None where nothing tells.
      num_updated: different rows that the last step updated; None where each step updates all.
      norms: the tenth, half and nine tenths quantiles of trained rows' Euclidean norms; empty without any.
      changes: the same quantiles of what the last step changed a row by, over its norm; empty where it updated none.
      effective_rank: of the trained rows; None for fewer than 32, and for rows narrower than 8. It is
        `exp(-sum p log p)` for the singular values' shares `p` of their sum (Roy and Vetterli, The effective rank,
        2007). Rows that all point the same way have 1.
      growth: the same quantiles of `growth_of` trained rows; empty where first values cannot be had.
    """

    table: str
    num_rows: int
    num_trained: int | None
    num_updated: int | None
    norms: tuple[float, ...]
    changes: tuple[float, ...]
    effective_rank: float | None
    growth: tuple[float, ...] = ()


def table_figures(hosts: Sequence[Sequence[TableLook]], *, began_anew: bool = True) -> tuple[TableFigures, ...]:
    """The figures of each table; none unless all hosts looked. Rows have one owner each, so looks add up.

    Args:
      hosts: of each host its tables, the same on all.
      began_anew: whether the run began with initial values. Rows of another run have grown there, so they have no
        growth here.
    """
    if not all(hosts):
        return ()
    found = tuple(_figures(parts) for parts in zip(*hosts, strict=True))
    return found if began_anew else tuple(replace(one, growth=()) for one in found)


def _figures(parts: Sequence[TableLook]) -> TableFigures:
    factors = [part.factor for part in parts if part.factor is not None]
    norms = np.concatenate([part.norms for part in parts])
    return TableFigures(
        table=parts[0].table,
        num_rows=sum(part.num_rows for part in parts),
        num_trained=_sum([part.num_trained for part in parts]),
        num_updated=_sum([part.num_updated for part in parts]),
        norms=_quantiles(norms),
        changes=_quantiles(np.concatenate([part.changes for part in parts])),
        growth=_quantiles(np.concatenate([part.growth for part in parts])),
        effective_rank=effective_rank(np.concatenate(factors)) if factors and len(norms) >= LEAST_ROWS else None,
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    finite = values[np.isfinite(values)]
    return tuple(float(one) for one in np.quantile(finite, QUANTILES)) if len(finite) else ()


def growth_of(norms: np.ndarray, first: np.ndarray) -> np.ndarray:
    """float32 `[n]`: norms of rows over those of their first values. Small first values count as `LEAST_SCALE`.

    Args:
      norms: float32 `[n]`.
      first: float32 `[n, dim]`.
    """
    least = LEAST_SCALE * np.sqrt(np.float32(first.shape[1]))
    return (norms / np.maximum(np.linalg.norm(first, axis=1), least)).astype(np.float32)


def effective_rank(values: np.ndarray) -> float | None:
    """Of rows, or of a factor of theirs; see `TableFigures`.

    Args:
      values: float32 `[n, dim]`.

    Returns:
      None where a number is not finite, or all are zero.
    """
    values = values.astype(np.float64)
    # The smaller one of the two products has the same singular values.
    squares = values @ values.T if len(values) < values.shape[1] else values.T @ values
    if not np.isfinite(squares).all():
        return None
    singular = np.sqrt(np.clip(np.linalg.eigvalsh(squares), 0, None))
    if singular.sum() <= 0:
        return None
    shares = singular / singular.sum()
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))
