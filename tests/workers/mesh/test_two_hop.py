"""Exchanges by way of relays: the same frames arrive as without, and the faults of hosts are found and named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.grid import Grid
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import ExchangeTimeout, FrameError, MeshBroken, MeshUsageError, PeerLost
from podembed.workers.mesh.two_hop import FIRST_HOP, SECOND_HOP, TwoHop
from tests.long_tests import examples
from tests.workers.mesh.mesh_testing import PATIENCE_S, Inbox, in_threads, meshes, succeed, trade

_NO_FRAME = -1
_SIZES = st.sampled_from([_NO_FRAME, _NO_FRAME, 0, 1, 57, 1500, 65_536, 300_001])


def _payload(step: int, source: int, target: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng([step, source, target]).integers(0, 256, max(0, num_bytes), np.uint8)


def _run_steps(mesh: Mesh, sizes: list[np.ndarray]) -> None:
    """All exchanges of one host, which checks what it gets; every third one is direct."""
    rank, num_ranks = mesh.identity.rank, mesh.identity.num_ranks
    two_hop = TwoHop(mesh)
    for step, step_sizes in enumerate(sizes):
        send = {
            target: np.array_split(_payload(step, rank, target, size), 3)
            for target, size in enumerate(step_sizes[rank])
            if size != _NO_FRAME
        }
        senders = [peer for peer in range(num_ranks) if peer != rank and step_sizes[peer, rank] != _NO_FRAME]
        inbox = Inbox()
        way = mesh if step % 3 == 2 else two_hop
        way.begin(tag=Tag.ROWS, step=step, send=send, receive=inbox, senders=senders)
        if (rank + step) % 2:
            threading.Event().wait(0.001)
        way.finish(timeout_s=PATIENCE_S)
        assert sorted(inbox.payloads) == senders
        for source in senders:
            expected = _payload(step, source, rank, step_sizes[source, rank])
            np.testing.assert_array_equal(inbox.payloads[source], expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 12])
@given(data=st.data())
@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_frame_arrives_where_it_belongs(num_ranks: int, data: st.DataObject) -> None:
    cells = st.lists(_SIZES, min_size=num_ranks**2, max_size=num_ranks**2)
    sizes = [np.reshape(data.draw(cells), (num_ranks, num_ranks)) for _ in range(4)]
    with meshes(num_ranks) as ranks:
        succeed(in_threads([lambda mesh=mesh: _run_steps(mesh, sizes) for mesh in ranks]))


def test_a_host_sends_few_frames_and_each_byte_at_most_twice() -> None:
    num_ranks, num_bytes = 12, 100
    with meshes(num_ranks) as ranks:

        def run(mesh: Mesh) -> None:
            TwoHop(mesh).exchange(
                tag=Tag.IDS, step=0, send=[[bytes(num_bytes)]] * num_ranks, receive=Inbox(), timeout_s=PATIENCE_S
            )

        succeed(in_threads([lambda mesh=mesh: run(mesh) for mesh in ranks]))
        for mesh in ranks:
            assert mesh.statistics.num_frames == Grid(num_ranks).most_frames == 5
            # With eight bytes for each part of each hop.
            assert mesh.statistics.bytes_sent <= 2 * num_ranks * (num_bytes + 8)


def _outcomes(ranks: list[Mesh], run: Callable[[Mesh], Any], *, without: int) -> dict[int, Any]:
    """What the others end with when one host takes no part."""
    others = [mesh for mesh in ranks if mesh.identity.rank != without]
    found = in_threads([lambda mesh=mesh: run(mesh) for mesh in others])
    return {mesh.identity.rank: one for mesh, one in zip(others, found, strict=True)}


def test_the_hosts_of_its_row_name_a_host_that_stands_still() -> None:
    """Others wait for hosts of that row; they are told before they give up themselves."""
    num_ranks, still = 12, 5
    with meshes(num_ranks) as ranks:

        def run(mesh: Mesh) -> None:
            TwoHop(mesh).exchange(tag=Tag.IDS, step=0, send=[[b"x"]] * num_ranks, receive=Inbox(), timeout_s=0.6)

        found = _outcomes(ranks, run, without=still)
    timeouts = [error for error in found.values() if isinstance(error, ExchangeTimeout)]
    assert timeouts
    assert {error.waiting_for for error in timeouts} == {(still,)}
    blamed = {error.blamed_rank for error in found.values() if isinstance(error, PeerLost)}
    assert blamed <= {still}
    assert len(timeouts) + sum(isinstance(error, PeerLost) for error in found.values()) == num_ranks - 1


def test_following_who_waits_for_whom_leads_to_a_host_that_stands_still() -> None:
    num_ranks, still = 12, 5
    with meshes(num_ranks) as ranks:
        ways = {mesh.identity.rank: TwoHop(mesh) for mesh in ranks if mesh.identity.rank != still}
        for way in ways.values():
            way.begin(tag=Tag.IDS, step=0, send=[[b"x"]] * num_ranks, receive=Inbox())
        threads = [
            threading.Thread(target=in_threads, args=([lambda way=way: way.finish(timeout_s=PATIENCE_S)],), daemon=True)
            for way in ways.values()
        ]
        for thread in threads:
            thread.start()
        grid, waits = Grid(num_ranks), {}

        def has_settled() -> bool:
            waits.update({rank: ranks[rank].waiting_for for rank in ways})
            others = [rank for rank in ways if grid.row_of(rank) != grid.row_of(still)]
            return all(waits[rank] and still not in waits[rank][1:] for rank in ways) and all(
                len(waits[rank]) == 1 for rank in others
            )

        deadline = threading.Event()
        for _ in range(200):
            if has_settled():
                break
            deadline.wait(0.02)
        for rank in ways:
            at, steps = rank, 0
            while at != still:
                assert waits[at], f"rank {at} waits for nobody"
                at, steps = waits[at][0], steps + 1
                assert steps <= 2, "they wait in a circle"
        ranks[0].abort("seen enough")
        for thread in threads:
            thread.join(PATIENCE_S)


def test_a_host_that_leaves_in_the_middle_is_known_to_all() -> None:
    num_ranks, lost = 7, 3
    with meshes(num_ranks) as ranks:

        def run(mesh: Mesh) -> None:
            way = TwoHop(mesh)
            for step in range(3):
                if mesh.identity.rank == lost and step == 1:
                    way.begin(tag=Tag.IDS, step=step, send=[[b"x"]] * num_ranks, receive=Inbox())
                    mesh.close()
                    return
                way.exchange(tag=Tag.IDS, step=step, send=[[b"x"]] * num_ranks, receive=Inbox(), timeout_s=PATIENCE_S)

        errors = _outcomes(ranks, run, without=-1)
    assert errors.pop(lost) is None
    assert all(isinstance(error, PeerLost) for error in errors.values())
    assert lost in {error.blamed_rank for error in errors.values()}


def test_a_host_that_exchanges_directly_among_relays_is_found() -> None:
    with meshes(5) as ranks:

        def run(mesh: Mesh) -> None:
            way = mesh if mesh.identity.rank == 1 else TwoHop(mesh)
            way.exchange(tag=Tag.IDS, step=0, send=[[b"x"]] * 5, receive=Inbox(), timeout_s=PATIENCE_S)

        errors = in_threads([lambda mesh=mesh: run(mesh) for mesh in ranks])
    assert all(isinstance(error, FrameError | PeerLost) for error in errors)
    assert any(isinstance(error, FrameError) and error.field == "tag and step" for error in errors)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "16 bytes of lengths"),
        (np.array([-2, -1], np.int64).tobytes(), r"they are \[-2, -1\]"),
        (np.array([2**62, 2**62], np.int64).tobytes(), "joined frames"),
        (np.array([1, 1], np.int64).tobytes() + b"abc", r"they are \[1, 1\]"),
    ],
    ids=["short", "negative", "long", "rest"],
)
def test_joined_frames_that_contradict_themselves_are_refused(frame: bytes, text: str) -> None:
    """Rank 1 sends rank 0 its frame of the first hop. Four hosts are two rows of two."""
    with meshes(4) as ranks:
        ranks[1].begin(tag=Tag.IDS + FIRST_HOP, step=0, send={0: [frame]}, receive=Inbox(), senders=())
        with pytest.raises(FrameError, match=text) as caught:
            TwoHop(ranks[0]).exchange(tag=Tag.IDS, step=0, send=[[]] * 4, receive=Inbox(), timeout_s=PATIENCE_S)
        assert (caught.value.rank, caught.value.field) == (1, "joined frames")
        with pytest.raises(MeshBroken):
            trade(ranks[0], [b""] * 4)


@pytest.mark.parametrize(("lengths", "senders", "found"), [([0, -1], (), "one"), ([-1, -1], (1,), "none")])
def test_a_frame_too_many_or_too_few_is_refused(lengths: list[int], senders: tuple[int, ...], found: str) -> None:
    with meshes(4) as ranks:
        frame = np.array(lengths, np.int64)
        ranks[1].begin(tag=Tag.IDS + FIRST_HOP, step=0, send={0: [frame]}, receive=Inbox(), senders=())
        with pytest.raises(FrameError, match="relayed frame") as caught:
            TwoHop(ranks[0]).exchange(
                tag=Tag.IDS, step=0, send={}, receive=Inbox(), senders=senders, timeout_s=PATIENCE_S
            )
        assert (caught.value.rank, caught.value.found) == (1, found)


def test_a_frame_of_the_second_hop_is_checked_too() -> None:
    """Rank 2 is the relay of rank 0 in its column."""
    with meshes(4) as ranks:
        ranks[1].begin(tag=Tag.IDS + FIRST_HOP, step=0, send={0: [np.array([-1, -1])]}, receive=Inbox(), senders=())
        ranks[2].begin(tag=Tag.IDS + SECOND_HOP, step=0, send={0: [b"abc"]}, receive=Inbox(), senders=())
        with pytest.raises(FrameError, match="16 bytes of lengths") as caught:
            TwoHop(ranks[0]).exchange(tag=Tag.IDS, step=0, send={}, receive=Inbox(), senders=(), timeout_s=PATIENCE_S)
        assert caught.value.rank == 2


def test_calls_out_of_order_and_buffers_that_do_not_fit_are_refused() -> None:
    with meshes(2) as ranks:
        with pytest.raises(MeshUsageError, match="no exchange in progress"):
            TwoHop(ranks[0]).finish(timeout_s=1)

        def run(mesh: Mesh) -> None:
            TwoHop(mesh).exchange(
                tag=Tag.IDS, step=0, send=[[b"abc"]] * 2, receive=lambda *_: bytearray(2), timeout_s=PATIENCE_S
            )

        errors = in_threads([lambda mesh=mesh: run(mesh) for mesh in ranks])
        assert any(isinstance(error, MeshUsageError) and "buffer of 2 bytes" in str(error) for error in errors)
