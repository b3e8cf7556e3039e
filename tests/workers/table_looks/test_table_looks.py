"""What hosts see of samples of their tables' rows, beside plain numpy over whole tables: on one host, and on several
with cut tables.
"""

from __future__ import annotations

import numpy as np
import pytest

from podembed.embedding.buckets import BucketLayout
from podembed.embedding.initializers import Constant, Uniform
from podembed.embedding.optimizers import SGD, Adagrad, Adam, Optimizer
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.table_looks.figures import QUANTILES, TableFigures, table_figures
from podembed.workers.host.table_looks.look import (
    FIRST_LOOK,
    LATER_EVERY,
    LOOK_EVERY,
    MOST_NUMBERS,
    HostTable,
    TableLooks,
    sampled_ids,
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
        self.looks = [TableLooks([HostTable(table) for table in tables]) for tables in self.tables]

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

    def look(self, at: int, ids: np.ndarray, gradients: np.ndarray) -> tuple[TableFigures, ...]:
        """At an update of one table; the others have none."""
        seen = []
        for looks, tables in zip(self.looks, self.tables, strict=True):
            local = tables[at].index.rows_of(ids)
            with looks.around_update():
                tables[at].update(local[local >= 0], gradients[local >= 0], RATE)
            seen.append(looks.take())
            assert all(table.on_change is None for table in tables)
            assert looks.take() == ()
        return table_figures(seen)


def expected_rank(values: np.ndarray) -> float:
    singular = np.linalg.svd(values.astype(np.float64), compute_uv=False)
    shares = singular / singular.sum()
    return float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [Adagrad(RATE), SGD(RATE), Adam(RATE)])
def test_figures_are_those_of_the_same_rows(num_hosts: int, optimizer: Optimizer) -> None:
    random = np.random.default_rng(1)
    specs = [spec_of("large", 20_000, 16, optimizer), spec_of("small", 50, 24, optimizer)]
    hosts = Hosts(specs, num_hosts)
    for _ in range(5):
        ids = np.unique(random.zipf(1.3, 4000) % 20_000)
        hosts.update(0, ids, random.normal(size=(len(ids), 16)).astype(np.float32))
    first = np.stack([hosts.whole(0), Hosts(specs, 1).whole(0)])
    trained = (first[0] != first[1]).any(axis=1)
    ids = np.unique(random.integers(0, 20_000, 150))
    gradients = random.normal(size=(len(ids), 16)).astype(np.float32)
    large, small = hosts.look(0, ids, gradients)
    after, sample = hosts.whole(0), sampled_ids(specs[0])
    before = ids[trained[ids]] if optimizer.slots else ids
    trained[ids] = True
    if optimizer.touches_all_rows:
        # Rows without a gradient go on by their momentum.
        ids = np.flatnonzero((first[0] != after).any(axis=1))
    seen = after[sample[trained[sample]]]
    assert (large.table, large.num_rows, large.num_trained) == ("large", len(sample), len(seen))
    assert large.norms == pytest.approx(np.quantile(np.linalg.norm(seen, axis=1), QUANTILES), rel=1e-5)
    assert large.effective_rank == pytest.approx(expected_rank(seen), rel=1e-4)
    # First values are smaller than 0.2 a number.
    began = np.maximum(np.linalg.norm(first[1][sample[trained[sample]]], axis=1), 0.2 * np.sqrt(16))
    assert large.growth == pytest.approx(np.quantile(np.linalg.norm(seen, axis=1) / began, QUANTILES), rel=1e-4)
    if not optimizer.touches_all_rows:
        ratios = np.linalg.norm((after - first[0])[before], axis=1) / np.linalg.norm(first[0][before], axis=1)
        assert large.changes == pytest.approx(np.quantile(ratios, QUANTILES), rel=1e-4)
        assert large.num_updated == len(ids)
        assert (small.num_updated, small.changes) == (0, ())
    # A table that no step has updated.
    assert (small.num_rows, small.num_trained, small.norms, small.effective_rank) == (50, 0, (), None)


def test_a_collapsed_table_has_one_direction_left() -> None:
    random = np.random.default_rng(2)
    hosts = Hosts([spec_of("t", 400, 32, Adagrad(RATE), initializer=Constant(0.0))], 2)
    ids = np.arange(400)
    along = (np.arange(1, 401)[:, None] * np.ones((1, 32))).astype(np.float32)
    # Squares are of the directions, so all rows stay on one line.
    (found,) = hosts.look(0, ids, along)
    assert found.effective_rank == pytest.approx(1.0, abs=1e-3)
    # Rows change for the first time.
    assert found.changes == ()
    for _ in range(20):
        hosts.update(0, ids, random.normal(size=along.shape).astype(np.float32) * 400)
    (found,) = hosts.look(0, ids, along * 0)
    assert found.effective_rank is not None
    assert found.effective_rank > 25
    assert found.changes == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("optimizer", [Adam(RATE, lazy_adam=False), Adam(RATE), Adagrad(RATE)])
