"""Which tables are pooled where their rows are, and why: functions of what is declared or known of the data.

A table that lies whole on one host is pooled there if its optimizer allows it. For a table that is cut, each owner can
pool its part of every bag. Then one partial sum a bag and owner travels, where otherwise each distinct row does. The
way with fewer bytes is chosen, once for all features of a table, since a row gets one update a step.

The choice must be the same on all hosts, and again after a restart. So it counts what a batch has on average, and
nothing that is measured while a run trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from podembed.embedding.table_spec import TableSpec

ASSUMED_LENGTH = 4.0
"""Ids of a bag whose mean length is not known before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutWay:
    """How a table that is cut is looked up.

    Attributes:
      is_pooled: each owner pools its rows of each bag; otherwise distinct rows travel.
      reason: why, with the numbers.
    """

    is_pooled: bool
    reason: str


def can_pool_at_owner(spec: TableSpec) -> bool:
    """Whether a table's update may see the bags' gradients instead of one sum a host and row."""
    return why_not_pooled(spec) is None


def why_not_pooled(spec: TableSpec) -> str | None:
    """What keeps a table from being pooled at its owners, for `podembed plan`; None if nothing does."""
    rule = spec.optimizer
    if spec.layout.num_buckets * spec.layout.rows_per_bucket >= 1 << 31:
        return "frames have 32-bit row numbers"
    if rule is None:
        return "it is not trained"
    if not rule.use_gradient_accumulation:
        return "its optimizer does not accumulate gradients"
    return "its optimizer changes all rows" if rule.touches_all_rows else None


def cut_way(
    spec: TableSpec,
    *,
    lengths: Sequence[float | None],
    num_bags: int,
    num_hosts: int,
    why_rows: str | None = None,
) -> CutWay:
    """How a table is looked up if it is cut.

    A host sends and gets a partial sum of each bag for every other host. Of its distinct rows, `1 / num_hosts` are its
    own. So partial sums are fewer bytes where bags times hosts are fewer than distinct rows. Ids are taken to be spread
    evenly over the table, which gives the most distinct rows.

    Args:
      lengths: mean number of ids of a bag, for each feature of the table; None where it is not known, which counts as
        `ASSUMED_LENGTH`.
      num_bags: of each feature, in a host's share of a batch.
      why_rows: what makes the rows travel in any case.
    """
    why_rows = why_rows or why_not_pooled(spec)
    if why_rows is not None:
        return CutWay(is_pooled=False, reason=f"{why_rows}, so rows travel")
    if num_hosts == 1 or not lengths:
        return CutWay(is_pooled=False, reason="there is nothing to send")
    known = [ASSUMED_LENGTH if length is None else length for length in lengths]
    sums = num_bags * len(lengths) * num_hosts
    rows = -spec.num_rows * math.expm1(-num_bags * sum(known) / spec.num_rows)
    counted = f"a batch has {sum(known) / len(known):.3g} ids a bag"
    if None in lengths:
        counted = f"unknown lengths count as {ASSUMED_LENGTH:g} ids, so {counted}"
    if sums < rows:
        reason = f"{counted}: {sums:,} partial sums of owners are less than {rows:,.0f} rows"
        return CutWay(is_pooled=True, reason=reason)
    return CutWay(is_pooled=False, reason=f"{counted}: {rows:,.0f} rows are no more than {sums:,} partial sums")
