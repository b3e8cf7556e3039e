"""`PodStrategy` over Ray: what only several hosts show. What holds for every strategy is in `tests/conformance`."""

import importlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import Constant
from podembed.embedding.optimizers import SGD, Adagrad
from podembed.embedding.ragged import Ragged
from podembed.embedding.tf.keras.reducer import default_gradient_reducer
from podembed.embedding.tf.replicas.per_replica import PerReplica
from podembed.embedding.tf.replicas.replica_context import get_replica_context
from podembed.embedding.tf.replicas.strategies import LocalStrategy
from podembed.embedding.tf.tpu_embedding.checkpoint import Checkpoint, latest_checkpoint
from podembed.embedding.tf.tpu_embedding.embedding import TPUEmbedding
from podembed.embedding.tf.tpu_embedding.send_gradients import send_tpu_embedding_gradients
from podembed.orchestrator.group import watch
from podembed.orchestrator.stepwise.pod import PodLost
from podembed.orchestrator.stepwise.strategy import PodStrategy
from podembed.workers.checkpoint.chunks import ChunkDamaged
from podembed.workers.liveness.process_statistics import read_statistics
from podembed.workers.stepwise.host import StepwiseHost
from podembed.workers.stepwise.saved_index import AlreadySaved, NothingSaved
from tests.long_tests import is_long

pytestmark = pytest.mark.ray


@pytest.fixture
def strategy(pod_strategy):
    return pod_strategy


def declared(num_rows=40_000, dim=8):
    """One table of several buckets, so that both hosts own a part."""
    table = TableConfig(num_rows, dim, name="t", combiner="sum")
    return {"x": FeatureConfig(table), "s": FeatureConfig(table, max_sequence_length=2)}, table


@pytest.fixture
def make(strategy):
    made = []

    def make(*arguments, **keywords):
        with strategy.scope():
            made.append(TPUEmbedding(*arguments, **keywords))
        return made[-1]

    yield make
    for embedding in made:
        embedding.close()


def batch(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 40_000, rng.integers(0, 4)).tolist() for _ in range(num_samples)]
    return {"x": rng.integers(0, 40_000, num_samples), "s": Ragged.of_lists(rows)}


def local(config, *arguments, **keywords):
    with LocalStrategy().scope():
        return TPUEmbedding(config, *arguments, **keywords)


@pytest.mark.parametrize("num_samples", [4, 5, 1])
def test_batches_need_not_divide_by_the_hosts(make, strategy, num_samples):
    config, table = declared()
    pod, alone = make(config, num_samples, Adagrad(0.1)), local(config, num_samples, Adagrad(0.1))
    for embedding in (pod, alone):
        embedding.enqueue(batch(num_samples))
    expected, found = alone.dequeue(), pod.dequeue()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    alone.apply_gradients(expected)
    pod.apply_gradients(found)
    for embedding in (pod, alone):
        embedding.enqueue(batch(num_samples, 1))
    expected = alone.dequeue()
    alone.apply_gradients(expected)

    def step():
        activations = pod.dequeue()
        with pytest.raises(ValueError, match="Found gradient of shape"):
            pod.apply_gradients(jax.tree.map(lambda leaf: jnp.zeros((7, *leaf.shape[1:])), activations))
        pod.apply_gradients(activations)
        return jax.tree.map(np.asarray, activations)

    shares = strategy.run(step).values
    assert [len(share["x"]) for share in shares] == [-(-num_samples // 2), num_samples // 2]
    for name, value in expected.items():
        np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), value)
    rows, expected_rows = pod.read_tables()[table], alone.read_tables()[table]
    for name, values in expected_rows.items():
        np.testing.assert_allclose(rows[name], values, rtol=1e-5, atol=1e-6)


def test_both_hosts_hold_a_part(make, strategy):
    config, _ = declared(num_rows=100_000)
    make(config, 4, SGD(0.1))
    held = strategy._pod.ask_hosts(lambda at, host: host.call(StepwiseHost.read_buckets, 0))
    assert all(held)
    assert not set(held[0]) & set(held[1])


