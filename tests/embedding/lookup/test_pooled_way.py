"""Several hosts in one process: what they exchange is passed by hand; activations, rows and slots must be those of one
dense table.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.config import TableConfig
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks, pooling_owners
from podembed.embedding.lookup.pooled_frames import PooledRequest
from podembed.embedding.lookup.pooled_way import PooledWay
from podembed.embedding.lookup.pooling_choice import can_pool_at_owner
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from tests.long_tests import examples

DIMS = (8, 16, 8)
NUM_ROWS = (40, 7, 300)
NUM_SAMPLES = 9
RULES = (RowWiseAdagrad(0.1), Adagrad(0.1), SGD(0.5))
COMBINERS = ("sum", "mean", "sqrtn", "sum")
TABLE_OF = (0, 1, 2, 0)  # features 0 and 3 share a table
RATES = (0.1, 0.1, 0.5)


def specs() -> list[TableSpec]:
    """Three tables, the last in four buckets."""
    return [
        TableSpec.of(TableConfig(rows, dim, name=f"t{at}", optimizer=rule), seed=3, num_buckets=4 if at == 2 else 1)
        for at, (rows, dim, rule) in enumerate(zip(NUM_ROWS, DIMS, RULES, strict=True))
    ]


class Pod:
    """All hosts, with their activations and gradients."""

    def __init__(self, num_hosts: int, owners: list[int]) -> None:
        features = [
            FeatureBinding(name=f"f{at}", table=table, combiner=COMBINERS[at], column=0)
            for at, table in enumerate(TABLE_OF)
        ]
        self.layout = ActivationLayout(
            num_samples=NUM_SAMPLES,
            widths=tuple(DIMS[table] for table in TABLE_OF),
            owners=tuple(owners[table] for table in TABLE_OF),
        )
        self.lookups, self.activations, self.gradients = [], [], []
        for host in range(num_hosts):
            tables = []
            for at, spec in enumerate(specs()):
                held = np.arange(spec.layout.num_buckets) if owners[at] == host else np.empty(0, np.int64)
                tables.append(Table(spec, held))
                tables[-1].initialize()
            self.lookups.append(PooledWay(tables, features, self.layout, host=host, num_hosts=num_hosts))
            self.activations.append(aligned_empty((self.layout.num_floats,)))
            self.gradients.append(aligned_empty((self.layout.num_floats,)))
            self.gradients[-1][:] = np.random.default_rng(host).standard_normal(self.layout.num_floats)
        self.owners = owners

    def accepted(self, batches: list[dict[str, Ragged]]) -> list[PooledRequest]:
        hosts = range(len(self.lookups))
        requests = [lookup.request(batch) for lookup, batch in zip(self.lookups, batches, strict=True)]
        for host, lookup in enumerate(self.lookups):
            frames = [np.concatenate(self.lookups[other].words(requests[other], host)) for other in hosts]
            lookup.accept(requests[host], frames)
            lookup.group(requests[host], Blocks.of(self.layout, self.gradients[host]))
        return requests

    def step(self, batches: list[dict[str, Ragged]]) -> None:
        hosts = range(len(self.lookups))
        requests = self.accepted(batches)
        for host, lookup in enumerate(self.lookups):
            own = Blocks.of(self.layout, self.activations[host])
            lookup.gather(requests[host], own)
            lookup.gather_own(requests[host], own)
            for other in hosts:
                if other != host and other not in lookup.on_same_machine:
                    (answer,), (room,) = (
                        way(requests[host], other) for way in (lookup.outgoing, lookup.arriving_gradients)
                    )
                    self.activations[other][self.layout.region(host)] = answer
                    room[:] = self.gradients[other][self.layout.region(host)]
        for host, lookup in enumerate(self.lookups):
            lookup.update(requests[host], Blocks.of(self.layout, self.gradients[host]), RATES)

    def table(self, at: int) -> Table:
        return self.lookups[self.owners[at]]._tables[at]


def draw_batch(random: np.random.Generator, *, weighted: bool) -> dict[str, Ragged]:
    batch = {}
    for at, table in enumerate(TABLE_OF):
        num_samples = int(random.integers(1, NUM_SAMPLES + 1))
        lengths = random.integers(0, 4, num_samples)
        ids = random.integers(0, NUM_ROWS[table], int(lengths.sum()))
        splits = np.concatenate([[0], np.cumsum(lengths)])
        weights = random.uniform(0.5, 2.0, len(ids)) if weighted and at % 2 == 0 else None
        batch[f"f{at}"] = Ragged.of(ids, splits, weights)
    return batch


def factors(bags: Ragged, combiner: str) -> tuple[np.ndarray, np.ndarray]:
    """Per id its bag, and what its row counts in it."""
    lengths = np.diff(bags.row_splits)
    bag = np.repeat(np.arange(len(lengths)), lengths)
    weight = np.ones(bags.num_ids) if bags.weights is None else bags.weights.astype(np.float64)
    total = np.bincount(bag, weight if combiner == "mean" else weight**2, minlength=len(lengths))
    divisor = {"sum": np.ones(len(lengths)), "mean": total, "sqrtn": np.sqrt(total)}[combiner]
    return bag, weight / divisor[bag] if len(bag) else weight


def dense(table: Table) -> np.ndarray:
    """Local rows of each id of a table that is held whole."""
    layout, ids = table.spec.layout, np.arange(table.spec.num_rows)
    return (ids % layout.num_buckets) * layout.rows_per_bucket + ids // layout.num_buckets


@settings(deadline=None, max_examples=examples(15))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 3), weighted=st.booleans())
def test_a_step_is_that_of_dense_tables(seed: int, num_hosts: int, weighted: bool) -> None:
    random = np.random.default_rng(seed)
    pod = Pod(num_hosts, [int(owner) for owner in random.integers(0, num_hosts, 3)])
    batches = [draw_batch(random, weighted=weighted) for _ in range(num_hosts)]
    before = [pod.table(at).rows[dense(pod.table(at))].astype(np.float64) for at in range(3)]
    sums = [np.zeros_like(rows) for rows in before]
    touched = [np.zeros(rows, bool) for rows in NUM_ROWS]
    pod.step(batches)
    for host, batch in enumerate(batches):
        activations = pod.layout.blocks(pod.activations[host])
        gradients = pod.layout.blocks(pod.gradients[host])
        for at, table in enumerate(TABLE_OF):
            bags = batch[f"f{at}"]
            bag, factor = factors(bags, COMBINERS[at])
            expected = np.zeros((NUM_SAMPLES, DIMS[table]))
            np.add.at(expected, bag, before[table][bags.values] * factor[:, None])
            np.testing.assert_allclose(activations[at], expected, rtol=1e-4, atol=1e-5)
            np.add.at(sums[table], bags.values, gradients[at][bag] * factor[:, None])
            touched[table][bags.values] = True
    for at, rule in enumerate(RULES):
        square = sums[at] ** 2
        if isinstance(rule, RowWiseAdagrad):
            divisor = np.sqrt(square.mean(axis=1, keepdims=True)) + rule.epsilon
        else:
            divisor = np.sqrt(square + 0.1) if isinstance(rule, Adagrad) else 1.0
        expected = np.where(touched[at][:, None], before[at] - RATES[at] * sums[at] / divisor, before[at])
        np.testing.assert_allclose(pod.table(at).rows[dense(pod.table(at))], expected, rtol=1e-3, atol=1e-4)


def test_the_same_step_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        random = np.random.default_rng(7)
        pod = Pod(2, [0, 1, 0])
        for _ in range(3):
            pod.step([draw_batch(random, weighted=False) for _ in range(2)])
        results.append([pod.table(at).rows.copy() for at in range(3)])
    for first, second in zip(*results, strict=True):
        assert (first == second).all()


def test_hosts_that_share_memory_have_the_same_bits() -> None:
    """Where all hosts do, each pools for all of them at once. With one host elsewhere, its bags go apart from the
    others.
    """

    def trained(*pairs: tuple[int, int]) -> list[np.ndarray]:
        random = np.random.default_rng(5)
        pod = Pod(3, [0, 1, 2])
        for one, other in pairs:
            for host, to in ((one, other), (other, one)):
                memory = pod.activations[to], pod.gradients[to]
                pod.lookups[host].share(to, activations=[memory[0]], gradients=[memory[1]])
        for _ in range(3):
            pod.step([draw_batch(random, weighted=True) for _ in range(3)])
        # Between two blocks lies memory that belongs to none.
        blocks = [np.array(block) for memory in pod.activations for block in pod.layout.blocks(memory)]
        return [*blocks, *(pod.table(at).rows for at in range(3))]

    apart = trained()
    assert all(np.any(array != 0) for array in apart[-3:])
    for pairs in (((0, 1), (0, 2), (1, 2)), ((0, 1),)):
        for one, other in zip(apart, trained(*pairs), strict=True):
            assert one.tobytes() == other.tobytes()


def test_an_id_outside_the_table_is_refused_where_it_comes_from() -> None:
    batch = {f"f{at}": Ragged.of([0], [0, 1]) for at in range(4)} | {"f1": Ragged.of([7], [0, 1])}
    alone = Pod(1, [0, 0, 0]).lookups[0]
    request = alone.request(batch)
    with pytest.raises(ValueError, match=r"Found id 7 for a table of 7 rows"):
        alone.accept(request, [np.empty(0, np.int64)])
    with pytest.raises(ValueError, match=r"Found id 7 for a table of 7 rows"):
        Pod(2, [0, 0, 0]).lookups[1].request(batch)


@pytest.mark.parametrize("damage", ["length", "splits", "row", "negative row", "count"])
def test_a_damaged_frame_is_refused(damage: str) -> None:
    pod = Pod(2, [0, 0, 0])
    batch = {f"f{at}": Ragged.of([0, 1], [0, 2]) for at in range(4)}
    own, theirs = pod.lookups[0].request(batch), pod.lookups[1].request(batch)
    frame = np.concatenate(pod.lookups[1].words(theirs, 0))
    if damage == "length":
        frame = frame[:-1]
    elif damage == "splits":
        frame[1 + 3 * 4 + 1] = 5
    elif damage == "count":
        frame[2] = -1
    else:
        frame[-1] = 1 << 20 if damage == "row" else -1
    with pytest.raises(ValueError, match="Found"):
        pod.lookups[0].accept(own, [frame, frame])


def test_rules_that_touch_all_rows_or_apply_one_by_one_stay_with_rows() -> None:
    def spec(rule):
        return TableSpec.of(TableConfig(10, 4, name="t", optimizer=rule), seed=0)

    assert can_pool_at_owner(spec(Adagrad(0.1)))
    assert can_pool_at_owner(spec(FTRL(0.1)))
    assert not can_pool_at_owner(spec(SGD(0.1, use_gradient_accumulation=False)))
    assert not can_pool_at_owner(spec(Adam(0.1, lazy_adam=False)))
    assert can_pool_at_owner(spec(Adam(0.1)))


def test_blocks_of_one_owner_follow_each_other() -> None:
    layout = ActivationLayout(num_samples=3, widths=(4, 8, 2, 4), owners=(1, -1, 0, 1))
    assert layout.order == (2, 0, 3, 1)
    assert all(start % 16 == 0 for start in layout.starts)
    assert layout.region(1) == slice(layout.starts[0], layout.starts[1])
    assert layout.region(2) == slice(0, 0)
    memory = np.arange(layout.num_floats, dtype=np.float32)
    blocks = layout.blocks(memory)
    for at, block in layout.blocks_of(1, memory[layout.region(1)]).items():
        assert (block == blocks[at]).all()
    assert pooling_owners([np.array([1, 1]), np.array([0, 1])]) == (1, -1)
