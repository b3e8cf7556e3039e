"""Norms of samples of rows, beside plain numpy over whole tables: on one host, and on several with cut tables."""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.initializers import Constant, Uniform
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.row_norms import (
    FIRST_LOOK,
    LATER_EVERY,
    LOOK_EVERY,
    MOST_NUMBERS,
    QUANTILES,
    RowNorms,
    TableNorms,
    sampled_ids,
    table_norms,
)

RATE = 0.1


def spec_of(name: str, num_rows: int, dim: int, optimizer: Optimizer | None, **options: object) -> TableSpec:
    buckets = 1 << max(0, (num_rows // 500).bit_length() - 1)
    initializer = options.get("initializer", Uniform(-0.1, 0.1))
    layout = BucketLayout(num_rows=num_rows, num_buckets=buckets)
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=dim,
        layout=layout,
        optimizer=optimizer,
        initializer=initializer,  # type: ignore[arg-type]
        combiner="sum",
        seed=3,
    )


class Hosts:
    """Tables cut over hosts, with updates of whole tables."""

    def __init__(self, specs: list[TableSpec], num_hosts: int) -> None:
        self.tables = [
            [Table(spec, np.arange(host, spec.layout.num_buckets, num_hosts)) for spec in specs]
            for host in range(num_hosts)
        ]
        for table in (table for tables in self.tables for table in tables):
            table.initialize()
        self.norms = [RowNorms(tables, {}) for tables in self.tables]

    def update(self, at: int, ids: np.ndarray, gradients: np.ndarray) -> None:
        for tables in self.tables:
            local = tables[at].index.rows_of(ids)
            tables[at].update(local[local >= 0], gradients[local >= 0], RATE)

    def whole(self, at: int, *, name: str = "rows") -> np.ndarray:
        spec, ids = self.tables[0][at].spec, np.arange(self.tables[0][at].spec.num_rows)
        found = np.zeros((spec.num_rows, spec.widths[name]), np.float32)
        for tables in self.tables:
            local = tables[at].index.rows_of(ids)
            found[local >= 0] = tables[at].store.arrays[name][local[local >= 0]]
        return found

    def look(self) -> tuple[TableNorms, ...]:
        return table_norms([norms.take() for norms in self.norms])


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [Adagrad(RATE), SGD(RATE), Adam(RATE)])
def test_norms_are_those_of_the_same_rows(num_hosts: int, optimizer: Optimizer) -> None:
    random = np.random.default_rng(1)
    specs = [spec_of("large", 20_000, 16, optimizer), spec_of("small", 50, 24, optimizer)]
    hosts = Hosts(specs, num_hosts)
    hosts.look()
    for _ in range(5):
        ids = np.unique(random.zipf(1.3, 4000) % 20_000)
        hosts.update(0, ids, random.normal(size=(len(ids), 16)).astype(np.float32))
    large, small = hosts.look()
    first, after, sample = Hosts(specs, 1).whole(0), hosts.whole(0), sampled_ids(specs[0])
    sample_trained = sample[(first != after)[sample].any(axis=1)]
    norms = np.linalg.norm(after[sample_trained], axis=1)
    assert (large.table, large.num_rows, large.num_trained) == ("large", len(sample), len(norms))
    assert large.norms == pytest.approx(np.quantile(norms, QUANTILES), rel=1e-5)
    # First values are smaller than 0.2 a number.
    began = np.maximum(np.linalg.norm(first[sample_trained], axis=1), 0.2 * np.sqrt(16))
    assert large.growth == pytest.approx(np.quantile(norms / began, QUANTILES), rel=1e-4)
    # A table that no step has updated.
    assert (small.num_rows, small.num_trained, small.norms, small.growth) == (50, 0, (), ())


def test_what_has_no_figure() -> None:
    frozen, narrow = spec_of("frozen", 100, 16, None), spec_of("narrow", 100, 4, Adagrad(RATE))
    # Its first values cannot be had row by row, and plain gradients leave no other trace.
    untold = spec_of("untold", 100, 16, SGD(RATE), initializer=_as_keras)
    hosts = Hosts([frozen, narrow, untold], 1)
    ids = np.arange(40)
    hosts.update(2, ids, np.ones((40, 16), np.float32))
    hosts.update(1, ids, np.ones((40, 4), np.float32))
    found = {one.table: one for one in hosts.look()}
    assert found.keys() == {"narrow", "untold"}
    assert (found["narrow"].num_trained, len(found["narrow"].norms), found["narrow"].growth) == (40, 3, ())
    assert (found["untold"].num_trained, len(found["untold"].norms), found["untold"].growth) == (None, 3, ())
    # One host has not looked: it was in another window, say.
    assert table_norms([hosts.norms[0].take(), ()]) == ()
    # Numbers that are none have no quantile.
    hosts.tables[0][2].rows[:] = np.nan
    assert {one.table: one.norms for one in hosts.look()}["untold"] == ()


def test_a_first_value_that_fails_stops_no_training() -> None:
    def initializer(rows: np.ndarray, dim: int, seed: int) -> np.ndarray:
        if is_over:
            raise OSError("the file is gone")
        return np.zeros((len(rows), dim), np.float32)

    is_over = False
    hosts = Hosts([spec_of("t", 100, 16, Adagrad(RATE), initializer=initializer)], 1)
    hosts.update(0, np.arange(10), np.ones((10, 16), np.float32))
    is_over = True
    (found,) = hosts.look()
    assert (found.num_trained, len(found.norms), found.growth) == (10, 3, ())


def test_growth_is_over_first_values_that_are_not_small() -> None:
    hosts = Hosts([spec_of("large", 100, 16, SGD(RATE), initializer=Constant(1.0))], 2)
    hosts.update(0, np.arange(100), np.full((100, 16), -20.0, np.float32))
    (found,) = hosts.look()
    # From norm 4 to 12.
    assert found.growth == pytest.approx((3.0, 3.0, 3.0))


def test_a_sample_is_bounded() -> None:
    wide, large = spec_of("wide", 3000, 512, Adagrad(RATE)), spec_of("large", 100_000, 64, Adagrad(RATE))
    hosts = Hosts([wide, large], 3)
    for at, spec in enumerate((wide, large)):
        ids = np.arange(spec.num_rows)
        hosts.update(at, ids, np.random.default_rng(4).normal(size=(spec.num_rows, spec.dim)).astype(np.float32))
    seen = [norms.take() for norms in hosts.norms]
    for spec, parts in zip((large, wide), zip(*seen, strict=True), strict=True):
        assert 0 < sum(part.num_rows for part in parts) * spec.dim <= MOST_NUMBERS
    assert [one.table for one in table_norms(seen)] == ["large", "wide"]
    assert all(one.growth == () for one in table_norms(seen, began_anew=False))
    due = [number for number in range(1, 110) if hosts.norms[0].is_due()]
    assert due == [FIRST_LOOK, FIRST_LOOK + LOOK_EVERY, *(FIRST_LOOK + LATER_EVERY * at for at in (1, 2, 3))]


def _as_keras(shape: tuple[int, int], dtype: object) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
