"""Runs of older formats are read, checked, continued and compacted; their new commits have today's format."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.api.config import CheckpointConfig
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.manifest import FORMAT_VERSION, from_json, to_json
from podembed.orchestrator.commit.run_record import read_run
from podembed.tools.inspect.compact import compact
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.checkpoint_files import TablePlan
from podembed.workers.checkpoint.files import read_bucket
from podembed.workers.checkpoint.zarr_metadata import FLAT, NESTED
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import seal
from tests.long_tests import is_long
from tests.orchestrator.cluster.test_in_process import train
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import Arrays, commit_changes, two_tables
from tests.run_state import assert_same_bytes, committed_state

# Each written by the last program of its version: `committed_tables.two_tables()` whole at 10 and 20, and changed at
# 30. Files of version 2 have two buckets each.
ARCHIVES = {version: f"run_of_version_{version}.zip" for version in (1, 2, 3)}
BUCKETS_PER_FILE = {1: 1, 2: 2, 3: 1}
CHANGED = {"users": [0, 5, 36], "items": [4]}
HEAD = "s000000030-g00000001"


@pytest.fixture(params=[*ARCHIVES])
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    with zipfile.ZipFile(Path(__file__).parent / ARCHIVES[request.param]) as archive:
        archive.extractall(tmp_path / "run")
    return Store(tmp_path / "run")


def expected() -> dict[str, Arrays]:
    """The tables at step 30."""
    tables = {name: {k: v.copy() for k, v in table.arrays.items()} for name, table in two_tables().items()}
    for name, ids in CHANGED.items():
        for values in tables[name].values():
            values[ids] += 1
    return tables


def rows_of(store: Store, name: str) -> dict[str, dict[str, np.ndarray]]:
    """Table → array → values in row order."""
    found = {}
    for table in checkpoint.load(store, name).tables:
        buckets = [read_bucket(store, table, bucket) for bucket in range(table.num_buckets)]
        arrays = [np.stack(parts, axis=1) for parts in zip(*buckets, strict=True)]
        found[table.name] = {
            array.name: values.reshape(-1, array.width)[: table.num_rows]
            for array, values in zip(table.arrays, arrays, strict=True)
        }
    return found


def check_rows(store: Store, name: str) -> None:
    found = rows_of(store, name)
    for table, arrays in expected().items():
        assert [*found[table]] == [*arrays]
        for array, values in arrays.items():
            np.testing.assert_array_equal(found[table][array], values)


def test_an_old_run_is_read_and_verified(old_run: Store) -> None:
    version = read_run(old_run).format_version
    assert version in ARCHIVES
    infos = checkpoint.list_commits(old_run)
    assert [info.name for info in infos if info.counts] == [HEAD, "s000000020-g00000001", "s000000010-g00000001"]
    for info in infos:
        assert info.manifest is not None
        assert info.manifest.format_version == version
        assert {table.buckets_per_file for table in info.manifest.tables} == {BUCKETS_PER_FILE[version]}
        assert {table.separator for table in info.manifest.tables} == {"/"}
        assert checkpoint.verify(old_run, info.manifest).damages == ()
    check_rows(old_run, HEAD)
    (leaf,) = checkpoint.load(old_run, HEAD).dense
    np.testing.assert_array_equal(read_dense(old_run, leaf), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_damage_in_an_old_run_is_found(old_run: Store) -> None:
    head = checkpoint.load(old_run, HEAD)
    name = head.tables[0].chunks[1].name
    path = Path(old_run.locate(name))
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert [damage.name for damage in checkpoint.verify(old_run, head).damages] == [name]


def test_a_delta_of_today_follows_old_chunks(old_run: Store) -> None:
    lease = take(old_run)
    arrays = expected()
    after = commit_changes(old_run, lease, checkpoint.load(old_run, HEAD), 40, {"users": ([7], arrays["users"])})
    assert after.format_version == FORMAT_VERSION
    assert checkpoint.verify(old_run, after).is_intact
    check_rows(old_run, after.name)


def test_an_old_run_is_compacted_into_todays_format(old_run: Store) -> None:
    made = compact(old_run.url)
    assert (made.format_version, made.num_deltas) == (FORMAT_VERSION, 0)
    assert checkpoint.verify(old_run, made).is_intact
    check_rows(old_run, made.name)


def make_old(run: Path, version: int) -> None:
    """Rewrites what has a version as the program of that version wrote it."""
    for path in (run / "commit").glob("*.json"):
        made = from_json(path.stem, path.read_bytes())
        path.write_bytes(to_json(replace(made, format_version=version)))
    document = json.loads((run / "RUN.json").read_bytes())
    del document["sha256"]
    (run / "RUN.json").write_bytes(seal(document | {"format_version": version}))


@pytest.mark.parametrize("version", [*ARCHIVES])
@pytest.mark.parametrize("full_every", [pytest.param(1, marks=is_long), 3])
def test_training_goes_on_from_an_old_run(
    small_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_every: int, version: int
) -> None:
    """With the same bytes as if it had never stopped, in whole commits or deltas to old chunks."""
    monkeypatch.setattr("podembed.orchestrator.run.opening.choose_buckets", lambda job: (1, 64, 4))
    policy = CheckpointConfig(every_steps=1, num_to_keep=None, full_every=full_every)
    whole = train(small_data, tmp_path / "whole", max_steps=4, checkpoint_config=policy)
    with monkeypatch.context() as patched:
        patched.setattr("podembed.workers.checkpoint.shard.TablePlan", partial(TablePlan, separator=NESTED))
        if version == 1:
            patched.setattr("podembed.workers.host.shard.buckets_per_file", lambda *_, **__: {})
        old = train(small_data, tmp_path / "old", max_steps=2, checkpoint_config=policy)
    make_old(Path(old.path), version)
    resumed = train(small_data, tmp_path / "old", max_steps=4, checkpoint_config=policy)
    assert_same_bytes(committed_state(resumed.path), committed_state(whole.path))
    manifests = [info.manifest for info in checkpoint.list_commits(Store(resumed.path)) if info.manifest]
    assert {made.step: made.format_version for made in manifests} == {
        1: version,
        2: version,
        3: FORMAT_VERSION,
        4: FORMAT_VERSION,
    }
    for made in manifests:
        # A delta keeps the chunks of the whole commit before it.
        is_new = version > 1 or (made.format_version == FORMAT_VERSION and not made.num_deltas)
        expected_sizes = [1, 8, 4] if is_new else [1, 1, 1]
        assert [table.buckets_per_file for table in made.tables] == expected_sizes
        is_flat = made.format_version == FORMAT_VERSION and not made.num_deltas
        assert {table.separator for table in made.tables} == {FLAT if is_flat else NESTED}
    assert any(made.num_deltas for made in manifests) == (full_every > 1)
