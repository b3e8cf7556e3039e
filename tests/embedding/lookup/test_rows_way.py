"""Several lookups that exchange in one process, against one dense table in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import BucketLayout, place
from podembed.embedding.initializers import Constant
from podembed.embedding.lookup.rows_way import RowsWay
from podembed.embedding.lookup.streams import FeatureBinding, RowsRequest
from podembed.embedding.optimizers import SGD, Adagrad, Optimizer, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from tests.long_tests import examples

COMBINERS = ("sum", "mean", "sqrtn")
RATE = 0.1


def table_spec(name: str, *, num_rows: int, dim: int, num_buckets: int, optimizer: Optimizer) -> TableSpec:
    return TableSpec(
        name=name,
        num_rows=num_rows,
        dim=dim,
        layout=BucketLayout(num_rows=num_rows, num_buckets=num_buckets),
        optimizer=optimizer,
        initializer=Constant(0.0),
        combiner="mean",
        seed=0,
    )


# Two widths; a table of one bucket, so that most hosts own nothing of it; one with fewer rows than buckets; one that
# two features share.
SPECS = (
    table_spec("whole", num_rows=7, dim=3, num_buckets=1, optimizer=SGD(RATE)),
    table_spec("wide", num_rows=50, dim=8, num_buckets=8, optimizer=Adagrad(RATE)),
    table_spec("shared", num_rows=33, dim=3, num_buckets=4, optimizer=RowWiseAdagrad(RATE)),
    table_spec("tiny", num_rows=2, dim=8, num_buckets=4, optimizer=SGD(RATE)),
)


def feature_bindings(tables: Sequence[int], combiners: Sequence[str]) -> tuple[FeatureBinding, ...]:
    bindings, column = [], 0
    for number, (table, combiner) in enumerate(zip(tables, combiners, strict=True)):
        bindings.append(FeatureBinding(name=f"f{number}", table=table, combiner=combiner, column=column))
        column += SPECS[table].dim
    return tuple(bindings)


TABLE_OF_FEATURE = (2, 0, 1, 2, 3)
FEATURES = feature_bindings(TABLE_OF_FEATURE, ("mean", "sum", "sqrtn", "sum", "mean"))
WIDTH = sum(SPECS[table].dim for table in TABLE_OF_FEATURE)


@dataclass
class Pod:
    """The lookups of all hosts, and what the network between them does."""

    lookups: list[RowsWay]

    @staticmethod
    def of(num_hosts: int, rows: Sequence[np.ndarray], features: Sequence[FeatureBinding] = FEATURES) -> Pod:
        sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in SPECS]
        placement = place(bucket_bytes=sizes, num_hosts=num_hosts)
        pod = Pod([RowsWay(SPECS, features, placement, host=h, num_hosts=num_hosts) for h in range(num_hosts)])
        for lookup in pod.lookups:
            for table, values in zip(lookup.tables, rows, strict=True):
                table.initialize()
                for bucket in table.buckets:
                    real = values[bucket :: table.spec.layout.num_buckets]
                    table.bucket(int(bucket))["rows"][: len(real)] = real
        return pod

    def forward(self, batches: Sequence[dict[str, Ragged]]) -> tuple[list[RowsRequest], list[np.ndarray]]:
        """Each host's activations `[num_samples, WIDTH]`; they begin as NaN, so that a column left out shows."""
        prepared = [lookup.request(batch) for lookup, batch in zip(self.lookups, batches, strict=True)]
        for here, lookup in enumerate(self.lookups):
            # A host's own entries are its own business: what is passed for them must not matter.
            frames = frames_for(here, self.lookups, prepared)
            frames[here] = np.full(3, -9, np.int64)
            lookup.accept(prepared[here], frames)
        for lookup, one in zip(self.lookups, prepared, strict=True):
            lookup.gather(one)
        self._swap(prepared, send="served", receive="rows")
        activations = []
        for lookup, one, batch in zip(self.lookups, prepared, batches, strict=True):
            out = np.full((num_samples_of(batch), WIDTH), np.nan, np.float32)
            lookup.pool(one, by_feature(out, lookup.features))
            activations.append(out)
        return prepared, activations

    def backward(self, prepared: Sequence[RowsRequest], gradients: Sequence[np.ndarray], rate: float = RATE) -> None:
        for lookup, one, gradient in zip(self.lookups, prepared, gradients, strict=True):
            lookup.sum_by_row(one, by_feature(gradient, lookup.features))
        self._swap(prepared, send="rows", receive="served")
        for lookup, one in zip(self.lookups, prepared, strict=True):
            lookup.update(one, None, [rate] * len(SPECS))

    def array(self, table: int, name: str = "rows") -> np.ndarray:
        """One array of a table in row order, collected from its owners."""
        spec = SPECS[table]
        values = np.full((spec.num_rows, spec.widths[name]), np.nan, np.float32)
        for lookup in self.lookups:
            for bucket in lookup.tables[table].buckets:
                rows = values[bucket :: spec.layout.num_buckets]
                rows[...] = lookup.tables[table].bucket(int(bucket))[name][: len(rows)]
        assert not np.isnan(values).any(), "a bucket has no owner"
        return values

    def _swap(self, prepared: Sequence[RowsRequest], *, send: str, receive: str) -> None:
        """What `workers.host.host` does with the network between two calls."""
        for group in range(len(self.lookups[0].groups)):
            for here, lookup in enumerate(self.lookups):
                for there, other in enumerate(self.lookups):
                    if here != there:
                        sent = lookup.piece(prepared[here], group, there, of=send)
                        room = other.piece(prepared[there], group, here, of=receive)
                        assert sent.shape == room.shape
                        assert sent.flags.c_contiguous
                        assert room.flags.c_contiguous
                        room[...] = sent


