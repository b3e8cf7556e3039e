"""Runs with tables whose keys come and go: the same over kills and on other numbers of hosts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.table.table import Table
from podembed.jobs.fitting import fit
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, RunConfig, ScalingConfig, WarmStart
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.run.opening import open_run
from podembed.orchestrator.run.reference import open_commit
from podembed.orchestrator.run.warm_start import WarmStartRefused, plan_warm_start
from podembed.serving.predict.committed_model import open_model
from podembed.tools.fsck.check import check_run
from podembed.tools.inspect.inspect_run import describe
from podembed.workers.checkpoint.shard import CheckpointMismatch
from podembed.workers.host.warm_start import begin_tables
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import table_specs
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.orchestrator.driver.test_equality import NUM_STEPS, Killer, expected_audit, train_small
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import small_job
from tests.training import fit_job


def _losses(result: Result) -> np.ndarray:
    return np.array([result.losses[step] for step in sorted(result.losses)])


def _counters(result: Result) -> dict[str, int]:
    """What the newest commit says of keys since the run began, and of samples."""
    return dict(open_commit(result.path).manifest.counters)


@pytest.fixture(scope="module")
def alone(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train_small(small_data, tmp_path_factory.mktemp("alone"), "one", num_hosts=1, in_process=True, dynamic=True)


def test_a_cut_run_ends_with_the_same_bytes(alone: Result, small_data: str, tmp_path: Path) -> None:
    """Rows and keys come from the commit, and the index is built of them."""
    options = {"num_hosts": 1, "in_process": True, "dynamic": True}
    train_small(small_data, tmp_path, "cut", max_steps=20, **options)
    cut = train_small(small_data, tmp_path, "cut", full_every=3, **options)
    assert min(cut.losses) == 20
    assert_same_bytes(committed_state(cut.path), committed_state(alone.path))
    assert _counters(cut) == _counters(alone)
    assert {_counters(alone)[f"vocabulary/b/{name}"] > 0 for name in ("keys", "admitted", "dropped")} == {True}
    # Keys were forgotten: a table whose rows are all kept has other values.
    kept = train_small(small_data, tmp_path, "kept", num_hosts=1, in_process=True)
    assert (_losses(kept) != _losses(alone)).any()
    state = committed_state(alone.path)
    is_used = state["b/last"][:, 0] > 0
    assert 0 < is_used.sum() < len(is_used)
    assert not state["b/key"][~is_used].any()


def test_a_run_goes_on_with_more_room(small_data: str, tmp_path: Path) -> None:
    """Keys keep their rows, whether the commit was one of all rows or of changes, and after a commit of each kind."""
    options = {"num_hosts": 1, "in_process": True, "dynamic": True, "audit": False}
    states = []
    for name, full_every in (("full", 1), ("changes", 3)):
        before = committed_state(
            train_small(small_data, tmp_path, name, max_steps=20, full_every=full_every, **options).path
        )
        path = str(tmp_path / name)
        run = open_run(path, settings={"room": 0.5})
        assert sum(table.num_rows for table in run.record.tables) > sum(len(before[f"{t}/key"]) for t in "ab")
        saves = CheckpointConfig(every_steps=10, full_every=full_every, num_to_keep=None)
        config = RunConfig(max_steps=50, checkpoint_config=saves)
        fit(run, scaling=ScalingConfig(in_process=True), config=config, reporter=SilentReporter())
        assert not check_run(path).all_findings
        states.append(committed_state(path))
    assert_same_bytes(*states)
    rows = len(before["a/key"])
    assert len(states[0]["a/key"]) > rows
    shown = describe(Store(path), now_unix_s=0.0)
    assert shown.record is not None
    assert [recorded.num_rows for recorded in shown.record.tables][:1] == [rows]
    table = next(table for table in shown.tables if table.name == "a")
    assert (table.num_rows, table.slots_in_words) == (len(states[0]["a/key"]), "accumulator; keys come and go")
    # As if the record of the change were lost, or the job were edited.
    shutil.move(f"{path}/settings", tmp_path / f"settings of {name}")
    with pytest.raises(ConfigurationError, match=r"capacity of table 'a' that makes 13 rows.*Expected at least"):
        open_run(path)
    shutil.move(tmp_path / f"settings of {name}", f"{path}/settings")
    # What was committed before is read as it was.
    assert open_model(path, commit="20").tables[0].num_rows == rows
    with pytest.raises(ConfigurationError, match=r"room=0\.25.*\n.*table 'a' would have other rows \(\d+ -> \d+\)"):
        open_run(path, settings={"room": 0.25})


@pytest.mark.ray
def test_a_killed_run_that_goes_on_with_another_host_sees_the_same(
    alone: Result, ray_cluster: None, small_data: str, tmp_path: Path
) -> None:
    """Over chains of deltas. The audit table counts visits of samples, and is rolled back and moved like any table."""
    killer = Killer("HostActor", after_step=12, seed=3)
    options: dict[str, Any] = {"dynamic": True, "full_every": 3}
    # Steps behind the kill, also where the first commit is slow.
    killed = train_small(small_data, tmp_path, "two", num_hosts=2, max_steps=40, reporter=killer, **options)
    assert len(killed.recoveries) == 1
    three = train_small(small_data, tmp_path, "two", num_hosts=3, **options)
    head = checkpoint.load_head(Store(three.path))
    assert head is not None
    assert (head.hosts, head.num_deltas) == (3, 1)
    job = small_job(folder=small_data)
    audit = committed_state(three.path)["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(job, NUM_STEPS), atol=1e-4)
    assert sorted(three.losses) == [*range(40, NUM_STEPS)]
    np.testing.assert_allclose([*_losses(killed), *_losses(three)], _losses(alone), rtol=1e-5)
    ours, theirs = committed_state(three.path), committed_state(alone.path)
    for name, values in ours.items():
        if name.endswith(("key", "last", "count")):
            assert values.tobytes() == theirs[name].tobytes(), name
    # What a survivor had counted in the steps that were taken back is not counted twice.
    assert _counters(three) == _counters(alone)


@is_long
@pytest.mark.ray
def test_a_killed_run_ends_with_the_same_bytes(ray_cluster: None, small_data: str, tmp_path: Path) -> None:
    killer = Killer("HostActor", after_step=12, seed=3)
    killed = train_small(small_data, tmp_path, "two", num_hosts=2, dynamic=True, reporter=killer)
    assert len(killed.recoveries) == 1
    undisturbed = train_small(small_data, tmp_path, "calm", num_hosts=2, dynamic=True)
    assert_same_bytes(committed_state(killed.path), committed_state(undisturbed.path))


def _by_key(state: dict[str, np.ndarray], table: str, shift: int) -> dict[int, bytes]:
    """Key → rows, slots, count and last step of all that have a row."""
    own = {name.split("/")[1]: values for name, values in state.items() if name.startswith(f"{table}/")}
    own = {name: values for name, values in own.items() if name != "key" and not name.startswith("waiting")}
    keys = state[f"{table}/key"][:, 0]
    held = np.flatnonzero(own["last"][:, 0])
    own["last"] = own["last"] - shift
    return {int(keys[row]): b"".join(values[row].tobytes() for values in own.values()) for row in held}


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_a_new_run_begins_with_the_keys_of_another(alone: Result, small_data: str, num_hosts: int) -> None:
    """Whatever its capacity and its buckets, and on any number of hosts."""
    source = checkpoint.load_head(Store(alone.path))
    assert source is not None
    job = small_job(folder=small_data, dynamic=True, room=0.6)
    buckets = [8 if name == "b" else 1 for name in job.table_names]
    specs = table_specs(job, buckets)
    plan = plan_warm_start(source, specs)
    found: dict[str, dict[int, bytes]] = {spec.name: {} for spec in specs}
    for host in range(num_hosts):
        tables = [Table(spec, np.arange(host, spec.layout.num_buckets, num_hosts)) for spec in specs]
        begin_tables(Store(alone.path), tables, plan.tables, on_chunk=lambda: None)
        for table in tables:
            if table.index.is_dynamic and len(table.buckets):
                view = table.spec.stored(table.in_place())
                state = {f"t/{name}": values for name, values in zip(table.spec.widths, view, strict=True)}
                keys = state["t/key"][:, 0][state["t/last"][:, 0] != 0]
                assert (table.index.rows_of(keys) >= 0).all()
                found[table.spec.name] |= _by_key(state, "t", 0)
    committed = committed_state(alone.path)
    assert found["b"] == _by_key(committed, "b", NUM_STEPS + 1)
    assert found["a"] == _by_key(committed, "a", NUM_STEPS + 1)
    narrow = table_specs(small_job(folder=small_data, dynamic=True, room=0.05), buckets)
    tables = [Table(spec, np.arange(spec.layout.num_buckets)) for spec in narrow]
    num_keys = source.counters["vocabulary/a/keys"]
    with pytest.raises(WarmStartRefused, match=rf"'a' has room for 3 keys, in the commit {num_keys} have a row"):
        plan_warm_start(source, narrow)
    # What is not known before keys are read: a bucket that has no room for its share.
    with pytest.raises(CheckpointMismatch, match=r"at least \d+ keys of the commit for bucket \d of"):
        begin_tables(Store(alone.path), tables, plan.tables, on_chunk=lambda: None)


def test_row_numbers_become_keys_and_not_the_other_way(alone: Result, small_data: str, tmp_path: Path) -> None:
    options = {"num_hosts": 1, "in_process": True, "audit": False, "max_steps": 3}
    static = train_small(small_data, tmp_path, "static", **options)
    arguments = {"folder": small_data, "dynamic": True, "room": 1.0, "audit": False}
    started = fit_job(
        JobReference(function="tests.small_job:small_job", arguments=arguments),
        tmp_path,
        name="warm",
        max_steps=1,
        warm_start=WarmStart(source=static.path),
    )
    before, after = committed_state(static.path), committed_state(started.path)
    held = np.flatnonzero(after["b/last"][:, 0])
    keys = after["b/key"][held, 0]
    assert sorted(keys) == [*range(len(before["b/rows"]))]
    for name in ("rows", "momentum", "velocity"):
        same = (after[f"b/{name}"][held] == before[f"b/{name}"][keys]).all(axis=1)
        assert 0.98 < same.mean() < 1.0
        assert (after["b/last"][held, 0][~same] == 1).all()
    assert set(after["b/last"][held, 0]) == {-1, 1}
    # Frozen, they are read alone.
    job = small_job(folder=small_data, dynamic=True, room=1.0, audit=False)
    frozen = next(table for name, table in zip(job.table_names, job.tables, strict=True) if name == "b")
    frozen.trainable = False
    start = WarmStart(source=started.path, rules=("b=rows",))
    path = fit_job(job, tmp_path, name="frozen", max_steps=2, warm_start=start).path
    kept = committed_state(path)
    orders = [np.lexsort((state["b/key"][:, 0], state["b/last"][:, 0] == 0)) for state in (kept, after)]
    count = len(before["b/rows"])
    for name in ("b/key", "b/rows"):
        assert (kept[name][orders[0][:count]] == after[name][orders[1][:count]]).all()
    assert not (kept["b/last"] > 0).any()
    assert (kept["a/last"] == 2).any()
    head = checkpoint.load_head(Store(started.path))
    assert head is not None
    specs = table_specs(small_job(folder=small_data, audit=False), [table.num_buckets for table in head.tables])
    with pytest.raises(WarmStartRefused, match=r"table 'b' has row numbers for keys, .*\(podembed export writes them"):
        plan_warm_start(head, specs)