def test_a_replica_may_enqueue_its_own_share(make, strategy):
    config, table = declared()
    pod, alone = make(config, 4, SGD(0.5)), local(config, 4, SGD(0.5))
    whole, halves = batch(4), (batch(2, 1), batch(2, 2))

    def step(features):
        pod.enqueue(features)
        activations = pod.dequeue()
        pod.apply_gradients(activations)
        with pytest.raises(RuntimeError, match="without an enqueued"):
            pod.dequeue()
        with pytest.raises(RuntimeError, match="on the driver"):
            pod.read_tables()
        with pytest.raises(ValueError, match="Inconsistent shape"):
            pod.enqueue({**features, "x": np.arange(3)})
        with pytest.raises(ValueError, match="id 40000"):
            pod.enqueue({**features, "x": np.array([0, 40_000])})
        return jax.tree.map(np.asarray, activations)

    results = strategy.run(step, args=(PerReplica(halves),))
    together = {
        "x": np.concatenate([half["x"] for half in halves]),
        "s": Ragged.of_lists([row for half in halves for row in half["s"].to_lists()]),
    }
    alone.enqueue(together)
    activations = alone.dequeue()
    for name, value in activations.items():
        np.testing.assert_array_equal(np.concatenate([result[name] for result in results.values]), value)
    alone.apply_gradients(activations)
    np.testing.assert_allclose(
        pod.read_tables()[table]["rows"], alone.read_tables()[table]["rows"], rtol=1e-5, atol=1e-6
    )
    # The same values as parts of a batch on the driver.
    taken_apart = {name: PerReplica(tuple(half[name] for half in halves)) for name in ("x", "s")}
    pod.enqueue(taken_apart, training=False)
    assert pod.dequeue()["s"].shape == (4, 2, 8)
    pod.enqueue(whole, training=False)
    pod.dequeue()


def test_shares_of_an_uneven_batch_can_be_enqueued_in_replicas(make, strategy):
    config, _ = declared()
    embedding = make(config, 5, SGD(0.5))

    def step(features):
        embedding.enqueue(features)
        activations = embedding.dequeue()
        embedding.apply_gradients(activations)
        return activations["x"].shape, activations["s"].shape

    shapes = strategy.run(step, args=(strategy.split(batch(5)),)).values
    assert shapes == (((3, 8), (3, 2, 8)), ((2, 8), (2, 2, 8)))


def test_gradients_may_come_in_a_run_of_their_own(make, strategy):
    config, _ = declared()
    embedding = make(config, 5, SGD(0.5))
    # What the driver dequeued before has no meaning for a replica.
    embedding.enqueue(batch(5), training=False)
    embedding.dequeue()
    embedding.enqueue(batch(5))
    activations = strategy.run(embedding.dequeue)
    strategy.run(embedding.apply_gradients, args=(activations,))
    assert embedding.metrics.num_steps == 1


def test_the_gang_of_devices_can_sum_over_replicas(make, strategy):
    def total(value):
        from podembed.embedding.tf.keras.reducer import default_gradient_reducer

        (summed,) = default_gradient_reducer().sum([jnp.asarray(value)])
        return float(summed[0]), jax.process_count()

    assert (
        strategy.run(total, args=(PerReplica((np.ones(1, np.float32), np.full(1, 2.0, np.float32))),)).values
        == ((3.0, 2),) * 2
    )
    assert strategy.run(lambda *, scale: scale, kwargs={"scale": 3}).values == (3, 3)
    assert strategy.local_results(5) == (5,)


def test_errors_of_a_function_keep_their_type_and_the_strategy_goes_on(make, strategy):
    config, _ = declared()
    embedding = make(config, 4, SGD(0.1))

    def broken():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        strategy.run(broken)
    # Not in Ray's wrapping, whose report with the remote traceback is the cause.
    assert type(raised.value) is KeyError
    assert raised.value.args == ("mine",)
    assert "in broken" in str(raised.value.__cause__)
    with pytest.raises(TwoParts, match="3: mine") as raised:
        strategy.run(raise_two_parts)
    assert raised.value.code == 3
    with pytest.raises(RuntimeError, match="without an enqueued training batch"):
        strategy.run(lambda: embedding.apply_gradients({"x": None, "s": None}))
    embedding.enqueue(batch(4), training=False)
    embedding.dequeue()


