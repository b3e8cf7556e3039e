"""`ParquetData`, `CsvData`, `NpyData`: what a user declares about the data of a run.

Which files, which column is the label, which columns are dense numbers, and which column holds the ids of each feature.
`workers.data.columns` declares a single column. Values only: `workers.formats.registry` opens the files, and
`workers.input.reader` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, TypeVar

from podembed.embedding.features.column_shape import ColumnShape
from podembed.workers.data.columns import DataConfigError, DenseColumn, IdColumn, Label, Outside, check_choice
from podembed.workers.data.extra_columns import (
    ExtraColumn,
    IntegerColumn,
    ListColumn,
    VectorColumn,
    batch_shapes,
    dense_of,
    extra_of,
)
from podembed.workers.data.times import TimeScale
from podembed.workers.declared_types import check_plain_fields, shown

ReadOrder = Literal["shuffled", "files"]

# Rows that are read, and shuffled, at once where the file itself has no row groups.
ROWS_PER_BLOCK = 32_768


Data = TypeVar("Data", bound="InputData")


@dataclass(frozen=True, slots=True)
class InputData:
    """What every source of samples declares; users write one of its kinds, such as `ParquetData`.

    Attributes:
      paths: one or several paths or globs, local or fsspec URLs (`gs://bucket/day_*/*.parquet`). Files are read in
        sorted order.
      label: column of finite numbers without nulls; without one every sample is a positive one. Of several labels the
        one by which a job without tasks is evaluated, by default the first.
      labels: all labels, where there are several; a plain name stands for `Label(name)`.
      dense: columns of dense numbers and vectors, in the order in which the model sees them; a plain name stands for
        `DenseColumn(name)`.
      extra: columns that a model gets by name (`ModelBatch.columns`); a plain name stands for `DenseColumn(name)`.
      features: feature name to its ids; a plain column name stands for `IdColumn(column)`. The order is the order of
        the batch.
      sample_weight: column of finite numbers >= 0 without nulls, or None, which stands for all ones.
      sample_id: column of integers >= 0 without nulls that names a row for audits. None stands for the
        position of the row over all files in sorted order.
      eval_paths: paths or globs of held-out data with the same columns.
      binary_labels: whether labels other than 0 and 1 are malformed. A job with the default loss, which is for these,
        sets it.
      has_labels: whether labels are read; predictions do without.
      max_bad_rows: rows of the whole data that may be malformed. Such a row becomes padding in its place, so the same
        ones are left out at every replay. It is counted and written with its reason to the run's folder. One more ends
        the run.
      order: order of the samples in training. `shuffled`: another one in each epoch, by the job's seed. `files`: from
        the first row of the first file, in sorted order, to the last row of the last one, the same in each epoch. That
        is for data in the order of time.
    """

    paths: str | tuple[str, ...]
    _: KW_ONLY
    label: str = ""
    labels: tuple[str | Label, ...] = ()
    dense: tuple[str | DenseColumn | VectorColumn, ...] = ()
    extra: tuple[str | ExtraColumn, ...] = ()
    features: Mapping[str, str | IdColumn] = field(default_factory=dict)
    sample_weight: str | None = None
    sample_id: str | None = None
    eval_paths: str | tuple[str, ...] = ()
    max_bad_rows: int = 0
    binary_labels: bool = False
    has_labels: bool = True
    order: ReadOrder = "shuffled"

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        _take_labels(self)
        object.__setattr__(self, "extra", extra_of(self.extra, [label.name for label in self.label_columns]))
        object.__setattr__(self, "paths", _as_paths(self.paths, "paths"))
        object.__setattr__(self, "eval_paths", _as_paths(self.eval_paths, "eval_paths"))
        object.__setattr__(self, "dense", dense_of(self.dense))
        _check_features(self)
        features = {
            name: IdColumn(source) if isinstance(source, str) else source for name, source in self.features.items()
        }
        object.__setattr__(self, "features", features)
        if not self.paths:
            raise DataConfigError("Found no paths. Expected at least one path or glob. Pass paths='folder/*.parquet'.")
        if str(self.order) == "time":
            raise DataConfigError(
                f"Found order='time' of {type(self).__name__}. Expected 'files', since samples come as the files have "
                "them and are not sorted by a column. Sort them by time when you write the files, and pass "
                "order='files'."
            )
        check_choice(self.order, ReadOrder, where=f"order of {type(self).__name__}")
        if self.max_bad_rows < 0:
            raise DataConfigError(f"Found max_bad_rows {self.max_bad_rows}. Expected 0 or more. Pass 0 to refuse any.")

    @property
    def label_columns(self) -> tuple[Label, ...]:
        """Every label that is read, in their order."""
        if not self.has_labels:
            return ()
        declared = tuple(label for label in self.labels if isinstance(label, Label))
        if not declared:
            declared = (Label(self.label),) if self.label else ()
        if not self.binary_labels:
            return declared
        return tuple(replace(one, num_classes=2) if one.name == self.label else one for one in declared)

    @property
    def column_shapes(self) -> dict[str, ColumnShape]:
        """What a batch has as named columns: the labels but one, the extra columns, and lengths of those of lists."""
        labels = {label.name: ColumnShape() for label in self.label_columns if label.name != self.label}
        return labels | batch_shapes(self.extra_columns)

    @property
    def extra_columns(self) -> tuple[ExtraColumn, ...]:
        return tuple(column for column in self.extra if not isinstance(column, str))

    @property
    def list_columns(self) -> dict[str, ListColumn]:
        """The extra columns of lists."""
        return {one.name: one for one in self.extra_columns if isinstance(one, ListColumn)}

    @property
    def dense_columns(self) -> tuple[DenseColumn | VectorColumn, ...]:
        return tuple(column for column in self.dense if not isinstance(column, str))

    @property
    def num_dense(self) -> int:
        """Dense numbers of a sample."""
        return sum(column.shape.size for column in self.dense_columns)

    @property
    def id_columns(self) -> dict[str, IdColumn]:
        return {name: source for name, source in self.features.items() if isinstance(source, IdColumn)}

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        return tuple(dict.fromkeys(self._uses))

    @property
    def shared_columns(self) -> frozenset[str]:
        """The columns that more than one thing is made of."""
        return frozenset(name for name in self._uses if self._uses.count(name) > 1)

    @property
    def _uses(self) -> list[str]:
        named = [label.name for label in self.label_columns] + [column.name for column in self.dense_columns]
        named += [column for source in self.id_columns.values() for column in source.columns]
        named += [column.name for column in self.extra_columns]
        return named + [name for name in (self.sample_weight, self.sample_id) if name is not None]

    @property
    def vocabularies(self) -> tuple[str, ...]:
        """Every vocabulary file that a feature names, each once."""
        return tuple(dict.fromkeys(source.vocabulary for source in self.id_columns.values() if source.vocabulary))

    def has_lists(self, column: str) -> bool | None:
        """Whether a row of an id column may hold several ids; None where only the files say."""
        return None

    @property
    def has_footers(self) -> bool:
        """Whether files say what is in them without being read."""
        return False

    def resolved(self: Data, vocabulary_sizes: Mapping[str, int], outside: Mapping[str, Outside] | None = None) -> Data:
        """The same data with exactly the features of the model, in the model's order.

        A feature that is not declared here reads the column of its own name as it is.

        Args:
          vocabulary_sizes: feature name to rows of its table.
          outside: feature name to what becomes of ids outside its table, by default `error`.

        Raises:
          DataConfigError: a feature is declared here that the model does not have, or with another vocabulary size.
        """
        unknown = [name for name in self.features if name not in vocabulary_sizes]
        if unknown:
            raise DataConfigError(
                f"Found features {unknown} in the data. Expected only features of the model, {list(vocabulary_sizes)}. "
                f"Remove them from {type(self).__name__}, or declare a FeatureConfig for each."
            )
        declared = self.id_columns
        features = {}
        for name, size in vocabulary_sizes.items():
            source = declared.get(name, IdColumn(name))
            if source.vocabulary_size not in (None, size):
                raise DataConfigError(
                    f"Found vocabulary_size {source.vocabulary_size} for feature {name!r} in the data and {size} in "
                    "its table. Expected the same. Leave it out of IdColumn to take the table's."
                )
            features[name] = replace(source, vocabulary_size=size, outside=(outside or {}).get(name, "error"))
            if source.vocabulary is not None and features[name].outside == "any":
                raise DataConfigError(
                    f"Found a vocabulary for feature {name!r}, whose table has a capacity. Expected none, since its "
                    "values are keys themselves. Leave it out, or declare vocabulary_size."
                )
            if features[name].outside == "any" and source.negatives is not None and not source.negatives.is_in_files:
                raise DataConfigError(
                    f"Found negatives of feature {name!r}, whose table has a capacity. Expected none that are drawn or "
                    "counted, since its keys change from step to step. Train with the items of the batch "
                    "(in_batch_softmax), write lists into the data, or declare vocabulary_size."
                )
            owner = source.negatives and source.negatives.without_positives_of
            if owner is not None and (owner not in vocabulary_sizes or owner == name):
                raise DataConfigError(
                    f"Found negatives of feature {name!r} without_positives_of={owner!r}. Expected another feature of "
                    f"the model, one of {[other for other in vocabulary_sizes if other != name]}. Name the feature of "
                    "the user."
                )
        return replace(self, features=features)

    def for_evaluation(self: Data) -> Data:
        """The held-out files under the same declaration.

        Raises:
          DataConfigError: no eval_paths are declared.
        """
        if not self.eval_paths:
            raise DataConfigError(
                f"Found no eval_paths. Expected the files to evaluate on. Pass eval_paths to {type(self).__name__}."
            )
        return replace(self, paths=self.eval_paths, eval_paths=())


@dataclass(frozen=True, slots=True)
class ParquetData(InputData):
    """Samples in Parquet files: scalars, lists of integers, strings and lists of strings. Row groups are read and
    shuffled whole.
    """

    @property
    def has_footers(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class CsvData(InputData):
    """Samples in CSV files with a header, plain or gzip, in UTF-8; fields may be quoted and then hold delimiters and
    line ends. The ending of a file decides nothing: a `.tsv` of a database dump is `delimiter="\\t", quoting=False`.

    An empty field is null. Starting a run reads every file once to count its rows, and a gzip file is unpacked to a
    temporary file by every host that reads from it: convert to Parquet what is read often.

    Attributes:
      delimiter: one character.
      strings: id columns whose values are strings; those of other id columns are integers.
      times: columns of dates or times in ISO 8601, such as `2024-05-01` or `2024-05-01T12:30:00Z`; those with a `unit`
        or `since` are so anyway.
      list_separators: column to the character between the ids of its lists.
      rows_per_block: rows that are read, and shuffled, at once.
      quoting: whether a field that begins with a quote goes on to the next one, as RFC 4180 says. Without it a quote is
        a character as any other, and a line is a row.
    """

    _: KW_ONLY
    delimiter: str = ","
    strings: tuple[str, ...] = ()
    list_separators: Mapping[str, str] = field(default_factory=dict)
    rows_per_block: int = ROWS_PER_BLOCK
    times: tuple[str, ...] = ()
    quoting: bool = True

    def __post_init__(self) -> None:
        InputData.__post_init__(self)
        _check_rows_per_block(self.rows_per_block)
        if not isinstance(self.list_separators, Mapping) or not all(
            isinstance(text, str) for pair in self.list_separators.items() for text in pair
        ):
            raise DataConfigError(
                f"Found list_separators={shown(self.list_separators)}. Expected a dictionary of columns to what stands "
                "between ids. Write list_separators={'genres': '|'}."
            )
        for name in ("strings", "times"):
            if isinstance(getattr(self, name), str):
                raise DataConfigError(
                    f"Found {name}={getattr(self, name)!r}. Expected a tuple of columns. Write "
                    f"{name}=({getattr(self, name)!r},)."
                )
        both = sorted(self.time_columns & {*self.strings, *self.list_separators})
        if both:
            raise DataConfigError(
                f"Found columns {both} as times and as strings or lists. Expected one of them. Leave {both[0]!r} out "
                "of one."
            )
        if "" in self.list_separators.values():
            raise DataConfigError(
                f"Found list_separators {dict(self.list_separators)}. Expected at least one character in each. Pass "
                "what stands between ids."
            )
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise DataConfigError(
                f"Found delimiter {self.delimiter!r}. Expected one ASCII character other than quotes and line ends. "
                "Pass ',' or '\\t'."
            )

    def has_lists(self, column: str) -> bool | None:
        return column in self.list_separators

    @property
    def time_columns(self) -> frozenset[str]:
        """The columns that hold times."""
        scales = [(part.column, part.scale) for source in self.id_columns.values() for part in source.parts]
        named = (*self.dense_columns, *self.extra_columns)
        scales += [(one.name, one.scale) for one in named if isinstance(one, DenseColumn | IntegerColumn)]
        return frozenset({*self.times, *(name for name, scale in scales if scale != TimeScale())})


@dataclass(frozen=True, slots=True)
class NpyData(InputData):
    """Samples in the form of torchrec and MLPerf: arrays of one day or part in three `.npy` files, read block by block.

    `paths` name the label files, `*labels.npy` of shape `[n]` or `[n, 1]`. Beside each lie a dense file, `[n, d]`
    floats or integers, and a sparse file, `[n, s]` integers. Their names have `dense` and `sparse` in place of
    `labels`. Their columns are called `label`, `int_0` to `int_<d-1>` and `cat_0` to `cat_<s-1>`.

    Attributes:
      rows_per_block: rows that are read, and shuffled, at once.
    """

    _: KW_ONLY
    label: str = "label"
    rows_per_block: int = ROWS_PER_BLOCK

    def __post_init__(self) -> None:
        InputData.__post_init__(self)
        _check_rows_per_block(self.rows_per_block)

    def has_lists(self, column: str) -> bool | None:
        return False


def _take_labels(data: InputData) -> None:
    """Makes `label` and `labels` complete.

    Raises:
      DataConfigError: they do not name columns, or not the same ones.
    """
    given: Any = data.labels
    if not isinstance(given, tuple | list) or not all(isinstance(label, str | Label) for label in given):
        raise DataConfigError(
            f"Found labels={shown(given)}. Expected a tuple of names of columns or Label. Write "
            "labels=('click', Label('buy', missing='mask'))."
        )
    labels = tuple(Label(label) if isinstance(label, str) else label for label in given)
    names = [label.name for label in labels]
    if len(set(names)) != len(names) or (labels and data.label and data.label not in names):
        raise DataConfigError(
            f"Found label={data.label!r} and labels {names}. Expected each label once, and the one among the others. "
            "Write labels=('click', 'buy')."
        )
    object.__setattr__(data, "label", data.label or next(iter(names), ""))
    object.__setattr__(data, "labels", labels)


def _as_paths(paths: Any, field: str) -> tuple[str, ...]:
    """Whatever can only be meant as one path or several, as texts."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise DataConfigError(
            f"Found {field}={shown(paths)}. Expected a path or glob, or a tuple of them. Write "
            f"{field}='folder/*.parquet'."
        )
    texts = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in given]
    wrong = next((path for path in texts if not isinstance(path, str) or not path), None)
    if wrong is not None:
        raise DataConfigError(
            f"Found {shown(wrong)} among {field}. Expected paths or globs, which are text. Write "
            f"{field}='folder/*.parquet'."
        )
    return tuple(texts)


def _check_features(data: InputData) -> None:
    """Raises `DataConfigError` for features that are declared as something else."""
    given: Any = data.features
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise DataConfigError(
            f"Found features={shown(given)} in {type(data).__name__}. Expected a dictionary of features to columns. "
            "Write features={'user': 'user_id'}; names of columns that are called like their features may be left out."
        )
    for name, source in given.items():
        if not isinstance(source, str | IdColumn):
            raise DataConfigError(
                f"Found features[{name!r}]={shown(source)} in {type(data).__name__}. Expected the name of a column or "
                f"an IdColumn. Write {{{name!r}: 'column'}}, or IdColumn('column', mode='hash')."
            )


def _check_rows_per_block(rows: int) -> None:
    if rows < 1:
        raise DataConfigError(f"Found rows_per_block {rows}. Expected at least 1. Leave it out for {ROWS_PER_BLOCK:,}.")
