"""Hosts that exchange by way of relays train the same bytes as hosts that exchange directly."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from podembed.workers.job.job import JobConfig
from podembed.workers.mesh.grid import Grid
from podembed.workers.mesh.mesh_errors import ExchangeTimeout, MeshError, PeerLost
from podembed.workers.mesh.route import Route
from podembed.workers.mesh.routes import KINDS, SETTLED_AFTER, RouteCosts
from tests.long_tests import long_case
from tests.run_state import assert_same_bytes
from tests.small_job import small_job
from tests.workers.host.test_host import BUCKETS, Pod, pod
from tests.workers.mesh.mesh_testing import in_threads

ALL_WHOLE = (1, 1, 1)
LAST = 14


@pytest.fixture(scope="module")
def job(small_data: str) -> JobConfig:
    return replace(small_job(folder=small_data, audit=False, evaluate=True), overlap=True)


def _all(hosts: Pod, call: str) -> list:
    return hosts.all(call, [(None,)] * hosts.num_hosts)


@pytest.mark.parametrize(
    ("num_hosts", "shares_memory", "buckets"),
    [
        (5, False, ALL_WHOLE),
        (7, True, BUCKETS),
        long_case(5, False, BUCKETS),
        long_case(7, True, ALL_WHOLE),
        *(
            long_case(*one, way)
            for one in [(1, True), (2, False), (3, True), (12, False)]
            for way in (BUCKETS, ALL_WHOLE)
        ),
    ],
)
def test_relays_change_no_byte(
    job: JobConfig, tmp_path: Path, num_hosts: int, shares_memory: bool, buckets: tuple[int, ...]
) -> None:
    """With prefetched vectors, an evaluation in between, and 12 lanes for up to 12 hosts."""
    states, scores, frames = [], [], []
    for route in (Route.DIRECT, Route.TWO_HOP):
        options = {"buckets": buckets, "shares_memory": shares_memory, "exchange": route, "hold_s": 0.002}
        with pod(job, tmp_path / route, num_hosts, **options) as hosts:
            _all(hosts, "restore")
            hosts.train(0, 9, is_followed=True)
            scores.append([part.scores.tobytes() for part in hosts.all("evaluate")])
            hosts.train(9, LAST)
            frames.append(sum(worker._present.mesh.statistics.num_frames for worker in hosts.workers))
            states.append(hosts.state("end"))
    assert_same_bytes(*states)
    assert scores[0] == scores[1]
    if Grid(num_hosts).most_frames < (num_hosts - 1) // 2:
        assert frames[1] < frames[0]


def test_hosts_that_choose_while_they_train_change_no_byte(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are prefetched meanwhile, so the choice falls into the middle of a step."""
    num_hosts, states = 5, []
    for frame_s in (0.0, 1.0):
        costs = RouteCosts(frame_s=frame_s, byte_s=0.0, part_s=0.0, hop_s=0.0)
        monkeypatch.setattr("podembed.workers.mesh.routes.DEFAULT_COSTS", costs)
        with pod(job, tmp_path / str(frame_s), num_hosts, hold_s=0.002) as hosts:
            _all(hosts, "restore")
            first = hosts.train(0, SETTLED_AFTER - 2, is_followed=True)
            later = hosts.train(SETTLED_AFTER - 2, LAST)
            assert [window.relayed for window in first] == [()] * num_hosts
            relayed = tuple(kind.name.lower() for kind in KINDS) if frame_s else ()
            assert [window.relayed for window in later] == [relayed] * num_hosts
            states.append(hosts.state("end"))
    assert_same_bytes(*states)


def test_a_host_that_leaves_ends_the_step_of_all(job: JobConfig, tmp_path: Path) -> None:
    with pod(job, tmp_path, 7, exchange=Route.TWO_HOP, step_timeout_s=600.0) as hosts:
        _all(hosts, "restore")
        hosts.train(0, 2, is_followed=True)
        leaving, staying = hosts.workers[3], [worker for at, worker in enumerate(hosts.workers) if at != 3]
        threading.Timer(0.3, leaving.close).start()
        outcomes = in_threads([lambda w=w: w.train(2, 10, False) for w in staying])
        assert all(isinstance(outcome, MeshError) for outcome in outcomes), outcomes
        assert 3 in {outcome.blamed_rank for outcome in outcomes if isinstance(outcome, PeerLost)}


def test_a_host_that_stands_still_is_named(job: JobConfig, tmp_path: Path) -> None:
    """Its relays wait for it, and others for these relays. Nobody waits for a host of another row."""
    num_hosts, still = 7, 3
    # Seven hosts share two cores with other tests: a step of theirs may take seconds without standing still.
    with pod(job, tmp_path, num_hosts, exchange=Route.TWO_HOP, step_timeout_s=10.0) as hosts:
        _all(hosts, "restore")
        hosts.train(0, 2)
        staying = [worker for at, worker in enumerate(hosts.workers) if at != still]
        outcomes = in_threads([lambda w=w: w.train(2, 10, False) for w in staying])
        named = {outcome.waiting_for for outcome in outcomes if isinstance(outcome, ExchangeTimeout)}
        assert named == {(still,)}
        assert {outcome.blamed_rank for outcome in outcomes if isinstance(outcome, PeerLost)} <= {still}
