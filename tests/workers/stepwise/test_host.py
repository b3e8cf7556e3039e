"""Stepwise hosts in threads of one process, over a real mesh: the same numbers as one host, and hosts that disagree are
noticed.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from podembed.embedding.buckets import place
from podembed.embedding.config import TableConfig
from podembed.embedding.lookup.exchange import SingleHost
from podembed.embedding.lookup.placement import place_tables
from podembed.embedding.lookup.steps import LookupSteps
from podembed.embedding.lookup.streams import FeatureBinding
from podembed.embedding.optimizers import Adagrad, Adam
from podembed.embedding.ragged import Ragged
from podembed.embedding.table_spec import TableSpec
from podembed.embedding.tf.engine.engine import EngineSpec, Share
from podembed.embedding.tf.engine.host_engine import HostEngine, InProcessEngine
from podembed.embedding.tf.engine.order import OrderError
from podembed.embedding.tf.features.bags import split_bags
from podembed.embedding.tf.replicas.strategies import get_replica_context
from podembed.workers.liveness.progress import Phase, Tracker
from podembed.workers.liveness.worker import Worker
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh_errors import MeshAborted, MeshError
from podembed.workers.stepwise.device import HostLinkCalls, Ran, ReplicaEngine, StepwiseDevice
from podembed.workers.stepwise.host import StepwiseHost, StepwiseSpec
from podembed.workers.stepwise.shared_values import DeviceValues, SharedValues
from tests.workers.stepwise.packing import PICKLED

NUM_SAMPLES = 12


def engine_spec(*, is_pipelined=False):
    tables = (
        TableSpec.of(TableConfig(50, 3, name="whole", optimizer=Adam(0.1, lazy_adam=False)), seed=3),
        TableSpec.of(TableConfig(200, 5, name="cut", optimizer=Adagrad(0.1)), seed=3, num_buckets=16),
        TableSpec.of(TableConfig(30, 3, name="unused here", optimizer=Adagrad(0.1)), seed=3, num_buckets=4),
    )
    features = (
        FeatureBinding(name="0", table=1, combiner="sum"),
        FeatureBinding(name="1", table=0, combiner="mean"),
        FeatureBinding(name="2", table=1, combiner="sqrtn"),
        FeatureBinding(name="3", table=2, combiner="sum"),
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
    made = [StepwiseHost(PICKLED) for _ in range(num_hosts)]
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
            host._mesh.abort("the test is over")
    # A mesh belongs to one thread at a time, so all threads have ended here.
    for host in made:
        host.close()


def start_engines(hosts, together, spec, *, is_whole=False):
    """Tables cut into buckets, or each whole on one host where its rule allows that. Returns where values lie."""
    sizes = [np.full(t.layout.num_buckets, t.bucket_bytes) for t in spec.tables]
    placement = place(bucket_bytes=sizes, num_hosts=len(hosts))
    if is_whole:
        placement = place_tables(spec.tables, num_features=spec.num_features, num_hosts=len(hosts))
    return together(lambda at: hosts[at].start_engine(spec, placement, None))


@pytest.mark.parametrize("hosts", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_hosts_together_do_what_one_engine_does(hosts, is_pipelined, is_whole):
    made, together = hosts
    spec = engine_spec(is_pipelined=is_pipelined)
    start_engines(made, together, spec, is_whole=is_whole)
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
        assert {host.metrics().num_steps for host in made} == {step + 1}
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


def sized_spec(*, is_pipelined):
    """A spec that says how large a usual batch is, with tables that are pooled at their owner and one that is cut."""
    tables = (
        TableSpec.of(TableConfig(50, 3, name="mean", optimizer=Adagrad(0.1)), seed=3),
        TableSpec.of(TableConfig(200, 5, name="cut", optimizer=Adam(0.1, lazy_adam=False)), seed=3, num_buckets=16),
        TableSpec.of(TableConfig(30, 4, name="sum", optimizer=Adagrad(0.1)), seed=3),
    )
    features = tuple(
        FeatureBinding(name=str(at), table=table, combiner=combiner)
        for at, (table, combiner) in enumerate(((0, "mean"), (1, "sum"), (2, "sum"), (0, "sum")))
    )
    shapes = ((NUM_SAMPLES,),) * 4
    rounding = (None, None, None)
    return EngineSpec(
        tables=tables, features=features, quantization=rounding, is_pipelined=is_pipelined, output_shapes=shapes
    )


def bags_of(rng, num_rows, num_samples):
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, num_samples))])
    return Ragged(rng.integers(0, num_rows, splits[-1]), splits, None)


def train_in_turns(made, together, spec, *, shares_memory, kept=()):
    """Batches of the usual size and others. Gradients come from the device, from the driver, and in a call of their
    own. Returns all activations, all rows, and the bytes that the meshes sent.

    Args:
      kept: steps whose activations the user keeps as they are; of the others a copy is left.
    """
    places = start_engines(made, together, spec, is_whole=True)
    others = [tuple(other for other in range(len(made)) if other != at) for at in range(len(made))]
    sent = []
    if shares_memory:
        assert together(lambda at: made[at].share_memory()) == others
    for host in made:
        host._mesh.begin = counted(host._mesh, sent)
    values = [DeviceValues(SharedValues.open(place.memory)) for place in places]
    rng, seen = np.random.default_rng(0), []
    for step, size in enumerate((NUM_SAMPLES, NUM_SAMPLES + 1, NUM_SAMPLES, NUM_SAMPLES, 5, NUM_SAMPLES, NUM_SAMPLES)):
        whole = [bags_of(rng, spec.tables[feature.table].num_rows, size) for feature in spec.features]
        shares = [split_bags(bags, size, len(made)) for bags in whole]

        def one(at, shares=shares, step=step):
            engine = ReplicaEngine(spec, calls_of(made[at]), values[at])
            own = tuple(bags[at] for bags in shares)
            engine.enqueue([Share(features=own, is_training=True)])
            (found,) = engine.dequeue(None)
            gradients = [[0.5 * array + at for array in found]]
            if step % 3 == 1:
                made[at].apply_gradients(gradients[0], [0.1, 0.2, 0.3], None)
            elif step % 3 == 2:
                ReplicaEngine(spec, calls_of(made[at]), values[at]).apply_gradients(gradients, [0.1, 0.2, 0.3], None)
            else:
                engine.apply_gradients(gradients, [0.1, 0.2, 0.3], None)
            engine.finish()
            return found if step in kept else [array.copy() for array in found]

        seen += together(one)
    together(lambda at: made[at].drain())
    rows = [made[at].read_buckets(table) for at in range(len(made)) for table in range(len(spec.tables))]
    for host in made:
        del host._mesh.begin
    together(lambda at: made[at].stop_engine())
    return seen, rows, sum(sent)


def counted(mesh, sent):
    """`mesh.begin`, with the number of bytes that it sends added to a list."""
    begin = mesh.begin

    def counting(**arguments):
        sent.append(sum(part.nbytes for parts in arguments["send"].values() for part in parts))
        begin(**arguments)

    return counting


@pytest.mark.parametrize("hosts", [2, 3], indirect=True)
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_hosts_that_share_memory_do_what_hosts_with_messages_do(hosts, is_pipelined):
    made, together = hosts
    spec = sized_spec(is_pipelined=is_pipelined)
    seen, rows, num_bytes = train_in_turns(made, together, spec, shares_memory=False)
    seen_in_memory, rows_in_memory, num_bytes_in_memory = train_in_turns(made, together, spec, shares_memory=True)
    assert num_bytes_in_memory < 0.8 * num_bytes
    require_same(seen, rows, seen_in_memory, rows_in_memory)


@pytest.mark.parametrize("hosts", [1, 2], indirect=True)
@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("kept", [(0, 2), (2, 3), range(7)], ids=str)
def test_activations_that_a_function_keeps_stay_as_they_are(hosts, is_pipelined, kept):
    made, together = hosts
    spec = sized_spec(is_pipelined=is_pipelined)
    shares_memory = len(made) > 1
    seen, rows, num_bytes = train_in_turns(made, together, spec, shares_memory=shares_memory)
    seen_kept, rows_kept, num_bytes_kept = train_in_turns(made, together, spec, shares_memory=shares_memory, kept=kept)
    require_same(seen, rows, seen_kept, rows_kept)
    # Other hosts send what they would otherwise leave in the memory that is still read.
    assert num_bytes_kept > num_bytes or not shares_memory


def require_same(seen, rows, seen_too, rows_too):
    for one, other in zip(seen, seen_too, strict=True):
        for array, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, same)
    for held, same in zip(rows, rows_too, strict=True):
        assert held.keys() == same.keys()
        for bucket, arrays in held.items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, same[bucket][name])


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_a_device_gets_the_batch_that_its_driver_did_not_wait_for(hosts):
    (host,), together = hosts
    spec = engine_spec()
    share = Share(features=tuple(batch(np.random.default_rng(0))), is_training=False)
    # The second engine counts from 1 again.
    for _ in range(2):
        (place,) = start_engines([host], together, spec)
        device = StepwiseDevice(PICKLED)
        device.join("unused by a gang of one", 1, 0, 5.0)
        device.attach(spec, place, 20.0)
        found = []

        def step(device=device, found=found):
            found.append(device.run_function(lambda: get_replica_context().engine.dequeue(None), (), {}, 1))

        running = threading.Thread(target=step)
        running.start()
        time.sleep(0.2)
        host.enqueue(share, 1)
        running.join(20.0)
        ((ran,),) = (found,)
        assert ran.has_room
        assert [array.shape for array in ran.value[0]] == [(NUM_SAMPLES, width) for width in (5, 3, 5, 3)]
        device.close()


def test_calls_out_of_order_are_refused_on_all_hosts_before_they_wait(hosts):
    made, together = hosts
    start_engines(made, together, engine_spec())

    def refused(at):
        with pytest.raises(OrderError):
            made[at].dequeue(None)
        return True

    assert together(refused) == [True, True]


def test_a_host_that_waits_says_for_whom(hosts):
    made, together = hosts
    start_engines(made, together, engine_spec())
    assert made[0].status().phase is Phase.IDLE
    share = Share(
        features=tuple(split_bags(bags, NUM_SAMPLES, 2)[0] for bags in batch(np.random.default_rng(0))),
        is_training=True,
    )
    said = []

    def look():
        while not made[0].status().waits_for:
            time.sleep(0.01)
        said.append(made[0].status())
        made[0]._mesh.abort("the test is over")

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(MeshAborted):
        made[0].enqueue(share)
    looking.join()
    assert (said[0].phase, said[0].waits_for) == (Phase.ID_EXCHANGE, (Worker("host", 1),))


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
            made[0]._mesh.exchange(
                tag=Tag.ROWS, step=1, send=[[], []], receive=lambda host, size: np.empty(size, np.uint8), timeout_s=20.0
            )
        else:
            made[1].enqueue(shares[1])

    with pytest.raises((MeshError, ValueError)):
        together(one_ahead)


class DirectLink:
    """Calls a host in the same process."""

    def __init__(self, host):
        self.host = host

    def begin(self, after, method, *arguments):
        return lambda: self.host.answer(after, method.__name__, arguments)


def calls_of(host):
    return HostLinkCalls(DirectLink(host), Tracker(), 0)


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_a_device_runs_functions_with_the_engine_of_its_host(hosts):
    made, together = hosts
    spec = engine_spec()
    start_engines(made, together, spec)
    device = StepwiseDevice(PICKLED)
    device.join("unused by a gang of one", 1, 0, 5.0)
    features = tuple(batch(np.random.default_rng(0)))

    said = []
    assert (device.status().phase, device.status().waits_for) == (Phase.BETWEEN, ())

    class TellingLink(DirectLink):
        def begin(self, after, method, *arguments):
            answer = super().begin(after, method, *arguments)

            def telling():
                said.append(device.status())
                return answer()

            return telling

    def step(scale, *, name):
        said.append(device.status())
        context = get_replica_context()
        engine = context.engine
        engine.enqueue([Share(features=features, is_training=True, name=name)])
        (activations,) = engine.dequeue(name)
        engine.apply_gradients([[scale * one for one in activations]], lambda step: [0.1 + step] * 3, name)
        context.state["calls"] = context.state.get("calls", 0) + 1
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.state["calls"]

    device.attach_to(spec, TellingLink(made[0]), None)
    assert device.run_function(step, (np.float32(0.5),), {"name": "n"}) == Ran((0, 1, 1), has_room=True)
    assert {(one.phase, one.waits_for) for one in said} == {
        (Phase.USER_FUNCTION, ()),
        (Phase.WAIT_FOR_HOST, (Worker("host", 0),)),
    }
    device.attach_to(spec, DirectLink(made[0]), None)
    assert device.run_function(step, (np.float32(0.5),), {"name": "n"}) == Ran((0, 1, 2), has_room=True)
    assert get_replica_context() is None
    assert made[0].metrics().learning_rates == (1.1, 1.1, 1.1)
    engine = ReplicaEngine(spec, calls_of(made[0]))
    for call in (engine.read_tables, lambda: engine.save("x"), lambda: engine.restore("x"), engine.close):
        with pytest.raises(RuntimeError, match="Expected a call on the driver"):
            call()
    device.detach()
    assert device.run_function(lambda: get_replica_context().engine, (), {}) == Ran(None, has_room=None)
    device.close()


class SlowLink(DirectLink):
    """Writes down when a call began, and when somebody waited for its answer."""

    def __init__(self, host):
        super().__init__(host)
        self.log = []

    def begin(self, after, method, *arguments):
        self.log.append(f"begin {method.__name__}")
        answer = super().begin(after, method, *arguments)

        def wait():
            self.log.append(f"wait {method.__name__}")
            return answer()

        return wait


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_a_function_goes_on_beside_an_update_that_cannot_be_refused(hosts):
    made, together = hosts
    spec = sized_spec(is_pipelined=False)
    (place,) = start_engines(made, together, spec)
    device, link = StepwiseDevice(PICKLED), SlowLink(made[0])
    device.join("unused by a gang of one", 1, 0, 5.0)
    device.attach_to(spec, link, SharedValues.open(place.memory))
    rng = np.random.default_rng(0)
    own = tuple(bags_of(rng, spec.tables[feature.table].num_rows, NUM_SAMPLES) for feature in spec.features)

    def step(*, name, num_steps=1):
        engine = get_replica_context().engine
        for _ in range(num_steps):
            engine.enqueue([Share(features=own, is_training=True)])
            (found,) = engine.dequeue(None)
            engine.apply_gradients([found], [0.1, 0.2, 0.3], name)
            link.log.append("goes on")

    device.run_function(step, (), {"name": None, "num_steps": 2})
    begin_update, wait_for_update = "begin apply_placed", "wait apply_placed"
    own_calls = [line for line in link.log if "apply" in line or line in ("goes on", "begin enqueue")]
    one = ["begin enqueue", begin_update, "goes on", wait_for_update]
    assert own_calls == one + one
    assert made[0].metrics().num_steps == 2
    # Under a name that the host does not wait for, the refusal is raised where the function can see it.
    link.log.clear()
    with pytest.raises(OrderError, match="name='other'"):
        device.run_function(step, (), {"name": "other"})
    assert link.log[-2:] == [begin_update, wait_for_update]
    device.close()


@pytest.mark.parametrize("hosts", [1], indirect=True)
def test_an_update_that_fails_fails_the_function(hosts):
    made, together = hosts
    spec = sized_spec(is_pipelined=False)
    (place,) = start_engines(made, together, spec)
    device = StepwiseDevice(PICKLED)
    device.join("unused by a gang of one", 1, 0, 5.0)
    device.attach_to(spec, DirectLink(made[0]), SharedValues.open(place.memory))
    own = tuple(bags_of(np.random.default_rng(0), 30, NUM_SAMPLES) for _ in spec.features)

    def step(error):
        engine = get_replica_context().engine
        engine.enqueue([Share(features=own, is_training=True)])
        (found,) = engine.dequeue(None)
        engine.apply_gradients([found], [0.1], None)
        if error is not None:
            raise error

    with pytest.raises(IndexError):
        device.run_function(step, (None,), {})
    made[0].discard()
    with pytest.raises(KeyError, match="mine"):
        device.run_function(step, (KeyError("mine"),), {})
    device.close()


def test_hosts_without_an_engine_say_so():
    host = StepwiseHost(PICKLED)
    with pytest.raises(RuntimeError, match="no engine"):
        host.drain()
    with pytest.raises(RuntimeError, match="before start"):
        host.connect([], 1.0)
    host.close()


def test_host_engines_on_two_placements_start_with_the_same_rows():
    spec = engine_spec()
    whole = InProcessEngine(spec).read_tables()
    placement = [np.arange(t.layout.num_buckets, dtype=np.int32) % 3 for t in spec.tables]
    for host in range(3):
        engine = HostEngine(spec, LookupSteps(spec.lookups(placement, host=host, num_hosts=3), SingleHost()))
        engine.initialize()
        for table, arrays in zip(engine.tables, whole, strict=True):
            for bucket in table.buckets:
                own = arrays["rows"][bucket :: table.spec.layout.num_buckets]
                np.testing.assert_array_equal(table.bucket(int(bucket))["rows"][: len(own)], own)
