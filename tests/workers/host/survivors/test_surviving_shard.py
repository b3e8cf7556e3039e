"""`SurvivingShard`: a survivor's tables cut anew, and restored. What is right is kept, what is not is found by its
digest, and only the rest is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import Adagrad
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.host.survivors.surviving_shard import SurvivingShard
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.workers.checkpoint.test_shard import assembled, write_live

BUCKETS = 8
ATTEMPT = "s000000004-g00000001"


class CountingStore(Store):
    """Remembers which files were read; can fail at one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read_names: list[str] = []
        self.fail_after: int | None = None

    def read_into(self, name: str, buffers: Sequence[memoryview], **where: int | None) -> None:
        if self.fail_after is not None and len(self.read_names) >= self.fail_after:
            raise StorageError("the storage is away")
        self.read_names.append(name)
        super().read_into(name, buffers, **where)


def spec_of(name: str) -> TableSpec:
    return TableSpec.of(TableConfig(203, 4, optimizer=Adagrad(0.1), name=name), seed=1, num_buckets=BUCKETS)


SPECS = (spec_of("a"), spec_of("b"))


def tables_with(owned: Sequence[Sequence[int]]) -> list[Table]:
    tables = [Table(spec, np.array(buckets, np.int64)) for spec, buckets in zip(SPECS, owned, strict=True)]
    for table in tables:
        table.initialize()
        table.rows[...] += 0.25
        # Padding is zero in a table that is restored from files or begins anew.
        for bucket in map(int, table.buckets):
            table.bucket(bucket)["rows"][len(range(bucket, 203, BUCKETS)) :] = 0
    return tables


@pytest.fixture
def committed(tmp_path: Path) -> tuple[CountingStore, tuple[TableFiles, ...]]:
    store = CountingStore(str(tmp_path))
    tables = tables_with([range(BUCKETS)] * 2)
    receipt = write_live(store, tables, ATTEMPT)
    return store, tuple(assembled(tables, [receipt], ATTEMPT))


def assert_committed(tables: Sequence[Table]) -> None:
    for table, whole in zip(tables, tables_with([range(BUCKETS)] * 2), strict=True):
        for bucket in map(int, table.buckets):
            for array, expected in zip(table.bucket(bucket).values(), whole.bucket(bucket).values(), strict=True):
                np.testing.assert_array_equal(array, expected)


def placement_of(owned: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.where(np.isin(np.arange(BUCKETS), buckets), 0, 1).astype(np.int32) for buckets in owned]


def test_the_same_placement_keeps_the_arrays_and_reads_nothing(
    committed: tuple[CountingStore, tuple[TableFiles, ...]],
) -> None:
    store, files = committed
    tables = tables_with([[0, 1, 2], [5]])
    memory = [table.rows.ctypes.data for table in tables]
    surviving = SurvivingShard(ATTEMPT, [np.ones(3, bool), np.ones(1, bool)])
    tables = surviving.recut(tables, SPECS, placement_of([[0, 1, 2], [5]]), host=0)
    restored, kept = surviving.restore(store, tables, files, on_chunk=lambda: None)
    assert [table.rows.ctypes.data for table in tables] == memory
    assert [mask.tolist() for mask in kept] == [[True] * 3, [True]]
    assert restored.buckets_to_compare == 4
    assert (restored.buckets_kept, restored.buckets_wrong, restored.buckets_read, restored.bytes_read) == (4, 0, 0, 0)
    assert_committed(tables)


def test_another_placement_keeps_what_stays_and_reads_what_comes(
    committed: tuple[CountingStore, tuple[TableFiles, ...]],
) -> None:
    store, files = committed
    tables = tables_with([[0, 1, 2], [5]])
    tables[0].bucket(1)["rows"][...] = -7.0  # not known, so nobody looks at it
    surviving = SurvivingShard(ATTEMPT, [np.array([True, False, True]), np.ones(1, bool)])
    tables = surviving.recut(tables, SPECS, placement_of([[1, 2, 4, 6], []]), host=0)
    assert [table.buckets.tolist() for table in tables] == [[1, 2, 4, 6], []]
    restored, kept = surviving.restore(store, tables, files, on_chunk=lambda: None)
    assert (restored.buckets_kept, restored.buckets_wrong, restored.buckets_read) == (1, 0, 3)
    assert [mask.tolist() for mask in kept] == [[False, True, False, False], []]
    read = [chunk for chunk in files[0].chunks if chunk.bucket in (1, 4, 6)]
    assert restored.bytes_read == sum(chunk.size_bytes for chunk in read)
    assert {*store.read_names} == {chunk.name for chunk in read}
    assert_committed(tables)


def test_buckets_that_turned_out_to_be_wrong_are_read_and_counted_once(
    committed: tuple[CountingStore, tuple[TableFiles, ...]],
) -> None:
    store, files = committed
    tables = tables_with([[0, 1, 2], [5]])
    tables[1].slots["accumulator"].reshape(-1).view(np.uint32)[7] ^= 1
    surviving = SurvivingShard(ATTEMPT, [np.array([True, True, False]), np.ones(1, bool)])
    # Of one of them the way back was lost, too.
    surviving.forget([np.array([False, False, True]), np.ones(1, bool)])
    restored, kept = surviving.restore(store, tables, files, on_chunk=lambda: None)
    assert (restored.buckets_kept, restored.buckets_wrong, restored.buckets_read) == (2, 2, 2)
    # The others have been compared now, too.
    assert not any(mask.any() for mask in kept)
    assert_committed(tables)
    assert surviving.restore(store, tables, files, on_chunk=lambda: None)[0].buckets_wrong == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_doubt_are_compared_first_and_read_where_they_are_wrong(
    committed: tuple[CountingStore, tuple[TableFiles, ...]], threads: int
) -> None:
    store, files = committed
    tables = tables_with([[0, 1, 2], [5]])
    tables[0].bucket(1)["rows"][3, 2] += 1.0
    tables[1].slots["accumulator"].reshape(-1).view(np.uint32)[7] ^= 1
    surviving = SurvivingShard(ATTEMPT, [np.ones(3, bool), np.ones(1, bool)])
    restored, kept = surviving.restore(
        store, tables, files, on_chunk=lambda: None, compares_first=True, threads=threads
    )
    assert (restored.buckets_kept, restored.buckets_wrong, restored.buckets_read) == (2, 2, 2)
    assert restored.buckets_to_compare == 0
    assert not any(mask.any() for mask in kept)
    assert_committed(tables)


def test_what_was_right_before_a_fault_on_the_way_need_not_be_read_after_it(
    committed: tuple[CountingStore, tuple[TableFiles, ...]],
) -> None:
    store, files = committed
    tables = tables_with([[0, 1, 2], [5]])
    surviving = SurvivingShard(ATTEMPT, [np.array([True, False, False]), np.ones(1, bool)])
    store.fail_after = 1
    with pytest.raises(StorageError):
        surviving.restore(store, tables, files, on_chunk=lambda: None)
    assert [known.tolist() for known in surviving.known] == [[True, False, False], [True]]
    store.fail_after = None
    restored, kept = surviving.restore(store, tables, files, on_chunk=lambda: None)
    assert (restored.buckets_kept, restored.buckets_read) == (2, 2)
    assert [mask.tolist() for mask in kept] == [[True, False, False], [True]]
    assert_committed(tables)
