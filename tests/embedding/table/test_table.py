"""`Table`: initial values that do not depend on sharding, views of buckets, updates from several hosts, and
refusals.
"""

# Wrong arguments are passed on purpose.
# pyright: reportArgumentType=false

import pickle

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.config import TableConfig
from podembed.embedding.initializers import RowId, TruncatedNormal
from podembed.embedding.kernels import pool
from podembed.embedding.kernels.arrays import BlockLines
from podembed.embedding.kernels.threads import ONE_THREAD
from podembed.embedding.lookup.compiled import compile_kernels
from podembed.embedding.lookup.pooled_frames import BagKeys, frame_of, read_frame
from podembed.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from podembed.embedding.row_optimizers import table_rules
from podembed.embedding.table.stores.store import PooledFeature
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec


def spec_of(num_rows=37, dim=3, num_buckets=8, optimizer=None, initializer=None, name="users"):
    config = TableConfig(num_rows, dim, initializer, optimizer or Adagrad(0.1), name=name)
    return TableSpec.of(config, seed=11, num_buckets=num_buckets)


def test_spec_fills_in_defaults():
    config = TableConfig(100, 16)
    spec = TableSpec.of(config, seed=1, name="table_0", optimizer=RowWiseAdagrad())
    assert (spec.name, spec.num_rows, spec.dim, spec.combiner, spec.seed) == ("table_0", 100, 16, "mean", 1)
    assert spec.layout == BucketLayout(num_rows=100, num_buckets=1)
    assert spec.widths == {"rows": 16, "accumulator": 1}
    assert (spec.row_bytes, spec.bucket_bytes) == (68, 6800)
    assert spec.initializer == TruncatedNormal(stddev=0.25)
    own = TableSpec.of(TableConfig(100, 16, optimizer=SGD(), name="own"), seed=1, name="other", optimizer=Adam())
    assert (own.name, own.optimizer, own.widths) == ("own", SGD(), {"rows": 16})
    assert TableSpec.of(TableConfig(10, 4, name="read only"), seed=1).widths == {"rows": 4}
    large = TableSpec.of(TableConfig(1_000_000, 64, name="large"), seed=1, optimizer=Adagrad())
    assert large.layout.num_buckets == 512


@pytest.mark.parametrize(
    ("config", "arguments", "text"),
    [
        (TableConfig(10, 4), {}, "without a name"),
        (TableConfig(10, 4, name="t", dtype=np.int32), {}, "int32"),
        (TableConfig(10, 4, name="t"), {"num_buckets": 3}, "power of two"),
        (TableConfig(10, 4, name="t"), {"num_buckets": 0}, "power of two"),
        (TableConfig(10, 4, optimizer="adagrad", name="t"), {}, "unsupported optimizer class"),
    ],
)
def test_spec_is_checked(config, arguments, text):
    with pytest.raises(ValueError, match=text):
        TableSpec.of(config, seed=1, **arguments)


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "initializer", [None, RowId(), lambda shape, dtype: np.arange(shape[0] * shape[1]).reshape(shape)]
)
def test_initial_values_do_not_depend_on_sharding(num_hosts, initializer):
    spec = spec_of(initializer=initializer)
    whole = Table(spec, np.arange(8))
    whole.initialize()
    seen = 0
    for host in range(num_hosts):
        part = Table(spec, np.arange(host, 8, num_hosts))
        part.initialize()
        for bucket in part.buckets:
            for name, values in part.bucket(int(bucket)).items():
                assert np.array_equal(values, whole.bucket(int(bucket))[name])
            seen += 1
    assert seen == 8


def test_rows_lie_where_the_layout_says_and_padding_is_zero():
    spec = spec_of(num_rows=37, dim=3, num_buckets=8, initializer=RowId(1))
    table = Table(spec, np.array([1, 5, 7]))
    table.initialize()
    assert spec.layout.rows_per_bucket == 5
    assert table.rows.shape == (15, 3)
    for number, bucket in enumerate([1, 5, 7]):
        for position in range(5):
            row = position * 8 + bucket
            expected = row + 1 if row < 37 else 0
            assert (table.rows[number * 5 + position] == expected).all()
            assert (table.bucket(bucket)["rows"][position] == expected).all()


