"""Runs with incremental commits: the same bytes as with full ones, whoever reads them, and nothing goes that a kept
commit needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import CheckpointConfig, ConfigurationError, WarmStart
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.api.run_errors import WorkerRefused
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import Manifest, parse_commit_name, problems
from podembed.orchestrator.run.reference import open_commit
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.report import render
from podembed.tools.inspect.compact import compact
from podembed.tools.inspect.describe import export
from podembed.tools.inspect.diff import diff
from podembed.tools.inspect.extract import extract
from podembed.tools.inspect.inspect_run import describe
from podembed.tools.inspect.inspect_run import render as render_run
from podembed.tools.inspect.prune import prune
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.job.reference import JobReference
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.orchestrator.cluster.test_in_process import STEPS, train
from tests.orchestrator.committed_tables import commit_changes, commit_tables, create_run, flip_byte, random_table
from tests.run_state import assert_same_bytes, committed_state, tables_of
from tests.training import fit_job

CHAIN = CheckpointConfig(every_steps=4, num_to_keep=None, full_every=3)


@pytest.fixture(scope="module")
def full(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(small_data, tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def trained(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = train(small_data, tmp_path_factory.mktemp("chain") / "run", checkpoint_config=CHAIN)
    return Path(result.path)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def manifests(path: Path) -> list[Manifest]:
    """Those that count, oldest first."""
    store = Store(str(path))
    return [checkpoint.load(store, name) for name in reversed(read_lineage(store))]


def test_the_last_of_a_chain_has_the_bytes_of_a_full_commit_and_writes_fewer(full: Result, trained: Path) -> None:
    found = manifests(trained)
    assert [manifest.step for manifest in found] == [4, 8, 12, 16, 20, STEPS]
    assert [manifest.num_deltas for manifest in found] == [0, 1, 2, 0, 1, 2]
    assert_same_bytes(committed_state(str(trained)), committed_state(full.path))
    for first, *deltas in (found[:3], found[3:]):
        assert first.written_bytes == first.size_bytes
        assert all(delta.written_bytes < first.written_bytes / 2 for delta in deltas)
        assert deltas[-1].size_bytes == sum(manifest.written_bytes for manifest in (first, *deltas)) - sum(
            leaf.size_bytes for manifest in (first, *deltas[:-1]) for leaf in manifest.dense
        )


def test_a_run_goes_on_from_a_delta_and_so_does_its_chain(full: Result, small_data: str, tmp_path: Path) -> None:
    stopped = train(small_data, tmp_path / "run", max_steps=8, checkpoint_config=CHAIN)
    assert manifests(Path(stopped.path))[-1].num_deltas == 1
    result = train(small_data, tmp_path / "run", checkpoint_config=CHAIN)
    assert [manifest.num_deltas for manifest in manifests(Path(result.path))] == [0, 1, 2, 0, 1, 2]
    assert_same_bytes(committed_state(result.path), committed_state(full.path))
    assert {**stopped.losses, **result.losses} == dict(full.losses)


def test_the_keep_policy_leaves_what_a_kept_chain_needs(full: Result, small_data: str, tmp_path: Path) -> None:
    keep_two = CheckpointConfig(every_steps=4, num_to_keep=2, full_every=3)
    result = train(small_data, tmp_path / "run", checkpoint_config=keep_two)
    store = Store(result.path)
    found = manifests(Path(result.path))
    assert [manifest.step for manifest in found] == [20, STEPS]
    assert sorted(store.children("data")) == [f"s{step:09d}-g00000001" for step in (16, 20, STEPS)]
    assert not store.sizes("data/s000000016-g00000001/dense"), "only what the chain needs of it stays"
    assert check_run(result.path).is_intact
    assert_same_bytes(committed_state(result.path), committed_state(full.path))


def test_prune_leaves_what_a_kept_chain_needs(run: Path) -> None:
    before = committed_state(str(run))
    removal = prune(str(run), num_to_keep=2)
    assert len(removal.commits) == 4
    again = prune(str(run), num_to_keep=2)
    assert (again.commits, again.attempts, again.num_files) == ((), (), 0), "what a chain needs was not deleted"
    assert check_run(str(run)).is_intact
    assert_same_bytes(committed_state(str(run)), before)


def test_all_policies_together_keep_every_commit_readable(full: Result, small_data: str, tmp_path: Path) -> None:
    """Gaps in the lineage, chains across them, and metrics that are those of the step although training went on
    meanwhile.
    """
    config = CheckpointConfig(
        every_steps=4, on_best=True, num_to_keep=2, keep_every_steps=10, keep_best=1, full_every=3
    )
    result = train(
        small_data, tmp_path / "run", evaluate=True, eval_every_steps=3, max_steps=STEPS, checkpoint_config=config
    )
    found = manifests(Path(result.path))
    aucs = {evaluation.step: evaluation.auc for evaluation in result.evaluations if evaluation.step < STEPS}
    best = max(aucs, key=lambda step: aucs[step])
    steps = [manifest.step for manifest in found]
    assert {best, steps[-2], STEPS} <= {*steps}
    assert len(steps) < STEPS // 4, "nothing was deleted"
    assert {m.step: m.metrics["auc"] for m in found if m.metrics} == {s: aucs[s] for s in steps if s in aucs}
    check = check_run(result.path)
    assert check.is_intact, render(check)
    assert not check.leftovers
    assert_same_bytes(committed_state(result.path), committed_state(full.path))
    compact(result.path)
    removal = prune(result.path, num_to_keep=2, also=config.keep_policies)
    left = [manifest.step for manifest in manifests(Path(result.path))]
    assert best in left
    assert [parse_commit_name(name) for name in removal.commits] == [(step, 1) for step in steps if step not in left]
    assert check_run(result.path).is_intact
    assert_same_bytes(committed_state(result.path), committed_state(full.path))


def begun_from(source: str, small_data: str, path: Path, rules: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The state of a new run after three steps from another run's newest commit."""
    arguments = {"folder": small_data, "audit": False}
    result = fit_job(
        JobReference(function="tests.small_job:small_job", arguments=arguments),
        path.parent,
        name=path.name,
        max_steps=3,
        checkpoint_config=CheckpointConfig(every_steps=2, full_every=2),
        warm_start=WarmStart(source=source, rules=rules),
    )
    assert [manifest.num_deltas for manifest in manifests(Path(result.path))] == [0, 1]
    return committed_state(result.path)


