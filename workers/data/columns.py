"""`Label`, `DenseColumn`, `IdColumn`, `Negatives`: what a user declares about one column of the data.

This is the only place that says how a raw value becomes a number or a row of a table. Training, evaluation and export
can therefore not disagree about it. `workers.columns` does what is declared here.
"""

from __future__ import annotations

import math
import os
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.features.id_policies import rows_in
from podembed.workers.data.times import TimeScale, Unit, origin_problem
from podembed.workers.declared_types import check_plain_fields, shown

IdMode = Literal["as_is", "hash", "vocabulary"]
Missing = Literal["empty", "zero"]
MissingLabel = Literal["refuse", "mask"]
Transform = Literal["identity", "log1p"]
Distribution = Literal["uniform", "popularity"]
Chance = Literal["log_q", "log_frequency"]
Outside = Literal["error", "drop", "clip", "hash", "any"]


class DataConfigError(ValueError):
    """A declaration of the data that cannot be meant."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label a row, float32.

    Attributes:
      name: the column, of an integer, float or boolean type.
      missing: what a null means. `refuse`: the row is malformed. `mask`: the sample does not have this label. The
        losses of a job and of its tasks leave it out, as evaluations do. A loss of the model finds it in
        `ModelBatch.label_masks`. A number that is not finite is malformed in both cases.
      num_classes: labels are whole numbers from 0 to `num_classes - 1`, and a row with another one is malformed. None
        takes any finite number. A job fills it in, by its loss or its tasks.
    """

    name: str
    missing: MissingLabel = "refuse"
    num_classes: int | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        if not self.name:
            raise DataConfigError("Found Label(''). Expected the name of a column. Write Label('click').")
        check_choice(self.missing, MissingLabel, where=f"missing of label {self.name!r}")
        if self.num_classes is not None and self.num_classes < 2:
            raise DataConfigError(
                f"Found num_classes={self.num_classes} for label {self.name!r}. Expected at least 2. Leave it out for "
                "labels that are any numbers."
            )


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """One dense number a row, float32.

    Attributes:
      name: the column, of an integer, float or boolean type, where a null counts as 0; or of dates, timestamps, times
        of day or durations.
      transform: `identity`, or `log1p` for log(1 + max(x, 0)), which tames counts with long tails.
      unit, since: of columns of times alone, what number a time becomes; see `workers.data.times.TimeScale`.
    """

    name: str
    transform: Transform = "identity"
    unit: Unit | None = None
    since: str | None = None

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        check_choice(self.transform, Transform, where=f"transform of dense column {self.name!r}")
        check_scale(self.unit, self.since, where=f"dense column {self.name!r}")

    @property
    def scale(self) -> TimeScale:
        return TimeScale(self.unit, self.since)

    @property
    def shape(self) -> ColumnShape:
        """What a sample has of it."""
        return ColumnShape()


