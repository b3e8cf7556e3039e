"""`DynamicKeys`: the key space of a table whose keys come and go, and how its rows are cut into buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.buckets import MAX_BUCKETS, TARGET_BUCKET_BYTES, BucketLayout
from podembed.embedding.hashing import mix64
from podembed.embedding.kernels.key_map import MOST_ROWS, WORDS, lines_per_bucket
from podembed.embedding.row_index import KeyedRows, RowIndex
from podembed.embedding.vocabulary.policies import Admit, Always, Evict, MinCount, Never

FEWEST_ROWS = 2048
"""Of a bucket, where there are several. With fewer, the fullest one would have much more keys than the mean."""
MOST_SPARE = 1 << 20
"""Keys without a row that a step may name on one host, where each is looked up as its own first value."""
DEVIATIONS = 5
"""Rows of a bucket beyond the mean, in standard deviations of how many keys fall into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicKeys:
    """Any 64-bit number is a key. As `KeySpace`.

    Attributes:
      capacity: keys for which there is room in the whole table.
      admit: which keys get a row.
      evict: which keys of a full bucket lose theirs.
      forget_after: idle steps after which a key is forgotten; None for never.
      waiting: keys of the whole table that may wait for a row; None for as many as there are rows with `MinCount`, and
        none otherwise.
      default: what a key without a row is looked up as: "first", its own first value; "zeros"; or "shared", a row that
        all such keys of a bucket train together.
    """

    capacity: int
    admit: Admit = field(default_factory=Always)
    evict: Evict = field(default_factory=Never)
    forget_after: int | None = None
    waiting: int | None = None
    default: str = "first"

    @property
    def waits(self) -> bool:
        """Whether keys without a row are remembered."""
        return self.waiting != 0 and (self.waiting is not None or isinstance(self.admit, MinCount))

    @property
    def num_reserved(self) -> int:
        """Rows at the beginning of a bucket that no key has."""
        return int(self.default == "shared")

    @property
    def columns(self) -> Mapping[str, np.dtype]:
        """As `KeySpace`: the key, the step that named it last, plus one, and how often it was named. Then the same of a
        key that waits; which row it stands at means nothing. Steps before the run began are below zero.
        """
        own = {"key": np.dtype(np.int64), "last": np.dtype(np.int32), "count": np.dtype(np.uint32)}
        return own | ({f"waiting_{name}": kind for name, kind in own.items()} if self.waits else {})

    @property
    def counts(self) -> bool:
        """As `KeySpace`: of keys that ask for the last rows, those that were named most often get them."""
        return True

    @property
    def num_spare(self) -> int:
        """As `KeySpace`: memory is only taken as far as it is used."""
        return {"first": MOST_SPARE, "zeros": 1, "shared": 0}[self.default]

    def num_keys(self, layout: BucketLayout) -> int:
        return -1

    def hashes_of(self, keys: np.ndarray) -> np.ndarray:
        return mix64(keys).view(np.int64)

    def waiting_per_bucket(self, layout: BucketLayout) -> int:
        """Keys of a bucket that may wait."""
        if not self.waits:
            return 0
        most = layout.rows_per_bucket
        return most if self.waiting is None else min(most, -(-self.waiting // layout.num_buckets))

    def map_bytes(self, layout: BucketLayout) -> int:
        """Bytes that an index of the whole table takes beside the table's columns: maps, and what is known of rows."""
        line_bytes, hints_bytes = 8 * WORDS, 8
        map_bytes = line_bytes * lines_per_bucket(layout.rows_per_bucket) + hints_bytes
        row_bytes = 5
        if waiting := self.waiting_per_bucket(layout):
            map_bytes += line_bytes * lines_per_bucket(waiting) + hints_bytes
            row_bytes += 16
        return layout.num_buckets * (map_bytes + row_bytes * layout.rows_per_bucket)

    def chance_of_refusal(self, layout: BucketLayout) -> float:
        """Probability that a table with `capacity` keys has one for which its bucket has no room, from 0 to 1."""
        num_buckets, room = layout.num_buckets, layout.rows_per_bucket - self.num_reserved
        if self.capacity <= room:
            return 0.0
        # Of one bucket, the tail of a binomial distribution: its first term, then each from the one before.
        share, more = 1 / num_buckets, room + 1
        choices = math.lgamma(self.capacity + 1) - math.lgamma(more + 1) - math.lgamma(self.capacity - more + 1)
        term = math.exp(choices + more * math.log(share) + (self.capacity - more) * math.log1p(-share))
        total = 0.0
        while more <= self.capacity and term > 1e-9 * total:
            total += term
            term *= (self.capacity - more) / (more + 1) * share / (1 - share)
            more += 1
        return -math.expm1(num_buckets * math.log1p(-min(total, 1 - 1e-16)))

    def index(self, table: KeyedRows, layout: BucketLayout) -> RowIndex:
        from podembed.embedding.vocabulary.dynamic_index import DynamicIndex

        return DynamicIndex(self, table, layout)

    def layout(self, row_bytes: int, num_buckets: int | None = None) -> BucketLayout:
        """How the rows are cut.

        Several buckets get more rows than `capacity`, since keys fall into them by chance.

        Args:
          row_bytes: bytes of a row with everything beside it.
          num_buckets: as recorded with a run; None chooses.

        Raises:
          ValueError: a bucket would have more rows than a key map counts.
        """
        if num_buckets is None:
            least = max(FEWEST_ROWS, min(MOST_ROWS // 2, -(-TARGET_BUCKET_BYTES // row_bytes)))
            num_buckets = min(MAX_BUCKETS, 1 << max(0, (self.capacity // least).bit_length() - 1))
        mean = -(-self.capacity // num_buckets)
        spread = math.ceil(DEVIATIONS * math.sqrt(mean)) if num_buckets > 1 else 0
        per_bucket = mean + spread + self.num_reserved
        if per_bucket > MOST_ROWS:
            raise ValueError(
                f"Found capacity={self.capacity:,}, of which a bucket of {num_buckets:,} has {per_bucket:,} rows. "
                f"Expected at most {MOST_ROWS:,}. Begin a new run, whose tables are cut anew, or lower the capacity."
            )
        return BucketLayout(num_rows=per_bucket * num_buckets, num_buckets=num_buckets)
