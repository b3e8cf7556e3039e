"""Incremental saves of hosts: any chain of them, read by any number of other hosts, is the live state; and damage of a
link is found.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podembed.embedding.optimizers import Adagrad, Adam, RowWiseAdagrad
from podembed.embedding.table.table import Table
from podembed.workers.actors import _copied as copied
from podembed.workers.checkpoint import deltas as delta_files
from podembed.workers.checkpoint.background_save import BackgroundSave
from podembed.workers.checkpoint.checkpoint_files import TableFiles, TablePlan, WrittenBuckets
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.deltas import DeltaPart, problems_of
from podembed.workers.checkpoint.files import (
    assemble_delta,
    assemble_table,
    read_bucket,
    read_bucket_array,
    write_buckets,
    write_table_metadata,
)
from podembed.workers.checkpoint.shard import read_shard
from podembed.workers.liveness.progress import Tracker
from podembed.workers.storage.store import Store
from tests.long_tests import examples
from tests.workers.checkpoint.test_shard import assembled, contents, shards, spec

SPECS = (
    spec("users", 203, 3, 8, Adagrad(0.1)),
    spec("few", 5, 2, 1, Adam(0.1, lazy_adam=False)),
    spec("sparse/bags", 1000, 4, 4, RowWiseAdagrad(0.1)),
)


class Hosts:
    """Some hosts that train by themselves. Mutated: rows, and `files`, the newest commit."""

    def __init__(self, store: Store, num_hosts: int, files: tuple[TableFiles, ...] | None) -> None:
        self.store, self.files = store, files
        self.tables: list[list[Table]] = shards(num_hosts, SPECS)
        self.saves = [
            BackgroundSave(
                tables,
                tracker=Tracker(),
                stalled_after_s=60.0,
                raise_if_aborted=lambda: None,
                tracks_changes=True,
            )
            for tables in self.tables
        ]
        for tables, save in zip(self.tables, self.saves, strict=True):
            if files is None:
                for table in tables:
                    table.initialize()
            else:
                read_shard(store, tables, files, on_chunk=lambda: None)
                save.track(files)

    def train(self, rng: np.random.Generator, num_rows: int) -> None:
        for tables in self.tables:
            for table in tables:
                real = [
                    np.arange(len(range(int(bucket), table.spec.num_rows, table.spec.layout.num_buckets)))
                    + at * table.spec.layout.rows_per_bucket
                    for at, bucket in enumerate(table.buckets)
                ]
                if real:
                    rows = rng.choice(np.concatenate(real), num_rows).astype(np.int64)
                    table.update(rows, rng.standard_normal((num_rows, table.spec.dim), np.float32), 0.1)

    def save(self, attempt: str, *, is_delta: bool) -> None:
        for save in self.saves:
            save.freeze()
        receipts = [
            save.write(self.store, attempt, is_first=host == 0, is_delta=is_delta)
            for host, save in enumerate(self.saves)
        ]
        if not is_delta:
            self.files = assembled(self.tables[0], receipts, attempt)
            return
        assert self.files is not None
        tables = []
        for at, table in enumerate(self.files):
            parts = [receipt.tables[at] for receipt in receipts]
            changed, buckets = [c for p in parts for c in p.parts], [p.buckets for p in parts]
            tables.append(assemble_delta(table, attempt, changed, buckets))
        self.files = tuple(tables)

    def contents(self) -> dict[str, bytes]:
        return contents(self.tables)


def compacted(store: Store, table: TableFiles, attempt: str) -> TableFiles:
    plan = TablePlan(
        attempt=attempt,
        name=table.name,
        num_rows=table.num_rows,
        num_buckets=table.num_buckets,
        widths={array.name: array.width for array in table.arrays},
        dtypes={},
    )
    receipts = [write_buckets(store, plan, b, read_bucket(store, table, b)) for b in range(table.num_buckets)]
    return assemble_table(plan, write_table_metadata(store, plan), [WrittenBuckets.of(plan, receipts)])


def padding_cleared(found: dict[str, bytes]) -> dict[str, bytes]:
    """Positions behind the last row may hold anything: rules that touch all rows touch them, too, and deltas leave them
    out.
    """
    cleared = {}
    for key, data in found.items():
        name, bucket, array = key.rsplit(" ", 2)
        (one,) = [s for s in SPECS if s.name == name]
        num_rows = len(range(int(bucket), one.num_rows, one.layout.num_buckets))
        cleared[key] = data[: num_rows * 4 * one.widths[array]]
    return cleared


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_chain_is_the_live_state(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random updates, full and incremental commits, compaction, and restarts on other numbers of hosts, which lose what
    was not committed.
    """
    store = Store(str(tmp_path_factory.mktemp("chain")))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    hosts, committed = Hosts(store, data.draw(st.integers(1, 3), "hosts"), None), {}
    for number in range(data.draw(st.integers(2, 10), "operations")):
        attempt = f"s{number:09d}-g00000001"
        match data.draw(st.sampled_from(["train", "full", "delta", "delta", "compact", "restart"]), "operation"):
            case "train":
                hosts.train(rng, data.draw(st.sampled_from([1, 7, 150]), "rows"))
            case "full":
                hosts.save(attempt, is_delta=False)
                committed = hosts.contents()
            case "delta" if hosts.files is not None:
                hosts.train(rng, 3)
                hosts.save(attempt, is_delta=True)
                committed = hosts.contents()
            case "compact" if hosts.files is not None:
                hosts.files = tuple(compacted(store, table, attempt) for table in hosts.files)
            case "restart" if hosts.files is not None:
                hosts = Hosts(store, data.draw(st.integers(1, 4), "hosts"), hosts.files)
                assert padding_cleared(hosts.contents()) == padding_cleared(committed)
    if hosts.files is not None:
        again = Hosts(store, data.draw(st.integers(1, 5), "hosts"), hosts.files)
        assert padding_cleared(again.contents()) == padding_cleared(committed)
        for table in hosts.files:
            for bucket in range(table.num_buckets):
                values = read_bucket(store, table, bucket)
                one = read_bucket_array(store, table, table.arrays[-1], bucket)
                assert one.tobytes() == values[-1].tobytes()
                for array, value in zip(table.arrays, values, strict=True):
                    key = f"{table.name} {bucket} {array.name}"
                    assert padding_cleared({key: value.tobytes()}) == padding_cleared({key: committed[key]})


