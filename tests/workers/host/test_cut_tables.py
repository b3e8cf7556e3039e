"""Cut tables whose owners pool, beside the same tables whose rows travel: the same activations and updates, over real
connections, with every way in which a step may be cut into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podembed.embedding.buckets import BucketLayout, place
from podembed.embedding.initializers import Uniform
from podembed.embedding.kernels import threads as thread_rules
from podembed.embedding.kernels.arrays import aligned_empty
from podembed.embedding.lookup.activation_layout import EVERY_HOST, Blocks
from podembed.embedding.lookup.lookups import Lookups
from podembed.embedding.lookup.steps import LookupStep, LookupSteps
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import SGD, Adagrad, RowWiseAdagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.row_index import DenseKeys, KeySpace
from podembed.embedding.table.table import Table
from podembed.embedding.table_spec import TableSpec
from podembed.workers.host.exchange import MeshExchange
from podembed.workers.thread_pool import ThreadPool
from tests.embedding.table.stores.mapped_store import MappedStores
from tests.long_tests import examples
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, meshes, succeed

NUM_SAMPLES, NUM_STEPS, RATE = 7, 4, 0.1
# Of table, combiner: a table of one bucket, two that are cut, of which two features share one, and one that can only
# be looked up by rows.
FEATURES = ((1, "mean"), (0, "sum"), (2, "sqrtn"), (1, "sum"), (3, "sum"))
RULES = (SGD(RATE), Adagrad(RATE), RowWiseAdagrad(RATE), Adagrad(RATE, use_gradient_accumulation=False))
SHAPES = ((9, 3, 1), (120, 16, 8), (60, 8, 4), (50, 3, 4))


def table_specs(keys: KeySpace | None = None, stores: Any = None) -> list[TableSpec]:
    """With keys of another kind, each bucket has room for all of its keys."""
    spread = 4 if keys is not None else 1
    return [
        TableSpec(
            name=f"t{at}",
            num_rows=spread * num_rows,
            dim=dim,
            layout=BucketLayout(num_rows=spread * num_rows, num_buckets=num_buckets),
            optimizer=rule,
            initializer=Uniform(-1.0, 1.0),
            combiner="mean",
            seed=0,
            keys=keys or DenseKeys(),
            stores=stores,
        )
        for at, ((num_rows, dim, num_buckets), rule) in enumerate(zip(SHAPES, RULES, strict=True))
    ]


def draw_bags(random: np.random.Generator, table: int, *, is_weighted: bool) -> Ragged:
    """Fewer samples than the layout has; some bags are empty, some weights cancel out."""
    num_samples = int(random.integers(NUM_SAMPLES - 2, NUM_SAMPLES + 1))
    lengths = random.integers(0, 5, num_samples)
    ids = random.integers(0, SHAPES[table][0], int(lengths.sum()))
    weights = random.choice([0.0, 0.5, 2.0], len(ids)) if is_weighted else None
    return Ragged.of(ids, np.concatenate([[0], np.cumsum(lengths)]), weights)


class Pod:
    """Hosts in threads, each with two buffers of activations and gradients."""

    def __init__(
        self,
        num_hosts: int,
        *,
        pools_cut: bool,
        shares: bool,
        prefetches: bool,
        wire: str,
        num_owners: int | None = None,
        num_threads: int = 1,
        keys: KeySpace | None = None,
        stores: Any = None,
    ) -> None:
        self.prefetches, self.wire = prefetches, wire
        specs = table_specs(keys, stores)
        sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
        placement = place(bucket_bytes=sizes, num_hosts=num_owners or num_hosts)
        features = [FeatureBinding(name=f"f{at}", table=of[0], combiner=of[1]) for at, of in enumerate(FEATURES)]
        self.hosts = [
            Lookups.build(
                specs,
                features,
                placement,
                host=host,
                num_hosts=num_hosts,
                num_samples=NUM_SAMPLES,
                needs_rows=[False] * len(specs),
                pools_cut=[pools_cut] * len(specs),
                quantization=[None] * len(specs),
                num_buffers=2,
                thread_pool=ThreadPool(num_threads),
            )
            for host in range(num_hosts)
        ]
        layout = self.hosts[0].layout
        assert (EVERY_HOST in layout.owners) == (pools_cut and num_hosts > 1 and num_owners != 1)
        self.activations = [[aligned_empty((layout.memory_floats,)) for _ in range(2)] for _ in self.hosts]
        self.gradients = [[aligned_empty((layout.num_floats,)) for _ in range(2)] for _ in self.hosts]
        for host, lookups in enumerate(self.hosts):
            for table in lookups.tables:
                table.initialize()
            for other in range(num_hosts):
                if shares and other != host:
                    lookups.pooled.share(other, activations=self.activations[other], gradients=self.gradients[other])

    def train(self, batches: Sequence[Sequence[dict[str, Ragged]]]) -> list[list[np.ndarray]]:
        """Per host, the activations of every step. Gradients follow from them. Notes the frames that hosts sent."""
        with meshes(len(self.hosts)) as ranks:
            exchanges = [
                MeshExchange(mesh, lookups, wire_dtype=self.wire, timeout_s=PATIENCE_S)
                for mesh, lookups in zip(ranks, self.hosts, strict=True)
            ]
            found = in_threads(
                [
                    lambda host=host, exchange=exchange: self._train(host, exchange, [step[host] for step in batches])
                    for host, exchange in enumerate(exchanges)
                ]
            )
            self.num_frames = [mesh.statistics.num_frames for mesh in ranks]
        return succeed(found)

    def _train(self, host: int, exchange: MeshExchange, batches: Sequence[dict[str, Ragged]]) -> list[np.ndarray]:
        lookups = self.hosts[host]
        layout, steps = lookups.layout, LookupSteps(lookups, exchange)
        activations = [Blocks.of(layout, memory) for memory in self.activations[host]]
        gradients = [Blocks.of(layout, memory) for memory in self.gradients[host]]

        def prepared(number: int) -> LookupStep:
            step = steps.find(batches[number], buffer=number % 2)
            steps.ask(step, number, training_step=number, gradients=gradients[number % 2])
            return step

        seen = []
        step = prepared(0)
        steps.forward(step, activations[0])
        for number in range(len(batches)):
            own = number % 2
            seen.append(np.concatenate([block.reshape(-1) for block in activations[own].arrays]))
            for gradient, block in zip(gradients[own].arrays, activations[own].arrays, strict=True):
                gradient[...] = 0.1 * block + 0.01
            following = prepared(number + 1) if number + 1 < len(batches) else None
            if following is not None and self.prefetches:
                steps.prefetch(following, step, activations[1 - own])
            steps.backward(step, gradients[own], [RATE] * len(RULES))
            if following is not None:
                steps.forward(following, activations[1 - own])
                step = following
        return seen

    def arrays(self) -> list[np.ndarray]:
        """Rows and slots of all tables, in the order of the rows."""
        found = []
        for at, (num_rows, _, num_buckets) in enumerate(SHAPES):
            tables: list[Table] = [lookups.tables[at] for lookups in self.hosts]
            for name, width in tables[0].spec.widths.items():
                whole = np.full((num_rows, width), np.nan, np.float32)
                for table in tables:
                    for bucket in table.buckets:
                        own = whole[bucket::num_buckets]
                        own[...] = table.bucket(int(bucket))[name][: len(own)]
                found.append(whole)
        return found


def trained(
    num_hosts: int,
    seed: int,
    *,
    pools_cut: bool,
    shares: bool = False,
    prefetches: bool = True,
    is_weighted: bool = False,
    wire: str = "float32",
    num_threads: int = 1,
    stores: Any = None,
) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    ways = {"pools_cut": pools_cut, "shares": shares, "prefetches": prefetches}
    pod = Pod(num_hosts, **ways, wire=wire, num_threads=num_threads, stores=stores)
    return pod.train(draw_batches(num_hosts, seed, is_weighted=is_weighted)), pod.arrays()


def draw_batches(num_hosts: int, seed: int, *, is_weighted: bool) -> list[list[dict[str, Ragged]]]:
    """Per step and host."""
    random = np.random.default_rng(seed)
    return [
        [
            {
                f"f{at}": draw_bags(random, table, is_weighted=is_weighted and at % 2 == 0)
                for at, (table, _) in enumerate(FEATURES)
            }
            for _ in range(num_hosts)
        ]
        for _ in range(NUM_STEPS)
    ]


def flat(found: tuple[list[list[np.ndarray]], list[np.ndarray]]) -> list[np.ndarray]:
    """All activations of all hosts, then all arrays of the tables."""
    return [*(step for host in found[0] for step in host), *found[1]]


@settings(deadline=None, max_examples=examples(12))
@given(seed=st.integers(0, 10_000), num_hosts=st.integers(1, 4), is_weighted=st.booleans(), shares=st.booleans())
def test_partial_sums_give_what_rows_give(seed: int, num_hosts: int, is_weighted: bool, shares: bool) -> None:
    by_rows = trained(num_hosts, seed, pools_cut=False, is_weighted=is_weighted)
    pooled = trained(num_hosts, seed, pools_cut=True, is_weighted=is_weighted, shares=shares)
    for expected, found in zip(by_rows[0], pooled[0], strict=True):
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=f"step {step}")
    for expected, found in zip(by_rows[1], pooled[1], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_bytes_depend_neither_on_the_prefetch_nor_on_shared_memory(num_hosts: int) -> None:
    whole = trained(num_hosts, 3, pools_cut=True, prefetches=False)
    for shares, prefetches in ((False, True), (True, True), (True, False)):
        other = trained(num_hosts, 3, pools_cut=True, shares=shares, prefetches=prefetches)
        for one, two in zip(flat(whole), flat(other), strict=True):
            assert (one == two).all(), (shares, prefetches)


def test_a_narrow_wire_rounds_partial_sums() -> None:
    exact, rounded = (trained(2, 5, pools_cut=True, wire=wire) for wire in ("float32", "bfloat16"))
    differences = [np.abs(a - b).max() for a, b in zip(flat(exact), flat(rounded), strict=True)]
    assert 0 < max(differences) < 0.1


@pytest.mark.parametrize("shares", [False, True])
def test_each_exchange_is_one_frame_and_none_where_nothing_is_due(shares: bool) -> None:
    """Rows of three widths and pooled vectors travel together. Hosts that own nothing send ids and gradients."""
    batches = draw_batches(3, 3, is_weighted=False)
    every = Pod(3, pools_cut=True, shares=shares, prefetches=False, wire="float32")
    every.train(batches)
    assert every.num_frames == [3 * 2 * NUM_STEPS] * 3
    one = Pod(3, pools_cut=False, shares=shares, prefetches=False, wire="float32", num_owners=1)
    one.train(batches)
    assert one.num_frames == [(2 + 2) * NUM_STEPS, (2 + 1) * NUM_STEPS, (2 + 1) * NUM_STEPS]


@pytest.mark.parametrize(("num_hosts", "pools_cut"), [(1, False), (2, False), (3, True)])
def test_any_number_of_threads_gives_the_same_bytes(
    num_hosts: int, pools_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that travel, partial sums, and tables that one host has whole; most parts of the work are of one bag."""
    expected = flat(trained(num_hosts, 3, pools_cut=pools_cut, is_weighted=True))
    monkeypatch.setattr(thread_rules, "_MIN_SHARED", 0)
    monkeypatch.setattr(thread_rules, "_MIN_PART", 1)
    monkeypatch.setattr(thread_rules, "_MIN_COLUMNS", 8)
    for num_threads in (2, 3):
        found = flat(trained(num_hosts, 3, pools_cut=pools_cut, is_weighted=True, num_threads=num_threads))
        for one, other in zip(expected, found, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("num_hosts", "pools_cut"), [(1, False), (2, False), (3, True)])
def test_rows_in_files_give_the_same_bytes(num_hosts: int, pools_cut: bool) -> None:
    """Pooled at one owner and at every one, and rows that travel."""
    expected = flat(trained(num_hosts, 3, pools_cut=pools_cut, is_weighted=True))
    found = flat(trained(num_hosts, 3, pools_cut=pools_cut, is_weighted=True, stores=MappedStores()))
    for one, other in zip(expected, found, strict=True):
        assert one.tobytes() == other.tobytes()
