"""Saved embeddings: any number of hosts writes and reads them, keys are TensorFlow's, and damage is found."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, AdagradMomentum, Adam, Lion, Momentum
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.shard import CheckpointMismatch
from podembed.workers.stepwise.checkpoint import CHECKPOINT_STORAGE
from podembed.workers.stepwise.saved_embedding import TABLE_STORAGE, assemble, new_attempt, restore_tables, write_host
from podembed.workers.stepwise.saved_index import (
    AlreadySaved,
    IndexTooLarge,
    NothingSaved,
    checkpoint_key,
    publish,
    read_index,
)
from podembed.workers.storage import strict_json
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.strict_json import DocumentRefused, seal
from tests.long_tests import long_case


def spec_of(optimizer=None, *, name="users", num_rows=37, dim=3, num_buckets=8):
    config = TableConfig(num_rows, dim, optimizer=optimizer or Adam(0.1), name=name)
    return TableSpec.of(config, seed=1, num_buckets=num_buckets)


def table_of(spec, host=0, num_hosts=1):
    """One host's part with values that no other place has."""
    table = Table(spec, np.arange(host, spec.layout.num_buckets, num_hosts))
    for at, name in enumerate(spec.widths):
        for bucket in table.buckets:
            values = table.bucket(int(bucket))[name]
            rows = np.arange(len(values)) * spec.layout.num_buckets + bucket
            real = rows < spec.num_rows
            values[real] = (at * 1000 + rows[real] + 0.25)[:, None]
    return table


def save(path, spec, *, num_hosts, num_steps=7):
    attempt = new_attempt()
    receipts = [
        write_host(path, [table_of(spec, host, num_hosts)], attempt, is_first=host == 0) for host in range(num_hosts)
    ]
    publish(path, assemble([spec], attempt, receipts, num_steps=num_steps))


@pytest.mark.parametrize("written_by", [long_case(1), long_case(2), 3])
@pytest.mark.parametrize(("read_by", "num_buckets"), [(1, 8), (2, 8), (3, 8), (2, 1), (2, 2), (1, 16), (3, 32)])
def test_any_number_of_hosts_and_buckets_reads_what_any_wrote(tmp_path, written_by, read_by, num_buckets):
    path = str(tmp_path / "saved")
    save(path, spec_of(), num_hosts=written_by)
    spec = spec_of(num_buckets=num_buckets)
    assert spec.layout == BucketLayout(num_rows=37, num_buckets=num_buckets)
    for host in range(read_by):
        table = Table(spec, np.arange(host, num_buckets, read_by))
        assert restore_tables(path, [table]) == 7
        expected = table_of(spec, host, read_by)
        np.testing.assert_array_equal(table.rows, expected.rows)
        for name, slot in table.slots.items():
            np.testing.assert_array_equal(slot, expected.slots[name])


def test_other_readers_find_arrays_with_their_keys(tmp_path):
    path = tmp_path / "saved"
    save(str(path), spec_of(name="users/eu.1"), num_hosts=2)
    found = {}
    for file in path.rglob("zarr.json"):
        array = zarr.open_array(file.parent, mode="r")
        found[array.attrs["checkpoint_key"]] = np.asarray(array)
    assert set(found) == {
        "users.Seu..1/.ATTRIBUTES/VARIABLE_VALUE",
        "users.Seu..1.Smomenta/.ATTRIBUTES/VARIABLE_VALUE",
        "users.Seu..1.Svelocities/.ATTRIBUTES/VARIABLE_VALUE",
    }
    rows = found["users.Seu..1/.ATTRIBUTES/VARIABLE_VALUE"]
    assert [rows[r % 8, r // 8, 0] for r in range(37)] == [r + 0.25 for r in range(37)]


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (SGD(0.1), []),
        (Adagrad(0.1), ["accumulators"]),
        (AdagradMomentum(0.1), ["accumulators", "momenta"]),
        (FTRL(0.1), ["accumulators", "linears"]),
        (Adam(0.1), ["momenta", "velocities"]),
        (Momentum(0.1), ["momenta"]),
        (Lion(0.1), ["momenta"]),
    ],
)
def test_slots_have_the_names_of_tensorflow(tmp_path, optimizer, slots):
    path = str(tmp_path / "saved")
    save(path, spec_of(optimizer), num_hosts=1)
    keys = json.loads((tmp_path / "saved" / "embedding.json").read_text())["tables"][0]["keys"]
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert list(keys.values()) == sorted(
        [f"users{suffix}", *(f"users.S{slot}{suffix}" for slot in slots)], key=list(keys.values()).index
    )
    assert set(keys.values()) == {f"users{suffix}", *(f"users.S{slot}{suffix}" for slot in slots)}
    assert checkpoint_key("t", "own_slot") == f"t.Sown_slot{suffix}"


