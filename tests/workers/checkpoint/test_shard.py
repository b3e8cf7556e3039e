"""A shard on storage: what several hosts write together, any other number of them reads back to the byte, or says why
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout, place
from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.checkpoint.file_threads import FileThreads
from podembed.workers.checkpoint.files import assemble_table
from podembed.workers.checkpoint.shard import (
    CheckpointMismatch,
    ShardReceipt,
    read_dense,
    read_shard,
    table_plan,
    write_dense,
    write_shard,
)
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store

ATTEMPT = "s000000010-g00000001"


def spec(name: str, num_rows: int, dim: int, num_buckets: int, optimizer: Optimizer) -> TableSpec:
    return TableSpec.of(TableConfig(num_rows, dim, optimizer=optimizer, name=name), seed=1, num_buckets=num_buckets)


SPECS = (
    spec("one bucket", 5, 3, 1, SGD(0.1)),
    spec("users", 37, 4, 8, Adam()),
    spec("few/rows", 3, 2, 4, Adagrad(0.1)),
)


def shards(num_hosts: int, specs: tuple[TableSpec, ...] = SPECS) -> list[list[Table]]:
    """Each host's tables; some of them hold nothing."""
    sizes = [np.full(s.layout.num_buckets, s.bucket_bytes, np.int64) for s in specs]
    placement = place(bucket_bytes=sizes, num_hosts=num_hosts)
    return [
        [Table(s, np.flatnonzero(owners == host)) for s, owners in zip(specs, placement, strict=True)]
        for host in range(num_hosts)
    ]


def fill(hosts: list[list[Table]]) -> None:
    """Every row and slot another value, which depends on table, row and column alone."""
    for tables in hosts:
        for number, table in enumerate(tables):
            for bucket in table.buckets:
                rows = np.arange(bucket, table.spec.num_rows, table.spec.layout.num_buckets)
                for slot, values in enumerate(table.bucket(int(bucket)).values()):
                    values[: len(rows)] = 1000 * number + 100 * slot + rows[:, None] + np.arange(values.shape[1]) / 10


def contents(hosts: list[list[Table]]) -> dict[str, bytes]:
    """All buckets of all hosts by name."""
    found = {}
    for tables in hosts:
        for table in tables:
            for bucket in table.buckets:
                for name, values in table.bucket(int(bucket)).items():
                    found[f"{table.spec.name} {bucket} {name}"] = values.tobytes()
    return found


class Live:
    """The rows as they lie in the tables; nothing changes them meanwhile."""

    def values(self, table: Table, bucket: int, count: int = 1) -> list[np.ndarray]:
        return list(table.bucket(bucket, count).values())

    def done(self, values: Sequence[np.ndarray]) -> None: ...


def write_live(
    store: Store,
    tables: Sequence[Table],
    attempt: str,
    *,
    is_first: bool = True,
    on_chunk: Callable[[], None] = lambda: None,
    per_file: Mapping[str, int] | None = None,
) -> ShardReceipt:
    with FileThreads(store) as threads:
        return write_shard(
            store,
            tables,
            attempt,
            is_first=is_first,
            view=Live(),
            threads=threads,
            on_chunk=on_chunk,
            buckets_per_file=per_file or {},
        )


def write(
    store: Store, hosts: list[list[Table]], attempt: str = ATTEMPT, per_file: Mapping[str, int] | None = None
) -> tuple[TableFiles, ...]:
    receipts = [
        write_live(store, tables, attempt, is_first=host == 0, per_file=per_file) for host, tables in enumerate(hosts)
    ]
    return assembled(hosts[0], receipts, attempt)


def assembled(tables: Sequence[Table], receipts: Sequence[ShardReceipt], attempt: str) -> tuple[TableFiles, ...]:
    """The files of all hosts' receipts, as a manifest has them."""
    files = []
    for at, table in enumerate(tables):
        parts = [receipt.tables[at] for receipt in receipts]
        arrays = next(part.arrays for part in parts if part.arrays)
        plan = table_plan(table.spec, attempt, buckets_per_file=parts[0].buckets_per_file)
        files.append(assemble_table(plan, arrays, [part.buckets for part in parts]))
    return tuple(files)


def read(store: Store, hosts: list[list[Table]], files: tuple[TableFiles, ...]) -> int:
    marks: list[int] = []
    for tables in hosts:
        read_shard(store, tables, files, on_chunk=lambda: marks.append(1))
    return len(marks)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 3), (3, 1), (2, 5), (5, 2)])
def test_any_number_of_hosts_reads_what_another_number_wrote(tmp_path: Path, writers: int, readers: int) -> None:
    store = Store(str(tmp_path / "a run"))
    written, found = shards(writers), shards(readers)
    fill(written)
    files = write(store, written)
    assert read(store, found, files) == sum(s.layout.num_buckets for s in SPECS)
    assert contents(found) == contents(written)


