"""Candidates of a sample: ids that are drawn as negatives, and the parts in which an evaluation looks at many of them.

Both are readers around another one. `workers.data.columns.Negatives` is the declaration.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.hashing import combine
from podembed.embedding.ragged import Ragged
from podembed.workers.data.batch import Batch
from podembed.workers.data.columns import IdColumn, Negatives, chance_key
from podembed.workers.data.config import InputData
from podembed.workers.data.input_errors import InputError
from podembed.workers.input.chances import Chances
from podembed.workers.input.index import InputIndex, build_index
from podembed.workers.input.interactions import Interactions, read_interactions
from podembed.workers.input.lanes import LanePlan
from podembed.workers.input.negative_kernels import draw_distinct, draw_negatives, make_aliases
from podembed.workers.input.read_ahead import StepReader

# Separate draws of training from those of an evaluation, and both from other uses of the seed.
_TRAINING, _EVALUATION = 5, 6

# What training files say of a column, by the column and by the feature whose positives are left out.
Known = dict[tuple[IdColumn, str | None], Interactions]


class NegativeSampler:
    """Draws the negatives of one feature. Calls change nothing. Features of one column with equal declarations get the
    same.

    Attributes:
      negatives: negatives as declared.
    """

    def __init__(
        self,
        feature: str,
        source: IdColumn,
        known: Interactions | None,
        *,
        seed: int,
        is_evaluation: bool = False,
        room: tuple[int, ...] = (),
    ) -> None:
        """Args:
        source: resolved, with negatives.
        known: of the training files, where the declaration needs them.
        room: vectors of a sample, for `chances`.
        """
        declared = source.negatives
        if declared is None or source.vocabulary_size is None or (known is None and declared.needs_counts):
            raise ValueError(f"Found no negatives of {feature!r} that could be drawn. Expected resolved data.")
        self.negatives: Negatives = declared
        self._feature, self._source = feature, source
        self._count = declared.drawn(is_evaluation=is_evaluation)
        self._is_evaluation = is_evaluation
        self._seed = combine(seed, _EVALUATION if is_evaluation else _TRAINING, zlib.crc32(source.column.encode()))
        self._first_row = source.first_row
        self._num_rows = max(1, source.vocabulary_size - source.first_row)
        self._known, self._room = known, room
        self._chances = Chances(source, known) if room and declared.chances else None
        self._candidates = np.zeros(0, np.int64)
        self._thresholds, self._aliases, self._weights = np.zeros(0), np.zeros(0, np.int64), np.zeros(0)
        if declared.by == "popularity" and known is not None:
            self._candidates = np.flatnonzero(known.counts)
            weights = known.counts[self._candidates] ** float(declared.alpha)
            self._thresholds, self._aliases = np.empty(len(weights)), np.empty(len(weights), np.int64)
            make_aliases(weights, self._thresholds, self._aliases)
            # Training draws by the tables alone.
            self._weights = weights if is_evaluation else self._weights

    def extend(self, rows: Batch, *, epoch: int = 0) -> Ragged:
        """The ids of the feature, each followed by its negatives. In an evaluation the only id of a sample has fewer if
        no more may be drawn.

        Raises:
          InputError: a sample with ids has none or several of the owner.
        """
        ids = rows.features[self._feature]
        owners, known_ids = self._owners_of(rows), np.zeros(0, np.int32)
        begins, ends = np.zeros_like(owners), np.zeros_like(owners)
        if self.negatives.without_positives_of is not None and self._known is not None:
            (begins, ends), known_ids = self._known.spans(owners), self._known.ids
        width = self._count + (not self.negatives.only)
        out = np.empty(ids.num_ids * width, np.int64)
        arguments = (
            ids.values,
            self._source.rows_of(ids.values),
            ids.row_splits,
            rows.sample_ids,
            begins,
            ends,
            known_ids,
            self._candidates,
            self._thresholds,
            self._aliases,
            self._first_row,
            self._num_rows,
            self._count,
            not self.negatives.only,
            np.uint64(combine(self._seed, epoch)),
            out,
        )
        if not self._is_evaluation:
            draw_negatives(*arguments)
            return Ragged(out, ids.row_splits * width)
        sizes = np.empty(ids.num_samples, np.int64)
        draw_distinct(*arguments, self._weights, sizes)
        splits = np.concatenate([[0], np.cumsum(sizes)])
        return Ragged(out[: splits[-1]], splits)

    def chances(self, rows: Batch, ids: Ragged) -> dict[str, np.ndarray]:
        """The named columns that models get of the ids, float32 `[n, *room]`.

        Args:
          rows: rows as read.
          ids: ids of the feature, as `extend` returned them.

        Raises:
          InputError: as `extend`.
        """
        if self._chances is None:
            return {}
        width, found = math.prod(self._room), {}
        for kind in self.negatives.chances:
            if kind == "log_q":
                given = rows.features[self._feature]
                values = self._chances.log_q(given, ids, self._owners_of(rows), width=width)
            else:
                values = self._chances.log_frequency(ids, width=width)
            found[chance_key(self._feature, kind)] = values.reshape(rows.num_samples, *self._room)
        return found

    def _owners_of(self, rows: Batch) -> np.ndarray:
        """int64 `[n]`: the row of each sample's owner; -1 where there is none, or the sample has no ids."""
        owner, found = self.negatives.without_positives_of, np.full(rows.num_samples, -1, np.int64)
        if owner is not None and self._known is not None:
            real = np.flatnonzero(np.diff(rows.features[self._feature].row_splits))
            found[real] = self._known.owner_rows(rows.only_ids(owner, real))
        return found