@dataclass(frozen=True, slots=True)
class Negatives:
    """Ids that are drawn beside those of a column. Each id of a sample is followed by its negatives.

    What is drawn is a function of the job's seed, the epoch and the sample's id. So it is the same at any number of
    hosts and after a restart, and another in every epoch. No id of the sample itself is drawn, unless hardly any other
    is left.

    Attributes:
      count: negatives of each id in training.
      by: `uniform`: all rows of the table that stand for values are as likely. `popularity`: an id is drawn as often as
        its number of positive samples in the training files, to the power of `alpha`. Samples whose label is above 0
        are positive.
      alpha: alpha of `popularity`. 0 draws evenly from the ids that occur.
      without_positives_of: a feature with one id a sample, such as the user. No id is drawn that occurs in a positive
        sample of the same user in the training files.
      evaluation: as many are drawn in an evaluation, always the same ones, all different. None stands for `count`.
        `all`: nothing is drawn. The first id of a sample is ranked among all ids that could be drawn for it.
      given: if above 0, nothing is drawn in an evaluation. The evaluation files have lists of at most so many ids, the
        positive one first.
      only: leave out the ids of the column, and keep the negatives alone.
      log_q: whether models get `ModelBatch.log_q`: how likely each id of the feature is drawn.
      log_frequency: whether they get `ModelBatch.log_frequency`: how often each id is that of a positive sample.
    """

    count: int
    _: KW_ONLY
    by: Distribution = "uniform"
    alpha: float = 0.75
    without_positives_of: str | None = None
    evaluation: int | str | None = None
    given: int = 0
    only: bool = False
    log_q: bool = False
    log_frequency: bool = False

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        check_choice(self.by, Distribution, where="the distribution of Negatives")
        if isinstance(self.evaluation, str) and (self.evaluation != "all" or self.only):
            raise DataConfigError(
                f"Found Negatives with evaluation={self.evaluation!r} and only={self.only}. Expected a number, or "
                "'all' to rank the id of the column among all others. Write Negatives(4, evaluation='all')."
            )
        drawn = 0 if isinstance(self.evaluation, str) else self.evaluation or 0
        if min(self.count, drawn, self.given) < 0 or (self.count == 0 and self.only):
            raise DataConfigError(
                f"Found Negatives with count={self.count}, evaluation={self.evaluation}, given={self.given} and "
                f"only={self.only}. Expected numbers of at least 0, and some ids in all. Write Negatives(4)."
            )
        if self.given and self.evaluation is not None:
            raise DataConfigError(
                f"Found Negatives with evaluation={self.evaluation} and given={self.given}. Expected one of them, "
                "since ids of an evaluation are drawn or in the files. Leave one out."
            )
        if not 0 <= self.alpha < 100:
            raise DataConfigError(
                f"Found alpha={self.alpha} of Negatives. Expected a power such as 0.75. Leave it out for that."
            )

    @property
    def needs_counts(self) -> bool:
        """Whether the training files are read before the first step."""
        return self.by == "popularity" or self.without_positives_of is not None or self.log_frequency

    @property
    def is_in_files(self) -> bool:
        """Whether nothing is drawn, and nothing of the training files is asked: evaluation files have lists."""
        return self.count == 0 and self.given > 0 and not self.needs_counts and not self.log_q

    @property
    def chances(self) -> tuple[Chance, ...]:
        """What models get to know of the ids."""
        return tuple(kind for kind in get_args(Chance) if getattr(self, kind))

    @property
    def draws(self) -> Negatives:
        """What says which ids come, without what models get to know of them."""
        return replace(self, log_q=False, log_frequency=False)

    @property
    def ranks_all(self) -> bool:
        """Whether an evaluation ranks all ids."""
        return isinstance(self.evaluation, str)

    def drawn(self, *, is_evaluation: bool) -> int:
        """Negatives of each id."""
        if not is_evaluation:
            return self.count
        if self.given or isinstance(self.evaluation, str):
            return 0
        return self.count if self.evaluation is None else self.evaluation

    def width(self, *, is_evaluation: bool) -> int:
        """Ids that come of one id of the column; at most, where an evaluation has lists."""
        if is_evaluation and self.given:
            return self.given
        return self.drawn(is_evaluation=is_evaluation) + (not self.only)


def chance_key(feature: str, kind: Chance) -> str:
    """The name in a reader's batch of what models get to know of a feature's ids."""
    return f"{feature}/{kind}"