def frames_for(here: int, lookups: Sequence[RowsWay], requests: Sequence[RowsRequest]) -> list[np.ndarray]:
    """What all hosts ask of one."""
    return [np.concatenate(way.words(request, here)) for way, request in zip(lookups, requests, strict=True)]


def by_feature(columns: np.ndarray, features: Sequence[FeatureBinding]) -> dict[str, np.ndarray]:
    """Each feature's columns of `[num_samples, WIDTH]`."""
    return {f.name: columns[:, f.column : f.column + SPECS[f.table].dim] for f in features}


def num_samples_of(batch: dict[str, Ragged]) -> int:
    return next(iter(batch.values())).num_samples


class Dense:
    """The same tables on one host, as matrices: lookups by a dense `[samples, rows]` weight matrix, updates from its
    transpose.
    """

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.rows = [values.astype(np.float64) for values in rows]
        self.accumulators = [
            np.full((spec.num_rows, spec.dim if spec.name == "wide" else 1), 0.1 if spec.name == "wide" else 0.0)
            for spec in SPECS
        ]

    def activations(self, batch: dict[str, Ragged], features: Sequence[FeatureBinding]) -> np.ndarray:
        return np.concatenate([share(batch[f.name], f) @ self.rows[f.table] for f in features], axis=1)

    def update(
        self, batch: dict[str, Ragged], features: Sequence[FeatureBinding], gradient: np.ndarray, rate: float
    ) -> None:
        for at, spec in enumerate(SPECS):
            total, touched = np.zeros_like(self.rows[at]), np.zeros((spec.num_rows, 1), bool)
            for feature in features:
                if feature.table == at:
                    columns = gradient[:, feature.column : feature.column + spec.dim].astype(np.float64)
                    total += share(batch[feature.name], feature).T @ columns
                    touched[batch[feature.name].values] = True
            change = total
            if spec.name == "wide":
                self.accumulators[at] += np.where(touched, total**2, 0.0)
                change = total / np.sqrt(self.accumulators[at])
            elif spec.name == "shared":
                self.accumulators[at] += np.where(touched, (total**2).mean(axis=1, keepdims=True), 0.0)
                change = total / (np.sqrt(self.accumulators[at]) + 1e-8)
            self.rows[at] -= np.where(touched, rate * change, 0.0)


def share(ragged: Ragged, feature: FeatureBinding) -> np.ndarray:
    """float64 `[samples, rows]`: how much of each row is in each sample's activation."""
    matrix = np.zeros((ragged.num_samples, SPECS[feature.table].num_rows))
    for sample in range(ragged.num_samples):
        ids = slice(ragged.row_splits[sample], ragged.row_splits[sample + 1])
        values = ragged.values[ids]
        weights = np.ones(len(values)) if ragged.weights is None else ragged.weights[ids].astype(np.float64)
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[feature.combiner]
        if divisor:
            np.add.at(matrix[sample], values, weights / divisor)
    return matrix


def random_rows(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.standard_normal((spec.num_rows, spec.dim)).astype(np.float32) for spec in SPECS]