class WithNegatives:
    """A reader whose batches have negatives. One thread at a time, as the reader itself."""

    def __init__(self, reader: StepReader, plan: LanePlan, samplers: Mapping[str, NegativeSampler]) -> None:
        self._reader, self._plan, self._samplers = reader, plan, samplers

    def read(self, step: int) -> Batch:
        batch, (epoch, _) = self._reader.read(step), self._plan.position_of(step)
        drawn = {name: sampler.extend(batch, epoch=epoch) for name, sampler in self._samplers.items()}
        columns = dict(batch.columns)
        for name, sampler in self._samplers.items():
            columns |= sampler.chances(batch, drawn[name])
        return replace(batch, features={**batch.features, **drawn}, columns=columns)

    def close(self) -> None:
        self._reader.close()


class WithZeros:
    """A reader whose batches have further columns of zeros, which only training has values for."""

    def __init__(self, reader: StepReader, shapes: Mapping[str, ColumnShape]) -> None:
        self._reader, self._shapes = reader, shapes

    def read(self, step: int) -> Batch:
        batch = self._reader.read(step)
        zeros = {name: shape.zeros(batch.num_samples) for name, shape in self._shapes.items()}
        return replace(batch, columns={**zeros, **batch.columns})

    def close(self) -> None:
        self._reader.close()


class InParts:
    """A reader that gives each batch several times, every time with the next candidates.

    So an evaluation looks at many candidates in the memory of a training step.
    """

    def __init__(self, reader: StepReader, *, features: Sequence[str], width: int, num_parts: int) -> None:
        """Args:
        features: with the same candidates.
        width: candidates of a sample in a part.
        """
        self._reader, self._features, self._width, self._num_parts = reader, tuple(features), width, num_parts

    def read(self, step: int) -> Batch:
        """Part `step % num_parts` of the batch of step `step // num_parts`.

        Raises:
          InputError: a sample has more candidates than there is room for.
        """
        at, part = divmod(step, self._num_parts)
        batch = self._reader.read(at)
        ids = batch.features[self._features[0]]
        longest = int(np.diff(ids.row_splits).max(initial=0))
        if longest > self._width * self._num_parts:
            raise InputError(
                f"Found a sample with {longest} candidates of feature {self._features[0]!r} in the evaluation data. "
                f"Expected at most {self._width * self._num_parts}. Make room for more: Negatives(..., "
                f"given={longest})."
            )
        first = part * self._width
        cut = {name: cut_bags(batch.features[name], first=first, length=self._width) for name in self._features}
        return replace(batch, features={**batch.features, **cut})

    def close(self) -> None:
        self._reader.close()


def cut_bags(bags: Ragged, *, first: int, length: int) -> Ragged:
    """The ids `first` to `first + length - 1` of each bag, as far as it has them."""
    lengths = np.diff(bags.row_splits)
    kept = np.clip(lengths - first, 0, length)
    splits = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(kept, out=splits[1:])
    begins = bags.row_splits[:-1] + first
    places = np.arange(int(splits[-1])) + np.repeat(begins - splits[:-1], kept)
    return Ragged(bags.values[places], splits)


def samplers_of(
    data: InputData,
    training: InputIndex | None,
    *,
    seed: int,
    is_evaluation: bool = False,
    known: Known | None = None,
    rooms: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, NegativeSampler]:
    """Samplers of the features whose columns declare negatives. Reads the training files, if a declaration needs that.

    Args:
      data: resolved, for training.
      training: index of the training files; None looks at them if a declaration needs that.
      known: what was read of these files before; what is read now is added.
      rooms: by feature the vectors of a sample, as `JobConfig.activation_shapes` has them without their width. Without
        them batches have no chances of ids.

    Raises:
      InputError: as `read_interactions`.
    """
    known = {} if known is None else known
    samplers = {}
    for name, source in data.id_columns.items():
        declared = source.negatives
        if declared is None or (is_evaluation and (declared.given or declared.ranks_all)):
            continue
        interactions = interactions_of(data, training, name, known=known)
        samplers[name] = NegativeSampler(
            name, source, interactions, seed=seed, is_evaluation=is_evaluation, room=(rooms or {}).get(name, ())
        )
    return samplers


def interactions_of(data: InputData, training: InputIndex | None, feature: str, *, known: Known) -> Interactions | None:
    """What the training files say of a feature with negatives; None if its declaration does not ask.

    Arguments are those of `samplers_of`.

    Raises:
      InputError: as `read_interactions`.
    """
    source = data.id_columns[feature]
    declared = source.negatives
    if declared is None or not declared.needs_counts:
        return None
    # Features of one column and mode count the same rows of the same table.
    key = replace(source, negatives=None), declared.without_positives_of
    if key not in known:
        training = training or build_index(data)
        known[key] = read_interactions(data, training, feature=feature, owner=declared.without_positives_of)
    return known[key]
