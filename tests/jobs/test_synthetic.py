from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.jobs.finished_folder import FolderError
from podembed.jobs.synthetic import NUM_DENSE, VOCABULARY_SIZES, SyntheticSet, SyntheticSpec, write_synthetic
from podembed.workers.data.batch import Batch
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, evaluation_plan
from podembed.workers.job.quality import area_under_curve
from tests.batches import joined

SPEC = SyntheticSpec(train_rows=5_000, eval_rows=4_000, train_files=3, rows_per_group=1_000, seed=7)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> SyntheticSet:
    return write_synthetic(tmp_path_factory.mktemp("synthetic") / "set", SPEC)


def read_all(synthetic: SyntheticSet, *, evaluation: bool) -> Batch:
    data = synthetic.data().for_evaluation() if evaluation else synthetic.data()
    index = build_index(data)
    plan = evaluation_plan(index, num_lanes=1, batch_size=500)
    reader = InputReader(data, index, plan, [0])
    return joined([reader.read(step) for step in range(plan.steps_per_epoch)])


def test_the_set_has_the_promised_shape(synthetic: SyntheticSet) -> None:
    index = build_index(synthetic.data())
    assert [sum(file.row_group_rows) for file in index.files] == [1666, 1666, 1668]
    assert index.row_group_rows == (1000, 666, 1000, 666, 1000, 668)
    train, held_out = read_all(synthetic, evaluation=False), read_all(synthetic, evaluation=True)
    assert (train.num_samples, train.num_dense, len(train.features)) == (5_000, NUM_DENSE, 26)
    assert train.sample_ids.tolist() == list(range(5_000))
    assert held_out.sample_ids.tolist() == list(range(5_000, 9_000))
    assert tuple(synthetic.vocabulary_sizes.values()) == VOCABULARY_SIZES
    assert len(synthetic.list_features) == 6
    for name, bags in train.features.items():
        lengths = np.diff(bags.row_splits)
        if name in synthetic.list_features:
            assert lengths.min() == 0
            assert len(set(lengths.tolist())) > 5
        else:
            assert (lengths == 1).all()


def test_frequent_ids_are_much_more_frequent(synthetic: SyntheticSet) -> None:
    bags = read_all(synthetic, evaluation=False).features["f25"]
    counts = np.sort(np.bincount(bags.values))[::-1]
    assert counts[0] > 0.1 * bags.num_ids
    assert counts[0] > 1.5 * counts[1] > 2 * counts[3]
    assert (counts > 0).sum() > 500


def test_reachable_quality_is_what_the_files_allow(synthetic: SyntheticSet) -> None:
    assert 0.78 < synthetic.reachable_auc < 0.84
    assert synthetic.reachable_log_loss < synthetic.base_log_loss - 0.08
    held_out = read_all(synthetic, evaluation=True)
    assert synthetic.base_rate == pytest.approx(held_out.labels.mean())
    # A linear model of the numbers alone, fitted on the training rows, gets part of the way and not beyond.
    train = read_all(synthetic, evaluation=False)
    weights, *_ = np.linalg.lstsq(train.dense, train.labels - train.labels.mean(), rcond=None)
    auc = area_under_curve(held_out.dense @ weights, held_out.labels)
    assert 0.1 < (auc - 0.5) / (synthetic.reachable_auc - 0.5) < 0.9


def test_a_finished_set_is_used_again(synthetic: SyntheticSet) -> None:
    paths = sorted(synthetic.folder.iterdir())
    before = [path.stat().st_mtime_ns for path in paths]
    assert write_synthetic(synthetic.folder, SPEC) == synthetic
    assert [path.stat().st_mtime_ns for path in paths] == before
    meta = json.loads((synthetic.folder / "meta.json").read_text())
    assert meta["reachable_auc"] == synthetic.reachable_auc
    assert meta["vocabulary_sizes"] == synthetic.vocabulary_sizes
    assert meta["spec"]["seed"] == 7


def test_the_same_spec_gives_the_same_rows_and_another_replaces_them(tmp_path: Path) -> None:
    small = SyntheticSpec(train_rows=300, eval_rows=200, train_files=1, seed=1)
    first = pq.read_table(write_synthetic(tmp_path / "a", small).folder / "train-00.parquet")
    again = pq.read_table(write_synthetic(tmp_path / "b", small).folder / "train-00.parquet")
    assert first.equals(again)
    other = write_synthetic(tmp_path / "a", SyntheticSpec(train_rows=300, eval_rows=200, train_files=1, seed=2))
    assert not pq.read_table(other.folder / "train-00.parquet").equals(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_strangers_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderError, match="Choose another name"):
        write_synthetic(tmp_path, SPEC)
    assert (tmp_path / "notes.txt").read_text() == "mine"