# Of "users", whose eight buckets one host has.
@pytest.mark.parametrize("per_file", [2, 8])
@pytest.mark.parametrize("readers", [1, 3])
def test_any_number_of_hosts_reads_files_of_several_buckets(tmp_path: Path, per_file: int, readers: int) -> None:
    store = Store(str(tmp_path))
    written, found = shards(1), shards(readers)
    fill(written)
    files = write(store, written, per_file={"users": per_file, "few/rows": 4})
    assert [(entry.buckets_per_file, len(entry.chunks)) for entry in files] == [
        (1, 1),
        (per_file, 24 // per_file),
        (4, 2),
    ]
    read(store, found, files)
    assert contents(found) == contents(written)


def test_a_file_is_written_by_one_host_alone(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="users"):
        write(Store(str(tmp_path)), shards(2), per_file={"users": 2})


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("at", [5, 100, -3, -30])
def test_damage_in_a_file_of_several_buckets_is_found(tmp_path: Path, at: int, readers: int) -> None:
    """In rows and in a later bucket. The index no host needs, whether it reads a part of the file or all of it."""
    store = Store(str(tmp_path))
    hosts = shards(1)
    fill(hosts)
    files = write(store, hosts, per_file={"users": 4})
    path = chunk_path(store, files[1], 4)
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)
    if at < 0:
        found = shards(readers)
        read(store, found, files)
        assert contents(found) == contents(hosts)
        return
    with pytest.raises(ChunkDamaged, match="table 'users', rows, bucket"):
        read(store, shards(readers), files)


def test_a_mark_for_every_bucket(tmp_path: Path) -> None:
    marks: list[int] = []
    (tables,) = shards(1)
    write_live(Store(str(tmp_path)), tables, ATTEMPT, on_chunk=lambda: marks.append(1))
    assert len(marks) == sum(s.layout.num_buckets for s in SPECS)


def test_an_attempt_is_written_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    hosts = shards(2)
    write(store, hosts)
    with pytest.raises(StorageError, match=ATTEMPT):
        write(store, hosts)
    write(store, hosts, "s000000011-g00000001")


@pytest.fixture
def written(tmp_path: Path) -> tuple[Store, tuple[TableFiles, ...]]:
    store = Store(str(tmp_path))
    hosts = shards(2)
    fill(hosts)
    return store, write(store, hosts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": SGD(0.1)}, "momentum"),
        ({"dim": 5}, "'rows': 5"),
        ({"num_rows": 38, "layout": BucketLayout(num_rows=38, num_buckets=8)}, r"\(38, 8,"),
        ({"layout": BucketLayout(num_rows=37, num_buckets=4)}, r"\(37, 4,"),
    ],
)
def test_another_table_under_the_same_name_is_refused(
    written: tuple[Store, tuple[TableFiles, ...]], change: dict[str, Any], words: str
) -> None:
    store, files = written
    specs = (SPECS[0], replace(SPECS[1], **change), SPECS[2])
    with pytest.raises(CheckpointMismatch, match=rf"Table 'users': found .*{words}.* begin a new run"):
        read(store, shards(1, specs), files)


def test_missing_and_unknown_tables_are_listed(written: tuple[Store, tuple[TableFiles, ...]]) -> None:
    store, files = written
    with pytest.raises(
        CheckpointMismatch, match=r"Found tables \['few/rows', 'one bucket', 'users'\].*Expected \['users'\]"
    ):
        read(store, shards(1, SPECS[1:2]), files)
    with pytest.raises(CheckpointMismatch, match=r"Found tables \['one bucket'\]"):
        read(store, shards(1), files[:1])


def chunk_path(store: Store, table: TableFiles, bucket: int) -> Path:
    return Path(store.location, table.chunk(table.arrays[0], bucket).name)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swapped"])
def test_a_damaged_file_is_found_by_the_host_that_needs_it_and_named(
    written: tuple[Store, tuple[TableFiles, ...]], damage: str
) -> None:
    store, files = written
    path = chunk_path(store, files[1], 3)
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[5] ^= 16
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "gone":
            path.unlink()
        case "swapped":
            path.write_bytes(chunk_path(store, files[1], 4).read_bytes())
    with pytest.raises(ChunkDamaged, match="users"):
        read(store, shards(1), files)


def test_dense_arrays_come_back_with_their_names_shapes_and_types(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    arrays = {
        "params/top/0/weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "params/linear/~/w b": np.ones((1, 1, 2), np.float32),
        "params/../../escape": np.ones(1, np.float32),
        "optimizer/0/count": np.asarray(7, np.int32),
        "optimizer/empty": np.zeros((0, 3), np.float32),
    }
    found = read_dense(store, write_dense(store, ATTEMPT, arrays))
    assert found.keys() == arrays.keys()
    for key, values in arrays.items():
        assert (found[key].dtype, found[key].shape) == (values.dtype, values.shape)
        assert found[key].tobytes() == values.tobytes()
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
