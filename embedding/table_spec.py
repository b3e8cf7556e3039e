"""`TableSpec`: everything that must be known to hold and train the rows of one table, as a value.

A `TableConfig` is what the user wrote and may change. A spec is fixed when the run is created, has every default filled
in and knows how the rows are cut into buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podembed.embedding.buckets import MAX_BUCKETS, BucketLayout, bucket_layout
from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import ROW_OPTIMIZERS, Optimizer
from podembed.embedding.row_index import DenseKeys, KeySpace
from podembed.embedding.vocabulary.policies import SmallNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One table as the hosts see it.

    Attributes:
      name: of the table; also part of what its initial values are drawn from.
      num_rows: rows of the whole table.
      dim: columns of a row.
      layout: how the rows are cut into buckets.
      optimizer: the update rule; None for a table that is only read, which then has no slots.
      initializer: first value of a row, see `embedding.initializers`.
      combiner: "mean", "sum" or "sqrtn".
      seed: of the run.
      keys: what its keys are.
      stores: where rows lie, a `table.stores.store.StoreKind`; None for the host's memory.
      is_sharded: each device has a part of it, and its host owns the buckets of its devices.
    """

    name: str
    num_rows: int
    dim: int
    layout: BucketLayout
    optimizer: Optimizer | None
    initializer: Callable[..., Any]
    combiner: str
    seed: int
    keys: KeySpace = field(default_factory=DenseKeys)
    stores: Any = None
    is_sharded: bool = False

    def __post_init__(self) -> None:
        num_buckets = self.layout.num_buckets
        if num_buckets < 1 or num_buckets & (num_buckets - 1):
            raise ValueError(
                f"Found {num_buckets} buckets for table '{self.name}'. Expected a power of two. Take the number "
                "recorded with the run."
            )
        if self.layout.num_rows != self.num_rows:
            raise ValueError(
                f"Found a layout for {self.layout.num_rows} rows in table '{self.name}' of {self.num_rows}. "
                "Expected the same number. Build it with bucket_layout(num_rows=...)."
            )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise ValueError(
                f"Table '{self.name}': {self.optimizer!r} is an unsupported optimizer class. Expected one of "
                f"podembed.embedding. Pass one of {', '.join(rule.__name__ for rule in ROW_OPTIMIZERS)}."
            )

    @staticmethod
    def of(
        config: TableConfig,
        *,
        seed: int,
        name: str | None = None,
        optimizer: Optimizer | None = None,
        num_buckets: int | None = None,
        most_hosts: int = MAX_BUCKETS,
    ) -> TableSpec:
        """Fills in the defaults of a declared table.

        Args:
          seed: of the run.
          name: used if the declaration has none.
          optimizer: used if the declaration has none.
          num_buckets: a power of two, when resuming a run; None chooses by size.
          most_hosts: that will ever share the table; for the choice.

        Raises:
          ValueError: the table has no name, is not float32, or its optimizer is none of ours.
        """
        final_name = config.name or name
        if not final_name:
            raise ValueError("Found a table without a name. Expected one for checkpoints. Pass TableConfig(name=...).")
        if config.dtype != np.float32:
            raise ValueError(
                f"Found dtype {config.dtype} of table '{final_name}'. Expected float32, the type of all rows. Leave it "
                "out."
            )
        chosen = optimizer if config.optimizer is None else config.optimizer
        chosen = chosen if config.trainable else None
        row_bytes = chosen.row_bytes(config.dim) if isinstance(chosen, Optimizer) else 4 * config.dim
        if config.dynamic_keys is not None:
            _refuse_all_rows(final_name, config, chosen)
            beside = sum(dtype.itemsize for dtype in config.dynamic_keys.columns.values())
            layout = config.dynamic_keys.layout(row_bytes + beside, num_buckets)
        elif num_buckets is not None:
            layout = BucketLayout(num_rows=config.vocabulary_size, num_buckets=num_buckets)
        else:
            layout = bucket_layout(num_rows=config.vocabulary_size, row_bytes=row_bytes, most_hosts=most_hosts)
        return TableSpec(
            name=final_name,
            num_rows=layout.num_rows,
            dim=config.dim,
            layout=layout,
            optimizer=chosen,
            initializer=config.initializer,
            combiner=config.combiner,
            seed=seed,
            keys=config.key_space,
            stores=config.stores,
            is_sharded=config.is_sharded,
        )

    @property
    def widths(self) -> dict[str, int]:
        """Columns of "rows", of each slot and of what the index keeps, in float32 words and in order."""
        slots = () if self.optimizer is None else self.optimizer.slots
        own = {name: dtype.itemsize // 4 for name, dtype in self.keys.columns.items()}
        return {"rows": self.dim} | {slot.name: slot.columns(self.dim) for slot in slots} | own

    @property
    def stored_widths(self) -> dict[str, int]:
        """The same in files, where what the index keeps has its own types."""
        return {name: 1 if name in self.keys.columns else width for name, width in self.widths.items()}

    def stored(self, arrays: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Views of a bucket's arrays, in the order of `widths`, with the types that they have in files."""
        values = [*arrays.values()] if isinstance(arrays, Mapping) else arrays
        types = self.keys.columns
        return [array.view(types.get(name, np.float32)) for name, array in zip(self.widths, values, strict=True)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its slots."""
        return 4 * sum(self.widths.values())

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket with its slots, padding rows included."""
        return self.row_bytes * self.layout.rows_per_bucket


def _refuse_all_rows(name: str, config: TableConfig, optimizer: Any) -> None:
    """Decisions of a step are made while the update of the step before is under way. Rows that this one still changes,
    although nobody named them, must decide nothing, and a row must not change before its key's first step.
    """
    if not (isinstance(optimizer, Optimizer) and optimizer.touches_all_rows and config.dynamic_keys is not None):
        return
    decays = bool(getattr(optimizer, "l2", 0.0)) or bool(optimizer.weight_decay_factor)
    if decays or isinstance(config.dynamic_keys.evict, SmallNorm):
        what = "decays all rows" if decays else "changes all rows, beside evict=SmallNorm()"
        raise ValueError(
            f"Found {optimizer!r} for table '{name}' with a capacity, which {what} in every step. Expected a rule that "
            "changes the rows that a step names, such as Adam(lazy_adam=True). Take one."
        )
