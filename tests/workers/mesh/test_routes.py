"""Hosts choose the same route from the same numbers, by what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.grid import Grid
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.route import Route
from podembed.workers.mesh.routes import KINDS, SETTLED_AFTER, RouteCosts, Routes
from tests.workers.mesh.mesh_testing import PATIENCE_S, Inbox, in_threads, meshes, succeed


def test_many_hosts_with_few_bytes_go_by_way_of_relays() -> None:
    costs = RouteCosts(frame_s=40e-6, byte_s=1e-9, part_s=1e-6, hop_s=50e-6)
    assert costs.cheapest(num_hosts=2, num_bytes=0) is Route.DIRECT
    assert costs.cheapest(num_hosts=4, num_bytes=0) is Route.DIRECT
    assert costs.cheapest(num_hosts=32, num_bytes=1e5) is Route.TWO_HOP
    assert costs.cheapest(num_hosts=32, num_bytes=1e7) is Route.DIRECT
    assert costs.cheapest(num_hosts=1024, num_bytes=1e7) is Route.TWO_HOP


def test_costs_follow_from_frames_bytes_and_hops() -> None:
    costs = RouteCosts(frame_s=10.0, byte_s=0.5, part_s=2.0, hop_s=3.0)
    assert costs.direct_s(num_hosts=16, num_bytes=8) == 3 + 15 * 10 + 8 * 0.5
    assert costs.two_hop_s(num_hosts=16, num_bytes=8) == 2 * 3 + 6 * 10 + 16 * 2 + 2 * 8 * 0.5


def _train(mesh: Mesh, num_bytes: dict[int, int], *, num_steps: int, **options: Any) -> Routes:
    """So many exchanges of each kind, and what was sent is told where it is time for that."""
    routes, num_ranks = Routes(mesh, **options), mesh.identity.num_ranks
    for step in range(num_steps):
        for kind in KINDS:
            is_settling = kind == Tag.IDS and routes.is_settling
            told = routes.mean_bytes() if is_settling else np.zeros(3, np.int64)
            inbox = Inbox()
            send = [[told, bytes(num_bytes[kind])]] * num_ranks
            routes.exchange(tag=kind, step=step, send=send, receive=inbox, timeout_s=PATIENCE_S)
            if is_settling:
                inbox.payloads[mesh.identity.rank] = told.view(np.uint8)
                routes.settle(np.array([inbox.payloads[rank][:24].view(np.int64) for rank in range(num_ranks)]))
    return routes


def test_all_hosts_choose_alike_for_each_kind_and_once() -> None:
    costs = RouteCosts(frame_s=40e-6, byte_s=1e-9, part_s=1e-6, hop_s=10e-6)
    num_bytes = {Tag.IDS: 10, Tag.ROWS: 300_000, Tag.GRADIENTS: 1000}
    num_ranks = 9
    with meshes(num_ranks) as ranks:
        run = [lambda mesh=mesh: _train(mesh, num_bytes, num_steps=SETTLED_AFTER + 3, costs=costs) for mesh in ranks]
        found = succeed(in_threads(run))
        expected = {Tag.IDS: Route.TWO_HOP, Tag.ROWS: Route.DIRECT, Tag.GRADIENTS: Route.TWO_HOP}
        assert [routes.chosen for routes in found] == [expected] * num_ranks
        direct, few = num_ranks - 1, Grid(num_ranks).most_frames
        # The exchange of ids after which hosts choose is direct itself.
        frames = (
            (SETTLED_AFTER + 1) * direct + 2 * few + (SETTLED_AFTER + 3) * direct + SETTLED_AFTER * direct + 3 * few
        )
        assert [mesh.statistics.num_frames for mesh in ranks] == [frames] * num_ranks


@pytest.mark.parametrize("declared", [Route.DIRECT, Route.TWO_HOP])
def test_a_declared_route_holds_from_the_first_exchange_on(declared: Route) -> None:
    num_bytes = dict.fromkeys(KINDS, 10)
    with meshes(4) as ranks:
        num_steps = SETTLED_AFTER + 2
        run = [lambda mesh=mesh: _train(mesh, num_bytes, num_steps=num_steps, declared=declared) for mesh in ranks]
        found = succeed(in_threads(run))
        assert all(routes.chosen == dict.fromkeys(KINDS, declared) for routes in found)
        frames = 3 * num_steps * (3 if declared is Route.DIRECT else 2)
        assert ranks[0].statistics.num_frames == frames