@pytest.fixture
def chain(tmp_path: Path) -> Hosts:
    """A full commit and two deltas of two hosts."""
    hosts = Hosts(Store(str(tmp_path)), 2, None)
    rng = np.random.default_rng(3)
    for number in range(3):
        hosts.train(rng, 20)
        hosts.save(f"s{number:09d}-g00000001", is_delta=number > 0)
    return hosts


def test_a_delta_holds_the_changed_rows_and_no_others(chain: Hosts) -> None:
    assert chain.files is not None
    table = chain.files[2]
    (delta, _) = table.deltas
    # Every host changed up to 20 rows of those that it holds.
    assert 20 < delta.num_rows <= 40
    for part in delta.parts:
        assert part.files[0].key == "ids"
        assert [file.key for file in part.files[1:]] == ["rows", "accumulator"]
        assert list(part.buckets) == sorted(part.buckets)
    few = chain.files[1]
    assert [d.num_rows for d in few.deltas] == [5, 5], "this rule changes all rows; padding is left out"


def test_a_commit_without_changes_has_digests_and_no_files(chain: Hosts) -> None:
    assert chain.files is not None
    before = [table.digests for table in chain.files]
    chain.save("s000000009-g00000001", is_delta=True)
    assert [table.deltas[-1].parts for table in chain.files] == [(), (), ()]
    assert [table.digests for table in chain.files] == before
    assert not list(Path(chain.store.location, "data").glob("s000000009*"))


