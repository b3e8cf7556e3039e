"""The same training whatever the number of hosts, the cuts and the faults: losses, bytes, and how often each sample was
seen.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from podembed.embedding.initializers import row_source
from podembed.embedding.kernels import threads as thread_rules
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, MetricsConfig, RunConfig, ScalingConfig
from podembed.orchestrator.api.result import Result
from podembed.orchestrator.cluster import ray_calls
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.commit.run_record import RunMismatch, read_run
from podembed.orchestrator.events.event import Event
from podembed.orchestrator.events.progress import WindowReport
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.orchestrator.events.tracing import TraceWritten
from podembed.workers.input.index import build_index
from podembed.workers.input.lengths import bag_lengths
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.input.sources import job_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, cut_ways, table_specs
from podembed.workers.liveness.progress import Phase
from podembed.workers.storage.store import Store
from tests.long_tests import is_long
from tests.processes import actor_processes
from tests.run_state import assert_same_bytes, committed_state
from tests.small_job import BATCH_SIZE, NUM_ROWS, small_job
from tests.tools.tracing.reading import Slice, read_trace

NUM_STEPS = 50
COMMIT_EVERY = 10
PATIENCE_S = 600.0


def train_small(
    folder: str,
    tmp_path: Path,
    name: str,
    *,
    num_hosts: int,
    in_process: bool = False,
    threads: int = 1,
    max_steps: int = NUM_STEPS,
    full_every: int = 1,
    reporter: SilentReporter | None = None,
    trace: str | None = None,
    job: str = "tests.small_job:small_job",
    **options: Any,
) -> Result:
    """`options` are arguments of the small job."""
    trainer = Trainer(
        JobReference(function=job, arguments={"folder": folder, **options}),
        scaling_config=ScalingConfig(num_hosts=num_hosts, threads_per_host=threads, in_process=in_process),
        run_config=RunConfig(
            name=name,
            storage_path=str(tmp_path),
            max_steps=max_steps,
            checkpoint_config=CheckpointConfig(every_steps=COMMIT_EVERY, full_every=full_every),
            metrics_config=MetricsConfig(trace=trace),
        ),
        reporter=reporter or SilentReporter(),
    )
    return trainer.fit()


def _losses(result: Result) -> np.ndarray:
    assert sorted(result.losses) == list(range(NUM_STEPS))
    return np.array([result.losses[step] for step in range(NUM_STEPS)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_host(small_data: str, runs: Path) -> Result:
    """The run without Ray, in this process."""
    return train_small(small_data, runs, "one", num_hosts=1, in_process=True)


class PlainJax:
    """The same job as one would write it without us: dense tables, `jax.grad` through a gather, optax for the dense
    half.

    With staleness 1 a step sees the tables as they are before the update of the step before, unless `drain` was called
    in between. Those on devices are never stale.
    """

    def __init__(self, job: JobConfig) -> None:
        self.job = job
        self.specs = table_specs(job, choose_buckets(job))
        self.tables, self.slots = [], []
        for spec in self.specs:
            rows = np.empty((spec.num_rows, spec.dim), np.float32)
            every = np.arange(spec.num_rows)
            fill = row_source(
                spec.initializer, seed=spec.seed, table_name=spec.name, num_rows=spec.num_rows, dim=spec.dim
            )
            fill(every, rows)
            self.tables.append(jnp.asarray(rows))
            optimizer = spec.optimizer
            assert optimizer is not None
            self.slots.append(
                [jnp.full((spec.num_rows, slot.columns(spec.dim)), slot.initial_value) for slot in optimizer.slots]
            )
        self.params = job.model.init(jax.random.key(job.seed), 2, job.widths)
        assert job.dense_optimizer is not None
        self.state = job.dense_optimizer.init(self.params)
        self.waiting: tuple[Any, list[np.ndarray]] | None = None

    def step(self, batch) -> float:
        stale = list(self.tables)
        self.drain()
        places = zip(self.job.tables, self.tables, stale, strict=True)
        seen = [now if table.is_on_devices else before for table, now, before in places]
        loss, (dense, rows) = self._gradients(self.params, seen, self._arrays(batch))
        assert self.job.dense_optimizer is not None
        updates, self.state = self.job.dense_optimizer.update(dense, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        touched = [np.zeros((spec.num_rows, 1), bool) for spec in self.specs]
        for name, feature in self.job.features.items():
            touched[self.job.tables.index(feature.table)][batch.features[name].values] = True
        self.waiting = rows, touched
        if not self.job.staleness:
            self.drain()
        return float(loss)

    def _arrays(self, batch) -> Any:
        """A batch, whose ids are as many as a round number: JAX compiles for each shape."""
        bags = {}
        for name in self.job.features:
            ragged = batch.features[name]
            bag = np.repeat(np.arange(ragged.num_samples), np.diff(ragged.row_splits))
            length = np.maximum(np.diff(ragged.row_splits), 1).astype(np.float32)[:, None]
            # One bag more takes what is there up to that number.
            spare = -len(bag) % 256
            bag = np.pad(bag, (0, spare), constant_values=ragged.num_samples)
            bags[name] = np.pad(ragged.values, (0, spare)), bag, length
        return bags, batch.dense, batch.labels, batch.weights

    @functools.cached_property
    def _gradients(self) -> Any:
        def loss_of(params, tables, arrays):
            bags, features, labels, weights = arrays
            activations = {}
            for name, feature in self.job.features.items():
                ids, bag, length = bags[name]
                table = tables[self.job.tables.index(feature.table)]
                total = jax.ops.segment_sum(table[ids], bag, len(length) + 1)[:-1]
                combiner = feature.combiner or feature.table.combiner
                activations[name] = total / {"sum": 1.0, "mean": length, "sqrtn": jnp.sqrt(length)}[combiner]
            logits = self.job.model.apply(params, features, activations)
            loss = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
            return (loss * weights).sum() / weights.sum()

        # As one program: operations one by one are compiled one by one.
        return jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))

    def drain(self) -> None:
        """Applies the update that still waits."""
        if self.waiting is None:
            return
        for at, (spec, gradient, touched) in enumerate(zip(self.specs, *self.waiting, strict=True)):
            new, slots = self._updated(spec, self.tables[at], self.slots[at], gradient)
            self.tables[at] = jnp.where(touched, new, self.tables[at])
            self.slots[at] = [jnp.where(touched, n, o) for n, o in zip(slots, self.slots[at], strict=True)]
        self.waiting = None

    @staticmethod
    def _updated(spec, table, slots, g):
        optimizer = spec.optimizer
        rate = optimizer.learning_rate
        match type(optimizer).__name__:
            case "SGD":
                return table - rate * g, []
            case "Adagrad":
                a = slots[0] + g * g
                return table - rate * g / jnp.sqrt(a), [a]
            case "RowWiseAdagrad":
                a = slots[0] + (g * g).mean(axis=1, keepdims=True)
                return table - rate * g / (jnp.sqrt(a) + optimizer.epsilon), [a]
            case "Adam":
                m = optimizer.beta_1 * slots[0] + (1 - optimizer.beta_1) * g
                v = optimizer.beta_2 * slots[1] + (1 - optimizer.beta_2) * g * g
                return table - rate * m / jnp.sqrt(v + optimizer.epsilon**2), [m, v]
        raise AssertionError(optimizer)


def test_one_host_equals_plain_jax(one_host: Result, small_data: str, runs: Path) -> None:
    job = small_job(folder=small_data)
    index = build_index(job.resolved_data)
    plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
    reader = InputReader(job.resolved_data, index, plan, range(job.num_lanes))
    plain = PlainJax(job)
    expected = [plain.step(reader.read(step)) for step in range(NUM_STEPS)]
    np.testing.assert_allclose(_losses(one_host), expected, rtol=1e-5)
    state = committed_state(one_host.path)
    for spec, table in zip(plain.specs, plain.tables, strict=True):
        if spec.name == "audit":
            continue  # its gradient is defined by hand, per sample and not per mean; the resume test checks it
        np.testing.assert_allclose(state[f"{spec.name}/rows"], table, rtol=2e-4, atol=2e-5)


def test_several_threads_change_no_byte(
    one_host: Result, small_data: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the dense half keeps to its one thread, whose products would have other bits with several."""
    monkeypatch.setattr(thread_rules, "_MIN_SHARED", 0)
    monkeypatch.setattr(thread_rules, "_MIN_PART", 1)
    result = train_small(small_data, runs, "threads", num_hosts=1, in_process=True, threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kernels-")]
    np.testing.assert_array_equal(_losses(result), _losses(one_host))
    assert_same_bytes(committed_state(result.path), committed_state(one_host.path))


@pytest.mark.ray
def test_two_hosts_have_the_losses_of_one(one_host: Result, two_hosts: Result) -> None:
    np.testing.assert_allclose(_losses(two_hosts), _losses(one_host), rtol=1e-5)


# make test goes from two hosts to three and on to one, below.
@is_long
@pytest.mark.ray
def test_three_hosts_have_the_losses_of_one(one_host: Result, ray_cluster: None, small_data: str, runs: Path) -> None:
    three = train_small(small_data, runs, "three", num_hosts=3)
    np.testing.assert_allclose(_losses(three), _losses(one_host), rtol=1e-5)


@pytest.mark.ray
def test_rows_travel_for_one_table_and_vectors_for_the_others(two_hosts: Result) -> None:
    """What the other tests compare covers both ways across the network."""
    manifest = checkpoint.load_head(Store(two_hosts.path))
    assert manifest is not None
    hosts_of = {table: set(owners) for table, owners in manifest.placement.items()}
    assert hosts_of.pop("b") == {0, 1}
    assert all(len(owners) == 1 for owners in hosts_of.values())
    assert set().union(*hosts_of.values()) == {0, 1}


@pytest.mark.ray
@is_long
def test_two_runs_are_bitwise_equal(two_hosts: Result, small_data: str, runs: Path) -> None:
    again = train_small(small_data, runs, "two-again", num_hosts=2)
    assert (_losses(again) == _losses(two_hosts)).all()
    assert_same_bytes(committed_state(again.path), committed_state(two_hosts.path))


@pytest.mark.ray
@is_long
def test_a_run_without_overlap_has_the_same_bytes(two_hosts: Result, small_data: str, runs: Path) -> None:
    without = train_small(small_data, runs, "two-without-overlap", num_hosts=2, overlap=False)
    assert "early exchange" in two_hosts.phase_s
    assert "early exchange" not in without.phase_s
    assert (_losses(without) == _losses(two_hosts)).all()
    assert_same_bytes(committed_state(without.path), committed_state(two_hosts.path))


class Killer(SilentReporter):
    """Kills one actor of the run with SIGKILL a random moment after a given step was reported, and a commit; before the
    next report at the latest.

    Attributes:
      hosts_before, hosts_after: the host processes of the generations before and after.
      traces: that were written.
    """

    def __init__(self, kind: str, after_step: int, seed: int) -> None:
        self.kind, self.after_step = kind, after_step
        self.delay_s = random.Random(seed).uniform(0.0, 0.2)
        self.killed: list[int] = []
        self._has_struck = threading.Event()
        self.hosts_before: set[int] = set()
        self.hosts_after: set[int] = set()
        self.has_commit = False
        self.traces: list[TraceWritten] = []

    def event(self, event: Event) -> None:
        if isinstance(event, TraceWritten):
            self.traces.append(event)
        super().event(event)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.has_commit = True

    def window(self, report: WindowReport) -> None:
        if report.generation > 1:
            self.hosts_after = {*actor_processes("HostActor")}
        elif report.step >= self.after_step and self.has_commit and not self.killed:
            self.hosts_before = {*actor_processes("HostActor")}
            victim = actor_processes(self.kind)[0]
            self.killed.append(victim)
            threading.Timer(self.delay_s, self._strike).start()
        elif self.killed:
            # The driver waits here, so that a run on a busy machine does not come to its end before.
            assert self._has_struck.wait(PATIENCE_S)

    def _strike(self) -> None:
        os.kill(self.killed[0], signal.SIGKILL)
        self._has_struck.set()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver puts into Ray's object store, as with many hosts."""
    put, found = ray_calls._put, []
    monkeypatch.setattr(ray_calls, "MANY_HOSTS", 1)
    monkeypatch.setattr(ray_calls, "MANY_BUCKETS", 1)
    monkeypatch.setattr(ray_calls, "_put", lambda value: found.append(value) or put(value))
    return found


@is_long
@pytest.mark.ray
def test_a_killed_run_whose_hosts_share_their_arguments_ends_with_the_same_bytes(
    shared: list[Any], two_hosts: Result, small_data: str, runs: Path
) -> None:
    killer = Killer("HostActor", after_step=20, seed=4)
    result = train_small(small_data, runs, "killed-shared", num_hosts=2, reporter=killer)
    assert len(result.recoveries) == 1
    # Two generations: specs and addresses of both, and the tables that the second one restored.
    assert [type(value).__name__ for value in shared] == ["HostSpec", "list", "HostSpec", "list", "tuple"]
    assert (_losses(result) == _losses(two_hosts)).all()
    assert_same_bytes(committed_state(result.path), committed_state(two_hosts.path))
    _check_survivors(killer, result)


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["HostActor", pytest.param("DeviceActor", marks=is_long)])
def test_a_killed_run_ends_with_the_same_bytes(kind: str, two_hosts: Result, small_data: str, runs: Path) -> None:
    seed = int(time.time())
    # Of a later step the next report may be that of 48, the last one that is traced.
    killer = Killer(kind, after_step=random.Random(seed).randrange(12, 31), seed=seed)
    result = train_small(small_data, runs, f"killed-{kind}", num_hosts=2, reporter=killer, trace="5:48")
    print(f"killed a {kind} {killer.delay_s:.2f} s after step {killer.after_step} (seed {seed})")
    assert killer.killed
    assert len(result.recoveries) == 1
    # Up to an interval since the last boundary, and one more if the commit of that boundary was still being written.
    assert result.recoveries[0].discarded_steps <= 2 * COMMIT_EVERY
    assert (_losses(result) == _losses(two_hosts)).all()
    assert_same_bytes(committed_state(result.path), committed_state(two_hosts.path))
    _check_survivors(killer, result)
    _check_traces(killer, result)


