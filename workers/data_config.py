"""`ParquetData`: what a user declares about the data of a run.

Which files, which column is the label, which columns are dense numbers and how they are transformed, which column holds the ids of each
feature and how a value of it becomes a row of the table. This is the only place where raw values become row ids, so training, evaluation
and export cannot disagree about it. Values only; the files are opened by `workers.input_index` and read by `workers.input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, get_args

IdMode = Literal["as_is", "hash"]
Missing = Literal["empty", "zero"]
Transform = Literal["identity", "log1p"]


class DataConfigError(ValueError):
    """A declaration of the data that cannot be meant."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """One dense number a row, float32.

    Attributes:
      name: the column, of an integer, float or boolean type. A null counts as 0.
      transform: `identity`, or `log1p` for log(1 + max(x, 0)), which tames counts with long tails.
    """

    name: str
    transform: Transform = "identity"

    def __post_init__(self) -> None:
        _check_choice(self.transform, Transform, where=f"transform of dense column {self.name!r}")


@dataclass(frozen=True, slots=True)
class IdColumn:
    """Where the ids of one feature come from and how a value becomes a row of its table.

    Attributes:
      column: a column of integers (one id a sample) or of lists of integers (a bag a sample).
      mode: `as_is`: the value is the row, and anything outside [0, vocabulary_size) is an error. `hash`: the row is
        1 + mix64(value, salt) mod (vocabulary_size - 1), for values of any size; row 0 is left to missing values.
      vocabulary_size: rows of the table; None until `ParquetData.resolved` fills it in.
      missing: what a null becomes, be it the value, a list or an id in a list: `empty`: no id; `zero`: row 0. None stands for
        `empty` with `as_is` and `zero` with `hash`.
      salt: separates features that hash into one table although equal values mean different things.
    """

    column: str
    mode: IdMode = "as_is"
    vocabulary_size: int | None = None
    missing: Missing | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        _check_choice(self.mode, IdMode, where=f"mode of id column {self.column!r}")
        if self.missing is None:
            object.__setattr__(self, "missing", "zero" if self.mode == "hash" else "empty")
        _check_choice(self.missing, Missing, where=f"missing of id column {self.column!r}")
        least = 2 if self.mode == "hash" else 1
        if self.vocabulary_size is not None and self.vocabulary_size < least:
            raise DataConfigError(
                f"Found vocabulary_size {self.vocabulary_size} for id column {self.column!r} in mode {self.mode!r}. "
                f"Expected at least {least}. Give the table more rows."
            )


@dataclass(frozen=True, slots=True)
class ParquetData:
    """The data of a run, in Parquet files.

    Attributes:
      paths: one or several paths or globs, local or fsspec URLs (`gs://bucket/day_*/*.parquet`). Files are read in sorted order.
      label: column of finite numbers without nulls.
      dense: columns of dense numbers, in the order in which the model sees them; a plain name stands for `DenseColumn(name)`.
      features: feature name to its ids; a plain column name stands for `IdColumn(column)`. The order is the order of the batch.
      sample_weight: column of finite numbers >= 0 without nulls, or None, which stands for all ones.
      sample_id: column of integers >= 0 without nulls that names a row for audits, or None, which stands for the position of the
        row over all files in sorted order.
      eval_paths: paths or globs of held-out data with the same columns.
    """

    paths: str | tuple[str, ...]
    _: KW_ONLY
    label: str
    dense: tuple[str | DenseColumn, ...] = ()
    features: Mapping[str, str | IdColumn] = field(default_factory=dict)
    sample_weight: str | None = None
    sample_id: str | None = None
    eval_paths: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _as_paths(self.paths))
        object.__setattr__(self, "eval_paths", _as_paths(self.eval_paths))
        if isinstance(self.dense, str):
            raise DataConfigError(
                f"Found dense={self.dense!r}. Expected a tuple of columns. Write dense=({self.dense!r},)."
            )
        dense = tuple(DenseColumn(column) if isinstance(column, str) else column for column in self.dense)
        object.__setattr__(self, "dense", dense)
        features = {
            name: IdColumn(source) if isinstance(source, str) else source for name, source in self.features.items()
        }
        object.__setattr__(self, "features", features)
        if not self.paths:
            raise DataConfigError("Found no paths. Expected at least one path or glob. Pass paths='folder/*.parquet'.")
        _check_unique([column.name for column in dense])

    @property
    def dense_columns(self) -> tuple[DenseColumn, ...]:
        return tuple(column for column in self.dense if isinstance(column, DenseColumn))

    @property
    def id_columns(self) -> dict[str, IdColumn]:
        return {name: source for name, source in self.features.items() if isinstance(source, IdColumn)}

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        named = [self.label, *(column.name for column in self.dense_columns)]
        named += [source.column for source in self.id_columns.values()]
        named += [name for name in (self.sample_weight, self.sample_id) if name is not None]
        return tuple(dict.fromkeys(named))

    def resolved(self, vocabulary_sizes: Mapping[str, int]) -> ParquetData:
        """The same data with exactly the features of the model, in the model's order.

        A feature that is not declared here reads the column of its own name as it is.

        Args:
          vocabulary_sizes: feature name to rows of its table.

        Raises:
          DataConfigError: a feature is declared here that the model does not have, or with another vocabulary size.
        """
        unknown = [name for name in self.features if name not in vocabulary_sizes]
        if unknown:
            raise DataConfigError(
                f"Found features {unknown} in the data. Expected only features of the model, {list(vocabulary_sizes)}. "
                "Remove them from ParquetData, or declare a FeatureConfig for each."
            )
        declared = self.id_columns
        features = {}
        for name, size in vocabulary_sizes.items():
            source = declared.get(name, IdColumn(name))
            if source.vocabulary_size not in (None, size):
                raise DataConfigError(
                    f"Found vocabulary_size {source.vocabulary_size} for feature {name!r} in the data and {size} in its table. "
                    "Expected the same. Leave it out of IdColumn to take the table's."
                )
            features[name] = replace(source, vocabulary_size=size)
        return replace(self, features=features)

    def for_evaluation(self) -> ParquetData:
        """The held-out files under the same declaration.

        Raises:
          DataConfigError: no eval_paths are declared.
        """
        if not self.eval_paths:
            raise DataConfigError(
                "Found no eval_paths. Expected the files to evaluate on. Pass eval_paths to ParquetData."
            )
        return replace(self, paths=self.eval_paths, eval_paths=())


def _as_paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)


def _check_unique(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataConfigError(f"Found dense columns {twice} more than once. Expected each once. Remove the repetition.")


def _check_choice(value: object, choices: object, *, where: str) -> None:
    if value not in get_args(choices):
        raise DataConfigError(f"Found {value!r} as {where}. Expected one of {get_args(choices)}. Pick one of them.")