def random_batch(
    rng: np.random.Generator, features: Sequence[FeatureBinding], num_samples: int, *, longest: int, weighted: bool
) -> dict[str, Ragged]:
    batch = {}
    for feature in features:
        lengths = rng.integers(0, longest + 1, num_samples)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        # Squared, so that some ids come often.
        ids = (SPECS[feature.table].num_rows * rng.random(splits[-1]) ** 2).astype(np.int64)
        weights = rng.choice([0.0, 0.5, 1.0, 2.5], splits[-1]) if weighted and feature.column else None
        batch[feature.name] = Ragged.of(ids, splits, weights)
    return batch


def joined(batches: Sequence[dict[str, Ragged]]) -> dict[str, Ragged]:
    """All hosts' samples as one batch."""
    result = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        lengths = np.concatenate([np.diff(part.row_splits) for part in parts])
        known = [part.weights for part in parts if part.weights is not None]
        weights = np.concatenate(known) if known else None
        splits = np.concatenate([[0], np.cumsum(lengths)])
        result[name] = Ragged.of(np.concatenate([part.values for part in parts]), splits, weights)
    return result


def check_steps(num_hosts: int, seed: int, features: Sequence[FeatureBinding], **shape: int | bool) -> None:
    """Three steps on the pod and on the dense tables; every activation, row and slot must agree."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    pod, dense = Pod.of(num_hosts, rows, features), Dense(rows)
    for _ in range(3):
        sizes = rng.integers(0, 6, num_hosts)
        batches = [random_batch(rng, features, int(size), **shape) for size in sizes]  # type: ignore[arg-type]
        prepared, activations = pod.forward(batches)
        whole = joined(batches)
        expected = dense.activations(whole, features)
        np.testing.assert_allclose(np.concatenate(activations), expected, rtol=1e-4, atol=1e-4)
        gradients = [rng.standard_normal((int(size), WIDTH)).astype(np.float32) for size in sizes]
        pod.backward(prepared, gradients)
        dense.update(whole, features, np.concatenate(gradients), RATE)
    for at, spec in enumerate(SPECS):
        np.testing.assert_allclose(pod.array(at), dense.rows[at], rtol=2e-4, atol=2e-4, err_msg=spec.name)
        if "accumulator" in spec.widths:
            np.testing.assert_allclose(pod.array(at, "accumulator"), dense.accumulators[at], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_hosts_together_are_one_dense_table(num_hosts: int, weighted: bool) -> None:
    for seed in range(3):
        check_steps(num_hosts, seed, FEATURES, longest=5, weighted=weighted)


@settings(deadline=None, max_examples=examples(40))
@given(
    num_hosts=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 2**32 - 1),
    combiners=st.tuples(*[st.sampled_from(COMBINERS)] * len(TABLE_OF_FEATURE)),
    longest=st.integers(0, 9),
    weighted=st.booleans(),
)
def test_any_combiners_weights_and_bag_lengths(
    num_hosts: int, seed: int, combiners: tuple[str, ...], longest: int, weighted: bool
) -> None:
    check_steps(num_hosts, seed, feature_bindings(TABLE_OF_FEATURE, combiners), longest=longest, weighted=weighted)


def one_sample(ids: dict[str, list[int]]) -> dict[str, Ragged]:
    return {feature.name: Ragged.of_lists([ids.get(feature.name, [])]) for feature in FEATURES}


def test_a_row_that_all_hosts_use_is_updated_once_with_the_sum() -> None:
    """Adagrad tells one update with a sum from several with parts."""
    rows = random_rows(np.random.default_rng(0))
    pod = Pod.of(3, rows)
    prepared, _ = pod.forward([one_sample({"f2": [11, 11]})] * 3)
    gradient = np.zeros((1, WIDTH), np.float32)
    wide = FEATURES[2]
    gradient[:, wide.column : wide.column + 8] = 1.0
    pod.backward(prepared, [gradient] * 3)
    total = 3 * 2 / np.sqrt(2)  # three hosts, the id twice in a bag of two, sqrtn
    np.testing.assert_allclose(pod.array(1, "accumulator")[11], 0.1 + total**2, rtol=1e-5)
    np.testing.assert_allclose(pod.array(1)[11], rows[1][11] - RATE * total / np.sqrt(0.1 + total**2), rtol=1e-5)


def test_rows_that_no_id_names_keep_their_bytes() -> None:
    rows = random_rows(np.random.default_rng(1))
    pod = Pod.of(2, rows)
    prepared, _ = pod.forward([one_sample({"f0": [5], "f3": [6]}), one_sample({})])
    pod.backward(prepared, [np.ones((1, WIDTH), np.float32)] * 2)
    changed = (pod.array(2) != rows[2]).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [5, 6]
    for at in (0, 1, 3):
        assert pod.array(at).tobytes() == rows[at].tobytes()


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_a_batch_without_any_id_gives_zeros_and_changes_nothing(num_hosts: int) -> None:
    rows = random_rows(np.random.default_rng(2))
    pod = Pod.of(num_hosts, rows)
    prepared, activations = pod.forward([one_sample({})] * num_hosts)
    assert all((out == 0).all() for out in activations)
    assert all(p.num_unique.tolist() == [0] * len(SPECS) for p in prepared)
    pod.backward(prepared, [np.ones((1, WIDTH), np.float32)] * num_hosts)
    assert all(pod.array(at).tobytes() == values.tobytes() for at, values in enumerate(rows))


def test_only_distinct_rows_are_asked_for() -> None:
    pod = Pod.of(2, random_rows(np.random.default_rng(3)))
    batch = {**one_sample({}), "f0": Ragged.of_lists([[1, 1, 2]]), "f3": Ragged.of_lists([[2, 2, 3]])}
    prepared = pod.lookups[0].request(batch)
    assert prepared.num_unique.tolist() == [0, 0, 3, 0]
    assert prepared.asked_counts.sum(axis=0).tolist() == [0, 0, 3, 0]
    assert sum(map(len, prepared.asked)) == 3


def test_the_next_batch_may_be_prepared_and_accepted_before_the_update() -> None:
    """As the host does: the ids of step t + 1 travel while step t is on the device."""
    rng = np.random.default_rng(4)
    rows = random_rows(rng)
    batches = [[random_batch(rng, FEATURES, 4, longest=6, weighted=True) for _ in range(2)] for _ in range(2)]
    gradients = [rng.standard_normal((4, WIDTH)).astype(np.float32) for _ in range(2)]
    early, late = Pod.of(2, rows), Pod.of(2, rows)
    prepared, _ = early.forward(batches[0])
    ahead = [lookup.request(batch) for lookup, batch in zip(early.lookups, batches[1], strict=True)]
    for here, lookup in enumerate(early.lookups):
        lookup.accept(ahead[here], frames_for(here, early.lookups, ahead))
    early.backward(prepared, gradients)
    for lookup, one in zip(early.lookups, ahead, strict=True):
        lookup.gather(one)
    early._swap(ahead, send="served", receive="rows")
    for number, lookup in enumerate(early.lookups):
        out = np.empty((4, WIDTH), np.float32)
        lookup.pool(ahead[number], by_feature(out, FEATURES))
    prepared, _ = late.forward(batches[0])
    late.backward(prepared, gradients)
    _, activations = late.forward(batches[1])
    assert activations[1].tobytes() == out.tobytes()
    for at in range(len(SPECS)):
        assert early.array(at).tobytes() == late.array(at).tobytes()


def test_the_result_is_the_same_bits_each_time_and_on_each_placement_of_the_same_hosts() -> None:
    def run() -> list[bytes]:
        rng = np.random.default_rng(5)
        pod = Pod.of(3, random_rows(rng))
        for _ in range(4):
            batches = [random_batch(rng, FEATURES, 5, longest=7, weighted=True) for _ in range(3)]
            prepared, activations = pod.forward(batches)
            pod.backward(prepared, activations)
        return [pod.array(at).tobytes() for at in range(len(SPECS))]

    assert run() == run()


def test_a_wide_feature_leaves_the_columns_of_others_alone() -> None:
    pod = Pod.of(1, random_rows(np.random.default_rng(6)))
    lookup = pod.lookups[0]
    prepared = lookup.request(one_sample({"f0": [1]}))
    lookup.accept(prepared, [np.empty(0, np.int64)])
    lookup.gather(prepared)
    out = np.full((2, WIDTH + 4), 7.0, np.float32)
    lookup.pool(prepared, by_feature(out, FEATURES))
    assert (out[:, WIDTH:] == 7.0).all()
    assert (out[1] == 7.0).all()
    np.testing.assert_array_equal(out[0, :3], pod.array(2)[1])


@pytest.mark.parametrize("bad", [-1, 56, 2**62])
def test_ids_outside_the_table_do_not_reach_another_row(bad: int) -> None:
    """Readers refuse such ids; if one slips through, an owner must fail, not serve somebody else's row."""
    pod = Pod.of(1, random_rows(np.random.default_rng(7)))
    with pytest.raises((ValueError, IndexError)):
        pod.forward([one_sample({"f2": [bad]})])