def test_rows_that_rest_count_where_a_step_names_them(optimizer: Optimizer) -> None:
    hosts = Hosts([spec_of("t", 200, 16, optimizer)], 1)
    ids = np.arange(20)
    hosts.update(0, ids, np.ones((20, 16), np.float32))
    (found,) = hosts.look(0, ids, np.ones((20, 16), np.float32))
    # Dense rules step all rows, and those without a history do not count.
    assert min(found.changes) > 0
    (found,) = hosts.look(0, np.arange(100, 120), np.zeros((20, 16), np.float32))
    assert (found.changes == (0.0, 0.0, 0.0)) == (not optimizer.touches_all_rows)


def test_what_has_no_figure() -> None:
    frozen, narrow = spec_of("frozen", 100, 16, None), spec_of("narrow", 100, 4, Adagrad(RATE))
    # Its first values cannot be had row by row, and plain gradients leave no other trace.
    untold = spec_of("untold", 100, 16, SGD(RATE), initializer=_as_keras)
    hosts = Hosts([frozen, narrow, untold], 1)
    ids = np.arange(40)
    hosts.update(2, ids, np.ones((40, 16), np.float32))
    first, second = hosts.look(1, ids, np.ones((40, 4), np.float32))
    assert {first.table, second.table} == {"narrow", "untold"}
    narrow_found, untold_found = sorted((first, second), key=lambda one: one.table)
    assert (narrow_found.num_trained, narrow_found.effective_rank, narrow_found.growth) == (40, None, ())
    assert (untold_found.num_trained, untold_found.growth) == (None, ())
    assert untold_found.effective_rank is not None
    # One host has not looked: it was in another window, say.
    assert table_figures([hosts.looks[0].take(), ()]) == ()
    # Numbers that are none have no quantile and no rank.
    hosts.tables[0][2].rows[:] = np.nan
    found = {one.table: one for one in hosts.look(1, ids, np.ones((40, 4), np.float32))}["untold"]
    assert (found.norms, found.effective_rank) == ((), None)


def test_an_update_that_fails_leaves_no_hook() -> None:
    hosts = Hosts([spec_of("t", 100, 16, Adagrad(RATE))], 1)
    with pytest.raises(ValueError, match="not held here|row"):
        hosts.look(0, np.array([5]), np.ones((1, 3), np.float32))
    assert hosts.tables[0][0].on_change is None
    assert hosts.looks[0].take() == ()


def test_growth_is_over_first_values_that_are_not_small() -> None:
    hosts = Hosts([spec_of("large", 100, 16, SGD(RATE), initializer=Constant(1.0))], 2)
    ids = np.arange(100)
    (found,) = hosts.look(0, ids, np.full((100, 16), -20.0, np.float32))
    # From norm 4 to 12.
    assert found.growth == pytest.approx((3.0, 3.0, 3.0))


def test_a_look_is_bounded() -> None:
    wide, large = spec_of("wide", 3000, 512, Adagrad(RATE)), spec_of("large", 100_000, 64, Adagrad(RATE))
    hosts = Hosts([wide, large], 3)
    for at, spec in enumerate((wide, large)):
        ids = np.arange(spec.num_rows)
        hosts.update(at, ids, np.random.default_rng(4).normal(size=(spec.num_rows, spec.dim)).astype(np.float32))
    seen = []
    for looks in hosts.looks:
        with looks.around_update():
            pass
        seen.append(looks.take())
    for parts in zip(*seen, strict=True):
        assert sum(part.factor.size for part in parts if part.factor is not None) <= MOST_NUMBERS
    assert [one.table for one in table_figures(seen)] == ["large", "wide"]
    assert all(one.growth == () for one in table_figures(seen, began_anew=False))
    due = [number for number in range(1, 110) if hosts.looks[0].is_due()]
    assert due == [FIRST_LOOK, FIRST_LOOK + LOOK_EVERY, *(FIRST_LOOK + LATER_EVERY * at for at in (1, 2, 3))]


def _as_keras(shape: tuple[int, int], dtype: object) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