class TwoParts(Exception):
    """Pickle cannot make it again from its `args`."""

    def __init__(self, code, why):
        super().__init__(f"{code}: {why}")
        self.code = code


def raise_two_parts():
    raise TwoParts(3, "mine")


def test_a_damaged_file_is_named_and_costs_no_tables(make, tmp_path):
    path = tmp_path / "saved"
    config, _ = declared()
    embedding = make(config, 4, SGD(0.1))
    embedding.save(str(path))
    chunk = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ChunkDamaged, match="CRC-32C"):
        embedding.restore(str(path))
    embedding.enqueue(batch(4), training=False)
    embedding.dequeue()


def test_hosts_find_modules_in_folders_that_the_program_put_on_its_path(strategy, far_away):
    assert strategy.run(importlib.import_module(far_away).answer).values == (42, 42)


def test_a_function_may_hold_the_interpreter_and_sleep(strategy, monkeypatch):
    """Longer than a process of a run may be silent."""
    monkeypatch.setattr(watch, "SILENCE_S", 1.0)

    def sleep():
        import ctypes

        ctypes.PyDLL(None).sleep(4)
        return "awake"

    assert strategy.run(sleep).values == ("awake", "awake")


# make test stops a host beside a batch that hosts have room for, below.
@is_long
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_process_that_is_stopped_is_found_named_and_ended(ray_cluster, kind):
    config, _ = declared()
    # So long is waited where it is not noticed.
    with PodStrategy(num_hosts=2, step_timeout_s=600.0, run_timeout_s=600.0) as strategy:
        with strategy.scope():
            embedding = TPUEmbedding(config, 4, SGD(0.1))
        embedding.enqueue(batch(4), training=False)
        embedding.dequeue()
        actors = [handle.actor for pair in strategy._pod.handles for handle in (pair.host, pair.device)]
        processes = [process for _, process in ray.get([actor.identity.remote() for actor in actors], timeout=300.0)]
        frozen = processes[2 if kind == "host" else 3]

        def step(features):
            if get_replica_context().replica_id_in_sync_group == 1:
                os.kill(frozen, signal.SIGSTOP)
            embedding.enqueue(features)
            return embedding.dequeue()["x"].shape

        with pytest.raises(PodLost, match=f"{kind} 1 hung: .*stopped by a signal.*the process is frozen"):
            strategy.run(step, args=(strategy.split(batch(4)),))
        # Before the strategy is closed.
        assert not [process for process in processes if read_statistics(process) is not None]
        with pytest.raises(PodLost, match=f"{kind} 1"):
            embedding.dequeue()


# make test kills a host between two batches, and a device process between two functions.
@is_long
def test_a_host_that_is_lost_while_functions_run_is_named(ray_cluster):
    config, _ = declared()
    # So long is waited where the loss is not noticed.
    with PodStrategy(num_hosts=2, step_timeout_s=600.0, run_timeout_s=600.0) as strategy:
        with strategy.scope():
            embedding = TPUEmbedding(config, 4, SGD(0.1))
        _, process = ray.get(strategy._pod.handles[1].host.actor.identity.remote(), timeout=300.0)

        def step(features):
            if get_replica_context().replica_id_in_sync_group == 1:
                os.kill(process, signal.SIGKILL)
            embedding.enqueue(features)

        with pytest.raises(PodLost, match="lost its tables: host 1 died"):
            strategy.run(step, args=(strategy.split(batch(4)),))


def test_the_driver_goes_on_beside_a_batch_that_hosts_have_room_for(ray_cluster):
    config, table = declared()
    alone = local(config, 4, SGD(0.5))
    with PodStrategy(num_hosts=2, step_timeout_s=600.0) as strategy:
        with strategy.scope():
            embedding = TPUEmbedding(config, 4, SGD(0.5))

        def step():
            embedding.apply_gradients(embedding.dequeue())

        for seed in range(4):
            embedding.enqueue(batch(4, seed))
            alone.enqueue(batch(4, seed))
            alone.apply_gradients(alone.dequeue())
            if seed == 2:
                # One that nobody has room for is refused where it is made, and costs nothing.
                with pytest.raises(RuntimeError, match="earlier batch is in flight"):
                    embedding.enqueue(batch(4))
            strategy.run(step)
        rows = embedding.read_tables()[table]["rows"]
        np.testing.assert_allclose(rows, alone.read_tables()[table]["rows"], rtol=1e-5, atol=1e-6)
        processes = [pair.host.actor.identity.remote() for pair in strategy._pod.handles]
        _, process = ray.get(processes, timeout=300.0)[1]
        os.kill(process, signal.SIGSTOP)
        embedding.enqueue(batch(4))
        with pytest.raises(PodLost, match="host 1 hung: .*the process is frozen"):
            strategy.run(step)


