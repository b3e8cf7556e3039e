"""Tables of a new run from another run's commit: every row arrives, whatever the two numbers of buckets and the number
of hosts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.commit.manifest import Manifest
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.host.warm_start import TableStart, begin_tables, read_buckets
from podembed.workers.storage.store import Store
from tests.orchestrator.committed_tables import SampleTable, flip_byte, random_table, run_with
from tests.run_state import tables_of

NUM_ROWS, DIM = 37, 3


def adagrad_table(seed: int, num_buckets: int = 4) -> SampleTable:
    """As a run with Adagrad would leave it."""
    return random_table(seed, num_rows=NUM_ROWS, num_buckets=num_buckets, widths={"rows": DIM, "accumulator": DIM})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Manifest]:
    tables = {"users": adagrad_table(1), "items": adagrad_table(2)}
    store, (manifest,) = run_with(tmp_path_factory.mktemp("warm") / "run", tables, 10)
    return store, manifest


def hosts_tables(optimizer: Optimizer, *, num_buckets: int, num_hosts: int) -> list[Table]:
    """One table, cut into buckets that lie on several hosts in turn."""
    config = TableConfig(NUM_ROWS, DIM, name="members", optimizer=optimizer)
    spec = TableSpec.of(config, seed=1, num_buckets=num_buckets)
    return [Table(spec, np.arange(host, num_buckets, num_hosts)) for host in range(num_hosts)]


def in_row_order(tables: list[Table]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for table in tables:
        num_buckets = table.spec.layout.num_buckets
        for bucket in table.buckets:
            filled = BucketLayout(num_rows=NUM_ROWS, num_buckets=num_buckets).num_rows_of(int(bucket))
            for name, values in table.bucket(int(bucket)).items():
                whole = found.setdefault(name, np.full((NUM_ROWS, values.shape[1]), np.nan, np.float32))
                whole[int(bucket) :: num_buckets] = values[:filled]
    return found


@pytest.mark.parametrize(("num_buckets", "num_hosts"), [(1, 1), (1, 3), (2, 2), (4, 3), (16, 2), (64, 3)])
@pytest.mark.parametrize("optimizer", [Adagrad(0.5), Adam(0.1), SGD(0.1)])
def test_a_table_begins_with_rows_and_slots_or_with_rows_alone(
    source, num_buckets: int, num_hosts: int, optimizer: Optimizer
) -> None:
    store, manifest = source
    with_slots = isinstance(optimizer, Adagrad)
    tables = hosts_tables(optimizer, num_buckets=num_buckets, num_hosts=num_hosts)
    start = TableStart(table="members", num_buckets=num_buckets, source=manifest.tables[0], with_slots=with_slots)
    for table in tables:
        begin_tables(store, [table], [start], on_chunk=lambda: None)
    found, committed = in_row_order(tables), tables_of(store, manifest)
    np.testing.assert_array_equal(found.pop("rows"), committed["users/rows"])
    if with_slots:
        np.testing.assert_array_equal(found.pop("accumulator"), committed["users/accumulator"])
    for slot in optimizer.slots if found else ():
        assert (found.pop(slot.name) == slot.initial_value).all()
    assert not found


def test_a_table_without_a_source_begins_as_in_any_new_run(source) -> None:
    store, _ = source
    (table,) = hosts_tables(Adagrad(0.5), num_buckets=4, num_hosts=1)
    (fresh,) = hosts_tables(Adagrad(0.5), num_buckets=4, num_hosts=1)
    fresh.initialize()
    begin_tables(store, [table], [TableStart(table="members", num_buckets=4, source=None)], on_chunk=lambda: None)
    assert table.rows.tobytes() == fresh.rows.tobytes()


def test_padding_is_that_of_a_new_table(source) -> None:
    """The commit's padding is 99; a bucket's bytes must not depend on where they come from."""
    store, manifest = source
    (table,) = hosts_tables(Adagrad(0.5), num_buckets=8, num_hosts=1)
    start = TableStart(table="members", num_buckets=8, source=manifest.tables[0])
    begin_tables(store, [table], [start], on_chunk=lambda: None)
    for bucket in range(8):
        filled = BucketLayout(num_rows=NUM_ROWS, num_buckets=8).num_rows_of(bucket)
        assert (table.bucket(bucket)["rows"][filled:] == 0).all()


@pytest.mark.parametrize(("num_buckets", "num_hosts"), [(1, 1), (1, 2), (2, 1), (4, 3), (64, 2)])
def test_a_table_that_grows_keeps_its_rows_and_slots_and_gives_new_rows_their_first_values(
    source, num_buckets: int, num_hosts: int
) -> None:
    store, manifest = source
    committed = tables_of(store, manifest)
    more = NUM_ROWS + 100
    config = TableConfig(more, DIM, name="members", optimizer=Adagrad(0.5))
    spec = TableSpec.of(config, seed=1, num_buckets=num_buckets)
    start = TableStart(table="members", num_buckets=num_buckets, num_rows=more, source=manifest.tables[0])
    for host in range(num_hosts):
        table, fresh = (Table(spec, np.arange(host, num_buckets, num_hosts)) for _ in range(2))
        fresh.initialize()
        begin_tables(store, [table], [start], on_chunk=lambda: None)
        for bucket in table.buckets:
            filled = BucketLayout(num_rows=more, num_buckets=num_buckets).num_rows_of(int(bucket))
            rows = int(bucket) + num_buckets * np.arange(filled)
            old = rows < NUM_ROWS
            assert old.any() or num_buckets == 64
            for name, values in table.bucket(int(bucket)).items():
                np.testing.assert_array_equal(values[:filled][old], committed[f"users/{name}"][rows[old]])
                np.testing.assert_array_equal(values[:filled][~old], fresh.bucket(int(bucket))[name][:filled][~old])
                np.testing.assert_array_equal(values[filled:], fresh.bucket(int(bucket))[name][filled:])


class Counting(Store):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[str] = []

    def read_into(self, name, buffers, **where) -> None:
        self.opened.append(name)
        super().read_into(name, buffers, **where)


class TestReading:
    @pytest.mark.parametrize("cut_by", [1, 2, 4, 16, 64])
    @pytest.mark.parametrize("num_hosts", [1, 3])
    def test_every_row_and_slot_arrives(self, source, cut_by: int, num_hosts: int) -> None:
        store, manifest = source
        files = manifest.tables[0]
        expected = tables_of(store, manifest)
        rows_per_bucket = -(-NUM_ROWS // cut_by)
        found = {array.name: np.full((NUM_ROWS, array.width), -1, np.float32) for array in files.arrays}
        for host in range(num_hosts):
            mine = range(host, cut_by, num_hosts)
            out = {
                bucket: [np.full((rows_per_bucket, array.width), -7, np.float32) for array in files.arrays]
                for bucket in mine
            }
            counting = Counting(store.location)
            read_buckets(counting, files, num_buckets=cut_by, out=out)
            assert len(counting.opened) == len(set(counting.opened)), "each file once"
            for bucket, arrays in out.items():
                filled = BucketLayout(num_rows=NUM_ROWS, num_buckets=cut_by).num_rows_of(bucket)
                for array, values in zip(files.arrays, arrays, strict=True):
                    found[array.name][bucket::cut_by] = values[:filled]
                    assert (values[filled:] == -7).all(), "padding is not touched"
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[f"users/{name}"])

    def test_only_the_files_that_hold_the_rows_are_read(self, source) -> None:
        store, manifest = source
        counting = Counting(store.location)
        out = {5: [np.empty((-(-NUM_ROWS // 8), DIM), np.float32) for _ in range(2)]}
        read_buckets(counting, manifest.tables[0], num_buckets=8, out=out)
        assert [name.split("users/")[1] for name in counting.opened] == ["rows/c.1.0.0", "accumulator/c.1.0.0"]

    def test_damage_is_found(self, tmp_path: Path) -> None:
        store, (manifest,) = run_with(tmp_path / "run", {"users": adagrad_table(3)}, 10)
        flip_byte(store.locate(manifest.tables[0].chunks[5].name))
        out = {0: [np.empty((NUM_ROWS, DIM), np.float32) for _ in range(2)]}
        with pytest.raises(ChunkDamaged, match="accumulator/c.1."):
            read_buckets(store, manifest.tables[0], num_buckets=1, out=out)

    @pytest.mark.parametrize(
        ("num_buckets", "bucket", "rows", "message"),
        [(3, 0, 13, "power of two"), (2, 2, 19, "below 2"), (2, 0, 18, "Found bucket 0"), (0, 0, 1, "power of two")],
    )
    def test_arrays_that_do_not_fit_are_refused(
        self, source, num_buckets: int, bucket: int, rows: int, message: str
    ) -> None:
        store, manifest = source
        out = {bucket: [np.empty((rows, DIM), np.float32) for _ in range(2)]}
        with pytest.raises(ValueError, match=message):
            read_buckets(store, manifest.tables[0], num_buckets=num_buckets, out=out)
