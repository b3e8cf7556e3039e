"""Which rows two buckets share when one table is cut in two ways.

Row r lies in bucket r mod V at position r div V. V is always a power of two, so of two cuts the finer one splits each
bucket of the coarser. Bucket c of V holds exactly the rows of buckets c, c+V, c+2V, ... of a finer cut, every ratio-th
position of it. Any change of the number of buckets therefore goes bucket by bucket with strided copies. Pure; no file
is opened here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import BucketLayout


@dataclass(frozen=True, slots=True)
class Cut:
    """One of `num_buckets` buckets of a table; `num_buckets` is a power of two."""

    num_buckets: int
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The rows that lie in two buckets: `one` and `other` select their positions, in the same order of rows.

    Attributes:
      first_row, row_stride, num_rows: the rows are first_row, first_row + row_stride, and so on.
    """

    one: slice
    other: slice
    first_row: int
    row_stride: int
    num_rows: int


def overlap(one: Cut, other: Cut, *, num_rows: int) -> Overlap:
    """The rows of a table of `num_rows` that lie in both buckets.

    Raises:
      ValueError: they share none, whatever the number of rows.
    """
    fine, coarse = (one, other) if one.num_buckets >= other.num_buckets else (other, one)
    if fine.bucket % coarse.num_buckets != coarse.bucket:
        raise ValueError(
            f"Found bucket {fine.bucket} of {fine.num_buckets} and bucket {coarse.bucket} of {coarse.num_buckets}, "
            "which share no row. "
            f"Expected bucket {fine.bucket % coarse.num_buckets} of {coarse.num_buckets}. Pair buckets with `partners`."
        )
    shared = BucketLayout(num_rows=num_rows, num_buckets=fine.num_buckets).num_rows_of(fine.bucket)
    ratio = fine.num_buckets // coarse.num_buckets
    start = fine.bucket // coarse.num_buckets
    in_fine, in_coarse = slice(0, shared), slice(start, start + shared * ratio, ratio)
    return Overlap(
        one=in_fine if fine is one else in_coarse,
        other=in_coarse if fine is one else in_fine,
        first_row=fine.bucket,
        row_stride=fine.num_buckets,
        num_rows=shared,
    )


def partners(cut: Cut, num_buckets: int) -> range:
    """The buckets of another cut that share rows with one of this cut."""
    if num_buckets <= cut.num_buckets:
        return range(cut.bucket % num_buckets, cut.bucket % num_buckets + 1)
    return range(cut.bucket, num_buckets, cut.num_buckets)


def describe_rows(cut: Cut, *, num_rows: int) -> str:
    """The rows of a bucket for people: `9 rows: 1, 5, 9 ... 33`."""
    layout = BucketLayout(num_rows=num_rows, num_buckets=cut.num_buckets)
    count = layout.num_rows_of(cut.bucket)
    if count == 0:
        return "no rows"
    *rows, last = layout.ids_of(cut.bucket, np.array([*range(min(count, 3)), count - 1])).tolist()
    tail = "" if count <= 3 else f", {last}" if count == 4 else f" ... {last}"
    return f"{count} row{'s' if count > 1 else ''}: {', '.join(map(str, rows))}{tail}"