def _check_traces(killer: Killer, result: Result) -> None:
    """The fault cuts the first trace, which tells of it. The next generation traces what it trains of the steps."""
    base_step = result.recoveries[0].base_step
    cut, whole = killer.traces
    assert (cut.first_step, cut.last_step, whole.first_step, whole.last_step) == (5, 48, base_step, 48)
    assert Path(cut.location).name == "steps-5-48-generation-1-cut.pftrace"
    assert "died" in cut.fault
    assert whole.fault == ""
    assert (cut.missing != (), whole.missing) == (True, ())
    everybody = {f"{kind} {number}" for kind in ("host", "device") for number in (0, 1)}
    files: set[str] = set()
    for written in killer.traces:
        processes = read_trace(Path(written.location).read_bytes())
        assert {*processes} == {"driver", *everybody - {*written.missing}}
        assert processes["driver"].facts["ended by"] == (written.fault or "its last step")
        assert 0.0 < max(clock.uncertainty_s for clock in written.clocks) < 1.0
        for number in range(2):
            if (host := processes.get(f"host {number}")) is not None:
                assert {Phase.ID_EXCHANGE, Phase.ACTIVATION_EXCHANGE} <= {one.name for one in host.tracks["work"]}
                files |= {one.name for track in host.tracks if track.startswith("files") for one in host.tracks[track]}
    assert "write file" in files
    steps = {f"step {number}" for number in range(base_step, 48)}
    sent: list[dict[tuple[str, int], Slice]] = []
    for name, other in (("host 0", "host 1"), ("host 1", "host 0")):
        tracks = processes[name].tracks
        assert {one.name for one in tracks["work"] if one.name.startswith("step ")} == steps
        assert any(one.name.startswith("read step ") for one in tracks["input"])
        # On a busy machine the second trace ends before its first file.
        assert "write s000000040-g00000002" in {one.name for one in tracks["save"]}
        sent.append({(one.name, one.values["step"]): one for one in tracks[f"with {other}"]})
    assert {name for name, _ in sent[0]} <= {phase.value for phase in Phase} | {"control"}
    in_both = sent[0].keys() & sent[1].keys()
    assert {step for name, step in in_both if name == Phase.GRADIENT_EXCHANGE} == {*range(base_step, 48)}
    uncertain_ns = 2e9 * max(clock.uncertainty_s for clock in whole.clocks)
    for key in in_both:
        mine, theirs = sent[0][key], sent[1][key]
        assert mine.values["bytes_sent"] == theirs.values["bytes_received"]
        assert mine.values["bytes_received"] == theirs.values["bytes_sent"]
        # Neither can end before the other has begun, on one clock.
        assert max(mine.began_ns, theirs.began_ns) <= min(mine.ended_ns, theirs.ended_ns) + uncertain_ns