def test_a_table_without_optimizer_reads_rows_alone(tmp_path):
    path = str(tmp_path / "saved")
    save(path, spec_of(), num_hosts=2)
    bare = TableSpec.of(TableConfig(37, 3, name="users"), seed=1)
    table = Table(bare, np.arange(bare.layout.num_buckets))
    restore_tables(path, [table])
    assert table.rows[:, 0].tolist() == [r + 0.25 for r in range(37)]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of(name="other"), "Expected one called 'other'"),
        (spec_of(num_rows=36), "37 rows"),
        (spec_of(dim=4), "columns"),
        (spec_of(Adagrad(0.1)), "accumulator"),
    ],
)
def test_other_tables_are_refused_before_anything_is_read(tmp_path, spec, text):
    path = str(tmp_path / "saved")
    save(path, spec_of(), num_hosts=1)
    table = Table(spec, np.arange(8))
    with pytest.raises(CheckpointMismatch, match=text):
        restore_tables(path, [table])
    assert not table.rows.any()


def test_nothing_saved_is_replaced_and_nothing_half_written_is_found(tmp_path):
    path = str(tmp_path / "saved")
    with pytest.raises(NothingSaved, match=r"no embedding.json"):
        read_index(path)
    write_host(path, [table_of(spec_of())], new_attempt(), is_first=True)
    with pytest.raises(NothingSaved):
        TABLE_STORAGE.describe(path)
    save(path, spec_of(), num_hosts=2)
    with pytest.raises(AlreadySaved, match="Pass a new path"):
        save(path, spec_of(), num_hosts=1)
    with pytest.raises(AlreadySaved):
        TABLE_STORAGE.save(path, [table_of(spec_of())], num_steps=1)
    (described,) = TABLE_STORAGE.describe(path)
    assert (described.name, described.num_rows, described.widths) == (
        "users",
        37,
        {"rows": 3, "momentum": 3, "velocity": 3},
    )


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_damage_is_found(tmp_path):
    path = tmp_path / "saved"
    save(str(path), spec_of(), num_hosts=1)
    chunk = next(file for file in path.rglob("*") if file.is_file() and file.suffix != ".json")
    table = Table(spec_of(), np.arange(8))
    flipped(chunk)
    with pytest.raises(ChunkDamaged):
        restore_tables(str(path), [table])
    flipped(chunk)
    restore_tables(str(path), [table])
    chunk.unlink()
    with pytest.raises(ChunkDamaged):
        restore_tables(str(path), [table])
    flipped(path / "embedding.json")
    with pytest.raises(StorageError, match="checksum"):
        read_index(str(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("tables"),
        lambda d: d.update(format_version=2),
        lambda d: d.update(num_steps=-1),
        lambda d: d.update(num_steps=True),
        lambda d: d["tables"][0].update(num_buckets=3),
        lambda d: d["tables"][0].update(num_rows=0),
        lambda d: d["tables"][0]["digests"].pop(),
        lambda d: d["tables"][0]["arrays"].reverse(),
        lambda d: d["tables"][0]["arrays"][0].update(dtype="float64"),
        lambda d: d["tables"][0]["arrays"][0].update(path=3),
        lambda d: d["tables"][0]["chunks"]["rows"].pop(),
        lambda d: d["tables"][0]["chunks"].pop("momentum"),
        lambda d: d["tables"][0]["arrays"][0].update(path="../../etc"),
    ],
)
def test_an_index_that_says_something_else_is_refused(tmp_path, change):
    path = tmp_path / "saved"
    save(str(path), spec_of(), num_hosts=1)
    document = json.loads((path / "embedding.json").read_text())
    document.pop("sha256")
    change(document)
    (path / "embedding.json").write_bytes(seal(document))
    with pytest.raises(StorageError):
        restore_tables(str(path), [Table(spec_of(), np.arange(8))])


@pytest.mark.parametrize("index", ["embedding.json", "checkpoint.json"])
@pytest.mark.parametrize("kind", ["hole", "values", "folder"])
def test_an_index_of_very_many_bytes_or_values_is_refused_before_it_is_built(tmp_path, index, kind):
    path = tmp_path / "saved" / index
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "values":
        path.write_bytes(seal({"tables": [0] * (strict_json.MAX_VALUES + 1)}))
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(DocumentRefused, match=index):
            read_index(str(tmp_path / "saved"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Several copies of the bytes, and none of the values, whose list alone would have 64 MiB.
    assert peak < 60 << 20


def test_an_index_that_no_restore_would_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_VALUES", 20)
    path = tmp_path / "saved"
    with pytest.raises(IndexTooLarge, match=r"about \d+ values .* Expected at most 20"):
        save(str(path), spec_of(), num_hosts=1)
    with pytest.raises(IndexTooLarge, match=r"checkpoint\.json would have about"):
        CHECKPOINT_STORAGE.publish(str(path), parts=[str(n) for n in range(30)], arrays={}, tables=None)
    assert not list(path.glob("*.json"))
