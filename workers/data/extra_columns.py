"""`IntegerColumn`, `VectorColumn`, `ListColumn`: columns that a model gets by name, beside dense numbers and features.

`DenseColumn` is one as well, and vectors may stand among the dense numbers. `workers.columns.extra_columns` reads what
is declared here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from podembed.embedding.features.column_shape import ColumnShape
from podembed.workers.data.columns import DataConfigError, DenseColumn, check_choice, check_scale
from podembed.workers.data.times import TimeScale, Unit
from podembed.workers.declared_types import check_plain_fields, shown

IntegerType = Literal["int32", "int64"]
ListType = Literal["float32", "int32", "int64"]
Kept = Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class IntegerColumn:
    """One whole number a row, such as a raw id or a time.

    Attributes:
      name: the column, of integers or times.
      dtype: `int32`, and a row with a number beyond it is malformed. `int64`, which comes to the model as two uint32,
        the low 32 bits first, since JAX has no 64 bits by default.
      missing: what a null becomes.
      unit, since: of columns of times alone, what integer a time becomes; see `workers.data.times.TimeScale`.
    """

    name: str
    dtype: IntegerType = "int32"
    missing: int = 0
    unit: Unit | None = None
    since: str | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        check_choice(self.dtype, IntegerType, where=f"dtype of column {self.name!r}")
        check_scale(self.unit, self.since, where=f"column {self.name!r}")
        bits = 31 if self.dtype == "int32" else 63
        if not -(1 << bits) <= self.missing < 1 << bits:
            raise DataConfigError(
                f"Found missing={self.missing} for column {self.name!r}. Expected an {self.dtype}. Write a smaller one."
            )

    @property
    def scale(self) -> TimeScale:
        return TimeScale(self.unit, self.since)

    @property
    def shape(self) -> ColumnShape:
        """What a sample has of it."""
        return ColumnShape((), "int32") if self.dtype == "int32" else ColumnShape((2,), "uint32")


@dataclass(frozen=True, slots=True)
class VectorColumn:
    """A vector a row, float32 `[n, size]`. Of `dense` it is so many dense numbers.

    Attributes:
      name: the column, of lists with exactly `size` numbers. A null list, or a null in a list, is zeros. A row with a
        list of another length is malformed.
      size: numbers of a row.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        _check_size(self.size, where=f"size of vector column {self.name!r}")

    @property
    def shape(self) -> ColumnShape:
        """What a sample has of it."""
        return ColumnShape((self.size,))


@dataclass(frozen=True, slots=True)
class ListColumn:
    """Numbers of a history, such as its times: `[n, max_length]`, with zeros behind those of a row.

    How many a row has is `ModelBatch.lengths[name]`.

    Attributes:
      name: the column, of lists of numbers, integers or times. A null list is empty, and a null in a list is 0.
      max_length: the most that a row keeps.
      dtype: `float32`, or one of `IntegerColumn`; int64 comes as `[n, max_length, 2]`.
      unit, since: of lists of times alone, as of `IntegerColumn`.
      keep: `first`: of longer lists the first numbers are kept, as those of a feature. `last`: the last ones, as those
        of an `IdColumn(last=max_length)`.
    """

    name: str
    max_length: int
    dtype: ListType = "float32"
    unit: Unit | None = None
    since: str | None = None
    keep: Kept = "first"

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        _check_size(self.max_length, where=f"max_length of list column {self.name!r}")
        check_choice(self.dtype, ListType, where=f"dtype of list column {self.name!r}")
        check_choice(self.keep, Kept, where=f"keep of list column {self.name!r}")
        check_scale(self.unit, self.since, where=f"list column {self.name!r}")

    @property
    def scale(self) -> TimeScale:
        return TimeScale(self.unit, self.since)

    @property
    def shape(self) -> ColumnShape:
        """What a sample has of it."""
        inner = (self.max_length, 2) if self.dtype == "int64" else (self.max_length,)
        return ColumnShape(inner, "uint32" if self.dtype == "int64" else self.dtype)

    @property
    def length_key(self) -> str:
        """The name in a reader's batch of the lengths, int32 `[n]`."""
        return f"{self.name}/length"


ExtraColumn = DenseColumn | IntegerColumn | VectorColumn | ListColumn


def extra_of(given: Any, labels: Collection[str]) -> tuple[ExtraColumn, ...]:
    """The columns that are declared as extra; a plain name stands for `DenseColumn(name)`.

    Args:
      labels: names of the labels.

    Raises:
      DataConfigError: it is something else, or a name comes twice.
    """
    if not isinstance(given, tuple | list) or not all(isinstance(column, str | ExtraColumn) for column in given):
        raise DataConfigError(
            f"Found extra={shown(given)}. Expected a tuple of names of columns, DenseColumn, IntegerColumn, "
            "VectorColumn or ListColumn. Write extra=('age', VectorColumn('image', 128))."
        )
    columns = tuple(DenseColumn(column) if isinstance(column, str) else column for column in given)
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1 or name in labels})
    if twice:
        raise DataConfigError(
            f"Found extra columns {twice} more than once, or among the labels {list(labels)}. Expected other names, "
            "since a batch has labels by name already. Remove the repetition."
        )
    return columns


def dense_of(given: Any) -> tuple[DenseColumn | VectorColumn, ...]:
    """The columns that are declared as dense; a plain name stands for `DenseColumn(name)`.

    Raises:
      DataConfigError: it is something else, or a name comes twice.
    """
    if isinstance(given, str):
        raise DataConfigError(f"Found dense={given!r}. Expected a tuple of columns. Write dense=({given!r},).")
    is_tuple = isinstance(given, tuple | list)
    if not is_tuple or not all(isinstance(column, str | DenseColumn | VectorColumn) for column in given):
        raise DataConfigError(
            f"Found dense={shown(given)}. Expected a tuple of names of columns, DenseColumn or VectorColumn. Write "
            "dense=('price', DenseColumn('visits', 'log1p'))."
        )
    columns = tuple(DenseColumn(column) if isinstance(column, str) else column for column in given)
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataConfigError(f"Found dense columns {twice} more than once. Expected each once. Remove the repetition.")
    return columns


def batch_shapes(columns: Collection[ExtraColumn]) -> dict[str, ColumnShape]:
    """What a batch has of extra columns, by name."""
    lengths = {one.length_key: ColumnShape((), "int32") for one in columns if isinstance(one, ListColumn)}
    return {column.name: column.shape for column in columns} | lengths


def _check_size(size: int, *, where: str) -> None:
    if size < 1:
        raise DataConfigError(f"Found {size} as {where}. Expected at least 1. Write how many numbers a row has.")