@is_long
@pytest.mark.ray
def test_a_killed_run_whose_owners_pool_a_cut_table_ends_with_the_same_bytes(
    ray_cluster: None, small_data: str, runs: Path
) -> None:
    job = small_job(folder=small_data, cut_bags=True)
    lengths = bag_lengths(job, build_index(job.resolved_data))
    ways = cut_ways(job, table_specs(job, choose_buckets(job)), lengths, num_hosts=2)
    (way,) = [way for way, name in zip(ways, job.table_names, strict=True) if name == "cut_bags"]
    assert way.is_pooled
    alone = train_small(small_data, runs, "bags-one", num_hosts=1, in_process=True, cut_bags=True)
    undisturbed = train_small(small_data, runs, "bags-two", num_hosts=2, cut_bags=True)
    np.testing.assert_allclose(_losses(undisturbed), _losses(alone), rtol=1e-5)
    manifest = checkpoint.load_head(Store(undisturbed.path))
    assert manifest is not None
    assert set(manifest.placement["cut_bags"]) == {0, 1}
    killer = Killer("HostActor", after_step=20, seed=3)
    result = train_small(small_data, runs, "bags-killed", num_hosts=2, cut_bags=True, reporter=killer)
    assert killer.killed
    assert len(result.recoveries) == 1
    assert (_losses(result) == _losses(undisturbed)).all()
    assert_same_bytes(committed_state(result.path), committed_state(undisturbed.path))


