"""Stepwise hosts in threads of one process, over a real mesh: the same numbers as one host, and hosts that disagree are
noticed.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from podembed.embedding.buckets import place
from podembed.embedding.config import TableConfig
from podembed.embedding.engine.engine import EngineSpec, HostEngine, InProcessEngine, Share
from podembed.embedding.engine.order import OrderError
from podembed.embedding.features.bags import split_bags
from podembed.embedding.lookup.feature_lookup import LookupFeature
from podembed.embedding.optimizers import Adagrad, Adam
from podembed.embedding.ragged import Ragged
from podembed.embedding.replicas.strategies import get_replica_context
from podembed.embedding.table_spec import TableSpec
from podembed.workers.mesh.errors import MeshAborted, MeshError
from podembed.workers.stepwise.host import MeshExchange, ReplicaEngine, StepwiseDevice, StepwiseHost, StepwiseSpec

NUM_SAMPLES = 12


def engine_spec(*, is_pipelined=False):
    tables = (
        TableSpec.of(TableConfig(50, 3, name="whole", optimizer=Adam(0.1, lazy_adam=False)), seed=3),
        TableSpec.of(TableConfig(200, 5, name="cut", optimizer=Adagrad(0.1)), seed=3, num_buckets=16),
        TableSpec.of(TableConfig(30, 3, name="unused here", optimizer=Adagrad(0.1)), seed=3, num_buckets=4),
    )
    features = (
        LookupFeature(table=1, combiner="sum"),
        LookupFeature(table=0, combiner="mean"),
        LookupFeature(table=1, combiner="sqrtn"),
        LookupFeature(table=2, combiner="sum"),
    )
    return EngineSpec(tables=tables, features=features, quantization=(None, None, None), is_pipelined=is_pipelined)


def batch(rng):
    """Whole-batch bags of every feature; the last feature has ids in the first half of the samples only."""
    found = []
    for num_rows, last in ((200, NUM_SAMPLES), (50, NUM_SAMPLES), (200, NUM_SAMPLES), (30, NUM_SAMPLES // 2)):
        lengths = np.where(np.arange(NUM_SAMPLES) < last, rng.integers(0, 4, NUM_SAMPLES), 0)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        weights = rng.uniform(0.5, 2, splits[-1]).astype(np.float32)
        found.append(Ragged(rng.integers(0, num_rows, splits[-1]), splits, weights))
    return found


@pytest.fixture
def hosts(request):
    """Connected hosts, each to be called from its own thread."""
    num_hosts = getattr(request, "param", 2)
    made = [StepwiseHost() for _ in range(num_hosts)]
    addresses = [
        host.start(
            StepwiseSpec(
                run_id="r",
                generation=1,
                token=b"t" * 32,
                host=at,
                num_hosts=num_hosts,
                bind_address="127.0.0.1",
                step_timeout_s=20.0,
            )
        )
        for at, host in enumerate(made)
    ]
    with ThreadPoolExecutor(num_hosts) as pool:
        list(pool.map(lambda host: host.connect(addresses, 20.0), made))
        yield made, lambda call: list(pool.map(call, range(num_hosts)))
        for host in made:
            host.abort("the test is over")
    # A mesh belongs to one thread at a time, so all threads have ended here.
    for host in made:
        host.close()


def start_engines(hosts, together, spec):
    sizes = [np.full(t.layout.num_buckets, t.bucket_bytes) for t in spec.tables]
    placement = place(bucket_bytes=sizes, num_hosts=len(hosts))
    together(lambda at: hosts[at].start_engine(spec, placement, None))


@pytest.mark.parametrize("hosts", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_hosts_together_do_what_one_engine_does(hosts, is_pipelined):
    made, together = hosts
    spec = engine_spec(is_pipelined=is_pipelined)
    start_engines(made, together, spec)
    alone = InProcessEngine(spec)
    rng = np.random.default_rng(0)
    for step in range(4):
        features = batch(rng)
        shares = [split_bags(bags, NUM_SAMPLES, len(made)) for bags in features]
        alone.enqueue([Share(features=tuple(features), is_training=True)])
        own = [Share(features=tuple(bags[at] for bags in shares), is_training=True) for at in range(len(made))]
        together(lambda at, own=own: made[at].enqueue(own[at]))
        (expected,) = alone.dequeue(None)
        found = together(lambda at: made[at].dequeue(None))
        for feature, whole in enumerate(expected):
            np.testing.assert_allclose(np.concatenate([part[feature] for part in found]), whole, rtol=1e-5, atol=1e-6)
        gradients = [rng.normal(size=one.shape).astype(np.float32) for one in expected]
        alone.apply_gradients([gradients], lambda step: [0.1, 0.2, 0.3], None)
        cut = [np.split(one, np.cumsum([len(p[f]) for p in found])[:-1]) for f, one in enumerate(gradients)]
        together(lambda at, cut=cut: made[at].apply_gradients([own[at] for own in cut], [0.1, 0.2, 0.3], None))
        assert {host.num_steps() for host in made} == {step + 1}
    together(lambda at: made[at].drain())
    for table, arrays in enumerate(alone.read_tables()):
        layout = spec.tables[table].layout
        seen = 0
        for host in made:
            for bucket, values in host.read_buckets(table).items():
                for name, whole in arrays.items():
                    own = whole[bucket :: layout.num_buckets]
                    np.testing.assert_allclose(values[name][: len(own)], own, rtol=2e-5, atol=2e-6)
                seen += 1
        assert seen == layout.num_buckets


def test_calls_out_of_order_are_refused_on_all_hosts_before_they_wait(hosts):
    made, together = hosts
    start_engines(made, together, engine_spec())

    def refused(at):
        with pytest.raises(OrderError):
            made[at].dequeue(None)
        return True

    assert together(refused) == [True, True]


def test_a_waiting_host_is_freed_by_abort(hosts):
    made, together = hosts
    start_engines(made, together, engine_spec())
    share = Share(
        features=tuple(split_bags(bags, NUM_SAMPLES, 2)[0] for bags in batch(np.random.default_rng(0))),
        is_training=True,
    )
    waiting = threading.Timer(0.3, lambda: made[0].abort("the other one failed"))
    waiting.start()
    with pytest.raises(MeshAborted):
        made[0].enqueue(share)
    waiting.join()


def test_hosts_that_fall_out_of_step_are_noticed(hosts):
    made, together = hosts
    start_engines(made, together, engine_spec())
    features = batch(np.random.default_rng(0))
    shares = [
        Share(features=tuple(split_bags(bags, NUM_SAMPLES, 2)[at] for bags in features), is_training=True)
        for at in range(2)
    ]

    def one_ahead(at):
        if at == 0:
            made[0]._exchange.rows([[np.zeros((0, 3), np.float32)] * 3] * 2, [[(0, 3)] * 3] * 2)
        else:
            made[1].enqueue(shares[1])

    with pytest.raises((MeshError, ValueError)):
        together(one_ahead)


class Wire:
    """An exchange whose peer sends what a test says."""

    def __init__(self, frame):
        self.frame = frame

    def exchange(self, *, receive, **others):
        receive(1, self.frame.nbytes)[...] = self.frame


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (np.array([1], np.int64), "whole int64 with 2 in front"),
        (np.array([1, 2, 3], np.int32), "whole int64 with 2 in front"),
        (np.array([1, 1, 7], np.int64), "announced"),
        (np.array([-1, 2, 7], np.int64), "announced"),
    ],
)
def test_ids_that_contradict_their_counts_are_refused(frame, text):
    asked = [[np.zeros(1, np.int64)] * 2] * 2
    with pytest.raises(ValueError, match=text):
        MeshExchange(Wire(frame), timeout_s=1.0).ids(asked)  # type: ignore[arg-type]


def test_rows_of_another_size_are_refused():
    send = [[np.zeros((1, 3), np.float32)]] * 2
    with pytest.raises(ValueError, match=r"sent 8 bytes of rows\. Expected 24"):
        MeshExchange(Wire(np.zeros(2, np.float32)), timeout_s=1.0).rows(send, [[(1, 3)], [(2, 3)]])  # type: ignore[arg-type]


class DirectLink:
    """Calls a host in the same process."""

    def __init__(self, host):
        self.host = host

    def call(self, method, *arguments):
        return method(self.host, *arguments)


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_a_device_runs_functions_with_the_engine_of_its_host(hosts):
    made, together = hosts
    spec = engine_spec()
    start_engines(made, together, spec)
    device = StepwiseDevice()
    device.join("unused by a gang of one", 1, 0, 5.0)
    features = tuple(batch(np.random.default_rng(0)))

    def step(scale, *, name):
        context = get_replica_context()
        engine = context.engine
        engine.enqueue([Share(features=features, is_training=True, name=name)])
        (activations,) = engine.dequeue(name)
        engine.apply_gradients([[scale * one for one in activations]], lambda step: [0.1 + step] * 3, name)
        context.state["calls"] = context.state.get("calls", 0) + 1
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.state["calls"]

    assert device.run_function(step, (np.float32(0.5),), {"name": "n"}, spec, DirectLink(made[0])) == (0, 1, 1)
    assert device.run_function(step, (np.float32(0.5),), {"name": "n"}, spec, DirectLink(made[0])) == (0, 1, 2)
    assert get_replica_context() is None
    assert made[0].metrics().learning_rates == (1.1, 1.1, 1.1)
    engine = ReplicaEngine(spec, DirectLink(made[0]))
    for call in (engine.read_tables, lambda: engine.save("x"), lambda: engine.restore("x"), engine.close):
        with pytest.raises(RuntimeError, match="Expected a call on the driver"):
            call()
    device.close()


def test_hosts_without_an_engine_say_so():
    host = StepwiseHost()
    with pytest.raises(RuntimeError, match="no engine"):
        host.drain()
    with pytest.raises(RuntimeError, match="before start"):
        host.connect([], 1.0)
    host.abort("nothing to abort")
    host.close()


def test_host_engines_on_two_placements_start_with_the_same_rows():
    spec = engine_spec()
    whole = InProcessEngine(spec).read_tables()
    placement = [np.arange(t.layout.num_buckets, dtype=np.int32) % 3 for t in spec.tables]
    for host in range(3):
        engine = HostEngine(spec, placement, host=host, num_hosts=3, exchange=None)  # type: ignore[arg-type]
        engine.initialize()
        for table, arrays in zip(engine.tables, whole, strict=True):
            for bucket in table.buckets:
                own = arrays["rows"][bucket :: table.spec.layout.num_buckets]
                np.testing.assert_array_equal(table.bucket(int(bucket))["rows"][: len(own)], own)