@dataclass(frozen=True, slots=True)
class IdColumn:
    """The source of one feature's ids, and the way from a value to a row of its table. `workers.columns.id_columns`
    has the table of all cases.

    Attributes:
      column: a column of integers, strings, or times (one id a sample), or of lists of integers or strings (a bag a
        sample).
      mode: `as_is`: the value is the row, and anything outside [0, vocabulary_size) is an error; integers only. Where
        keys come and go, the value is the key: any integer, or the 64 bits of a text. `hash`: the row is 1 +
        mix64(value, salt) mod (vocabulary_size - 1), for values of any size; row 0 is left to missing values. Where
        keys come and go, the key is mix64(value, salt). `vocabulary`: the row is `num_reserved` + the number of the
        value's line in the file; row 0 is for values that the file does not have.
      vocabulary_size: rows of the table; None until `InputData.resolved` fills it in.
      missing: what a null or an empty string becomes, be it the value, a list or an id in a list. `empty` is no id,
        `zero` is row 0. None stands for `zero` with `hash` and for `empty` otherwise.
      salt: separates features that hash into one table although equal values mean different things.
      vocabulary: path or URL of a text file in UTF-8, one value a line, counted from 0; gives the mode `vocabulary`.
      num_reserved: rows before the first value of the vocabulary, at least 1.
      unit, since: of columns of times alone, what integer a time becomes: whole units, rounded down; see
        `workers.data.times.TimeScale`.
      boundaries: rising numbers that cut the numbers of the column into buckets. A number is in bucket k if k of them
        are at most as large, and k takes the place of the number. With `missing="zero"` the rows begin at 1.
      crossed_with: further columns, whose values make one value with that of this column. Its key is made of theirs,
        in this order. A plain name stands for `IdColumn(name)`, and others may have `boundaries` or a `unit`. Gives
        the mode `hash`.
      weights: a column with a number for each id, of lists where the ids are lists.
      outside: what becomes of integers outside the table, as `TableConfig.invalid_ids` says it; `any` where none is
        outside, since the keys of the table come and go. But for `error`, they are handed on as they are.
        `InputData.resolved` fills it in.
      negatives: ids that are drawn beside those of the column.
      last: of a list the most ids that are kept, its last ones; None keeps all. What stands behind is as if the file
        had no others, but ids that are left out must be rows of the table as well.
    """

    column: str
    mode: IdMode = "as_is"
    vocabulary_size: int | None = None
    missing: Missing | None = None
    salt: int = 0
    vocabulary: str | None = None
    num_reserved: int = 1
    unit: Unit | None = None
    since: str | None = None
    outside: Outside = "error"
    negatives: Negatives | None = None
    boundaries: tuple[float, ...] = ()
    crossed_with: tuple[str | IdColumn, ...] = ()
    weights: str | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.negatives, Negatives | None):
            raise DataConfigError(
                f"Found negatives={shown(self.negatives)} for id column {self.column!r}. Expected Negatives, or None. "
                "Write negatives=Negatives(4)."
            )
        if isinstance(self.vocabulary, os.PathLike):
            object.__setattr__(self, "vocabulary", os.fspath(self.vocabulary))
        check_plain_fields(self, DataConfigError)
        if self.vocabulary is not None and self.mode == "as_is":
            object.__setattr__(self, "mode", "vocabulary")
        object.__setattr__(self, "boundaries", _boundaries_of(self.boundaries, self.column))
        if self.crossed_with:
            object.__setattr__(self, "crossed_with", _crossed_of(self.crossed_with, self.column))
            object.__setattr__(self, "mode", "hash" if self.mode == "as_is" else self.mode)
        check_choice(self.outside, Outside, where=f"outside of id column {self.column!r}")
        check_choice(self.mode, IdMode, where=f"mode of id column {self.column!r}")
        if self.missing is None:
            object.__setattr__(self, "missing", "zero" if self.mode == "hash" else "empty")
        check_choice(self.missing, Missing, where=f"missing of id column {self.column!r}")
        if (self.mode == "vocabulary") != (self.vocabulary is not None):
            raise DataConfigError(
                f"Found mode {self.mode!r} and vocabulary {self.vocabulary!r} for id column {self.column!r}. Expected "
                "a file with the mode 'vocabulary' and none with another. Pass vocabulary='values.txt' alone."
            )
        check_scale(self.unit, self.since, where=f"id column {self.column!r}")
        self._check_together()
        if self.num_reserved < 1:
            raise DataConfigError(
                f"Found num_reserved {self.num_reserved} for id column {self.column!r}. Expected at least 1, since row "
                "0 is for values that the vocabulary does not have."
            )
        if self.last is not None and (self.last < 1 or self.crossed_with):
            beside = " beside crossed_with" if self.crossed_with else ""
            raise DataConfigError(
                f"Found last={self.last}{beside} for id column {self.column!r}. Expected how many ids of a list are "
                "kept, at least 1, of a column whose values are not crossed. Leave it out to keep all."
            )
        num_buckets = len(self.boundaries) + 1 if self.boundaries else 1
        least = {"as_is": self.first_row + num_buckets, "hash": 2, "vocabulary": self.num_reserved}[self.mode]
        if self.vocabulary_size is not None and self.vocabulary_size < least:
            raise DataConfigError(
                f"Found vocabulary_size {self.vocabulary_size} for id column {self.column!r} in mode {self.mode!r}. "
                f"Expected at least {least}. Give the table more rows."
            )

    @property
    def scale(self) -> TimeScale:
        return TimeScale(self.unit, self.since)

    @property
    def first_row(self) -> int:
        """The first row of the table that stands for a value."""
        if self.boundaries and self.mode == "as_is":
            return int(self.missing == "zero")
        return {"as_is": 0, "hash": 1, "vocabulary": self.num_reserved}[self.mode]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id of a resolved column, int64: -1 of one that its table drops. Keys that come and go stay
        keys.
        """
        return ids if self.outside == "any" else rows_in(ids, self.vocabulary_size or 0, self.outside)

    @property
    def parts(self) -> tuple[IdColumn, ...]:
        """The columns whose values make one value, this one first; this one alone where none is crossed with it."""
        return (self, *(part for part in self.crossed_with if isinstance(part, IdColumn)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the feature is made of: those of `parts`, then the weights."""
        return (*(part.column for part in self.parts), *((self.weights,) if self.weights is not None else ()))

    def _check_together(self) -> None:
        """Raises `DataConfigError` for declarations that exclude each other."""
        raw = [name for name in ("boundaries", "crossed_with", "weights") if getattr(self, name)]
        rivals = [("vocabulary", raw[:1] if raw != ["weights"] else []), ("negatives", raw)]
        rivals.append(("weights", ["crossed_with"] if self.crossed_with else []))
        for name, others in rivals:
            if getattr(self, name) is not None and others:
                raise DataConfigError(
                    f"Found {name} and {others[0]} for id column {self.column!r}. Expected one of them, since they do "
                    "not go together. Leave one out."
                )