def test_memory_of_a_table():
    table = Table(spec_of(dim=16, optimizer=Adam()), np.arange(8))
    assert table.rows.ctypes.data % 64 == 0
    assert list(table.slots) == ["momentum", "velocity"]
    assert table.size_bytes == 3 * 40 * 16 * 4
    assert table.num_rows == 40
    assert not table.rows.any()
    table.initialize()
    assert table.rows.any()
    adagrad = Table(spec_of(), np.arange(8))
    adagrad.initialize()
    assert (adagrad.slots["accumulator"] == np.float32(0.1)).all()


def test_bucket_is_a_view_of_contiguous_memory():
    table = Table(spec_of(optimizer=RowWiseAdagrad()), np.array([2, 3]))
    views = table.bucket(3)
    assert list(views) == ["rows", "accumulator"]
    assert views["rows"].flags.c_contiguous
    assert views["accumulator"].shape == (5, 1)
    views["rows"][0] = 4.0
    assert (table.rows[5] == 4.0).all()
    with pytest.raises(KeyError, match="bucket 4 of table 'users'"):
        table.bucket(4)


@pytest.mark.parametrize("buckets", [[1, 1], [2, 1], [-1, 0], [7, 8]])
def test_buckets_are_checked(buckets):
    with pytest.raises(ValueError, match="rising numbers from 0 to 7"):
        Table(spec_of(), np.array(buckets))


def test_a_host_may_hold_nothing():
    for optimizer in (SGD(), Adagrad(), Adam(lazy_adam=False)):
        table = Table(spec_of(optimizer=optimizer), np.empty(0, np.int64))
        table.initialize()
        table.update(np.empty(0, np.int64), np.empty((0, 3), np.float32), 0.1)
        table.update([], [], 0.1)
        assert table.rows.shape == (0, 3)
        with pytest.raises(ValueError, match="Found local row 0"):
            table.update(np.array([0]), np.zeros((1, 3), np.float32), 0.1)


def test_gather():
    table = Table(spec_of(initializer=RowId()), np.array([0]))
    table.initialize()
    out = np.empty((2, 3), np.float32)
    table.gather(np.array([4, 1]), out)
    assert out.tolist() == [[32.0] * 3, [8.0] * 3]


def test_parts_of_several_hosts_are_read_where_they_lie_and_summed_in_their_order():
    """1e8 + 1 - 1e8 is 0 in float32 and 1 in another order."""
    table = Table(spec_of(optimizer=SGD()), np.arange(8))
    lots = np.zeros((3, 2, 3), np.float32)
    lots[0, 1], lots[1, 1], lots[2, 1] = 1e8, 1.0, -1e8
    whole = lots[:, 1, :]
    one = whole[:1].copy()
    one.flags.writeable = False
    table.update([np.array([9]), np.array([9, 9])], [one, whole[1:]], 1.0)
    assert not table.rows.any()
    table.update([np.array([9, 9]), np.array([9])], [np.stack([whole[0], whole[2]]), whole[1:2]], 1.0)
    assert table.rows[9].tolist() == [-1.0] * 3
    assert not np.delete(table.rows, 9, axis=0).any()


def test_updates_of_growing_and_shrinking_size():
    table = Table(spec_of(optimizer=SGD()), np.arange(8))
    total = np.zeros(40, np.float32)
    rng = np.random.default_rng(0)
    for count in (3, 50, 7, 0, 200, 1):
        rows = rng.integers(0, 40, count)
        table.update(rows, np.ones((count, 3), np.float32), 1.0)
        np.add.at(total, rows, -1.0)
    assert np.array_equal(table.rows, np.repeat(total[:, None], 3, axis=1))