@pytest.mark.parametrize("number", [pytest.param(0, marks=is_long), 1])
def test_of_the_device_processes_the_one_that_was_killed_is_named(ray_cluster, number):
    """The first one coordinates the gang: when it is gone, JAX ends the others before the next call."""
    with PodStrategy(num_hosts=2, step_timeout_s=600.0) as strategy:
        assert strategy.run(jax.process_count).values == (2, 2)
        actors = [pair.device.actor for pair in strategy._pod.handles]
        processes = [process for _, process in ray.get([actor.identity.remote() for actor in actors], timeout=300.0)]
        os.kill(processes[number], signal.SIGKILL)
        deadline = time.monotonic() + 20.0
        # The end of another one is noticed when its heartbeats are missed, a minute and more later.
        while number == 0 and time.monotonic() < deadline and read_statistics(processes[1]) is not None:
            time.sleep(0.1)
        with pytest.raises(PodLost, match=f"lost its tables: device {number} died: "):
            strategy.run(jax.process_count)


def test_an_unbuilt_embedding_cannot_be_built_inside_a_function(make, strategy):
    config, _ = declared()
    embedding = make(config, optimizer=SGD(0.1))
    with pytest.raises(RuntimeError, match="built inside a function"):
        strategy.run(lambda: embedding.enqueue(batch(2)))
    embedding.enqueue(batch(4), training=False)
    # Half of what the first batch had.
    assert strategy.run(lambda: embedding.dequeue()["x"].shape).values == ((2, 8), (2, 8))


def test_gradients_can_be_sent_from_driver_and_replicas(make, strategy):
    config, table = declared()
    pod, alone = make(config, 4, SGD(0.5)), local(config, 4, SGD(0.5))
    for from_replicas in (False, True):
        for embedding in (pod, alone):
            embedding.enqueue(batch(4))
        expected = alone.dequeue()
        alone.apply_gradients(expected)
        if from_replicas:
            # What the engine was started with does not change, so a replica can be told beforehand.
            strategy.run(
                lambda config: send_tpu_embedding_gradients(jax.tree.leaves(pod.dequeue()), [], config),
                args=(pod.serialized_config,),
            )
        else:
            send_tpu_embedding_gradients(jax.tree.leaves(pod.dequeue()), [], pod.serialized_config)
    np.testing.assert_allclose(
        pod.read_tables()[table]["rows"], alone.read_tables()[table]["rows"], rtol=1e-5, atol=1e-6
    )


def test_replicas_cannot_send_different_rates_nor_update_alone(make, strategy):
    table = TableConfig(40_000, 8, name="t", combiner="sum", optimizer=SGD(lambda: 0.5))
    embedding = make([FeatureConfig(table)], 4)
    before = embedding.read_tables()[table]["rows"]

    def send(config, rates):
        (activations,) = embedding.dequeue()
        send_tpu_embedding_gradients([jnp.ones_like(activations)], [np.float32(rates)], config)

    def update(of_replicas):
        activations = embedding.dequeue()
        if get_replica_context().replica_id_in_sync_group in of_replicas:
            embedding.apply_gradients(jax.tree.map(jnp.ones_like, activations))

    for kind, message, function, arguments in (
        (ValueError, r"by replica: {0: \[1.0\], 1: \[2.0\]}", send, (embedding.serialized_config, PerReplica((1, 2)))),
        (RuntimeError, r"ended on replicas \[0\]", update, ([1],)),
    ):
        embedding.enqueue([np.arange(4)])
        with pytest.raises(kind, match=message):
            strategy.run(function, args=arguments)
        embedding.discard()
    assert np.array_equal(embedding.read_tables()[table]["rows"], before)
    # Nothing was lost: both ways of an update go on.
    embedding.enqueue([np.arange(4)])
    strategy.run(send, args=(embedding.serialized_config, 0.25))
    embedding.enqueue([np.arange(4)])
    strategy.run(update, args=([0, 1],))
    moved = before - embedding.read_tables()[table]["rows"]
    np.testing.assert_allclose(moved[:4], 0.75, rtol=1e-5)


