"""Hosts that live through a fault: they go back to a commit, prove it, and a run goes on with the same bytes as one
that nothing happened to.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from podembed.embedding.buckets import MAX_BUCKETS, split_evenly
from podembed.embedding.lookup.placement import place_tables
from podembed.workers.checkpoint import save_pace
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.undo import Undo
from podembed.workers.device.doorway import ChannelError
from podembed.workers.host.host import HostWorker
from podembed.workers.host.survivors import verification
from podembed.workers.host.survivors.moves import BucketExchange
from podembed.workers.host.survivors.surviving_shard import Restored
from podembed.workers.host.survivors.verification import RowsDamaged
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import features_per_table, table_specs
from podembed.workers.mesh.mesh_errors import MeshBroken, MeshError
from podembed.workers.storage.storage_errors import StorageError
from podembed.workers.storage.store import Store
from tests.long_tests import is_long, long_case
from tests.run_state import assert_same_bytes, tables_of
from tests.small_job import small_job
from tests.workers.host.test_host import OneLineDevice, Pod
from tests.workers.mesh.mesh_testing import PATIENCE_S, in_threads, succeed

BASE = "s000000005-g00000003"


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return small_job(folder=small_data, audit=False)


class Survivors(Pod):
    """A pod whose hosts may be lost, and which then begins another generation. `are_apart`: hosts take each other to be
    on other machines.
    """

    are_apart = False
    undo_share = 1.0
    commit: tuple[str, tuple[TableFiles, ...]] | None = None

    def commit_as(self, attempt: str) -> None:
        self.commit = (attempt, self.save(attempt))
        for worker in self.workers:
            worker.acknowledge(attempt)

    def go_on(
        self,
        *,
        lost: Collection[int] = (),
        num_hosts: int | None = None,
        leave_at: int | None = None,
        compares_first: bool = False,
    ) -> list[Restored]:
        """The next generation, from the last commit: hosts that are not lost rejoin, devices are new."""
        before = self.workers[0]._present.spec
        num_before, self.num_hosts = self.num_hosts, num_hosts or self.num_hosts
        for worker in self.workers:
            worker.abort("a test")
        for device in self.devices:
            device.join(0.0)
        kept = [rank for rank in range(min(num_before, self.num_hosts)) if rank not in lost]
        for rank, worker in enumerate(self.workers):
            if rank not in kept:
                worker.close()
        self.workers = [self.workers[rank] if rank in kept else HostWorker() for rank in range(self.num_hosts)]
        spec = replace(
            before,
            generation=before.generation + 1,
            num_hosts=self.num_hosts,
            lanes=tuple(split_evenly(self.job.num_lanes, self.num_hosts)),
            placement=self.placed(before.placement),
            base=self.commit[0] if self.commit else None,
            undo_share=self.undo_share,
            compares_first=compares_first,
            shares_memory=not self.are_apart,
        )
        starts = [
            partial(worker.rejoin if rank in kept else worker.start, replace(spec, host=rank))
            for rank, worker in enumerate(self.workers)
        ]
        self.ready = succeed(in_threads(starts))
        self.devices += [OneLineDevice(ready.invitation, leave_at=leave_at) for ready in self.ready]
        addresses = [ready.mesh_address for ready in self.ready]
        self.all("connect", [(addresses, PATIENCE_S)] * self.num_hosts)
        return self.all("restore", [(self.commit[1] if self.commit else None,)] * self.num_hosts)


@contextmanager
def survivors(job: JobConfig, storage: Path, num_hosts: int, *, leave_at: int | None = None) -> Iterator[Survivors]:
    """A pod with a way back, before its first step; its devices leave in the middle of a step."""
    pod = Survivors(job, storage, num_hosts)
    try:
        pod.go_on(leave_at=leave_at)
        yield pod
    finally:
        pod.close()


@pytest.fixture(scope="module")
def undisturbed(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The tables after 12 steps, with a commit after 5."""
    with survivors(job, tmp_path_factory.mktemp("undisturbed"), 2) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        pod.train(5, 12)
        return pod.state("end")


def fail(pod: Survivors, first: int, last: int) -> None:
    """Trains until the devices leave: hosts are in the middle of a step, each somewhere else."""
    outcomes = pod.outcomes("train", [(first, last, False)] * pod.num_hosts)
    assert all(isinstance(outcome, ChannelError | MeshError) for outcome in outcomes), outcomes