@given(counts=st.dictionaries(st.integers(0, 40), st.integers(1, 9), max_size=12))
def test_a_part_knows_where_the_rows_of_each_bucket_lie(counts: dict[int, int]) -> None:
    buckets = sorted(counts)
    part = DeltaPart(buckets=tuple(buckets), counts=tuple(counts[bucket] for bucket in buckets), files=())
    owners = [bucket for bucket in buckets for _ in range(counts[bucket])]
    for bucket in range(42):
        place = part.place_of(bucket)
        assert (place is not None) == (bucket in counts)
        if place is not None:
            assert [at for at, owner in enumerate(owners) if owner == bucket] == [*range(place.start, place.stop)]
    again = copied(part)
    assert (again, hash(again)) == (part, hash(part))


def test_parts_are_cut_when_they_are_large(chain: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_files, "PART_BYTES", 100)
    chain.train(np.random.default_rng(0), 100)
    chain.save("s000000009-g00000001", is_delta=True)
    assert chain.files is not None
    assert len(chain.files[0].deltas[-1].parts) == 8
    again = Hosts(chain.store, 3, chain.files)
    assert padding_cleared(again.contents()) == padding_cleared(chain.contents())


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("file", ["ids", "rows", "accumulator"])
def test_damage_of_a_link_is_found_and_named(chain: Hosts, file: str, damage: str) -> None:
    assert chain.files is not None
    part = chain.files[2].deltas[0].parts[0]
    (entry,) = [one for one in part.files if one.key == file]
    path = Path(chain.store.location, entry.chunk_file)
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[0] ^= 4
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "gone":
            path.unlink()
    with pytest.raises(ChunkDamaged, match="sparse_bags"):
        read_shard(chain.store, shards(1, SPECS)[0], chain.files, on_chunk=lambda: None)
    with pytest.raises(ChunkDamaged, match="sparse_bags"):
        read_bucket(chain.store, chain.files[2], part.buckets[0])


def test_a_delta_left_out_of_the_chain_is_found_by_the_digest(chain: Hosts) -> None:
    assert chain.files is not None
    files = (replace(chain.files[0], deltas=chain.files[0].deltas[1:]), *chain.files[1:])
    with pytest.raises(ChunkDamaged, match="with digest"):
        read_shard(chain.store, shards(1, SPECS)[0], files, on_chunk=lambda: None)


def test_rows_of_elsewhere_are_not_written_over_others(chain: Hosts) -> None:
    assert chain.files is not None
    table = chain.files[0]
    part = table.deltas[0].parts[0]
    (ids,) = [file for file in part.files if file.key == "ids"]
    values = delta_files.read_dense(chain.store, ids)
    for wrong in (-1, table.num_rows * 8, int(values[0]) + 1):
        values[0] = wrong
        moved = delta_files.write_array(chain.store, f"data/s000000099-g00000001/{abs(wrong)}", "ids", values)
        changed = replace(part, files=(moved, *part.files[1:]))
        delta = replace(table.deltas[0], parts=(changed, *table.deltas[0].parts[1:]))
        with pytest.raises(ChunkDamaged, match=rf"found row {wrong}; expected rows of bucket"):
            read_bucket(chain.store, replace(table, deltas=(delta,)), part.buckets[0])


def good_delta(chain: Hosts) -> tuple[Any, dict[str, Any]]:
    assert chain.files is not None
    table = chain.files[0]
    arrays = {array.name: (array.width, array.dtype) for array in table.arrays}
    return table.deltas[0], {"num_buckets": 8, "rows_per_bucket": table.rows_per_bucket, "arrays": arrays}


def test_a_contradictory_delta_is_refused_before_a_file_is_opened(chain: Hosts) -> None:
    delta, shape = good_delta(chain)
    assert problems_of(delta, **shape) == []
    part, *others = delta.parts
    for bad in (
        replace(part, buckets=part.buckets[::-1]),
        replace(part, buckets=(*part.buckets[:-1], 8)),
        replace(part, buckets=()),
        replace(part, counts=part.counts[1:]),
        replace(part, counts=(0, *part.counts[1:])),
        replace(part, counts=(10**6, *part.counts[1:])),
        replace(part, files=part.files[:-1]),
        replace(part, files=part.files[::-1]),
        replace(part, files=(replace(part.files[0], dtype="float32"), *part.files[1:])),
    ):
        assert problems_of(replace(delta, parts=(bad, *others)), **shape), bad
    assert problems_of(replace(delta, parts=(part, part)), **shape)