def test_a_function_that_waits_for_a_rate_is_ended_by_the_next_one(make, strategy):
    interrupts = [KeyboardInterrupt()]

    def rate():
        if interrupts:
            raise interrupts.pop()
        return 0.5

    table = TableConfig(40_000, 8, name="t", combiner="sum", optimizer=SGD(rate))
    embedding = make([FeatureConfig(table)], 4)

    def step():
        state = get_replica_context().state
        activations = embedding.dequeue()
        try:
            embedding.apply_gradients(jax.tree.map(jnp.ones_like, activations))
        except BaseException as error:
            state["ended by"] = type(error).__name__
            raise
        return state.pop("ended by", None)

    embedding.enqueue([np.arange(4)])
    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    embedding.discard()
    embedding.enqueue([np.arange(4)])
    assert strategy.run(step).values == ("FunctionGivenUp",) * 2
    assert embedding.metrics.num_steps == 1


def test_written_by_two_hosts_read_by_one_and_by_none(make, tmp_path):
    path = str(tmp_path / "saved")
    config, table = declared()
    pod = make(config, 4, Adagrad(0.1), True)
    for step in range(3):
        pod.enqueue(batch(4, step))
        pod.apply_gradients(pod.dequeue())
    pod.save(path)
    expected = pod.read_tables()[table]
    with pytest.raises(AlreadySaved):
        pod.save(path)
    with pytest.raises(NothingSaved):
        pod.restore(str(tmp_path / "other"))
    alone = local(config, 4, Adagrad(0.1))
    alone.restore(path)
    for name, values in expected.items():
        np.testing.assert_array_equal(alone.read_tables()[table][name], values)
    outside = TPUEmbedding(config)
    outside.restore(path)
    np.testing.assert_array_equal(outside.embedding_tables[table].value, expected["rows"])
    # And back: what one process writes, two hosts read.
    back = str(tmp_path / "back")
    outside.save(back)
    pod.enqueue(batch(4))
    pod.apply_gradients(pod.dequeue())
    pod.restore(back)
    for name, values in expected.items():
        np.testing.assert_array_equal(pod.read_tables()[table][name], values)
    assert pod.metrics.num_steps == 3


def test_a_checkpoint_of_two_hosts_goes_on_in_one_process_and_back(make, strategy, tmp_path):
    config, table = declared()

    def step():
        state = get_replica_context().state
        kernel = state.get("trained here", jnp.zeros(8))
        activations = pod.dequeue()
        pod.apply_gradients(jax.tree.map(jnp.ones_like, activations))
        (total,) = default_gradient_reducer().sum([jnp.sum(activations["x"], axis=0)])
        state["trained here"] = kernel + total
        return state["trained here"]

    def put(kernel):
        get_replica_context().state["trained here"] = kernel

    pod = make(config, 4, Adagrad(0.1))
    for number in range(2):
        pod.enqueue(batch(4, number))
        kernels = strategy.run(step)
    checkpoint = Checkpoint(model=kernels, embedding=pod, step=2)
    path = checkpoint.save(tmp_path)
    expected = pod.read_tables()[table]
    alone = local(config, 4, Adagrad(0.1))
    restored = Checkpoint(model=jnp.zeros(8), embedding=alone, step=0).restore(path)
    np.testing.assert_array_equal(restored["model"], kernels.values[0])
    for name, values in expected.items():
        np.testing.assert_array_equal(alone.read_tables()[table][name], values)
    assert (restored["step"], alone.metrics.num_steps) == (2, 2)
    # And back: what one process saved, two hosts go on from.
    back = Checkpoint(model=restored["model"], embedding=alone, step=2).save(tmp_path)
    pod.enqueue(batch(4, 5))
    strategy.run(step)
    again = checkpoint.restore(back)
    strategy.run(put, args=(again["model"],))
    for name, values in expected.items():
        np.testing.assert_array_equal(pod.read_tables()[table][name], values)
    assert latest_checkpoint(tmp_path) == back
    # Replicas that went different ways cannot be one model.
    apart = strategy.run(
        lambda: get_replica_context().state["trained here"] + get_replica_context().replica_id_in_sync_group
    )
    with pytest.raises(ValueError, match="different values at 'model' of replicas 0 and 1"):
        Checkpoint(model=apart).save(tmp_path)


