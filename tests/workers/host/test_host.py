"""Pairs of `HostWorker` in threads: the real mesh, the real shared-memory channel, real files; the device side is a
thread with a model of one line.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podembed.embedding.buckets import place, split_evenly
from podembed.embedding.config import FeatureConfig, TableConfig
from podembed.embedding.initializers import row_source
from podembed.embedding.optimizers import SGD
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import assemble_table
from podembed.workers.checkpoint.shard import CheckpointMismatch, table_plan
from podembed.workers.data.input_errors import InputError
from podembed.workers.device.shared_memory import ChannelLost, ChannelTimeout, Invitation, Record, RecordKind
from podembed.workers.host.host import HostWorker
from podembed.workers.host.spec import HostReady, HostSpec
from podembed.workers.input.index import build_index
from podembed.workers.input.reader import InputReader, training_plan
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import table_specs
from podembed.workers.mesh.mesh_errors import MeshError
from podembed.workers.storage.store import Store
from tests.long_tests import long_case
from tests.run_state import assert_same_bytes, tables_of
from tests.small_job import NUM_LANES, NUM_ROWS, small_job
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, succeed

RATE = 0.5
# Of tables a, b and bags: with several buckets a table is spread over the hosts and its rows travel, with one it lies
# whole on one host.
BUCKETS = (1, 8, 4)


class OneLineDevice(threading.Thread):
    """Loss ½ Σ w a² / W over all activations, so that the gradient is w a / W; the score is the first column of the
    first feature.

    Attributes:
      seen: per step the activations of each feature, as they were.
    """

    def __init__(
        self,
        invitation: Invitation,
        *,
        leave_at: int | None = None,
        hold_s: float = 0.0,
        answer: Callable[[Record], Record | None] | None = None,
    ):
        super().__init__(daemon=True)
        self.invitation = invitation
        self.leave_at = leave_at
        self.hold_s = hold_s
        self.answer = answer or done
        self.seen: dict[int, list[np.ndarray]] = {}
        self.start()

    def run(self) -> None:
        end = self.invitation.connect(timeout_s=PATIENCE_S)
        try:
            while True:
                record = end.receive(timeout_s=600)
                if record.kind is RecordKind.END:
                    continue
                if record.step == self.leave_at:
                    return
                time.sleep(self.hold_s)
                arrays, layout = end.buffers[record.buffer], end.layout.activations
                activations = layout.blocks(arrays["activations"])
                self.seen[record.step] = [block.copy() for block in activations]
                weights, tensors = arrays["weights"], layout.tensors(arrays["activations"])
                if record.kind is RecordKind.TRAIN:
                    for gradient, tensor in zip(layout.tensors(arrays["gradients"]), tensors, strict=True):
                        gradient[...] = tensor * np.expand_dims(weights, (*range(1, tensor.ndim),)) / record.weight_sum
                arrays["scores"][...] = tensors[0].reshape(len(weights), -1)[:, 0]
                answer = self.answer(record)
                if answer is not None:
                    end.send(answer)
        except ChannelLost:
            # The host hangs up when it has ended, and when a test aborts it. Anything else is a fault of the test.
            return
        finally:
            end.close()


def done(record: Record) -> Record:
    return Record(kind=RecordKind.DONE, step=record.step, buffer=record.buffer)


class Pod:
    """Started and connected hosts."""

    def __init__(
        self,
        job: JobConfig,
        storage: Path,
        num_hosts: int,
        *,
        step_timeout_s: float = PATIENCE_S,
        buckets: tuple[int, ...] = BUCKETS,
        shares_memory: bool = True,
        pools_cut: tuple[bool, ...] | None = None,
        **device: Any,
    ) -> None:
        self.job = job
        self.storage = storage
        self.num_hosts = num_hosts
        self.buckets = buckets
        self.workers = [HostWorker() for _ in range(num_hosts)]
        data = job.resolved_data
        base = HostSpec(
            job=job,
            run_id="run",
            generation=3,
            token=bytes(32),
            plan_hash=bytes(32),
            host=0,
            num_hosts=num_hosts,
            lanes=tuple(split_evenly(job.num_lanes, num_hosts)),
            table_buckets=buckets,
            placement=self.placed(None),
            storage_url=str(storage),
            train_index=build_index(data),
            eval_index=build_index(data.for_evaluation()) if data.eval_paths else None,
            bind_address="127.0.0.1",
            step_timeout_s=step_timeout_s,
            shares_memory=shares_memory,
            pools_cut=pools_cut,
        )
        self.ready: list[HostReady] = self.all("start", [(replace(base, host=host),) for host in range(num_hosts)])
        self.devices = [OneLineDevice(ready.invitation, **device) for ready in self.ready]
        addresses = [ready.mesh_address for ready in self.ready]
        self.all("connect", [(addresses, PATIENCE_S)] * num_hosts)

    def placed(self, previous: Sequence[np.ndarray] | None) -> tuple[np.ndarray, ...]:
        """Who owns each bucket of each table."""
        specs = table_specs(self.job, self.buckets)
        sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
        return tuple(place(bucket_bytes=sizes, num_hosts=self.num_hosts, previous=previous))

    def all(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The method on every host at the same time; the first exception of any."""
        return succeed(self.outcomes(method, arguments))

    def outcomes(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        given = arguments or [()] * self.num_hosts
        return in_threads([lambda w=w, a=a: getattr(w, method)(*a) for w, a in zip(self.workers, given, strict=True)])

    def train(self, first: int, last: int, *, is_followed: bool = False) -> list[Any]:
        return self.all("train", [(first, last, is_followed)] * self.num_hosts)

    def save(self, attempt: str) -> tuple[TableFiles, ...]:
        self.all("begin_save", [(attempt,)] * self.num_hosts)
        receipts = self.all("write_save", [(attempt, False)] * self.num_hosts)
        tables = []
        for at, spec in enumerate(table_specs(self.job, self.buckets)):
            parts = [receipt.tables[at] for receipt in receipts]
            arrays = next(part.arrays for part in parts if part.arrays)
            buckets = [part.buckets for part in parts]
            plan = table_plan(spec, attempt, buckets_per_file=parts[0].buckets_per_file)
            tables.append(assemble_table(plan, arrays, buckets))
        return tuple(tables)

    def state(self, attempt: str) -> dict[str, np.ndarray]:
        """All tables in row order, by way of the files."""
        manifest: Any = SimpleNamespace(tables=self.save(attempt))
        return tables_of(Store(str(self.storage)), manifest)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
            worker.close()
        for device in self.devices:
            device.join(PATIENCE_S)


@contextmanager
def pod(job: JobConfig, storage: Path, num_hosts: int, **options: Any) -> Iterator[Pod]:
    pod = Pod(job, storage, num_hosts, **options)
    try:
        yield pod
    finally:
        pod.close()


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False, evaluate=True)


