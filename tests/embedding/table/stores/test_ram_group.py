"""Many features in one call against one call each: the same bytes, for hosts, widths, combiners, weights and rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podembed.embedding.config import TableConfig
from podembed.embedding.kernels import threads as thread_rules
from podembed.embedding.kernels.arrays import BlockLines, aligned_empty, matrix_of
from podembed.embedding.kernels.pool import pool
from podembed.embedding.kernels.threads import Threads
from podembed.embedding.lookup.pooled_frames import AskedBags, BagKeys, denominators, frame_of, read_frame
from podembed.embedding.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    CustomRowOptimizer,
    Optimizer,
    RowWiseAdagrad,
)
from podembed.embedding.table.stores.ram import RAM
from podembed.embedding.table.stores.store import PooledFeature, StoreKind
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.thread_pool import ThreadPool
from tests.embedding.table.stores.mapped_store import MappedStores

NUM_HOSTS, NUM_BAGS = 3, 21


def keep(gradient, row, slots, learning_rate, hyperparameters):
    return row - learning_rate * gradient, ()


RULES: tuple[Optimizer, ...] = (
    SGD(0.1, weight_decay_factor=0.01),
    Adagrad(0.1),
    RowWiseAdagrad(0.1, clipvalue=0.5),
    AdagradMomentum(0.1, clip_weight_min=-0.5),
    FTRL(0.1),
    Adam(0.1),
    RowWiseAdagrad(0.1),
    CustomRowOptimizer(keep),
    RowWiseAdagrad(0.1),
)
# Rows by which each of the three ways of grouping is taken, and widths of one and of several parts.
SIZES = [(9, 8), (400, 16), (30_000, 8), (40, 133), (7, 3), (900, 16), (5, 8), (300, 8), (2_000, 8)]
# Two features share the tables 1 and 8.
TABLE_OF = [*range(len(SIZES)), 1, 8]
RATES = [0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.3, 0.1, 0.2]


def features() -> list[PooledFeature]:
    """The last three are parts of bags: owners sum them, and divide by what came along."""
    combiners = [("sum", "mean", "sqrtn")[at % 3] for at in range(len(TABLE_OF))]
    return [
        PooledFeature(table=table, pooling="sum" if at >= len(TABLE_OF) - 3 else combiner, combiner=combiner)
        for at, (table, combiner) in enumerate(zip(TABLE_OF, combiners, strict=True))
    ]


def tables(stores: StoreKind = RAM) -> list[Table]:
    found = []
    for at, ((num_rows, dim), rule) in enumerate(zip(SIZES, RULES, strict=True)):
        spec = TableSpec.of(TableConfig(num_rows, dim, name=f"t{at}", optimizer=rule), seed=2, num_buckets=1)
        found.append(Table(replace(spec, stores=stores), np.zeros(1, np.int64)))
        found[-1].initialize()
    return found


def draw(random: np.random.Generator, held: list[Table], *, with_weights: bool) -> AskedBags:
    """What a host asks, as its frame says it."""
    parts = []
    for at, feature in enumerate(features()):
        lengths = random.integers(0, 6, NUM_BAGS)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        count = int(splits[-1])
        rows = random.integers(0, held[feature.table].num_rows, count).astype(np.int32)
        weights = random.random(count, np.float32) if with_weights and at % 4 == 1 else None
        is_part = feature.pooling != feature.combiner
        parts.append(BagKeys(rows, splits, weights, denominators(splits, weights, "mean") if is_part else None))
    return read_frame(frame_of(parts), num_features=len(parts), host=1)


def blocks(random: np.random.Generator, held: list[Table]) -> list[np.ndarray]:
    """One a feature; some start at a cache line, and rows of some lie apart."""
    found = []
    for at, table in enumerate(TABLE_OF):
        dim = held[table].spec.dim
        wide = aligned_empty((NUM_BAGS, dim + (4 if at % 2 else 0)))
        wide[...] = random.standard_normal(wide.shape)
        found.append(wide[:, :dim])
    return found


@pytest.fixture(params=[1, 2])
def thread_pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Whose threads share whatever there is."""
    monkeypatch.setattr(thread_rules, "_MIN_SHARED", 0)
    monkeypatch.setattr(thread_rules, "_MIN_PART", 1)
    found = ThreadPool(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("stores", [RAM, MappedStores()], ids=["ram", "mapped"])
def test_a_step_of_all_features_is_that_of_each(thread_pool: Threads, stores: StoreKind, with_weights: bool) -> None:
    random = np.random.default_rng(3)
    held, alone = tables(stores), tables()
    own, lines = stores.group(held, features(), num_hosts=NUM_HOSTS), BlockLines()
    for _ in range(2):
        asked = [draw(random, held, with_weights=with_weights) for _ in range(NUM_HOSTS)]
        out, gradients = ([blocks(random, held) for _ in range(NUM_HOSTS)] for _ in range(2))
        own.pool([bags.lines for bags in asked], [lines.of(of_host) for of_host in out], thread_pool)
        for bags, of_host in zip(asked, out, strict=True):
            for at, (feature, found) in enumerate(zip(features(), of_host, strict=True)):
                expected = np.zeros_like(found)
                one = bags[at]
                pool(alone[feature.table].rows, one.rows, one.row_splits, one.weights, feature.pooling, expected)
                assert expected.tobytes() == np.ascontiguousarray(found).tobytes()
        where = [lines.of(of_host) for of_host in gradients]
        grouped, scaled = own.group([bags.lines for bags in asked], where, thread_pool)
        own.scale(scaled, [bags.lines for bags in asked], where, thread_pool)
        own.update(grouped, RATES, thread_pool)
        for table in range(len(held)):
            alone[table].update(*entries(table, asked, gradients), RATES[table])
        for one, other in zip(held, alone, strict=True):
            assert one.rows.tobytes() == other.rows.tobytes()
            for name, slot in one.slots.items():
                assert slot.tobytes() == other.slots[name].tobytes()


def entries(
    table: int, asked: list[AskedBags], gradients: list[list[np.ndarray]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The rows of a table and the gradient of each id, host by host and feature by feature."""
    rows, found = [], []
    for bags, of_host in zip(asked, gradients, strict=True):
        for at, feature in enumerate(features()):
            if feature.table == table:
                one = bags[at]
                bag = np.repeat(np.arange(NUM_BAGS), np.diff(one.row_splits))
                each = of_host[at]
                if feature.combiner != "sum":
                    divisors = one.divisors
                    if divisors is None:
                        divisors = denominators(one.row_splits, one.weights, feature.combiner)
                    each = np.zeros_like(of_host[at])
                    np.divide(of_host[at], divisors[:, None], out=each, where=divisors[:, None] != 0)
                target = each[bag]
                if one.weights is not None:
                    target = target * one.weights[:, None]
                rows.append(one.rows.astype(np.int64))
                found.append(np.ascontiguousarray(target, np.float32))
    return rows, found


def test_rows_that_nobody_holds_are_refused_before_anything_changes(thread_pool: Threads) -> None:
    held = tables()
    own, lines = RAM.group(held, features(), num_hosts=1), BlockLines()
    asked = draw(np.random.default_rng(1), held, with_weights=False)
    gradients = blocks(np.random.default_rng(1), held)
    # As if a frame had been changed after it was looked at.
    asked[4].rows[0] = 7
    with pytest.raises(ValueError, match="Found local row 7 on a host that holds 7 rows"):
        own.group([asked.lines], [lines.of(gradients)], thread_pool)
    assert not any(table._marks.any() for table in held)


@pytest.mark.parametrize("is_short", [True, False], ids=["short", "narrow"])
def test_blocks_of_another_batch_are_refused(thread_pool: Threads, is_short: bool) -> None:
    held = tables()
    own = RAM.group(held, features(), num_hosts=1)
    asked = draw(np.random.default_rng(1), held, with_weights=False)
    good = blocks(np.random.default_rng(1), held)
    bad = [*good]
    bad[3] = good[3][:-1] if is_short else good[3][:, :64]
    shape = (20, 133) if is_short else (21, 64)
    lines = [asked.lines]
    grouped, scaled = own.group(lines, [BlockLines().of(good)], thread_pool)
    with pytest.raises(ValueError, match=rf"Found a block of shape \({shape[0]}, {shape[1]}\) for feature 3 .*21, 133"):
        own.pool(lines, [BlockLines().of(bad)], thread_pool)
    with pytest.raises(ValueError, match="Found a block of shape"):
        own.group(lines, [BlockLines().of(bad)], thread_pool)
    with pytest.raises(ValueError, match="Found a block of shape"):
        own.scale(scaled, lines, [BlockLines().of(bad)], thread_pool)
    assert len(grouped) == len(held)


def test_blocks_are_looked_at_again_only_if_they_are_others() -> None:
    lines, random = BlockLines(), np.random.default_rng(0)
    some = [np.zeros((count, 4), np.float32) for count in random.integers(1, 9, 5)]
    expected = np.array([(*matrix_of(block), *block.shape) for block in some])
    first = lines.of(some)
    assert np.array_equal(first, expected)
    assert lines.of([*some]) is first
    # The first block is the same one, and one behind it is not.
    some[3] = np.zeros((2, 4), np.float32)
    second = lines.of(some)
    assert second[3].tolist() == [*matrix_of(some[3]), 2, 4]
    assert np.array_equal(np.delete(second, 3, 0), np.delete(first, 3, 0))
    for _ in range(3 * BlockLines._MOST):
        gone = [np.zeros((1, 4), np.float32)]
        assert lines.of(gone)[0, 0] == gone[0].ctypes.data
    assert len(lines._found) <= BlockLines._MOST
    assert lines.of([]).shape == (0, 4)