@pytest.mark.parametrize("lost", [(), (1,), (0,)])
@pytest.mark.parametrize("is_saving", [long_case(False), True])
def test_the_bytes_are_those_of_an_undisturbed_run(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray], lost: tuple[int, ...], is_saving: bool
) -> None:
    """A fault in step 9, with or without a commit of step 7 that has begun and never comes to stand."""
    with survivors(job, tmp_path, 2, leave_at=9) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        pod.train(5, 7)
        if is_saving:
            pod.all("begin_save", [("s000000007-g00000003",)] * 2)
        fail(pod, 7, 12)
        restored = pod.go_on(lost=lost)
        for rank, one in enumerate(restored):
            held = sum(int((owners == rank).sum()) for owners in pod.workers[rank]._present.spec.placement)
            assert one.buckets_wrong == 0
            assert (one.buckets_kept, one.buckets_read) == ((0, held) if rank in lost else (held, 0))
            assert (one.bytes_read > 0) == (rank in lost)
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def test_rows_go_back_only_when_no_thread_reads_them(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault while rows that were kept are still compared, by threads that hear of it late."""
    with survivors(job, tmp_path, 2, leave_at=8) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        real_digest, real_stop = verification.has_digest, verification.RowVerification.stop
        real_undo, looked, is_told = Undo.back_to, [], threading.Event()

        def late(*arguments: Any) -> bool:
            assert is_told.wait(PATIENCE_S)
            # Still at work when whoever told it to stop could go on.
            time.sleep(0.2)
            return real_digest(*arguments)

        def stop(found: verification.RowVerification) -> None:
            is_told.set()
            real_stop(found)

        def back_to(undo: Undo, commit: str) -> Any:
            # Another host may be between two generations.
            generations = [worker._generation for worker in pod.workers]
            (shard,) = [found.shard for found in generations if found is not None and found.shard.undo is undo]
            assert shard._verification is not None
            looked.append([thread.is_alive() for thread in shard._verification._threads])
            return real_undo(undo, commit)

        monkeypatch.setattr(verification, "has_digest", late)
        monkeypatch.setattr(verification.RowVerification, "stop", stop)
        pod.go_on(leave_at=5)
        fail(pod, 5, 12)
        assert all(any(thread.is_alive() for thread in _threads_of(worker)) for worker in pod.workers)
        monkeypatch.setattr(Undo, "back_to", back_to)
        pod.go_on()
        assert looked == [[False], [False]]
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def spoil_a_row(worker: HostWorker) -> None:
    """Of table b, unknown to its undo log."""
    worker._present.shard.tables[1].rows[-3:, 0].view(np.uint32)[...] ^= 1 << 7


def _threads_of(worker: HostWorker) -> Sequence[threading.Thread]:
    found = worker._present.shard._verification
    assert found is not None
    return found._threads


def test_rows_in_doubt_are_compared_before_training(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    with survivors(job, tmp_path, 2, leave_at=8) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        spoil_a_row(pod.workers[1])
        restored = pod.go_on(compares_first=True)
        assert [one.buckets_wrong for one in restored] == [0, 1]
        assert [one.buckets_to_compare for one in restored] == [0, 0]
        assert restored[1].buckets_read == 1
        assert restored[1].buckets_to_compare == 0
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def test_a_fault_before_the_first_commit_begins_again(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    with survivors(job, tmp_path, 2, leave_at=3) as pod:
        fail(pod, 0, 5)
        pod.go_on()
        pod.train(0, 5)
        pod.commit_as(BASE)
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def test_fault_after_fault_and_one_in_the_middle_of_a_recovery(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery from a commit may be begun any number of times, and what a host has proved or read need not be right
    twice.
    """
    with survivors(job, tmp_path, 2, leave_at=8) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        pod.go_on(lost=[1], leave_at=6)
        fail(pod, 5, 12)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "read_into", _away)
            with pytest.raises(StorageError, match="away"):
                pod.go_on(lost=[0])
        restored = pod.go_on(lost=[0])
        assert restored[0].buckets_kept == 0
        assert (restored[1].buckets_read, restored[1].buckets_wrong) == (0, 0)
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def _away(*_: Any) -> None:
    raise StorageError("the storage is away")


def test_a_generation_that_was_left_takes_no_memory(job: JobConfig, tmp_path: Path) -> None:
    """Its tables are cut anew one by one, so nothing may lead to all of them, not even the error that ended it."""
    with survivors(job, tmp_path, 2) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        pod.workers[0].abort("a test")
        fail(pod, 5, 12)
        old = [weakref.ref(worker._present._lookups.both.rows) for worker in pod.workers]
        # The threads of this test keep their errors, whose frames lead everywhere.
        gc.collect()
        gc.disable()
        try:
            pod.go_on()
            assert [reference() for reference in old] == [None, None]
        finally:
            gc.enable()