@pytest.fixture(scope="module")
def plain_job(job: JobConfig) -> JobConfig:
    """The same with gradient descent everywhere, which can be written down in a line."""
    tables = {id(t): TableConfig(t.vocabulary_size, t.dim, optimizer=SGD(RATE), name=t.name) for t in job.tables}
    features = {
        name: FeatureConfig(tables[id(feature.table)], combiner=feature.combiner)
        for name, feature in job.features.items()
    }
    return replace(job, features=features)


class Dense:
    """`OneLineDevice` and SGD over whole tables, from the same batches."""

    def __init__(self, job: JobConfig, buckets: tuple[int, ...] = BUCKETS) -> None:
        self.job = job
        self.tables = []
        self.specs = table_specs(job, buckets)
        for spec in self.specs:
            rows = np.empty((spec.num_rows, spec.dim), np.float32)
            every = np.arange(spec.num_rows)
            fill = row_source(
                spec.initializer, seed=spec.seed, table_name=spec.name, num_rows=spec.num_rows, dim=spec.dim
            )
            fill(every, rows)
            self.tables.append(rows.astype(np.float64))
        index = build_index(job.resolved_data)
        plan = training_plan(index, num_lanes=job.num_lanes, batch_size=job.batch_size, seed=job.seed)
        self.reader = InputReader(job.resolved_data, index, plan, range(job.num_lanes))

    def step(self, number: int) -> list[np.ndarray]:
        """Updates the tables; returns the activations from before."""
        activations, change = self.look_up(number)
        self.apply(change)
        return activations

    def look_up(self, number: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Activations, and what the step takes off the tables: its gradient follows from the activations that it
        saw.
        """
        batch = self.reader.read(number)
        weights = batch.weights.astype(np.float64)[:, None] / batch.weights.sum(dtype=np.float64)
        change = [np.zeros_like(table) for table in self.tables]
        activations = []
        for name, feature in self.job.features.items():
            ragged, at = batch.features[name], self.job.tables.index(feature.table)
            lengths = np.diff(ragged.row_splits)
            divisor = {"sum": np.ones(len(lengths)), "mean": lengths, "sqrtn": np.sqrt(lengths)}[feature.combiner]
            share = np.zeros((ragged.num_samples, len(self.tables[at])))
            bag = np.repeat(np.arange(ragged.num_samples), lengths)
            np.add.at(share, (bag, ragged.values), 1 / np.maximum(divisor, 1)[bag])
            activations.append(share @ self.tables[at])
            change[at] += share.T @ (activations[-1] * weights)
        return activations, change

    def apply(self, change: list[np.ndarray]) -> None:
        for table, total in zip(self.tables, change, strict=True):
            table -= RATE * total


def set_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the hosts of this machine believe that they are on different ones, so that pooled vectors travel over
    TCP.
    """
    asked = itertools.count()
    monkeypatch.setattr("podembed.workers.host.same_machine.machine_identity", lambda: f"machine {next(asked)}")


@pytest.mark.parametrize(
    ("num_hosts", "machines"), [(1, 1), *(long_case(*one) for one in [(2, 1), (2, 2), (5, 1)]), (5, 5)]
)
def test_hosts_train_together_what_one_dense_model_trains(
    plain_job: JobConfig, tmp_path: Path, num_hosts: int, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 hosts share 12 lanes unevenly; the steps go over the end of an epoch, where batches are padded."""
    if machines > 1:
        set_machines_apart(monkeypatch)
    dense = Dense(plain_job)
    last = dense.reader.plan.steps_per_epoch + 3
    with pod(plain_job, tmp_path, num_hosts) as hosts:
        assert len({ready.num_samples for ready in hosts.ready}) == 1
        hosts.all("restore", [(None,)] * num_hosts)
        windows = [hosts.train(first, min(first + 9, last)) for first in range(0, last, 9)]
        state = hosts.state("s1")
        for step in range(last):
            expected = dense.step(step)
            for feature, values in enumerate(expected):
                first = 0
                for lanes, device in zip(split_evenly(NUM_LANES, num_hosts), hosts.devices, strict=True):
                    count = len(lanes) * dense.reader.plan.rows_per_lane_step
                    found = device.seen[step][feature]
                    np.testing.assert_allclose(found[:count], values[first : first + count], rtol=1e-4, atol=1e-5)
                    assert (found[count:] == 0).all(), "padding of the share"
                    first += count
        assert sum(window.num_samples for part in windows for window in part) == NUM_ROWS + 3 * plain_job.batch_size
        assert (sum(window.bytes_sent for part in windows for window in part) > 0) == (num_hosts > 1)
        assert all(window.usage.peak_memory_bytes > 0 for window in windows[0])
    for spec, table in zip(table_specs(plain_job, BUCKETS), dense.tables, strict=True):
        np.testing.assert_allclose(state[f"{spec.name}/rows"], table, rtol=1e-4, atol=1e-5)


def test_shared_memory_and_the_network_bring_the_same_bytes(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of one machine pool into each other's memory; on several machines the same vectors are sent, and only then
    cost bytes.
    """
    states, bytes_sent = [], []
    for name in ("shared", "sent"):
        if name == "sent":
            set_machines_apart(monkeypatch)
        with pod(job, tmp_path / name, 3) as hosts:
            hosts.all("restore", [(None,)] * 3)
            bytes_sent.append(sum(window.bytes_sent for window in hosts.train(0, 12)))
            hosts.all("evaluate")
            hosts.train(12, 15)
            states.append(hosts.state("end"))
    assert_same_bytes(*states)
    assert bytes_sent[1] > bytes_sent[0] > 0


def test_state_moves_between_any_numbers_of_hosts_and_training_goes_on(job: JobConfig, tmp_path: Path) -> None:
    """1 → 3 → 2 hosts through files equals one host throughout, up to the order of sums; the move itself changes no
    byte.
    """
    with pod(job, tmp_path, 1) as one:
        one.all("restore", [(None,)])
        one.train(0, 9)
        expected = one.state("one")
    tables: tuple[TableFiles, ...] | None = None
    for number, num_hosts in enumerate((1, 3, 2)):
        with pod(job, tmp_path, num_hosts) as hosts:
            hosts.all("restore", [(tables,)] * num_hosts)
            if tables is not None:
                before: Any = SimpleNamespace(tables=tables)
                assert_same_bytes(hosts.state(f"before-{number}"), tables_of(Store(str(tmp_path)), before))
            hosts.train(3 * number, 3 * number + 3)
            tables = hosts.save(f"after-{number}")
    assert tables is not None
    end: Any = SimpleNamespace(tables=tables)
    found = tables_of(Store(str(tmp_path)), end)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-5, err_msg=name)


def test_windows_may_be_cut_anywhere(job: JobConfig, tmp_path: Path) -> None:
    states = []
    for cuts in ([0, 7], [0, 1, 2, 5, 7]):
        with pod(job, tmp_path / str(len(cuts)), 2) as hosts:
            hosts.all("restore", [(None,)] * 2)
            for first, last in itertools.pairwise(cuts):
                hosts.train(first, last)
            states.append(hosts.state("end"))
    assert_same_bytes(*states)


@pytest.mark.parametrize("num_hosts", [1, 3, long_case(5)])
def test_an_evaluation_scores_each_sample_once_and_changes_no_row(
    job: JobConfig, tmp_path: Path, num_hosts: int
) -> None:
    with pod(job, tmp_path, num_hosts) as hosts:
        hosts.all("restore", [(None,)] * num_hosts)
        hosts.train(0, 2)
        before = hosts.state("before")
        parts = hosts.all("evaluate")
        again = hosts.all("evaluate")
        assert_same_bytes(hosts.state("after"), before)
        hosts.train(2, 4)
        scores = np.concatenate([part.scores for part in parts])
        assert scores.shape == (NUM_ROWS,)
        assert scores.tobytes() == np.concatenate([part.scores for part in again]).tobytes()
        # Feature "a" has one id a sample and adds nothing up, so the scores are the first column of its rows.
        ids = np.concatenate(
            [pq.read_table(path)["a"].to_numpy() for path in sorted(Path(job.data.paths[0]).parent.glob("*.parquet"))]
        )
        np.testing.assert_allclose(np.sort(scores), np.sort(before["a/rows"][ids, 0]), rtol=1e-6)
        assert sum(part.weights.sum() for part in parts) == NUM_ROWS


@pytest.mark.parametrize("cuts", [[0, 1, 2], [0, 2], [0, 3, 4]])
def test_an_evaluation_in_blocks_has_the_same_samples(job: JobConfig, tmp_path: Path, cuts: list[int]) -> None:
    """Also if one that was left comes before it, and training goes on after one that was left."""
    with pod(job, tmp_path, 2) as hosts:
        hosts.all("restore", [(None,)] * 2)
        hosts.train(0, 2)
        whole = hosts.all("evaluate")
        for first, last in itertools.pairwise(cuts):
            assert hosts.all("evaluate", [(first, last)] * 2) == [None, None]
        found = hosts.all("evaluate", [(cuts[-1], None)] * 2)
        for one, other in zip(found, whole, strict=True):
            assert one.scores.tobytes() == other.scores.tobytes()
            assert one.labels.tobytes() == other.labels.tobytes()
        assert hosts.all("evaluate", [(0, 1)] * 2) == [None, None]
        with pytest.raises(RuntimeError, match="Found batch 4 of an evaluation requested. Expected 0 or 1"):
            hosts.workers[0].evaluate(4, 5)
        hosts.train(2, 3)


def test_a_peer_that_leaves_ends_the_step_of_the_others(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 3, step_timeout_s=600.0) as hosts:
        hosts.all("restore", [(None,)] * 3)
        leaving, *staying = hosts.workers
        threading.Timer(0.3, leaving.close).start()
        outcomes = in_threads([lambda w=w: w.train(0, 10) for w in staying])
        assert all(isinstance(outcome, MeshError) for outcome in outcomes), outcomes
        assert all("exchange" in worker.status().phase for worker in staying)


def test_an_abort_ends_the_wait_for_peers(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 2, step_timeout_s=600.0) as hosts:
        hosts.all("restore", [(None,)] * 2)
        threading.Timer(0.3, hosts.workers[0].abort, ["a test"]).start()
        (outcome,) = in_threads([lambda: hosts.workers[0].train(0, 10)])
        assert isinstance(outcome, MeshError)
        assert "a test" in str(outcome)


def test_a_device_process_that_dies_is_noticed_at_once(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 1, step_timeout_s=600.0, leave_at=2) as hosts:
        hosts.all("restore", [(None,)])
        (outcome,) = hosts.outcomes("train", [(0, 10)])
        assert isinstance(outcome, ChannelLost)
        assert hosts.workers[0].status().phase == "device"
        assert hosts.workers[0].status().step == 2


def test_a_device_process_that_says_nothing_is_given_up(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 1, step_timeout_s=0.3, answer=lambda record: None) as hosts:
        hosts.all("restore", [(None,)])
        (outcome,) = hosts.outcomes("train", [(0, 10)])
        assert isinstance(outcome, ChannelTimeout)


def test_an_answer_for_another_step_is_refused(job: JobConfig, tmp_path: Path) -> None:
    def late(record: Record) -> Record:
        return Record(kind=RecordKind.DONE, step=record.step + 1)

    with pod(job, tmp_path, 1, answer=late) as hosts:
        hosts.all("restore", [(None,)])
        (outcome,) = hosts.outcomes("train", [(5, 6)])
        assert isinstance(outcome, RuntimeError)
        assert "answered DONE for step 6. Expected DONE for step 5" in str(outcome)


def test_an_id_outside_its_table_names_feature_value_and_file(small_data: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table = pq.read_table(f"{small_data}/part-0.parquet")
    ids = table["a"].to_numpy().copy()
    ids[70] = 50
    pq.write_table(table.set_column(table.column_names.index("a"), "a", pa.array(ids)), folder / "part-0.parquet")
    with pod(small_job(folder=str(folder), audit=False), tmp_path, 1) as hosts:
        hosts.all("restore", [(None,)])
        (outcome,) = hosts.outcomes("train", [(0, 13)])
        assert isinstance(outcome, InputError)
        for words in ("50", "'a'", "part-0.parquet", "vocabulary_size"):
            assert words in str(outcome)


def test_a_commit_of_other_tables_is_refused(job: JobConfig, plain_job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 1) as hosts:
        hosts.all("restore", [(None,)])
        tables = hosts.save("s1")
    with pod(plain_job, tmp_path, 1) as hosts:
        (outcome,) = hosts.outcomes("restore", [(tables,)])
        assert isinstance(outcome, CheckpointMismatch)
        assert "Table 'a': found rows, buckets and widths (50, 1, {'rows': 8, 'accumulator': 8})" in str(outcome)
        (outcome,) = hosts.outcomes("restore", [(tables[:2],)])
        assert "Found tables ['a', 'b'] in the commit. Expected ['a', 'b', 'bags']" in str(outcome)


def test_marks_grow_with_every_step_and_file(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 1) as hosts:
        (worker,) = hosts.workers
        marks = [worker.status().marks]
        for work in (
            lambda: worker.restore(None),
            lambda: worker.train(0, 3),
            lambda: hosts.save("s"),
            worker.evaluate,
        ):
            work()
            marks.append(worker.status().marks)
        assert np.diff(marks)[1:].min() >= 3
        assert marks == sorted(set(marks))
        assert worker.status().step == 2
        assert 0 <= time.time() - worker.status().step_unix_s < 3600


def test_calls_out_of_order_say_what_was_expected() -> None:
    worker = HostWorker()
    with pytest.raises(RuntimeError, match="Expected start first"):
        worker.connect([], 1.0)
    assert worker.status().phase == "idle"
    worker.abort("nothing to abort")
    worker.close()
    worker.close()


def test_no_thread_and_no_socket_stays(job: JobConfig, tmp_path: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with pod(job, tmp_path, 2) as hosts:
        hosts.all("restore", [(None,)] * 2)
        hosts.train(0, 2)
    assert {thread.ident for thread in threading.enumerate()} <= before
