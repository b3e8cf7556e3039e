"""Damage to a commit on disk: all of it is found, and nothing else is reported."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.manifest import Manifest, commit_file
from podembed.orchestrator.commit.verification import verify
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.checkpoint.files import read_file_buckets
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from podembed.workers.storage.strict_json import seal
from tests.orchestrator.commit.checkpoint_samples import take, write_next
from tests.orchestrator.committed_tables import random_table, run_with


@pytest.fixture(params=[1, 2])
def committed(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Store, Manifest, list[str]]:
    """A store, its one commit, and all files that the commit consists of, of one bucket or two."""
    store = Store(tmp_path / "run")
    lease = take(store)
    manifest = write_next(store, lease, 10, buckets_per_file=request.param)
    checkpoint.commit(store, manifest, lease)
    return store, manifest, [*manifest.file_sizes(), commit_file(manifest.name)]


def damaged_names(store: Store, manifest: Manifest) -> set[str]:
    return {damage.name for damage in verify(store, manifest).damages}


def test_a_good_commit_has_no_damage(committed) -> None:
    store, manifest, files = committed
    report = verify(store, manifest)
    assert report.is_intact
    assert report.num_files == len(files) - 1
    assert report.num_bytes == sum(store.size(name) for name in files[:-1])


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


DAMAGES = {
    "flipped bit": flip,
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "extended": lambda data, rng: data + rng.randbytes(rng.randrange(1, 9)),
    "zeroed page": lambda data, rng: bytes(len(data)),
    "shifted": lambda data, rng: data[1:] + data[:1],
}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_every_damage_of_every_file_is_found(committed, kind: str) -> None:
    store, manifest, files = committed
    rng = random.Random(kind)
    for name in files:
        path = Path(store.locate(name))
        good = path.read_bytes()
        for _ in range(4):
            bad = DAMAGES[kind](good, rng)
            if bad == good:
                continue
            path.write_bytes(bad)
            assert damaged_names(store, manifest) == {name}
        path.write_bytes(good)
    assert verify(store, manifest).is_intact


def test_every_missing_file_is_found(committed) -> None:
    store, manifest, files = committed
    for name in files:
        path = Path(store.locate(name))
        good = path.read_bytes()
        path.unlink()
        assert damaged_names(store, manifest) == {name}
        path.write_bytes(good)


def test_a_damaged_bucket_of_a_file_is_named_and_a_damaged_file_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    lease = take(store)
    manifest = write_next(store, lease, 10, buckets_per_file=4)
    checkpoint.commit(store, manifest, lease)
    file = manifest.tables[0].chunks[0]
    path = Path(store.locate(file.name))
    good = path.read_bytes()

    def found(data: bytes) -> list[tuple[str, str]]:
        path.write_bytes(data)
        return [(damage.name, damage.found.split(" bytes")[0]) for damage in verify(store, manifest).damages]

    chunk = 10 * 3 * 4 + 4
    assert found(good) == []
    at = 2 * chunk + 7
    damaged = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    assert found(damaged) == [(file.name, "bucket 2 (9 rows: 2, 6, 10 ... 34) with")]
    bad_index = bytes([good[-1] ^ 1])
    assert found(good[:-1] + bad_index) == [(file.name, "another index")]
    both = [(file.name, "another index"), (file.name, "bucket 2 (9 rows: 2, 6, 10 ... 34) with")]
    assert found(damaged[:-1] + bad_index) == both
    assert found(good[:-1]) == [(file.name, str(len(good) - 1))]
    path.unlink()
    assert [damage.name for damage in verify(store, manifest).damages] == [file.name]


def test_all_damages_are_reported_together(committed) -> None:
    store, manifest, files = committed
    hurt = random.Random(3).sample(files, 9)
    for name in hurt:
        path = Path(store.locate(name))
        path.write_bytes(flip(path.read_bytes(), random.Random(0)))
    assert damaged_names(store, manifest) == set(hurt)


def test_two_files_that_changed_places_are_found(committed) -> None:
    store, manifest, files = committed
    first, second = [Path(store.locate(name)) for name in files if "users/rows/c." in name][:2]
    os.rename(first, str(first) + ".x")
    os.rename(second, first)
    os.rename(str(first) + ".x", second)
    assert len(damaged_names(store, manifest)) == 2


def test_a_link_in_the_place_of_a_file_is_found(committed) -> None:
    store, manifest, files = committed
    path = Path(store.locate(files[1]))
    elsewhere = path.parent / "moved"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    assert damaged_names(store, manifest) == {files[1]}


def test_extra_files_are_ignored(committed) -> None:
    store, manifest, _ = committed
    store.write_new(f"data/{manifest.name}/tables/users/rows/c.99", [b"x"])
    assert verify(store, manifest).is_intact


def test_loading_refuses_what_verification_finds(committed) -> None:
    store, manifest, files = committed
    rng = random.Random(5)
    for name in files:
        if name.endswith(".json"):
            continue
        path = Path(store.locate(name))
        good = path.read_bytes()
        for _ in range(4):
            path.write_bytes(flip(good, rng))
            if all(damage.spares_rows for damage in verify(store, manifest).damages):
                load_everything(store, manifest)
            else:
                with pytest.raises(StorageError, match=name):
                    load_everything(store, manifest)
        path.write_bytes(good)


def test_a_damaged_index_hinders_no_start(tmp_path: Path) -> None:
    """Not even where every byte is read to choose the commit."""
    store = Store(tmp_path / "run")
    lease = take(store)
    for step in (10, 20):
        manifest = write_next(store, lease, step, buckets_per_file=4)
        checkpoint.commit(store, manifest, lease)
    for chunk in manifest.tables[0].chunks:
        path = Path(store.locate(chunk.name))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert {damage.spares_rows for damage in verify(store, manifest).damages} == {True}
    load_everything(store, manifest)
    found = checkpoint.newest_loadable(
        store, manifest.name, allow_ancestors=True, on_skip=lambda name, why: pytest.fail(why)
    )
    assert found == manifest.name


def load_everything(store: Store, manifest: Manifest) -> None:
    """As hosts restore, whole files at once."""
    for table in manifest.tables:
        length = table.buckets_per_file * table.rows_per_bucket
        out = [np.empty((length, array.width), np.float32) for array in table.arrays]
        for first in range(0, table.num_buckets, table.buckets_per_file):
            read_file_buckets(store, table, first, out=out)
    for leaf in manifest.dense:
        read_dense(store, leaf)


@pytest.mark.parametrize("per_file", [1, 2])
def test_a_commit_that_claims_rows_of_any_width_hides_no_other(tmp_path: Path, per_file: int) -> None:
    """Nobody makes what it claims before its files are found to be shorter."""
    table = random_table(0, num_rows=8, num_buckets=2, widths={"rows": 2})
    store, (good, forged) = run_with(tmp_path / "run", {"t": table}, 10, 20)
    path = tmp_path / "run" / commit_file(forged.name)
    claim = json.loads(path.read_bytes())
    del claim["sha256"]
    (of_table,) = claim["tables"]
    of_table["dim"] = of_table["arrays"][0]["width"] = 1 << 62
    of_table["buckets_per_file"] = per_file
    path.write_bytes(seal(claim))
    found = checkpoint.newest_loadable(store, forged.name, allow_ancestors=True, on_skip=lambda *skipped: None)
    assert found == good.name
