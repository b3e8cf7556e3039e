"""A Criteo-shaped data set whose best reachable quality is known.

A sample has thirteen numbers and 26 categorical features, six of them lists of varying length that may be empty. Ids
are drawn from Zipf laws, and labels from a planted model. That has a linear dense part, a hidden weight per id averaged
over each bag, and products of hidden factors of some feature pairs. The probability behind every label is known, and so
are the AUC and the log loss of a perfect model on the evaluation rows. A test can ask how much of that a training run
reaches. The set is written once into a folder and read from there afterwards.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from podembed.jobs.finished_folder import create_once, read_report
from podembed.workers.data.columns import IdColumn
from podembed.workers.data.config import ParquetData
from podembed.workers.job.quality import area_under_curve, mean_log_loss

GENERATOR = "criteo-synthetic"
GENERATOR_VERSION = 1
DEFAULT_FOLDER = Path(".data/criteo-synthetic")
NUM_DENSE = 13

VOCABULARY_SIZES = (
    10, 24, 60, 100, 150, 300, 500, 700, 1_000, 1_200, 1_500, 2_000, 2_500,
    3_000, 4_000, 5_000, 6_000, 8_000, 10_000, 12_000, 15_000, 18_000, 20_000, 20_000, 60_000, 100_000,
)  # fmt: skip
# Feature number to the mean length of its bags; all others hold one id a row.
LIST_MEAN_LENGTHS = {3: 2.0, 7: 4.0, 11: 3.0, 15: 6.0, 19: 2.5, 23: 5.0}
MAX_LIST_LENGTH = 20
# Pairs of one-id features whose hidden factors are multiplied.
INTERACTING_PAIRS = ((0, 4), (1, 8), (2, 12), (5, 6), (9, 10), (13, 17))
ZIPF_EXPONENTS = (1.2, 1.45)

DENSE_SCALE = 0.2
ID_SCALE = 0.3
# Ids of rank above this matter less and less: what is seen a handful of times could not be learned by any model.
TAPER_RANK = 50.0
INTERACTION_SCALE = 0.12
MEAN_LOGIT = -1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """What is generated; the folder is generated again when it was made from another one."""

    train_rows: int = 400_000
    eval_rows: int = 50_000
    train_files: int = 4
    rows_per_group: int = 10_000
    seed: int = 2024


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSet:
    """A generated set on disk.

    Attributes:
      folder: holds `train-*.parquet`, `eval-*.parquet` and `meta.json`.
      vocabulary_sizes: feature name (`f00` to `f25`) to its number of ids.
      list_features: the features whose columns are lists.
      reachable_auc, reachable_log_loss: reachable auc and reachable log loss of the true probabilities on the
        evaluation rows.
      base_rate: share of label 1 in the evaluation rows.
      base_log_loss: base log loss of always answering the base rate.
    """

    folder: Path
    spec: SyntheticSpec
    vocabulary_sizes: dict[str, int]
    list_features: tuple[str, ...]
    reachable_auc: float
    reachable_log_loss: float
    base_rate: float
    base_log_loss: float

    def data(self) -> ParquetData:
        """The declaration of this set, ready to be read."""
        return ParquetData(
            str(self.folder / "train-*.parquet"),
            eval_paths=str(self.folder / "eval-*.parquet"),
            label="label",
            dense=tuple(_dense_names()),
            features={name: IdColumn(name, vocabulary_size=size) for name, size in self.vocabulary_sizes.items()},
            sample_id="sample_id",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Feature:
    """One categorical feature of the planted model.

    Attributes:
      exponent: exponent of the Zipf law.
      ids_by_rank: int64 `[vocabulary_size]`, which id is the k-th most frequent.
      weights: float32 `[vocabulary_size]`, what an id adds to the logit, by rank.
      factors: float32 `[vocabulary_size]`, what an id brings into products, by rank.
      mean_length: of its bags, or None for one id a row.
    """

    name: str
    exponent: float
    ids_by_rank: np.ndarray
    weights: np.ndarray
    factors: np.ndarray
    mean_length: float | None


def write_synthetic(folder: Path | str = DEFAULT_FOLDER, spec: SyntheticSpec | None = None) -> SyntheticSet:
    """Generates the set, unless the folder already holds it.

    A folder that this generator filled from another spec or in another version is replaced.

    Raises:
      FolderError: the folder holds something else.
    """
    folder, spec = Path(folder), spec or SyntheticSpec()
    identity = {"generator": GENERATOR, "version": GENERATOR_VERSION, "spec": asdict(spec)}
    present = read_report(folder)
    if present is not None and present.get("generator") == GENERATOR and not _describes(present, identity):
        _remove(folder)
    report = create_once(folder, lambda unfinished: _write_set(unfinished, spec, identity))
    return SyntheticSet(
        folder=folder,
        spec=spec,
        vocabulary_sizes=dict(report["vocabulary_sizes"]),
        list_features=tuple(report["list_features"]),
        reachable_auc=report["reachable_auc"],
        reachable_log_loss=report["reachable_log_loss"],
        base_rate=report["base_rate"],
        base_log_loss=report["base_log_loss"],
    )


def _describes(report: dict[str, Any], identity: dict[str, Any]) -> bool:
    return all(report.get(key) == value for key, value in identity.items())


def _remove(folder: Path) -> None:
    """Renamed first, so that no program meets a half-removed folder under the name."""
    doomed = folder.parent / f".{folder.name}.replaced-{uuid.uuid4().hex[:12]}"
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _write_set(folder: Path, spec: SyntheticSpec, identity: dict[str, Any]) -> dict[str, Any]:
    """Writes all files and returns the report, which is `meta.json` too."""
    features = _plant(np.random.default_rng([spec.seed, 0]))
    dense_weights = np.random.default_rng([spec.seed, 1]).normal(0, 1, NUM_DENSE).astype(np.float32)
    dense_weights *= DENSE_SCALE
    first_sample_id = 0
    for number, num_rows in enumerate(_file_rows(spec)):
        table, _, _ = _rows(
            np.random.default_rng([spec.seed, 2, number]), features, dense_weights, num_rows, first_sample_id
        )
        pq.write_table(table, folder / f"train-{number:02d}.parquet", row_group_size=spec.rows_per_group)
        first_sample_id += num_rows
    rng = np.random.default_rng([spec.seed, 3])
    table, logits, labels = _rows(rng, features, dense_weights, spec.eval_rows, first_sample_id)
    pq.write_table(table, folder / "eval-00.parquet", row_group_size=spec.rows_per_group)
    base_rate = float(labels.mean())
    report = identity | {
        "vocabulary_sizes": {feature.name: len(feature.weights) for feature in features},
        "list_features": [feature.name for feature in features if feature.mean_length is not None],
        "reachable_auc": area_under_curve(logits, labels),
        "reachable_log_loss": mean_log_loss(logits, labels),
        "base_rate": base_rate,
        "base_log_loss": mean_log_loss(np.full(len(labels), np.log(base_rate / (1 - base_rate))), labels),
    }
    (folder / "meta.json").write_text(json.dumps(report, indent=1))
    return report


def _file_rows(spec: SyntheticSpec) -> Iterator[int]:
    """Rows of each training file; the last takes the remainder."""
    even = spec.train_rows // spec.train_files
    for _ in range(spec.train_files - 1):
        yield even
    yield spec.train_rows - even * (spec.train_files - 1)


def _plant(rng: np.random.Generator) -> list[_Feature]:
    """Draws the hidden model."""
    features = []
    for number, size in enumerate(VOCABULARY_SIZES):
        mean_length = LIST_MEAN_LENGTHS.get(number)
        # Averaging over a bag shrinks the signal by the root of its length; this gives every feature about the same
        # share.
        scale = ID_SCALE * (1.0 if mean_length is None else np.sqrt(mean_length))
        features.append(
            _Feature(
                name=f"f{number:02d}",
                exponent=float(rng.uniform(*ZIPF_EXPONENTS)),
                ids_by_rank=rng.permutation(size),
                weights=(rng.normal(0, scale, size) * _taper(size)).astype(np.float32),
                factors=rng.normal(0, 1, size).astype(np.float32),
                mean_length=mean_length,
            )
        )
    return features


def _taper(size: int) -> np.ndarray:
    """float64 `[size]`, by rank, falling slowly from 1."""
    return (1 + np.arange(size) / TAPER_RANK) ** -0.25


def _rows(
    rng: np.random.Generator, features: list[_Feature], dense_weights: np.ndarray, num_rows: int, first_sample_id: int
) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Draws rows: the table, the true log odds `[num_rows]` and the labels `[num_rows]`."""
    dense = rng.standard_normal((num_rows, NUM_DENSE), np.float32)
    logits = MEAN_LOGIT + (dense @ dense_weights).astype(np.float64)
    id_columns: dict[str, pa.Array] = {}
    factors: dict[int, np.ndarray] = {}
    for number, feature in enumerate(features):
        if feature.mean_length is None:
            ranks = _zipf_ranks(rng, feature, num_rows)
            id_columns[feature.name] = pa.array(feature.ids_by_rank[ranks])
            logits += feature.weights[ranks]
            factors[number] = feature.factors[ranks]
        else:
            id_columns[feature.name], added = _bags(rng, feature, num_rows)
            logits += added
    for left, right in INTERACTING_PAIRS:
        logits += INTERACTION_SCALE * factors[left] * factors[right]
    labels = (rng.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.int8)
    columns: dict[str, pa.Array] = {"label": pa.array(labels)}
    columns |= {name: pa.array(np.ascontiguousarray(dense[:, at])) for at, name in enumerate(_dense_names())}
    columns |= id_columns
    columns["sample_id"] = pa.array(np.arange(first_sample_id, first_sample_id + num_rows))
    return pa.table(columns), logits, labels