@pytest.mark.parametrize("rules", [(), ("b=rows", "@dense=params")])
def test_a_new_run_begins_from_a_chain_as_from_a_full_commit(
    full: Result, trained: Path, small_data: str, tmp_path: Path, rules: tuple[str, ...]
) -> None:
    from_chain = begun_from(str(trained), small_data, tmp_path / "chain", rules)
    assert_same_bytes(from_chain, begun_from(full.path, small_data, tmp_path / "full", rules))


def test_fsck_reads_every_link_and_names_what_a_damaged_one_holds(run: Path) -> None:
    assert check_run(str(run)).is_intact
    victim = next((run / "data" / "s000000020-g00000001").rglob("tables/b/delta-*/arrays/velocity/c/0/0"))
    flip_byte(victim)
    found = check_run(str(run))
    assert {finding.commit for finding in found.all_findings} == {"s000000020-g00000001", "s000000024-g00000001"}
    assert all(finding.file == str(victim.relative_to(run)) for finding in found.all_findings)
    text = render(found)
    assert "table 'b', velocity, " in text
    assert "changed by s000000020-g00000001" in text
    victim.unlink()
    assert any(finding.found == "no file" for finding in check_run(str(run)).all_findings)


def test_diff_sees_through_chains(full: Result, trained: Path) -> None:
    assert diff(open_commit(full.path), open_commit(str(trained))).is_equal
    difference = diff(open_commit(f"{trained}@s000000012-g00000001"), open_commit(str(trained)))
    assert not difference.is_equal
    store = Store(str(trained))
    states = [tables_of(store, manifest) for manifest in (manifests(trained)[2], manifests(trained)[5])]
    for table in difference.tables:
        for array in table.arrays:
            one, other = (state[f"{table.table}/{array.array}"] for state in states)
            assert array.num_changed == int((one != other).any(axis=1).sum())


@pytest.mark.parametrize("batch_bytes", [30_000, 64 << 20])
def test_exported_and_extracted_rows_are_those_of_the_chain(trained: Path, tmp_path: Path, batch_bytes: int) -> None:
    state, expected = open_commit(str(trained)), committed_state(str(trained))
    export(state, "b", format="npy", out=str(tmp_path / "b.npy"), with_slots=True, batch_bytes=batch_bytes)
    records = np.load(tmp_path / "b.npy")
    for name in ("rows", "momentum", "velocity"):
        assert records[name].tobytes() == expected[f"b/{name}"].tobytes()
    ids = [0, 37, 74, 29_999, 37]
    found = extract(state, "b", ids, with_slots=True).values
    assert all((values == expected[f"b/{name}"][ids]).all() for name, values in found.items())
    rows = extract(state, "b", ids, with_slots=False).values
    assert (rows["rows"] == expected["b/rows"][ids]).all()


def test_an_export_of_a_damaged_link_leaves_nothing(run: Path, tmp_path: Path) -> None:
    flip_byte(next((run / "data" / "s000000020-g00000001").rglob("tables/b/delta-*/arrays/rows/c/0/0")))
    with pytest.raises(ChunkDamaged, match="delta-"):
        export(open_commit(str(run)), "b", format="npy", out=str(tmp_path / "b.npy"))
    assert not list(tmp_path.glob("*.npy"))


def test_inspect_tells_deltas_from_full_commits(trained: Path) -> None:
    text = render_run(describe(Store(str(trained)), now_unix_s=2e9))
    (head,) = [line for line in text.splitlines() if line.strip().startswith("s000000024")]
    assert " delta 2, " in head
    assert f"podembed compact {trained}" in text


