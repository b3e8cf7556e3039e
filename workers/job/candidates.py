"""The candidates of a sample: which feature has them, how many the model scores at once, and in how many parts.

The first id of a sample is the positive one. `Ranks` say where it stands among all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from podembed.embedding.features.column_shape import ColumnShape
from podembed.workers.data.columns import Chance, IdColumn, Negatives, chance_key

# In the place of a feature: the candidates of each sample are a group of their own.
SAMPLE = "sample"


def candidates_problem(feature: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What is wrong with a feature of candidates, in sentences for the user; None if nothing is.

    Args:
      shapes: shapes of all features, as `JobConfig.activation_shapes`.
    """
    if feature not in shapes:
        return f"Found candidates={feature!r}. Expected a feature of the job. Name one of {list(shapes)}."
    if len(shapes[feature]) < 2:
        return (
            f"Found candidates={feature!r}, whose ids are combined to one vector. Expected a vector for each. "
            "Write FeatureConfig(table, max_sequence_length=5) for 5 candidates."
        )
    return None


def room_problem(feature: str, source: IdColumn, shape: tuple[int, ...]) -> str | None:
    """What is wrong with the room that a feature has for its negatives, or with its weights; None if nothing is."""
    if source.weights is not None and len(shape) > 1:
        return (
            f"Found weights={source.weights!r} for feature {feature!r}, whose ids are not combined. Expected a feature "
            "with one vector a sample. Leave out max_sequence_length and output_shape, or hand the numbers to the "
            f"model: extra=(ListColumn({source.weights!r}, {shape[0]}),)."
        )
    declared = source.negatives
    if declared is None:
        return None
    width, room = declared.width(is_evaluation=False), math.prod(shape[:-1])
    if len(shape) < 2 or room % width:
        found = f"room for {room} vectors a sample" if len(shape) > 1 else "one vector a sample"
        return (
            f"Found {found} for feature {feature!r}, whose column has Negatives({declared.count}). Expected "
            f"{width} for each id. Write FeatureConfig(table, max_sequence_length={width}) for one id a sample, or "
            f"output_shape=(None, length, {width}) for lists."
        )
    return None


def alignment_problem(columns: Mapping[str, IdColumn]) -> str | None:
    """What is wrong with features that would get negatives of different values, although they declare the same; None if
    nothing is.

    Args:
      columns: columns of all features, resolved.
    """
    seen: dict[tuple[str, Negatives], tuple[str, IdColumn]] = {}
    for name, source in columns.items():
        declared = source.negatives and source.negatives.draws
        if declared is None or not (declared.count or declared.ranks_all):
            continue
        # Each feature reads by itself what is in files. Only rows as they are may lie outside of a table.
        outside = source.outside if source.mode == "as_is" else "error"
        kind = replace(source, missing=None, outside=outside, negatives=declared)
        other, first = seen.setdefault((source.column, declared), (name, kind))
        # A table that refuses such ids meets none.
        is_refused = "error" in (outside, first.outside)
        if kind != (replace(first, outside=outside) if is_refused else first):
            return (
                f"Found the same Negatives for features {other!r} and {name!r} of column {source.column!r}, in whose "
                "tables a value has different rows. Expected one row, since rows are drawn. Give both the same mode, "
                "salt, and rows and invalid_ids of the table, or declare other Negatives for one of them."
            )
        if first.outside == "error":
            seen[source.column, declared] = name, kind
    return None


def chance_columns(columns: Mapping[str, IdColumn]) -> dict[Chance, dict[str, str]]:
    """The features of which models get `ModelBatch.log_q`, and those of which they get `ModelBatch.log_frequency`, with
    the column of a batch that has it.
    """
    return {
        kind: {
            name: chance_key(name, kind)
            for name, one in columns.items()
            if one.negatives is not None and kind in one.negatives.chances
        }
        for kind in get_args(Chance)
    }


def chance_shapes(
    columns: Mapping[str, IdColumn], activation_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ColumnShape]:
    """What a batch has of `chance_columns`: a number for each vector of the feature."""
    found = chance_columns(columns).values()
    return {key: ColumnShape(activation_shapes[name][:-1]) for by_feature in found for name, key in by_feature.items()}


def num_parts(source: IdColumn, room: int) -> int:
    """Number of parts in which an evaluation looks at the candidates of a sample.

    Args:
      room: candidates that are scored at once.
    """
    if source.negatives is None:
        return 1
    if source.negatives.ranks_all:
        # The positive one, and then each row of the table.
        return max(1, -(-(1 + (source.vocabulary_size or 0) - source.first_row) // room))
    return max(1, -(-source.negatives.width(is_evaluation=True) // room))


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The rank of each sample's positive candidate among its other candidates. Arrays int64 `[n]`.

    Attributes:
      above: candidates with a higher score.
      tied: others with the same score.
      others: all candidates but the positive one.
    """

    above: np.ndarray
    tied: np.ndarray
    others: np.ndarray

    @staticmethod
    def concatenate(parts: Sequence[Ranks]) -> Ranks:
        """The samples of all parts."""
        columns = zip(*((part.above, part.tied, part.others) for part in parts), strict=True)
        return Ranks(*map(np.concatenate, columns))

    def of(self, samples: np.ndarray) -> Ranks:
        """The ranks of some samples, by their numbers or a mask."""
        return Ranks(self.above[samples], self.tied[samples], self.others[samples])


class RankCounts:
    """Counts the candidates above each positive one, part by part, so that no score is kept. Mutated by `add`.

    Attributes:
      has_positive: bool `[n]`, whether a sample has any candidate.
    """

    def __init__(self) -> None:
        self.has_positive = np.zeros(0, bool)
        self._own = np.zeros(0, np.float32)
        self._counts = np.zeros((3, 0), np.int64)

    def add(self, scores: np.ndarray, is_candidate: np.ndarray, *, is_first: bool) -> None:
        """Takes a part of the candidates of the same samples.

        Args:
          scores: `[n, c]`.
          is_candidate: bool `[n, c]`, False where there is no candidate.
          is_first: of the first part, where the positive one is the first candidate.
        """
        if is_first:
            self.has_positive = is_candidate[:, 0].copy()
            self._own = np.where(self.has_positive, scores[:, 0], np.float32(np.nan))
            self._counts = np.zeros((3, len(scores)), np.int64)
            is_candidate = is_candidate.copy()
            is_candidate[:, 0] = False
        own = self._own[:, None]
        self._counts += [
            np.count_nonzero(found & is_candidate, axis=1)
            for found in (scores > own, scores == own, np.ones_like(is_candidate))
        ]
        # A score that is no number is refused where the figures are made.
        self._own[(np.isnan(scores) & is_candidate).any(axis=1)] = np.nan

    def result(self, samples: np.ndarray) -> tuple[np.ndarray, Ranks]:
        """The positive candidate's score and rank, for some of the samples. NaN if any score of the sample is NaN."""
        return self._own[samples], Ranks(*self._counts).of(samples)