def _bags(rng: np.random.Generator, feature: _Feature, num_rows: int) -> tuple[pa.Array, np.ndarray]:
    """Lists of ids and, float64 `[num_rows]`, the mean hidden weight of each; 0 for an empty one."""
    lengths = np.minimum(rng.poisson(feature.mean_length or 0.0, num_rows), MAX_LIST_LENGTH)
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ranks = _zipf_ranks(rng, feature, int(offsets[-1]))
    summed = np.concatenate([[0.0], np.cumsum(feature.weights[ranks], dtype=np.float64)])
    means = (summed[offsets[1:]] - summed[offsets[:-1]]) / np.maximum(lengths, 1)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(feature.ids_by_rank[ranks])), means


def _zipf_ranks(rng: np.random.Generator, feature: _Feature, count: int) -> np.ndarray:
    """int64 ranks from 0, with probability about proportional to (rank + 1) ** -exponent.

    The inverse of the distribution function of the continuous power law on [1, vocabulary_size + 1), rounded down.
    """
    size, power = len(feature.weights), 1.0 - feature.exponent
    uniform = rng.random(count)
    drawn = (1.0 + uniform * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.minimum(drawn.astype(np.int64) - 1, size - 1)


def _dense_names() -> list[str]:
    return [f"d{number}" for number in range(NUM_DENSE)]
