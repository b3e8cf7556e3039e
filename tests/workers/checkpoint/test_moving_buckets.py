"""N → M: whatever the numbers of hosts and buckets, each bucket is written by its owner, read once by its next owner,
and proved by its digest. Placements are those of the planner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.placement import place_tables
from podembed.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.checkpoint_files import TableFiles, buckets_per_file
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.files import assemble_table
from podembed.workers.checkpoint.shard import read_shard, table_plan
from podembed.workers.storage.store import Store
from tests.long_tests import examples
from tests.workers.checkpoint.test_shard import write_live

OPTIMIZERS = [SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1)]
Hosts = list[list[Table]]


class Counting(Store):
    """Remembers which files were opened."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[str] = []

    def read_into(self, name, buffers, **where) -> None:
        self.opened.append(name)
        super().read_into(name, buffers, **where)


def spec_of(at: int, num_rows: int, shift: int) -> TableSpec:
    config = TableConfig(num_rows, 1 + at, name=f"t{at}", optimizer=OPTIMIZERS[at % len(OPTIMIZERS)])
    return TableSpec.of(config, seed=at, num_buckets=1 << shift)


def hosts_of(specs: Sequence[TableSpec], placement: Sequence[np.ndarray], num_hosts: int) -> Hosts:
    return [
        [Table(spec, np.flatnonzero(owners == host)) for spec, owners in zip(specs, placement, strict=True)]
        for host in range(num_hosts)
    ]


def save(store: Store, hosts: Hosts, step: int) -> tuple[TableFiles, ...]:
    """In files of as many buckets as a run would choose."""
    attempt = f"s{step:09d}-g00000001"
    specs, placement = [table.spec for table in hosts[0]], []
    for at, spec in enumerate(specs):
        placement.append(np.zeros(spec.layout.num_buckets, np.int32))
        for host, tables in enumerate(hosts):
            placement[-1][tables[at].buckets] = host
    per_file = buckets_per_file(specs, placement, num_hosts=len(hosts))
    receipts = [
        write_live(store, tables, attempt, is_first=host == 0, per_file=per_file) for host, tables in enumerate(hosts)
    ]
    files = []
    for at, table in enumerate(hosts[0]):
        parts = [receipt.tables[at] for receipt in receipts]
        buckets = [part.buckets for part in parts]
        plan = table_plan(table.spec, attempt, buckets_per_file=per_file[table.spec.name])
        files.append(assemble_table(plan, parts[0].arrays, buckets))
    return tuple(files)


def opened_once(files: Sequence[TableFiles], placement: Sequence[np.ndarray]) -> list[str]:
    """The file of each chunk, once where one host has all of the file's buckets, and else once a bucket."""
    return [
        file.name
        for table, owners in zip(files, placement, strict=True)
        for file in table.chunks
        for _ in (file.buckets if len({*owners[file.buckets].tolist()}) > 1 else file.buckets[:1])
    ]


def state_of(hosts: Hosts) -> dict[tuple[str, int, str], bytes]:
    return {
        (table.spec.name, int(bucket), name): values.tobytes()
        for tables in hosts
        for table in tables
        for bucket in table.buckets
        for name, values in table.bucket(int(bucket)).items()
    }


@settings(max_examples=examples(8), deadline=None)
@given(
    tables=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=4),
    chain=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_chain_of_hosts_keeps_every_byte_and_reads_every_bucket_once(
    tables: list[tuple[int, int]], chain: list[int], seed: int
) -> None:
    """Among them: one host, more hosts than buckets, and tables with fewer rows than buckets, whose last buckets are
    empty.
    """
    specs = [spec_of(at, num_rows, shift) for at, (num_rows, shift) in enumerate(tables)]
    rng = np.random.default_rng(seed)
    previous: list[np.ndarray] | None = None
    hosts: Hosts = []
    with tempfile.TemporaryDirectory() as folder:
        for hop, num_hosts in enumerate(chain):
            placement = place_tables(specs, num_features=[1] * len(specs), num_hosts=num_hosts, previous=previous)
            following = hosts_of(specs, placement, num_hosts)
            if hop == 0:
                for table in (table for tables_here in following for table in tables_here):
                    for array in (table.rows, *table.slots.values()):
                        array[...] = rng.standard_normal(array.shape)
            else:
                files = save(Store(folder), hosts, hop)
                store = Counting(folder)
                for tables_here in following:
                    read_shard(store, tables_here, files, on_chunk=lambda: None)
                assert sorted(store.opened) == sorted(opened_once(files, placement))
                assert state_of(following) == state_of(hosts)
            hosts, previous = following, [*placement]


def test_the_digest_refuses_rows_and_slots_of_two_commits(tmp_path) -> None:
    """Every file is sound and is the one that the manifest names; only together they were never committed."""
    specs = [spec_of(1, 21, 2)]
    store = Store(str(tmp_path))
    (tables,) = hosts_of(specs, [np.zeros(4, np.int32)], 1)
    tables[0].initialize()
    (first,) = save(store, [tables], 1)
    tables[0].rows[...] += 1
    tables[0].slots["accumulator"][...] += 1
    (second,) = save(store, [tables], 2)
    chunks = tuple(
        one if one.array == "rows" else other for one, other in zip(first.chunks, second.chunks, strict=True)
    )
    mixed = replace(first, arrays=(first.arrays[0], second.arrays[1]), chunks=chunks)
    # The files are read by several threads; any of the four buckets may be the first that is refused.
    with pytest.raises(ChunkDamaged, match=r"table 't1', rows and slots, bucket [0-3] \([56] rows: [0-3], .*digest"):
        read_shard(store, tables, [mixed], on_chunk=lambda: None)
