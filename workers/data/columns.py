"""`Label`, `DenseColumn`, `IdColumn`, `Negatives`: what a user declares about one column of the data.

This is the only place that says how a raw value becomes a number or a row of a table. Training, evaluation and export
can therefore not disagree about it. `workers.columns` does what is declared here.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from podembed.embedding.features.column_shape import ColumnShape
from podembed.workers.data.times import TimeScale, Unit, origin_problem
from podembed.workers.declared_types import check_plain_fields, shown

IdMode = Literal["as_is", "hash", "vocabulary"]
Missing = Literal["empty", "zero"]
MissingLabel = Literal["refuse", "mask"]
Transform = Literal["identity", "log1p"]
Distribution = Literal["uniform", "popularity"]


class DataConfigError(ValueError):
    """A declaration of the data that cannot be meant."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label a row, float32.

    Attributes:
      name: the column, of an integer, float or boolean type.
      missing: what a null means. `refuse`: the row is malformed. `mask`: the sample does not have this label, and
        `ModelBatch.label_masks` says so. A number that is not finite is malformed in both cases.
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
      alpha: of `popularity`. 0 draws evenly from the ids that occur.
      without_positives_of: a feature with one id a sample, such as the user. No id is drawn that occurs in a positive
        sample of the same user in the training files.
      evaluation: as many are drawn in an evaluation, always the same ones, all different. None stands for `count`.
      given: if above 0, nothing is drawn in an evaluation. The evaluation files have lists of at most so many ids, the
        positive one first.
      only: leave out the ids of the column, and keep the negatives alone.
    """

    count: int
    _: KW_ONLY
    by: Distribution = "uniform"
    alpha: float = 0.75
    without_positives_of: str | None = None
    evaluation: int | None = None
    given: int = 0
    only: bool = False

    def __post_init__(self) -> None:
        check_plain_fields(self, DataConfigError)
        check_choice(self.by, Distribution, where="the distribution of Negatives")
        if min(self.count, self.evaluation or 0, self.given) < 0 or (self.count == 0 and self.only):
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
        return self.by == "popularity" or self.without_positives_of is not None

    def drawn(self, *, is_evaluation: bool) -> int:
        """Negatives of each id."""
        if not is_evaluation:
            return self.count
        return 0 if self.given else self.count if self.evaluation is None else self.evaluation

    def width(self, *, is_evaluation: bool) -> int:
        """Ids that come of one id of the column; at most, where an evaluation has lists."""
        if is_evaluation and self.given:
            return self.given
        return self.drawn(is_evaluation=is_evaluation) + (not self.only)


@dataclass(frozen=True, slots=True)
class IdColumn:
    """Where the ids of one feature come from and how a value becomes a row of its table. `workers.columns.id_columns`
    has the table of all cases.

    Attributes:
      column: a column of integers, strings, or times (one id a sample), or of lists of integers or strings (a bag a
        sample).
      mode: `as_is`: the value is the row, and anything outside [0, vocabulary_size) is an error; integers only. `hash`:
        the row is 1 + mix64(value, salt) mod (vocabulary_size - 1), for values of any size; row 0 is left to missing
        values. `vocabulary`: the row is `num_reserved` + the number of the value's line in the file; row 0 is for
        values that the file does not have.
      vocabulary_size: rows of the table; None until `InputData.resolved` fills it in.
      missing: what a null or an empty string becomes, be it the value, a list or an id in a list. `empty` is no id,
        `zero` is row 0. None stands for `zero` with `hash` and for `empty` otherwise.
      salt: separates features that hash into one table although equal values mean different things.
      vocabulary: path or URL of a text file in UTF-8, one value a line, counted from 0; gives the mode `vocabulary`.
      num_reserved: rows before the first value of the vocabulary, at least 1. unit, since: of columns of times alone,
      what integer a time becomes: whole units, rounded down; see `workers.data.times.TimeScale`.
      keeps_outside: whether integers outside the table are handed on as they are, for a table that says with
        `invalid_ids` what becomes of them. `InputData.resolved` fills it in.
      negatives: ids that are drawn beside those of the column.
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
    keeps_outside: bool = False
    negatives: Negatives | None = None

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
        check_choice(self.mode, IdMode, where=f"mode of id column {self.column!r}")
        if self.missing is None:
            object.__setattr__(self, "missing", "zero" if self.mode == "hash" else "empty")
        check_choice(self.missing, Missing, where=f"missing of id column {self.column!r}")
        if (self.mode == "vocabulary") != (self.vocabulary is not None):
            raise DataConfigError(
                f"Found mode {self.mode!r} and vocabulary {self.vocabulary!r} for id column {self.column!r}. Expected "
                "a file with the mode "
                "'vocabulary' and none with another. Pass vocabulary='values.txt' alone."
            )
        check_scale(self.unit, self.since, where=f"id column {self.column!r}")
        if self.num_reserved < 1:
            raise DataConfigError(
                f"Found num_reserved {self.num_reserved} for id column {self.column!r}. Expected at least 1, since row "
                "0 is for values "
                "that the vocabulary does not have."
            )
        least = {"as_is": 1, "hash": 2, "vocabulary": self.num_reserved}[self.mode]
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
        return {"as_is": 0, "hash": 1, "vocabulary": self.num_reserved}[self.mode]


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
