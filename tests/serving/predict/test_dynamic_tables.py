"""Commits of tables whose keys come and go, as a user reads them later: scored, looked up by key, exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import Constant, table_seed
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.vocabulary.key_space import DynamicKeys
from podembed.embedding.vocabulary.policies import LeastFrequent, MinCount, Probability
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.run.reference import open_commit
from podembed.serving.artifact.export_model import export_model
from podembed.serving.predict.committed_model import CommittedRows, open_model
from podembed.serving.predict.evaluate import evaluate
from podembed.serving.predict.rank import rank_all
from podembed.tools.inspect.describe import export
from podembed.tools.inspect.diff import diff
from podembed.tools.inspect.diff import render as render_diff
from podembed.tools.inspect.extract import extract
from podembed.tools.inspect.inspect_run import describe, render
from podembed.workers.columns.id_columns import key_of_text
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from tests.run_state import committed_state, tables_of
from tests.small_job import small_job
from tests.training import fit_job


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False, evaluate=True, dynamic=True)


@pytest.fixture(scope="module")
def run(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("dynamic")
    return fit_job(job, folder, max_steps=12, checkpoint_config=CheckpointConfig(every_steps=6))


def test_an_evaluation_has_the_figures_of_the_run(run: Result, job: JobConfig) -> None:
    found = evaluate(run.path, job=job)
    assert found.evaluation.loss == pytest.approx(run.evaluations[-1].loss, rel=1e-6)


@pytest.mark.parametrize("default", ["first", "zeros", "shared"])
def test_keys_have_their_rows_and_others_the_default(run: Result, job: JobConfig, default: str) -> None:
    model = open_model(run.path, job=job)
    state, at = committed_state(run.path), job.table_names.index("b")
    held = np.flatnonzero(state["b/last"][:, 0])
    keys = state["b/key"][held, 0]
    assert 0 < len(keys) < len(state["b/last"])
    rows = CommittedRows(model)
    np.testing.assert_array_equal(rows.rows(at, keys), state["b/rows"][held])
    np.testing.assert_array_equal(rows.keys(at), np.sort(keys))
    spec = model.specs[at]
    # What a job declares; the rows of the commit are the same.
    object.__setattr__(spec.keys, "default", default)
    new = np.array([1 << 60])
    expected = {
        "first": spec.initializer(new, spec.dim, table_seed(spec.seed, spec.name)),
        "zeros": np.zeros((1, spec.dim), np.float32),
        "shared": state["b/rows"][:1],
    }
    np.testing.assert_array_equal(rows.rows(at, new), expected[default])
    object.__setattr__(spec.keys, "default", "first")


def test_rows_are_extracted_by_key_and_exported_with_their_keys(run: Result, tmp_path: Path) -> None:
    state, commit = committed_state(run.path), open_commit(run.path)
    row = int(np.flatnonzero(state["b/last"][:, 0])[3])
    key = int(state["b/key"][row, 0])
    found = extract(commit, "b", [key])
    np.testing.assert_array_equal(found.values["rows"][0], state["b/rows"][row])
    assert found.values["count"][0] == state["b/count"][row]
    with pytest.raises(ConfigurationError, match="Found no row for key -1 in"):
        extract(commit, "b", [str(2**64 - 1)])
    with pytest.raises(ConfigurationError, match="Expected integers of 64 bits"):
        extract(commit, "b", [2**64])
    with pytest.raises(ConfigurationError, match=f"Found no row for key {key_of_text('new')} in table 'b'"):
        extract(commit, "b", ["new"])
    export(commit, "b", format="npy", out=str(tmp_path / "b.npy"))
    exported = np.load(tmp_path / "b.npy")
    np.testing.assert_array_equal(exported["key"], state["b/key"])
    np.testing.assert_array_equal(exported["rows"], state["b/rows"])


def test_inspect_says_how_full_tables_are(run: Result) -> None:
    state, text = committed_state(run.path), render(describe(Store(run.path), now_unix_s=2e9))
    lines = [line.replace(",", "").split() for line in text.partition("Keys that come and go")[2].splitlines()]
    found = {line[0]: line[1:] for line in lines if line and f"{line[0]}/last" in state}
    assert {*found} == {name.removesuffix("/key") for name in state if name.endswith("/key")}
    waiting = 0
    for table, (keys, rows, fill, waits, admitted, evicted, *_) in found.items():
        held = np.count_nonzero(state[f"{table}/last"])
        assert int(keys) == held == int(admitted) - int(evicted)
        assert int(rows) == len(state[f"{table}/last"])
        assert fill == f"{held / int(rows):.1%}"
        assert int(waits) == np.count_nonzero(state.get(f"{table}/waiting_last", np.zeros(1)))
        waiting += int(waits)
    assert waiting > 0


def test_commits_are_compared_key_by_key(run: Result) -> None:
    """Which row a key has means nothing, so what changed is what it says of a key."""
    one, other = open_commit(f"{run.path}@s000000006-g00000001"), open_commit(run.path)
    states = [tables_of(state.store, state.manifest) for state in (one, other)]
    difference = diff(one, other)
    for table in (table for table in difference.tables if table.keys is not None):
        rows, waiting = [], []
        for state in states:
            own = {
                name.partition("/")[2]: values for name, values in state.items() if name.startswith(f"{table.table}/")
            }
            rows.append({int(own["key"][at, 0]): own["rows"][at] for at in np.flatnonzero(own["last"])})
            waits = np.flatnonzero(own["waiting_last"]) if "waiting_last" in own else ()
            waiting.append(
                {tuple(int(own[f"waiting_{name}"][at, 0]) for name in ("key", "last", "count")) for at in waits}
            )
        keys, common = table.keys, rows[0].keys() & rows[1].keys()
        assert (keys.removed, keys.added) == (len(rows[0]) - len(common), len(rows[1]) - len(common))
        assert keys.waiting == len(waiting[0] ^ waiting[1])
        changes = {key: float(np.abs(rows[0][key].astype(np.float64) - rows[1][key]).max()) for key in common}
        (found,) = [array for array in table.arrays if array.array == "rows"]
        assert found.num_changed == sum(change > 0 for change in changes.values())
        assert (found.max_abs, changes[found.max_row or 0]) == (max(changes.values()),) * 2
        assert not {array.array for array in table.arrays} & {"key", "waiting_key"}
    assert diff(other, other).is_equal
    assert f"{difference.tables[0].keys.added:,} added" in render_diff(difference)


def test_an_exported_model_is_refused(run: Result, job: JobConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keys that come and go. Expected tables whose ids are row numbers"):
        export_model(run.path, out=tmp_path / "model", job=job)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"vocabulary_size": 9}, "Found capacity=5 beside vocabulary_size=9"),
        ({"keys": "rows"}, "Found capacity=5 beside keys='rows'"),
        ({"capacity": None, "admit": object(), "evict": None}, "Found admit without capacity"),
        ({"capacity": 0}, "Found capacity=0"),
        ({"admit": 3}, "Found admit=3"),
        ({"evict": "lru"}, "Found evict='lru'"),
        ({"forget_after": 0}, "Found forget_after=0"),
        ({"waiting": -1}, "Found waiting=-1"),
        ({"default": "mean"}, "Found default='mean'"),
        ({"place": "sharded"}, "Found place='sharded' beside capacity"),
        ({"invalid_ids": "drop"}, "Found invalid_ids='drop' beside capacity"),
        ({"initial_rows": np.zeros((5, 2))}, "Found initial_rows beside capacity"),
        ({"initializer": lambda shape, dtype: np.zeros(shape, dtype)}, "Found initializer=.* beside capacity"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(arguments: dict, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        TableConfig(**{"capacity": 5, "dim": 2, "optimizer": Adagrad(0.1), **arguments})


def test_the_least_declaration_takes_any_key() -> None:
    table = TableConfig(capacity=5, dim=2, initializer=Constant(0.0), keys="any")
    assert table.dynamic_keys == DynamicKeys(capacity=5)


def test_numbers_of_policies_are_those_of_python() -> None:
    found = (MinCount(np.int64(3)), Probability(np.float32(0.5)), LeastFrequent(np.int32(7)))
    assert repr(found) == "(MinCount(count=3), Probability(probability=0.5), LeastFrequent(half_life=7))"
    for policy, refused in [(MinCount, True), (Probability, True), (LeastFrequent, 2.0), (Probability, 0)]:
        with pytest.raises(ValueError, match="Expected an? (integer|number)"):
            policy(refused)


def test_samples_with_any_key_are_ranked(run: Result, job: JobConfig, tmp_path: Path) -> None:
    """Keys of hashed ids are of both signs, those of the run's ids are not."""
    hashed = {"b": replace(job.data.features["b"], mode="hash")}
    other = replace(job, data=replace(job.data, features={**job.data.features, **hashed}))
    path = fit_job(other, tmp_path, max_steps=2).path
    keys = committed_state(path)["b/key"]
    assert ((keys < 0).any(), (keys > 0).any()) == (True, True)
    counts = [rank_all(of, job=one, feature="b").evaluation.num_samples for of, one in ((run.path, job), (path, other))]
    assert counts[0] == counts[1] > 0
    with pytest.raises(ConfigurationError, match="Found --without a and feature 'a', whose table has a capacity"):
        rank_all(run.path, job=job, feature="b", without=("a",))