def test_one_host_returns_plain_values_and_its_loss_is_reported_at_once_and_for_good(ray_cluster):
    config, _ = declared()
    # So long is waited where the loss is not noticed.
    with PodStrategy(num_hosts=1, step_timeout_s=600.0) as strategy:
        with strategy.scope():
            embedding = TPUEmbedding(config, 4, SGD(0.1))
        embedding.enqueue(batch(4), training=False)
        assert strategy.run(lambda: embedding.dequeue()["x"].shape) == (4, 8)
        (pair,) = strategy._pod.handles
        _, process = ray.get(pair.host.actor.identity.remote(), timeout=300.0)
        os.kill(process, signal.SIGKILL)
        started = time.monotonic()

        def step():
            embedding.enqueue(batch(4))
            embedding.dequeue()

        with pytest.raises(PodLost, match="restore what was saved last"):
            step()
        assert time.monotonic() - started < 200.0
        with pytest.raises(PodLost, match="lost its tables"):
            embedding.dequeue()


def test_interrupted_at_random_moments_it_goes_on_from_a_step_that_counts_or_does_not(
    pod_strategy: PodStrategy,
) -> None:
    """Ctrl-C in loops of `run` and of the driver: after `discard` the tables are those of so many whole steps."""
    table = TableConfig(64, 4, name="t", initializer=Constant(0.5))
    local = LocalStrategy()
    embeddings = []
    for strategy in (pod_strategy, local):
        with strategy.scope():
            embeddings.append(TPUEmbedding(FeatureConfig(table), 8, Adagrad(0.25)))
    pod, alone = embeddings

    def ids(step: int) -> np.ndarray:
        return np.random.default_rng(step).integers(0, 64, 8)

    def gradient(step: int) -> np.ndarray:
        return np.random.default_rng(1000 + step).integers(-4, 5, (8, 4)).astype(np.float32)

    def on_driver(embedding: TPUEmbedding, step: int) -> None:
        embedding.enqueue(ids(step))
        embedding.dequeue()
        embedding.apply_gradients(jnp.asarray(gradient(step)))

    def in_run(embedding: TPUEmbedding, step: int) -> None:
        def take(of_replica: np.ndarray) -> None:
            embedding.dequeue()
            embedding.apply_gradients(jnp.asarray(of_replica))

        embedding.enqueue(ids(step))
        pod_strategy.run(take, (pod_strategy.split(gradient(step)),))

    def check() -> int:
        count = pod.metrics.num_steps
        while (step := alone.metrics.num_steps) < count:
            on_driver(alone, step)
        assert alone.metrics.num_steps == count
        found, expected = pod.read_tables()[table], alone.read_tables()[table]
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
        return count

    def loop(do: Callable[[TPUEmbedding, int], None], step: int, timer: threading.Timer) -> None:
        timer.start()
        until = time.monotonic() + 60.0
        for later in itertools.count(step):
            do(pod, later)
            if time.monotonic() > until:
                # Python swallows an interrupt that strikes in a finalizer.
                raise KeyboardInterrupt

    rng = random.Random(49)
    main = threading.main_thread().ident
    # A shell ignores the signal for what it starts in the background, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        in_run(pod, 0)
        for attempt in range(12):
            do = (in_run, on_driver)[attempt % 2]
            step = check()
            timer = threading.Timer(rng.random() * 0.2, signal.pthread_kill, (main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                loop(do, step, timer)
            pod.discard()
            step = check()
            for later in range(step, step + 3):
                do(pod, later)
            assert check() == step + 3
    finally:
        signal.signal(signal.SIGINT, before)
        pod.close()
        alone.close()
