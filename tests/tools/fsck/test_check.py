"""Damage of every kind is found and named; what harms nobody is reported apart; nothing is changed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.api.config import ConfigurationError
from podembed.orchestrator.api.keep_policies import KeepEvery
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.keep import keep_latest
from podembed.orchestrator.commit.lease_files import read_lineage
from podembed.orchestrator.commit.manifest import MAX_MANIFEST_BYTES, Manifest, commit_file, to_json
from podembed.tools.fsck import check as check_module
from podembed.tools.fsck.check import check_run
from podembed.tools.fsck.findings import RunCheck
from podembed.tools.fsck.report import render
from podembed.workers.storage.store import Store
from tests.orchestrator.commit.checkpoint_samples import take
from tests.orchestrator.committed_tables import (
    SampleTable,
    commit_changes,
    commit_tables,
    create_run,
    flip_byte,
    keyed_table,
    run_with,
    two_tables,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[Manifest]]:
    return run_with(tmp_path_factory.mktemp("fsck") / "run", two_tables(), 10, 20, 30)


@pytest.fixture
def run(template: tuple[Store, list[Manifest]], tmp_path: Path) -> tuple[Store, list[Manifest]]:
    """A copy to damage; copying is quicker than writing durably."""
    store, manifests = template
    shutil.copytree(store.location, tmp_path / "run")
    return Store(tmp_path / "run"), manifests


def contents(store: Store) -> dict[str, bytes]:
    return {name: store.read(name, max_bytes=1 << 30) for name in store.sizes()}


def damages(check: RunCheck) -> list[tuple[str | None, str]]:
    return [(finding.commit, finding.file) for finding in check.all_findings]


def test_a_good_run_is_intact(run) -> None:
    store, manifests = run
    before = contents(store)
    seen: list[str] = []
    check = check_run(store.location, on_commit=lambda checked: seen.append(checked.name))
    assert check.is_intact
    assert seen == [manifest.name for manifest in reversed(manifests)]
    assert [(c.counts, c.is_head, c.num_files) for c in check.commits] == [
        (True, index == 0, len(manifests[0].file_sizes())) for index in range(3)
    ]
    assert not check.leftovers
    assert "No damage found" in render(check)
    assert contents(store) == before


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("users/rows/c.3.", "table 'users', rows, bucket 3 (9 rows: 3, 7, 11 ... 35)"),
        ("users/accumulator/c.0.", "table 'users', accumulator, bucket 0 (10 rows: 0, 4, 8 ... 36)"),
        ("items/v/c.4.", "table 'items', v, bucket 4 (1 row: 4)"),
        ("items/m/c.6.", "table 'items', m, bucket 6 (no rows)"),
        ("users/rows/zarr.json", "table 'users', rows, shape of all buckets"),
        ("dense/w/c/0", "dense 'w'"),
        ("dense/w/zarr.json", "dense 'w', shape"),
    ],
)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named_with_what_it_holds(run, kind: str, place: str, how: str) -> None:
    store, manifests = run
    file = next(name for name in manifests[1].file_sizes() if kind in name)
    path = store.locate(file)
    if how == "flipped":
        flip_byte(path)
    elif how == "cut":
        os.truncate(path, store.size(file) - 3)
    else:
        os.unlink(path)
    check = check_run(store.location)
    assert damages(check) == [(manifests[1].name, file)]
    assert check.all_findings[0].place == place
    text = render(check)
    assert file in text
    assert place in text
    assert "1 damage found" in text
    assert check_run(store.location, commit=manifests[2].name).is_intact
    assert not check_run(store.location, commit=manifests[1].name).is_intact


def test_chunks_that_do_not_belong_together_are_found_by_the_digest(tmp_path: Path) -> None:
    """Chunk and manifest agree with each other; only the digest still tells of the rows that were there."""
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    manifest = commit_tables(store, lease, 10, tables, publish=False)
    digests = list(manifest.tables[0].digests)
    digests[2] = "0" * 32
    object.__setattr__(manifest.tables[0], "digests", tuple(digests))
    checkpoint.commit(store, manifest, lease)
    (finding,) = check_run(store.location).all_findings
    assert "rows/c.2." in finding.file
    assert "digest" in finding.found


def test_a_damaged_manifest_is_found_and_the_others_are_still_checked(run) -> None:
    store, manifests = run
    flip_byte(store.locate(commit_file(manifests[1].name)), 40)
    flip_byte(store.locate(manifests[0].tables[0].chunks[0].name))
    check = check_run(store.location)
    assert damages(check) == [
        (manifests[1].name, commit_file(manifests[1].name)),
        (manifests[0].name, manifests[0].tables[0].chunks[0].name),
    ]
    # Nobody knows which files a commit had whose manifest is lost, so none of them is called left over.
    assert not check.leftovers


@pytest.mark.parametrize("how", ["giant", "a folder"])
def test_a_manifest_that_is_no_file_of_ours_is_damage_like_any_other(run, tmp_path: Path, how: str) -> None:
    store, manifests = run
    head = manifests[2].name
    path = Path(store.locate(commit_file(head)))
    if how == "giant":
        os.truncate(path, MAX_MANIFEST_BYTES + 1)  # of which the disk holds nothing
    else:
        path.unlink()
        path.mkdir()
    check = check_run(store.location)
    assert damages(check) == [(head, commit_file(head))]
    assert [commit.is_head for commit in check.commits] == [True, False, False]
    skipped: list[str] = []
    found = checkpoint.newest_loadable(
        store, head, allow_ancestors=True, on_skip=lambda name, why: skipped.append(name)
    )
    assert (found, skipped) == (manifests[1].name, [head])


def test_a_manifest_that_is_missing_in_the_middle_breaks_the_chain(run) -> None:
    store, manifests = run
    store.delete(commit_file(manifests[1].name))
    check = check_run(store.location)
    assert damages(check) == [(manifests[2].name, commit_file(manifests[2].name))]
    (finding,) = check.all_findings
    assert finding.place == "the chain of commits"
    assert manifests[1].name in finding.found
    assert [left.path for left in check.leftovers] == [f"data/{manifests[1].name}"]


def test_commits_that_the_keep_policy_deleted_between_others_are_no_damage(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    manifests = [commit_tables(store, lease, step, tables) for step in (10, 20, 30, 40, 50)]
    keep_latest(store, lease, num_to_keep=2, also=[KeepEvery(30)])
    assert read_lineage(store) == tuple(manifests[at].name for at in (4, 3, 2, 0))
    assert check_run(store.location).is_intact


def test_a_parent_that_is_missing_and_was_not_between_two_commits_breaks_the_chain(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    first, second = (commit_tables(store, lease, step, tables) for step in (10, 20))
    store.replace(commit_file(second.name), to_json(dataclasses.replace(second, parent="s000000005-g00000001")))
    (finding,) = check_run(store.location).all_findings
    assert finding.found == "parent s000000005-g00000001, that is missing"
    assert finding.expected.startswith(f"parent {first.name}")


def test_the_oldest_commit_may_have_lost_its_parent_to_the_keep_policy(run) -> None:
    store, manifests = run
    store.delete(commit_file(manifests[0].name))
    check = check_run(store.location)
    assert check.is_intact
    assert [left.path for left in check.leftovers] == [f"data/{manifests[0].name}"]


def test_a_head_that_is_missing_is_found(tmp_path: Path) -> None:
    store, (manifest,) = run_with(tmp_path / "run", two_tables(), 10)
    take(store, "second")
    store.delete(commit_file(manifest.name))
    check = check_run(store.location)
    assert damages(check) == [(manifest.name, commit_file(manifest.name))]


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_the_record_of_the_run_is_checked(run, how: str) -> None:
    store, _ = run
    if how == "flipped":
        flip_byte(store.locate("RUN.json"), 12)
    else:
        store.delete("RUN.json")
    assert damages(check_run(store.location)) == [(None, "RUN.json")]


def test_commits_of_another_run_and_with_other_tables_are_found(run, tmp_path: Path) -> None:
    store, manifests = run
    other = two_tables()
    del other["items"]
    other_store, _ = create_run(tmp_path / "other", other, run_id="run-2")
    store.replace("RUN.json", other_store.read("RUN.json", max_bytes=1 << 20))
    check = check_run(store.location, commit=manifests[0].name)
    assert [(finding.place, finding.expected.split()[0]) for finding in check.all_findings] == [
        ("whose commit it is", "run-2"),
        ("table 'items'", "no"),
    ]


class TestLeases:
    def test_a_damaged_claim(self, run) -> None:
        store, _ = run
        flip_byte(store.locate("lease/g00000001.claim"), 20)
        assert damages(check_run(store.location)) == [(None, "lease/g00000001.claim")]

    def test_a_claim_that_says_another_generation(self, run) -> None:
        store, _ = run
        store.write_new("lease/g00000002.claim", [store.read("lease/g00000001.claim", max_bytes=1 << 14)])
        (finding,) = check_run(store.location).all_findings
        assert (finding.file, finding.found) == ("lease/g00000002.claim", "the claim of generation 1")

    def test_a_lost_claim(self, run) -> None:
        store, _ = run
        store.delete("lease/g00000001.claim")
        (finding,) = check_run(store.location).all_findings
        assert finding.file == "lease/g00000001.base.json"
        assert "no g00000001.claim" in finding.found

    def test_without_the_newest_base_every_commit_is_checked_and_none_is_called_left_over(self, run) -> None:
        store, manifests = run
        flip_byte(store.locate("lease/g00000001.base.json"), 20)
        check = check_run(store.location)
        assert {file for _, file in damages(check)} == {"lease/g00000001.base.json"}
        assert sorted(commit.name for commit in check.commits) == [manifest.name for manifest in manifests]
        assert not check.leftovers

    def test_a_torn_heartbeat_is_no_damage(self, run) -> None:
        store, _ = run
        store.replace("lease/g00000001.hb", b"torn")
        assert check_run(store.location).is_intact


class TestLeftovers:
    def test_they_are_named_and_kept(self, tmp_path: Path) -> None:
        tables = two_tables()
        store, first = create_run(tmp_path / "run", tables)
        kept = commit_tables(store, first, 10, tables)
        late = commit_tables(store, first, 20, tables, publish=False)
        second = take(store, "second")
        # A driver that was replaced publishes after its successor has chosen a base.
        store.create_exclusive(commit_file(late.name), b"zombie")
        commit_tables(store, second, 15, tables)
        unfinished = commit_tables(store, second, 25, tables, publish=False)
        store.write_new(f"data/{kept.name}/notes.txt", [b"mine"])
        store.write_new("commit/readme.txt", [b"mine too"])
        before = contents(store)
        check = check_run(store.location)
        assert check.is_intact
        found = {left.path: (left.what.split(":")[0], left.num_files) for left in check.leftovers}
        num_files = len(kept.file_sizes())
        assert found == {
            f"data/{kept.name}": ("extra files in a commit's folder", 1),
            f"data/{late.name}": ("an attempt that is no commit that counts", num_files),
            f"data/{unfinished.name}": ("an attempt of generation 2, the newest", num_files),
            commit_file(late.name): ("a commit that does not count", 1),
            "commit/readme.txt": ("files of nobody that writes runs", 1),
        }
        assert contents(store) == before
        assert f"data/{late.name}" in render(check)
        checked = check_run(store.location, include_uncounted=True)
        assert damages(checked) == [(late.name, commit_file(late.name))]
        assert not checked.commits[-1].counts

    def test_a_commit_that_is_deleted_meanwhile_is_not_damaged(self, run) -> None:
        store, manifests = run

        def prune_behind_our_back(checked) -> None:
            if checked.is_head:
                store.delete(commit_file(manifests[0].name))
                store.delete(manifests[0].tables[0].chunks[0].name)

        check = check_run(store.location, on_commit=prune_behind_our_back)
        assert check.is_intact
        assert [commit.is_gone for commit in check.commits] == [False, False, True]

    def test_nor_is_one_that_is_deleted_before_the_first_is_read(self, run, monkeypatch) -> None:
        store, manifests = run
        real = check_module.record_findings

        def prune_behind_our_back(*arguments):
            store.delete(commit_file(manifests[0].name))
            return real(*arguments)

        monkeypatch.setattr(check_module, "record_findings", prune_behind_our_back)
        check = check_run(store.location)
        assert check.is_intact
        assert [commit.is_gone for commit in check.commits] == [False, False, True]


def test_what_a_driver_commits_meanwhile_is_not_left_over(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    commit_tables(store, lease, 10, tables)
    check = check_run(store.location, on_commit=lambda checked: commit_tables(store, lease, 20, tables) and None)
    assert check.is_intact
    assert [commit.name for commit in check.commits] == ["s000000010-g00000001"]
    assert not check.leftovers


def test_what_is_no_run_or_no_commit_is_refused(run, tmp_path: Path) -> None:
    store, manifests = run
    (tmp_path / "file").write_text("x")
    for url in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigurationError, match="Found no run in"):
            check_run(str(url))
    with pytest.raises(ConfigurationError, match=manifests[2].name):
        check_run(store.location, commit="s000000011-g00000001")


def test_control_characters_from_files_do_not_reach_the_terminal(tmp_path: Path) -> None:
    tables = two_tables()
    store, lease = create_run(tmp_path / "run", tables)
    manifest = commit_tables(store, lease, 10, tables, dense={"w\x1b[2J": np.zeros(2, np.float32)})
    flip_byte(store.locate(manifest.dense[0].chunk_file))
    text = render(check_run(store.location))
    assert "w?[2J" in text
    assert "\x1b" not in text
    assert read_lineage(store) == (manifest.name,)


def one_key(table: SampleTable) -> tuple[int, int]:
    """A row of bucket 1 with a key, and the key."""
    row = next(row for row in range(1, 64, table.num_buckets) if table.arrays["last"][row, 0])
    return row, int(table.arrays["key"][row, 0])


@pytest.mark.parametrize("is_delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize(
    ("array", "found"),
    [
        ("key", "bucket 1 with key {other} of other buckets; expected keys whose hash says bucket 1"),
        ("key", "bucket 1 with key {key} more than once; expected keys once each"),
        ("waiting_key", "bucket 1 with key {key} that wait and have a row; expected keys that do either"),
        ("last", "bucket 1 with key {key} named by step 21; expected none after step 20, which the commit begins with"),
    ],
)
def test_keys_that_no_index_has_written_are_damage(tmp_path: Path, array: str, found: str, is_delta: bool) -> None:
    """With the checksums and digests of what was written, as a fault of the program would leave them."""
    table = keyed_table({key: 1.0 * key for key in range(30)}, num_buckets=8, seed=1)
    waiting = {f"waiting_{name}": np.zeros_like(table.arrays[name]) for name in ("key", "last", "count")}
    arrays = {name: values.copy() for name, values in {**table.arrays, **waiting}.items()}
    whole = dataclasses.replace(table, arrays={name: values.copy() for name, values in arrays.items()})
    row, key = one_key(table)
    free = next(row for row in range(1, 64, 8) if not table.arrays["last"][row, 0])
    (other, *_) = (int(key) for key in table.arrays["key"][2::8, 0] if key)
    if array == "last":
        arrays["last"][row] = 22
    elif "wait" in found:
        arrays["waiting_key"][free], arrays["waiting_last"][free] = key, 9
    else:
        arrays["key"][free], arrays["last"][free] = other if "{other}" in found else key, 9
    store, lease = create_run(tmp_path / "run", {"t": whole})
    if is_delta:
        parent = commit_tables(store, lease, 10, {"t": whole})
        head = commit_changes(store, lease, parent, 20, {"t": ([row, free], arrays)})
    else:
        head = commit_tables(store, lease, 20, {"t": dataclasses.replace(table, arrays=arrays)})
    check = check_run(store.location)
    (finding,) = check.all_findings
    assert f"found {finding.found}; expected {finding.expected}" == "found " + found.format(key=key, other=other)
    assert (finding.commit, finding.file in head.file_sizes()) == (head.name, True)
    assert f"table 't', {array}, " in finding.place
    assert ("changed" in finding.place or "delta" in finding.file) is is_delta
