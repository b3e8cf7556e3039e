"""Keys that are removed for good: from the newest commit, and with `prune --holding` from all files of the run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError
from podembed.orchestrator.commit.holder import RunIsHeld
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.run.reference import open_commit
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect import prune as prune_module
from podembed.tools.inspect.extract import extract
from podembed.tools.inspect.forget import forget, holders
from podembed.tools.inspect.prune import prune
from podembed.workers.columns.id_columns import hashed_key
from podembed.workers.job.job import JobConfig
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import keyed_table, run_with
from tests.run_state import committed_state
from tests.small_job import small_job
from tests.training import fit_job

CHAIN = CheckpointConfig(every_steps=4, num_to_keep=None, full_every=3)


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False, dynamic=True)


@pytest.fixture(scope="module")
def trained(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fit_job(job, tmp_path_factory.mktemp("forget"), max_steps=12, checkpoint_config=CHAIN).path)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def files_with(run: Path, table: str, key: int) -> list[Path]:
    """Files that hold the key, in the numbers of a table of one bucket."""
    files = [*run.glob(f"data/*/tables/{table}/*key/c.0.0.0")]
    files += run.glob(f"data/*/tables/{table}/delta-0/arrays/*key/c/0/0")
    return [path for path in files if key in np.frombuffer(path.read_bytes()[:-4], "<i8")]


def test_a_key_is_in_no_file_any_more_and_begins_anew(run: Path, job: JobConfig) -> None:
    before = committed_state(str(run))
    row = int(before["b/count"][:, 0].argmax())
    key = int(before["b/key"][row, 0])
    head, *older = read_lineage(Store(str(run)))
    with pytest.raises(ConfigurationError, match=f"in the newest commit {head}.*podembed forget .* b {key}"):
        prune(str(run), num_to_keep=None, holding=["b", str(key)])
    found = forget(str(run), "b", [str(key), "no such text"])
    assert (found.rows, found.waiting, found.absent) == ((str(key),), (), ("no such text",))
    assert found.older == (head, *older)
    assert read_lineage(Store(str(run))) == (found.commit, head, *older)
    after = committed_state(str(run))
    for name, values in before.items():
        expected = values.copy()
        if name.startswith("b/") and not name.startswith("b/waiting_"):
            expected[row] = 0
        assert after[name].tobytes() == expected.tobytes(), name
    counters = [dict(open_commit(str(run), commit=name).manifest.counters) for name in (head, found.commit)]
    assert counters[1]["vocabulary/b/keys"] == counters[0]["vocabulary/b/keys"] - 1
    with pytest.raises(ConfigurationError, match="Found no row for key"):
        extract(open_commit(str(run)), "b", [key])
    assert check_run(str(run)).is_intact
    assert files_with(run, "b", key)
    assert prune(str(run), num_to_keep=None, holding=["b", str(key)]).commits == (*reversed(older), head)
    assert files_with(run, "b", key) == []
    assert check_run(str(run)).is_intact
    fit_job(job, run.parent, max_steps=16, checkpoint_config=CHAIN)
    (count,) = extract(open_commit(str(run)), "b", [key]).values["count"][0]
    assert 0 < count < before["b/count"][row, 0], "it is a key that most batches name"
    assert check_run(str(run)).is_intact


def test_a_key_that_waits_is_forgotten_and_other_commits_stay(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = committed_state(str(run))
    at = int(state["b/waiting_last"][:, 0].argmax())
    key = str(state["b/waiting_key"][at, 0])
    with pytest.raises(SystemExit) as left:
        main(["forget", str(run), "b", key])
    assert left.value.code == 0
    name, *_ = read_lineage(Store(str(run)))
    out = capsys.readouterr().out
    assert f"{name} is the newest commit, without 0 rows and 1 waiting key of table 'b'" in out
    after = committed_state(str(run))
    assert [after[f"b/waiting_{column}"][at, 0] for column in ("key", "last", "count")] == [0, 0, 0]
    changed = {name for name, values in state.items() if values.tobytes() != after[name].tobytes()}
    assert changed == {"b/waiting_key", "b/waiting_last", "b/waiting_count"}
    again = forget(str(run), "b", [key])
    assert (again.commit, again.absent) == (None, (key,))
    assert f"still in {', '.join(again.older)}; to delete these: podembed prune {run} --holding b {key}" in out
    kept = [commit for commit in read_lineage(Store(str(run))) if commit not in again.older]
    with pytest.raises(SystemExit) as left:
        main(["prune", str(run), "--holding", "b", key])
    assert left.value.code == 0
    assert [*read_lineage(Store(str(run)))] == kept
    assert files_with(run, "b", int(key)) == []


def test_ids_are_written_as_they_stand_in_the_data_where_features_hash_them(
    small_data: str, job: JobConfig, tmp_path: Path
) -> None:
    hashed = {name: replace(column, mode="hash", salt=7) for name, column in job.data.features.items() if name == "b"}
    job = replace(job, data=replace(job.data, features={**job.data.features, **hashed}))
    path = fit_job(job, tmp_path, max_steps=2, checkpoint_config=CHAIN).path
    # What most samples of the data have.
    (key,) = extract(open_commit(path), "b", [37]).ids
    assert key == hashed_key(37, 7)
    assert extract(open_commit(path), "b", [key]).ids == (key,)
    with pytest.raises(ConfigurationError, match="Found no row for key 38 in"):
        extract(open_commit(path), "b", [38])
    assert forget(path, "b", ["37"]).rows == ("37",)
    with pytest.raises(ConfigurationError, match="Found no row for key 37 in"):
        extract(open_commit(path), "b", [37])


def test_a_key_that_was_named_before_the_run_began_is_forgotten(tmp_path: Path) -> None:
    """After a warm start its last step is below 0. Other keys of other buckets stay."""
    table = keyed_table({key: 1.0 * key for key in range(20, 40)}, num_buckets=8, seed=1, last=-3)
    store, _ = run_with(tmp_path / "run", {"t": table}, 10)
    assert forget(store.location, "t", ["33", "34"]).rows == ("33", "34")
    after = committed_state(store.location)
    gone = np.isin(table.arrays["key"][:, 0], [33, 34])
    for name, values in table.arrays.items():
        np.testing.assert_array_equal(after[f"t/{name}"], np.where(gone[:, None], 0, values))
    assert check_run(store.location).is_intact


def test_commits_that_a_driver_makes_while_files_are_searched_stay(
    run: Path, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(run))
    key = str(committed_state(str(run))["b/key"][:, 0].max())
    name = forget(str(run), "b", [key]).commit

    def search(*arguments: Any) -> tuple[str, ...]:
        found = holders(*arguments)
        fit_job(job, run.parent, max_steps=13, checkpoint_config=CHAIN)
        return found

    monkeypatch.setattr(prune_module, "holders", search)
    with pytest.raises(ConfigurationError, match=rf"Found commit s000000013-.* while files up to {name} were searched"):
        prune(str(run), num_to_keep=None, holding=["b", key])
    head, *others = read_lineage(store)
    assert (others[0], len(others)) == (name, 4)
    assert check_run(store.location).is_intact
    monkeypatch.undo()
    assert name not in prune(str(run), num_to_keep=None, holding=["b", key]).commits
    assert read_lineage(store)[:2] == (head, name)
    lease = take(store)
    with pytest.raises(RunIsHeld):
        prune(str(run), num_to_keep=None, holding=["b", key])
    lease.release()


def test_what_cannot_be_forgotten(run: Path, trained: Path) -> None:
    with pytest.raises(ConfigurationError, match="Found none of the keys new in table 'b'"):
        forget(str(run), "b", ["new"])
    with pytest.raises(ConfigurationError, match="Expected integers of 64 bits"):
        forget(str(run), "b", [str(2**64)])
    with pytest.raises(ConfigurationError, match="Found no table 'c'"):
        forget(str(run), "c", ["1"])
    assert Store(str(run)).sizes("commit") == Store(str(trained)).sizes("commit")
    lease = take(Store(str(run)))
    key = str(committed_state(str(run))["b/key"][:, 0].max())
    with pytest.raises(RunIsHeld):
        forget(str(run), "b", [key])
    lease.release()