def test_without_a_way_back_the_process_lives_and_reads_its_rows(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    with survivors(job, tmp_path, 2) as pod:
        pod.undo_share = 0.0
        pod.go_on(leave_at=8)
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        assert all(one.buckets_kept == 0 and one.buckets_read for one in pod.go_on())
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


@pytest.mark.parametrize(
    ("call", "arguments"), [("begin_save", ("s000000005-g00000003",)), ("evaluate", ()), ("verify", ())]
)
def test_a_row_that_changed_behind_the_back_of_the_log_is_found(
    job: JobConfig,
    tmp_path: Path,
    undisturbed: dict[str, np.ndarray],
    call: str,
    arguments: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is compared until somebody waits for it.
    monkeypatch.setattr(save_pace, "SHARE_OF_PROCESSORS", 1e-9)
    with survivors(job, tmp_path, 2, leave_at=8) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        spoil_a_row(pod.workers[1])
        restored = pod.go_on()
        assert restored[1].buckets_read == 0
        assert restored[1].buckets_to_compare == restored[1].buckets_kept > 0
        with pytest.raises(RowsDamaged, match="table 'b', rows and slots, bucket"):
            getattr(pod.workers[1], call)(*arguments)
        with pytest.raises(RowsDamaged):
            pod.workers[1].train(5, 6)
        pod.workers[0].verify()
        restored = pod.go_on()
        assert [one.buckets_wrong for one in restored] == [0, 1]
        assert restored[1].buckets_read == 1
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


def test_a_host_that_dies_as_buckets_move_is_a_fault_like_any_other(
    job: JobConfig, tmp_path: Path, undisturbed: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts become three, and the third is killed in the middle of a round; two go on, with what they still
    have.
    """
    with survivors(job, tmp_path, 2, leave_at=7) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        pod.are_apart = True
        real = BucketExchange._exchange

        def dies(exchange: BucketExchange, number: int, *arguments: Any) -> Any:
            if exchange.mesh.identity.rank == 2:
                exchange.mesh.close()
                raise MeshBroken("it died")
            return real(exchange, number, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(BucketExchange, "_exchange", dies)
            with pytest.raises(MeshError):
                pod.go_on(num_hosts=3)
        restored = pod.go_on(lost=[2], num_hosts=2)
        assert sum(one.buckets_wrong + one.buckets_refused for one in restored) == 0
        # Nothing had reached the third one, so all is still where it was.
        assert sum(one.buckets_read for one in restored) == 0
        pod.train(5, 12)
        assert_same_bytes(pod.state("end"), undisturbed)


@pytest.mark.parametrize(
    ("numbers", "are_apart"),
    [((2, 3), True), ((3, 2), True), long_case((2, 1), True), long_case((1, 2), True), ((2, 3), False)],
)
def test_with_other_numbers_of_hosts_only_what_no_host_has_is_read(
    job: JobConfig, tmp_path: Path, numbers: Sequence[int], are_apart: bool
) -> None:
    """On one machine, with the commit in a local folder, what another host has is read, too: its files are in memory
    already.
    """
    before, after = numbers
    with survivors(job, tmp_path, before, leave_at=7) as pod:
        pod.train(0, 5)
        pod.commit_as(BASE)
        fail(pod, 5, 12)
        pod.are_apart = are_apart
        old = pod.workers[0]._present.spec.placement
        restored = pod.go_on(num_hosts=after)
        new = pod.workers[0]._present.spec.placement
        was, becomes = np.concatenate(old), np.concatenate(new)
        lives = was < min(numbers)
        stay = int(((was == becomes) & lives).sum())
        assert sum(one.buckets_kept for one in restored) == stay > 0
        moving = int(lives.sum()) - stay
        assert (moving > 0) == (after > before)
        assert sum(one.buckets_moved for one in restored) == (moving if are_apart else 0)
        assert sum(one.buckets_read for one in restored) == int((~lives).sum()) + (0 if are_apart else moving)
        assert (sum(one.bytes_moved for one in restored) > 0) == (are_apart and moving > 0)
        assert sum(one.buckets_refused for one in restored) == 0
        committed: Any = SimpleNamespace(tables=pod.commit[1] if pod.commit else ())
        assert_same_bytes(pod.state("end"), tables_of(Store(str(tmp_path)), committed))
        pod.train(5, 8)


class FinelyCut(Survivors):
    """Buckets lie in blocks, as in a run."""

    def placed(self, previous: Sequence[np.ndarray] | None) -> tuple[np.ndarray, ...]:
        specs = table_specs(self.job, self.buckets)
        counts = features_per_table(self.job)
        return tuple(place_tables(specs, num_features=counts, num_hosts=self.num_hosts, previous=previous))


@is_long
def test_a_table_of_most_buckets_is_committed_and_recovered_and_goes_to_other_hosts(
    small_data: str, tmp_path: Path
) -> None:
    job = small_job(folder=small_data, audit=False, cut_bags=True)
    second = "s000000002-g00000003"
    pod = FinelyCut(job, tmp_path, 2, buckets=(1, 8, 4, MAX_BUCKETS))
    try:
        pod.go_on()
        pod.train(0, 2)
        pod.commit_as(second)
        assert 0 < len(Store(str(tmp_path)).sizes(f"data/{second}")) < 2_500
        pod.train(2, 3)
        undisturbed = pod.state("third")
        survivor, new = pod.go_on(lost=(1,))
        assert (survivor.buckets_wrong, survivor.buckets_read, new.buckets_kept) == (0, 0, 0)
        assert survivor.buckets_kept + new.buckets_read == sum(pod.buckets)
        pod.train(2, 3)
        assert_same_bytes(pod.state("again"), undisturbed)
        restored = pod.go_on(num_hosts=3)
        assert sum(one.buckets_wrong + one.buckets_refused for one in restored) == 0
        owners = np.bincount(pod.workers[0]._present.spec.placement[-1])
        assert owners.max() <= 1.02 * owners.mean()
        pod.train(2, 3)
        for name, rows in pod.state("three").items():
            np.testing.assert_allclose(rows, undisturbed[name], rtol=1e-4, atol=1e-5, err_msg=name)
    finally:
        pod.close()