def test_compacting_changes_no_byte_and_training_goes_on_from_it(
    full: Result, run: Path, small_data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = committed_state(str(run))
    with pytest.raises(SystemExit) as left:
        main(["compact", str(run)])
    assert left.value.code == 0
    assert "s000000024-g00000002 is a full commit" in capsys.readouterr().out
    head = manifests(run)[-1]
    assert (head.num_deltas, head.parent, head.step) == (0, "s000000024-g00000001", STEPS)
    assert_same_bytes(committed_state(str(run)), before)
    assert check_run(str(run)).is_intact
    assert compact(str(run)) == head, "a full commit needs nothing"
    prune(str(run), num_to_keep=2)
    on = train(small_data, run, max_steps=STEPS + 4, checkpoint_config=CHAIN)
    assert manifests(run)[-1].num_deltas == 1
    whole = train(small_data, run.parent / "whole", max_steps=STEPS + 4)
    assert_same_bytes(committed_state(on.path), committed_state(whole.path))


@pytest.mark.parametrize("read", ["compact", "extract", "export", "train", "warm start"])
def test_whoever_reads_a_damaged_link_names_its_file_and_what_it_holds(
    run: Path, small_data: str, tmp_path: Path, read: str
) -> None:
    state = open_commit(str(run))
    link, last = state.table("b").deltas
    part = link.parts[0]
    ids = read_dense(state.store, part.files[0])
    later = np.concatenate([read_dense(state.store, other.files[0]) for other in last.parts])
    at = int(np.flatnonzero(~np.isin(ids, later))[0])
    file = part.files[1].chunk_file
    flip_byte(run / file, at=at * 4 * part.files[1].shape[1])
    readers: dict[str, Callable[[], object]] = {
        "compact": lambda: compact(str(run)),
        "extract": lambda: extract(state, "b", [int(ids[at])]),
        "export": lambda: export(state, "b", format="npy", out=str(tmp_path / "b.npy")),
        "train": lambda: train(small_data, run, max_steps=STEPS + 1, checkpoint_config=CHAIN),
        "warm start": lambda: begun_from(str(run), small_data, tmp_path / "new"),
    }
    held = rf"table 'b', rows, {part.num_rows} rows of buckets? .*changed by {link.commit}"
    with pytest.raises((ChunkDamaged, WorkerRefused), match=f"{file}', {held}"):
        readers[read]()


@is_long
def test_a_chain_on_an_object_store(s3_url: str, full: Result, small_data: str, tmp_path: Path) -> None:
    """Training, compacting, pruning and single rows, whose reading asks for parts of files."""
    path = f"{s3_url}/run"
    train(small_data, path, checkpoint_config=CheckpointConfig(every_steps=8, num_to_keep=2, full_every=3))
    assert_same_bytes(committed_state(path), committed_state(full.path))
    ids = [0, 29_999, 37]
    found = [extract(open_commit(source), "b", ids).values for source in (path, full.path)]
    assert_same_bytes(*({**values} for values in found))
    written = [
        export(open_commit(source), "b", format="npy", out=str(tmp_path / f"{at}.npy"))
        for at, source in enumerate((path, full.path))
    ]
    np.testing.assert_array_equal(*(np.load(file.path) for file in written))
    assert open_commit(path).manifest.num_deltas == 2
    assert compact(path).num_deltas == 0
    assert len(prune(path, num_to_keep=2).commits) == 1
    assert check_run(path).is_intact
    assert_same_bytes(committed_state(path), committed_state(full.path))


def test_what_cannot_be_compacted(run: Path, tmp_path: Path) -> None:
    flip_byte(next((run / "data" / "s000000020-g00000001").rglob("tables/b/delta-*/ids/c/0")), at=1)
    head = read_lineage(Store(str(run)))[0]
    with pytest.raises(ChunkDamaged, match=r"delta-\d+/ids/c/0', table 'b', ids, .* changed by s000000020-g00000001"):
        compact(str(run))
    assert read_lineage(Store(str(run)))[0] == head
    store, lease = create_run(tmp_path / "empty", {})
    lease.release()
    with pytest.raises(ConfigurationError, match="Found no commit"):
        compact(store.location)


def test_a_manifest_with_a_chain_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    tables = {"users": random_table(1, num_rows=37, num_buckets=4, widths={"rows": 3, "accumulator": 1})}
    store, lease = create_run(tmp_path / "run", tables)
    head = commit_tables(store, lease, 10, tables)
    for step in (20, 30):
        head = commit_changes(store, lease, head, step, {"users": ([1, step], tables["users"].arrays)})
    assert problems(head) == []
    assert checkpoint.load(store, head.name) == head
    text = (tmp_path / "run" / "commit" / f"{head.name}.json").read_bytes()
    assert text.count(b'"deltas"') == 1
    (users,) = head.tables
    first, second = users.deltas
    for deltas in (
        (second, first),
        (first, first),
        (replace(first, commit="s000000040-g00000001"), second),
        (replace(first, commit="../../x"), second),
        (replace(first, parts=second.parts), second),
        (replace(first, parts=(replace(first.parts[0], buckets=(4,)),)), second),
    ):
        assert problems(replace(head, tables=(replace(users, deltas=deltas),))), deltas


def test_full_every_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="Found full_every=0. Expected"):
        CheckpointConfig(full_every=0)