def _check_survivors(killer: Killer, result: Result) -> None:
    """Host processes live on, and nothing is read but what lay on the lost one."""
    (recovery,) = result.recoveries
    lost = killer.hosts_before - killer.hosts_after
    assert lost == {*killer.killed} & killer.hosts_before
    assert recovery.survivors == len(killer.hosts_before - lost) == (1 if killer.kind == "HostActor" else 2)
    manifest = checkpoint.load_head(Store(result.path))
    assert manifest is not None
    held = [sum(owners.count(host) for owners in manifest.placement.values()) for host in range(2)]
    assert recovery.buckets_read in (held if lost else [0])
    assert recovery.buckets_kept == sum(held) - recovery.buckets_read
    assert bool(recovery.bytes_read) == bool(lost)


class _SaveKiller(SilentReporter):
    """Kills one actor of the run with SIGKILL when the first file of a given checkpoint attempt appears, while training
    goes on.
    """

    def __init__(self, kind: str, attempt: Path) -> None:
        self.kind, self.attempt = kind, attempt
        self.killed: list[int] = []
        self.commits: list[str] = []
        self._has_struck = threading.Event()
        threading.Thread(target=self._wait_and_kill, daemon=True).start()

    def _wait_and_kill(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if any(path.is_file() for path in self.attempt.rglob("*")):
                self.killed.append(actor_processes(self.kind)[0])
                os.kill(self.killed[0], signal.SIGKILL)
                self._has_struck.set()
                return
            time.sleep(0.001)

    def commit(self, name: str, *, size_bytes: int, seconds: float) -> None:
        self.commits.append(name)
        if name == self.attempt.name:
            # The driver waits here, so that a run on a busy machine does not come to its end before.
            assert self._has_struck.wait(PATIENCE_S)


@is_long
@pytest.mark.ray
@pytest.mark.parametrize(("kind", "full_every"), [("HostActor", 3), ("DeviceActor", 1)])
def test_a_kill_while_a_commit_is_written_ends_with_the_same_bytes(
    kind: str, full_every: int, two_hosts: Result, small_data: str, runs: Path
) -> None:
    """Full commits, and a delta that is written when a host dies; the chain goes on from what stands."""
    name = f"killed-saving-{kind}"
    killer = _SaveKiller(kind, runs / name / "data" / "s000000020-g00000001")
    result = train_small(small_data, runs, name, num_hosts=2, full_every=full_every, reporter=killer)
    assert killer.killed
    assert len(result.recoveries) == 1
    # Either the commit had been written by all, or the one before stands.
    assert result.recoveries[0].base_step == (20 if "s000000020-g00000001" in killer.commits else 10)
    assert (_losses(result) == _losses(two_hosts)).all()
    assert_same_bytes(committed_state(result.path), committed_state(two_hosts.path))


def expected_audit(job: JobConfig, num_steps: int) -> np.ndarray:
    """What one visit of each sample in each epoch leaves: a visit in a batch of weight W takes BATCH_SIZE / W."""
    index = build_index(job.resolved_data)
    plan = job_plan(job, index)
    reader = InputReader(job.resolved_data, index, plan, range(job.num_lanes))
    expected, visits = np.zeros(NUM_ROWS), np.zeros(NUM_ROWS, int)
    for step in range(num_steps):
        batch = reader.read(step)
        real = batch.sample_ids[~batch.is_padding]
        visits[real] += 1
        expected[real] -= BATCH_SIZE / batch.weights.sum()
    full_epochs = num_steps // plan.steps_per_epoch
    assert visits.min() >= full_epochs
    assert visits.max() <= full_epochs + 1
    return expected


@pytest.mark.ray
def test_resuming_on_other_numbers_of_hosts_sees_every_sample_once(
    ray_cluster: None, small_data: str, runs: Path
) -> None:
    """2 → 3 → 1 hosts, over two whole epochs, through chains of deltas; the audit table counts the visits, and it is
    rolled back and moved like any table.
    """
    job = small_job(folder=small_data)
    plan = training_plan(
        build_index(job.resolved_data), num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed
    )
    total = 2 * plan.steps_per_epoch
    for num_hosts, max_steps in ((2, 13), (3, 27), (1, total)):
        result = train_small(small_data, runs, "elastic", num_hosts=num_hosts, max_steps=max_steps, full_every=4)
        head = checkpoint.load_head(Store(result.path))
        assert head is not None
        assert (head.hosts, head.num_deltas) == (num_hosts, {13: 1, 27: 3, total: 1}[max_steps])
    assert result.step == total
    audit = committed_state(result.path)["audit/rows"][:, 0]
    np.testing.assert_allclose(audit, expected_audit(job, total), atol=1e-4)
    # The cluster was there before the runs. Counters of its node go on over the three drivers.
    assert _in_ray("podembed_samples_total", run="elastic", at_least=27 * job.batch_size) <= total * job.batch_size
    assert 0 < _in_ray("podembed_loss", run="elastic") < 10


def _in_ray(name: str, *, run: str, at_least: float = 0.0) -> float:
    """The value of a series of a run, as the metrics endpoint of Ray's node has it."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    end = time.monotonic() + 60.0
    while True:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples if one.name == f"ray_{name}"]
        found = [one.value for one in samples if one.labels["run"] == run]
        if found and found[0] >= at_least:
            return found[0]
        assert time.monotonic() < end, f"{name} is not among the metrics of the node, or too low: {found}"
        time.sleep(0.2)


def test_a_run_in_the_order_of_the_files_goes_on_where_it_stood(small_data: str, tmp_path: Path) -> None:
    """Cut within an epoch, at a commit and between two, it ends with the bytes of the run that was not cut; every
    sample was seen once.
    """
    job = small_job(folder=small_data, order="files")
    total = 2 * job_plan(job, build_index(job.resolved_data)).steps_per_epoch

    def train(name: str, max_steps: int, order: str = "files") -> Result:
        return train_small(small_data, tmp_path, name, num_hosts=1, in_process=True, max_steps=max_steps, order=order)

    whole = train("whole", total)
    for max_steps in (13, total - 7, total):
        cut = train("cut", max_steps)
        head = checkpoint.load_head(Store(cut.path))
        assert head is not None
        assert head.counters["samples"] == job_plan(job, build_index(job.resolved_data)).rows_before(max_steps)
    state = committed_state(cut.path)
    assert_same_bytes(state, committed_state(whole.path))
    np.testing.assert_allclose(state["audit/rows"][:, 0], expected_audit(job, total), atol=1e-4)
    record = read_run(Store(cut.path))
    assert (record.order, 2 * record.steps_per_epoch) == ("files", total)
    with pytest.raises(RunMismatch, match="order is 'files', given 'shuffled'"):
        train("cut", total, order="shuffled")