@pytest.mark.parametrize(
    ("rows", "gradients", "text"),
    [
        (np.array([1, 40]), np.ones((2, 3), np.float32), "Found local row 40"),
        (np.array([-1, 4]), np.ones((2, 3), np.float32), "Found local row -1"),
        (np.array([1, 2]), np.ones((3, 3), np.float32), "one gradient per row"),
        (np.array([1, 2]), np.ones((2, 4), np.float32), "one gradient per row"),
        (np.array([1, 2]), np.ones((2, 3), np.float64), "Expected float32"),
        (np.array([1, 2], np.int32), np.ones((2, 3), np.float32), "Expected int64"),
        ([np.array([1])], [np.ones((1, 3), np.float32)] * 2, "one gradient per row"),
    ],
)
@pytest.mark.parametrize("optimizer", [SGD(), SGD(use_gradient_accumulation=False), Adam(lazy_adam=False)])
def test_bad_updates_change_nothing(rows, gradients, text, optimizer):
    table = Table(spec_of(optimizer=optimizer), np.arange(8))
    table.initialize()
    before = table.rows.copy()
    with pytest.raises(ValueError, match=text):
        table.update(rows, gradients, 1.0)
    assert np.array_equal(table.rows, before)
    table.update(np.array([1]), np.ones((1, 3), np.float32), 1.0)
    assert (table.rows[1] != before[1]).all()


def test_a_table_without_optimizer_is_only_read():
    table = Table(TableSpec.of(TableConfig(10, 2, name="t"), seed=1), np.array([0]))
    table.initialize()
    assert table.slots == {}
    with pytest.raises(ValueError, match="has no optimizer"):
        table.update(np.array([1]), np.ones((1, 2), np.float32), 0.1)


def test_threads_share_the_rows_of_a_table_where_each_is_there_once():
    """Without accumulation a row is there several times, and its updates have an order."""
    sequential = Adagrad(0.1, use_gradient_accumulation=False)
    assert [Table(spec_of(optimizer=each), [0]).can_be_cut for each in (Adagrad(0.1), sequential)] == [True, False]
    assert not Table(TableSpec.of(TableConfig(37, 3, name="read only"), seed=1, num_buckets=8), [0]).can_be_cut


def test_compiling_ahead_runs_everything_on_nothing():
    specs = [spec_of(dim=dim, optimizer=optimizer) for dim in (3, 8) for optimizer in (SGD(), Adam(lazy_adam=False))]
    compile_kernels([*specs, TableSpec.of(TableConfig(10, 3, name="read only"), seed=1)])
    assert table_rules._update_tables.signatures


def test_what_is_compiled_ahead_is_not_compiled_in_a_step() -> None:
    # A width that no other test has, so that nothing is compiled yet.
    dim = 11
    spec = spec_of(dim=dim, optimizer=Adagrad(0.1))
    table, kind = Table(spec, np.array([0])), PooledFeature(table=0, pooling="sum", combiner="sum")
    gradients, before = np.ones((1, dim), np.float32), 0.0
    for weights in (None, np.array([2.0], np.float32)):
        compile_kernels([spec], has_weights=weights is not None, rows_travel=False)
        compiled = len(table_rules._update_tables.signatures)
        bags = read_frame(
            frame_of([BagKeys(np.zeros(1, np.int32), np.array([0, 1]), weights, None)]), num_features=1, host=0
        )
        group = table.stores.group([table], [kind], num_hosts=1)
        grouped, _ = group.group([bags.lines], [BlockLines().of([gradients])], ONE_THREAD)
        group.update(grouped, [0.1], ONE_THREAD)
        assert len(table_rules._update_tables.signatures) == compiled
        assert (table.rows[0] < before).all()
        before = table.rows[0].copy()
    # What is only for rows that travel is compiled where they do.
    compiled = len(pool._sum_gradients.signatures)
    compile_kernels([spec])
    assert len(pool._sum_gradients.signatures) == compiled + 1


def test_a_spec_travels_between_processes():
    spec = spec_of(optimizer=Adam(0.1, clipvalue=1.0))
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 — made one line above
