"""`Batch`: the rows of one step that one host reads, in the form the rest of the host works with.

A batch is a value: dense numbers, labels and weights as arrays, every feature as one `Ragged`. Padding rows have weight
0, empty bags and sample id -1. With them a batch always has the size that the step expects, and no loss or gradient
sees them. Where rows come from is the business of `workers.input.reader`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.ragged import Ragged
from podembed.workers.data.input_errors import InputError

PADDING_SAMPLE_ID = -1


class BatchError(ValueError):
    """The parts of a batch do not fit together."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """Rows of one step.

    Attributes:
      dense: float32 `[num_samples, num_dense]`.
      labels: float32 `[num_samples]`, those of `InputData.label`; NaN where a label is missing.
      weights: float32 `[num_samples]`, 0 on padding rows.
      features: one `Ragged` of num_samples samples a feature, in the order in which they are declared.
      sample_ids: int64 `[num_samples]`, -1 on padding rows.
      columns: the other labels and what else was declared by name, `[num_samples, ...]` of 4-byte numbers, as
        `InputData.column_shapes` says; zeros on padding rows.

    Raises:
      BatchError: on construction, if two parts disagree about the number of samples.
    """

    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    features: dict[str, Ragged]
    sample_ids: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A batch is made for every step: names are put together only for a message.
        expected = len(self.labels)
        lengths = {len(self.dense), len(self.weights), len(self.sample_ids)}
        lengths.update(len(ragged.row_splits) - 1 for ragged in self.features.values())
        lengths.update(map(len, self.columns.values()))
        if lengths == {expected}:
            return
        found = {"dense": len(self.dense), "weights": len(self.weights), "sample_ids": len(self.sample_ids)}
        found |= {f"feature {name!r}": ragged.num_samples for name, ragged in self.features.items()}
        found |= {f"column {name!r}": len(values) for name, values in self.columns.items()}
        for part, num_samples in found.items():
            if num_samples != expected:
                raise BatchError(
                    f"Found {num_samples} samples in {part} beside {expected} labels. "
                    "Expected all parts of a batch to have one entry a sample. Cut every part at the same rows."
                )

    @property
    def num_samples(self) -> int:
        """Rows with padding."""
        return len(self.labels)

    @property
    def num_dense(self) -> int:
        return self.dense.shape[1]

    @property
    def is_padding(self) -> np.ndarray:
        """bool `[num_samples]`; a row of the data may have weight 0 too, so the weight does not tell."""
        return self.sample_ids == PADDING_SAMPLE_ID

    def only_ids(self, feature: str, samples: np.ndarray) -> np.ndarray:
        """int64 `[len(samples)]`: the one id that each of these samples has in a feature.

        Raises:
          InputError: a sample has none or several.
        """
        ragged = self.features[feature]
        starts, stops = ragged.row_splits[samples], ragged.row_splits[samples + 1]
        other = np.flatnonzero(stops - starts != 1)
        if len(other):
            at = int(other[0])
            raise InputError(
                f"Found {stops[at] - starts[at]} ids of feature {feature!r} in sample {self.sample_ids[samples[at]]}. "
                "Expected one in each, "
                "since a metric groups samples by it. Group by another feature, or give the sample one id."
            )
        return ragged.values[starts]

    def padded(self, num_samples: int) -> Batch:
        """The same rows followed by padding up to `num_samples`.

        Raises:
          BatchError: the batch is longer than that.
        """
        missing = num_samples - self.num_samples
        if missing == 0:
            return self
        if missing < 0:
            raise BatchError(
                f"Found {self.num_samples} samples to pad to {num_samples}. Expected at most as many. Ask for a larger "
                "size."
            )
        return Batch(
            dense=np.concatenate([self.dense, np.zeros((missing, self.num_dense), np.float32)]),
            labels=np.concatenate([self.labels, np.zeros(missing, np.float32)]),
            weights=np.concatenate([self.weights, np.zeros(missing, np.float32)]),
            features={name: ragged.padded(num_samples) for name, ragged in self.features.items()},
            sample_ids=np.concatenate([self.sample_ids, np.full(missing, PADDING_SAMPLE_ID, np.int64)]),
            columns={
                name: np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
                for name, values in self.columns.items()
            },
        )

    def without_unlabelled(self) -> Batch:
        """The same rows. Those whose label is NaN, since it is missing, have weight 0."""
        return replace(self, weights=np.where(np.isnan(self.labels), np.float32(0), self.weights))

    def slice(self, start: int, stop: int) -> Batch:
        """Rows `start` to `stop - 1`, as views."""
        return Batch(
            dense=self.dense[start:stop],
            labels=self.labels[start:stop],
            weights=self.weights[start:stop],
            features=_slice_features(self.features, start, stop),
            sample_ids=self.sample_ids[start:stop],
            columns={name: values[start:stop] for name, values in self.columns.items()},
        )

    @staticmethod
    def empty(
        feature_names: Sequence[str],
        *,
        num_dense: int,
        columns: Mapping[str, ColumnShape] | None = None,
        weighted: Collection[str] = (),
    ) -> Batch:
        """A batch of no rows, to pad from; `weighted` features have weights of ids."""
        splits = np.zeros(1, np.int64)
        weights = {name: np.zeros(0, np.float32) if name in weighted else None for name in feature_names}
        return Batch(
            dense=np.zeros((0, num_dense), np.float32),
            labels=np.zeros(0, np.float32),
            weights=np.zeros(0, np.float32),
            features={name: Ragged(np.zeros(0, np.int64), splits, weights[name]) for name in feature_names},
            sample_ids=np.zeros(0, np.int64),
            columns={name: shape.zeros(0) for name, shape in (columns or {}).items()},
        )


def _slice_features(features: dict[str, Ragged], start: int, stop: int) -> dict[str, Ragged]:
    """Samples `start` to `stop - 1`; ids are views. Features with one id a row share one array of offsets, and go on
    doing so.
    """
    cut: dict[int, tuple[int, int, np.ndarray]] = {}
    sliced = {}
    for name, ragged in features.items():
        key = id(ragged.row_splits)
        if key not in cut:
            splits = ragged.row_splits[start : stop + 1]
            cut[key] = int(splits[0]), int(splits[-1]), splits - splits[0]
        first, last, splits = cut[key]
        weights = None if ragged.weights is None else ragged.weights[first:last]
        sliced[name] = Ragged(ragged.values[first:last], splits, weights)
    return sliced