def _boundaries_of(given: Any, column: str) -> tuple[float, ...]:
    numbers: tuple[Any, ...] = tuple(given) if isinstance(given, tuple | list) else (None,)
    is_number = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not is_number or not all(map(math.isfinite, numbers)) or sorted(set(numbers)) != list(numbers):
        raise DataConfigError(
            f"Found boundaries={shown(given)} for id column {column!r}. Expected rising finite numbers. Write "
            "boundaries=(18, 25, 35)."
        )
    return tuple(map(float, numbers))


def _crossed_of(given: Any, column: str) -> tuple[IdColumn, ...]:
    """The columns that one is crossed with, all as `IdColumn` in the mode `hash`, whose values may be of any size."""
    if not isinstance(given, tuple | list) or not all(isinstance(part, str | IdColumn) for part in given):
        raise DataConfigError(
            f"Found crossed_with={shown(given)} for id column {column!r}. Expected a tuple of names of columns or "
            f"IdColumn. Write IdColumn({column!r}, crossed_with=('brand',))."
        )
    parts = [IdColumn(part) if isinstance(part, str) else part for part in given]
    for part in parts:
        if part.vocabulary or part.salt or part.weights or part.negatives or part.crossed_with:
            raise DataConfigError(
                f"Found {part} in crossed_with of id column {column!r}. Expected a column with nothing but a unit, an "
                f"origin or boundaries, since the values themselves are crossed. Write IdColumn({part.column!r})."
            )
    return tuple(replace(part, mode="hash") for part in parts)


def check_scale(unit: Unit | None, since: str | None, *, where: str) -> None:
    """Raises `DataConfigError` for a scale of times that cannot be meant."""
    if unit is not None:
        check_choice(unit, Unit, where=f"unit of {where}")
    problem = None if since is None else origin_problem(since)
    if problem:
        raise DataConfigError(
            f"Found since={since!r} for {where}. Expected {problem}. Write it so, or leave it out for 1970-01-01."
        )


def check_choice(value: object, choices: object, *, where: str) -> None:
    if value not in get_args(choices):
        raise DataConfigError(f"Found {value!r} as {where}. Expected one of {get_args(choices)}. Pick one of them.")
