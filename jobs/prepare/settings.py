"""What a preparation is asked to do, as values: the form of the text, its columns, and how each field's values become
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podembed.jobs.text.criteo import ROWS_PER_GROUP
from podembed.jobs.text.criteo_lines import CATEGORY_NAMES, INTEGER_NAMES
from podembed.orchestrator.api.config import ConfigurationError
from podembed.workers.data.columns import DenseColumn

Form = Literal["criteo", "csv"]
IdKind = Literal["hash", "vocabulary"]

DEFAULT_HASH_ROWS = 200_000
DEFAULT_MIN_COUNT = 10
# About 280,000 Criteo lines: eight row groups, and seconds of work to lose by a kill.
PIECE_BYTES = 64 << 20
_FEWEST_ROWS = 2


class PrepareError(ConfigurationError):
    """A preparation that cannot be meant, or that does not fit what is in its folder already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlan:
    """One categorical field.

    Attributes:
      ids: `hash`, or `vocabulary` for an id of its own for every value that is frequent enough.
      max_rows: hash: rows of the table. vocabulary: most rows of the table, or None.
      min_count: vocabulary: how often a value must occur to be kept.
      salt: hash: separates equal values of different fields.
    """

    name: str
    ids: IdKind
    max_rows: int | None
    min_count: int
    salt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Everything besides the sources that decides the bytes of the prepared set.

    Attributes:
      label: column of the label; every row must have a finite number there.
      dense: columns of numbers, with the transform that training applies to them; nothing is transformed here.
      rows_per_group: rows of a Parquet row group; the last one of each file is smaller.
      piece_bytes: text that becomes one Parquet file, about; what one process does at a time.
      like_sha256: identity of the prepared set whose ids are taken over, or None.
    """

    form: Form
    label: str
    dense: tuple[DenseColumn, ...]
    fields: tuple[FieldPlan, ...]
    rows_per_group: int = ROWS_PER_GROUP
    piece_bytes: int = PIECE_BYTES
    like_sha256: str | None = None

    def __post_init__(self) -> None:
        names = [self.label, *(column.name for column in self.dense), *(field.name for field in self.fields)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PrepareError(
                f"Found columns {twice} named more than once. Expected each once. Remove the repetition."
            )
        if not self.fields:
            raise PrepareError(
                "Found no field of ids. Expected at least one. Name the categorical columns: --fields COLUMN..."
            )
        unfit = [field.name for field in self.fields if not field.name or "/" in field.name or field.name[0] == "."]
        if unfit:
            raise PrepareError(
                f"Found fields named {unfit}. Expected names that can name a file: not empty, without '/', no '.' in "
                "front. Rename the columns."
            )
        if self.rows_per_group < 1 or self.piece_bytes < 1:
            raise PrepareError(
                f"Found rows_per_group {self.rows_per_group} and piece_bytes {self.piece_bytes}. Expected at least 1."
            )
        for field in self.fields:
            if field.min_count < 1:
                raise PrepareError(
                    f"Found a least count of {field.min_count} for field {field.name!r}. Expected at least 1."
                )
            if field.max_rows is not None and field.max_rows < _FEWEST_ROWS:
                raise PrepareError(
                    f"Found {field.max_rows} table rows for field {field.name!r}. Expected at least {_FEWEST_ROWS}, "
                    "since one is reserved."
                )


def field_plans(
    names: Sequence[str], *, ids: IdKind, hashed: Sequence[str] = (), max_rows: int | None, min_count: int
) -> tuple[FieldPlan, ...]:
    """Plans for all fields: of kind `ids`, but for those in `hashed`.

    Raises:
      PrepareError: `hashed` names a field that is not there.
    """
    unknown = sorted(set(hashed) - set(names))
    if unknown:
        raise PrepareError(f"Found hashed fields {unknown}. Expected some of {list(names)}. Correct the names.")
    plans = []
    for salt, name in enumerate(names):
        kind: IdKind = "hash" if name in hashed else ids
        rows = max_rows if max_rows is not None or kind == "vocabulary" else DEFAULT_HASH_ROWS
        plans.append(FieldPlan(name=name, ids=kind, max_rows=rows, min_count=min_count, salt=salt))
    return tuple(plans)


def criteo_dense() -> tuple[DenseColumn, ...]:
    """Criteo's 13 counts, whose long tails training tames."""
    return tuple(DenseColumn(name, "log1p") for name in INTEGER_NAMES)


CRITEO_FIELDS = CATEGORY_NAMES
