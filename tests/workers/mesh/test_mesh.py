"""Exchanges between hosts that behave: every byte arrives once, where it belongs, whatever its size and order."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podembed.workers.mesh import active_exchange
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import MeshBroken, MeshUsageError, PeerLost
from tests.long_tests import examples
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, Inbox, identity, in_threads, meshes, succeed, trade

# From no frame at all over one packet to more than the kernel holds on both sides.
_NO_FRAME = -1
_SIZES = st.sampled_from([_NO_FRAME, 0, 1, 57, 1500, 65_536, 300_001, 6_000_000])


def _payload(step: int, source: int, target: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng([step, source, target]).integers(0, 256, max(0, num_bytes), np.uint8)


class _InPieces(Inbox):
    """An inbox whose payloads arrive in several buffers."""

    def __call__(self, rank: int, num_bytes: int) -> list[np.ndarray]:  # type: ignore[override]
        return np.array_split(super().__call__(rank, num_bytes), 3)


def _run_steps(mesh: Mesh, sizes: list[np.ndarray], is_split: bool) -> None:
    """All exchanges of one host; `sizes[step][source][target]` is known to all hosts, so each checks what it gets."""
    rank, num_ranks = mesh.identity.rank, mesh.identity.num_ranks
    for step, step_sizes in enumerate(sizes):
        payloads = [_payload(step, rank, target, step_sizes[rank, target]) for target in range(num_ranks)]
        send = [
            None if size == _NO_FRAME else np.array_split(payload, 3)
            for payload, size in zip(payloads, step_sizes[rank], strict=True)
        ]
        others = [peer for peer in range(num_ranks) if peer != rank]
        senders = [peer for peer in others if step_sizes[peer, rank] != _NO_FRAME]
        inbox = _InPieces() if step % 2 else Inbox()
        if is_split and (rank + step) % 2:
            mesh.begin(tag=Tag.ROWS, step=step, send=send, receive=inbox, senders=senders)
            statistics = mesh.finish(timeout_s=PATIENCE_S)
        else:
            statistics = mesh.exchange(
                tag=Tag.ROWS, step=step, send=send, receive=inbox, senders=senders, timeout_s=PATIENCE_S
            )
        assert sorted(inbox.payloads) == senders
        for source in senders:
            np.testing.assert_array_equal(
                inbox.payloads[source], _payload(step, source, rank, step_sizes[source, rank])
            )
        assert statistics.num_frames == np.count_nonzero(step_sizes[rank, others] != _NO_FRAME)
        assert statistics.bytes_sent == np.maximum(step_sizes, 0)[rank, others].sum()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@given(data=st.data())
@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_byte_arrives_where_it_belongs(num_ranks: int, data: st.DataObject) -> None:
    cells = st.lists(_SIZES, min_size=num_ranks**2, max_size=num_ranks**2)
    sizes = [np.reshape(data.draw(cells), (num_ranks, num_ranks)) for _ in range(3)]
    is_split = data.draw(st.booleans())
    with meshes(num_ranks) as ranks:
        succeed(in_threads([lambda mesh=mesh: _run_steps(mesh, sizes, is_split) for mesh in ranks]))


def test_one_host_needs_nobody() -> None:
    with Mesh.listen(identity(0, 1), bind_address=LOCAL) as mesh:
        mesh.connect([mesh.address], timeout_s=1)
        assert trade(mesh, [b"to myself"]) == {}
        assert mesh.statistics.num_exchanges == 1


def test_a_fast_host_runs_ahead_and_its_frames_wait() -> None:
    """Rank 1 begins the next exchange before rank 0 has finished the last, for every step."""
    with meshes(3) as ranks:
        num_steps = 20

        def run(mesh: Mesh) -> list[dict[int, bytes]]:
            received = []
            for step in range(num_steps):
                if mesh.identity.rank == 0:
                    threading.Event().wait(0.005)
                received.append(trade(mesh, [b"%d" % step] * 3, step=step))
            return received

        for received in succeed(in_threads([lambda mesh=mesh: run(mesh) for mesh in ranks])):
            assert [set(step.values()) for step in received] == [{b"%d" % step} for step in range(num_steps)]


def test_rows_arrive_in_the_callers_array() -> None:
    """What the embedding exchange does: send rows of a table, receive into a slice of a preallocated array."""
    with meshes(2) as ranks:
        tables = [np.arange(12, dtype=np.float32).reshape(6, 2) + 100 * rank for rank in range(2)]
        results = [np.zeros((6, 2), np.float32) for _ in range(2)]

        def run(rank: int) -> None:
            ranks[rank].exchange(
                tag=Tag.ROWS,
                step=3,
                send=[[tables[rank][1:3], tables[rank][5:]]] * 2,
                receive=lambda _, num_bytes: results[rank][2 : 2 + num_bytes // 8],
                timeout_s=PATIENCE_S,
            )

        succeed(in_threads([lambda rank=rank: run(rank) for rank in range(2)]))
        np.testing.assert_array_equal(results[0][2:5], tables[1][[1, 2, 5]])
        assert not results[0][[0, 1, 5]].any()


def test_a_larger_buffer_is_filled_from_its_start() -> None:
    with meshes(2) as ranks:
        buffers = [bytearray(b"." * 8), bytearray(b"." * 8)]

        def run(rank: int) -> None:
            ranks[rank].exchange(
                tag=Tag.IDS, step=0, send=[[b"abc"]] * 2, receive=lambda *_: buffers[rank], timeout_s=PATIENCE_S
            )

        succeed(in_threads([lambda rank=rank: run(rank) for rank in range(2)]))
        assert buffers == [b"abc.....", b"abc....."]


def test_statistics_add_up() -> None:
    with meshes(2) as ranks:
        for _ in range(3):
            succeed(in_threads([lambda mesh=mesh: trade(mesh, [b"12345"] * 2) for mesh in ranks]))
        statistics = ranks[0].statistics
        assert (statistics.num_exchanges, statistics.num_frames, statistics.bytes_sent) == (3, 3, 15)


def test_a_host_that_is_done_may_leave_while_others_still_wait() -> None:
    """The last exchange of a run: rank 1 has everything and closes, rank 0 still waits for rank 2."""
    with meshes(3) as ranks:
        ranks[0].begin(tag=Tag.IDS, step=0, send=[[b"x"]] * 3, receive=Inbox())
        ranks[2].begin(tag=Tag.IDS, step=0, send=[[b"y" * 8_000_000], [b"y"], []], receive=Inbox())
        trade(ranks[1], [b"z"] * 3, tag=Tag.IDS)
        ranks[1].close()
        finish = [lambda mesh=mesh: mesh.finish(timeout_s=PATIENCE_S) for mesh in (ranks[0], ranks[2])]
        succeed(in_threads(finish))
        with pytest.raises(PeerLost, match="rank 1") as caught:
            trade(ranks[0], [b""] * 3, step=1)
        assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"send": [[], [np.zeros((4, 4))[:, 0]]]}, "C-contiguous"),
        ({"send": [[], [bytes(101)]]}, "101 bytes for rank 1"),
    ],
)
def test_a_wrong_call_is_refused_and_harms_nothing(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_exchange, "MAX_FRAME_BYTES", 100)
    with meshes(2) as ranks:
        arguments: dict[str, Any] = {"tag": Tag.IDS, "step": 0, "send": [[], [b"x"]], "receive": Inbox()}
        with pytest.raises(MeshUsageError, match=message):
            ranks[0].begin(**(arguments | change))
        results = succeed(in_threads([lambda mesh=mesh: trade(mesh, [b"a", b"b"]) for mesh in ranks]))
        assert results == [{1: b"a"}, {0: b"b"}]


def test_calls_out_of_order_are_refused() -> None:
    with Mesh.listen(identity(0, 2), bind_address=LOCAL) as mesh, pytest.raises(MeshUsageError, match="not connected"):
        trade(mesh, [b"", b""])
    with meshes(2) as ranks:
        with pytest.raises(MeshUsageError, match="no exchange in progress"):
            ranks[0].finish(timeout_s=1)
        ranks[0].begin(tag=Tag.IDS, step=0, send=[[], []], receive=Inbox())
        with pytest.raises(MeshUsageError, match="unfinished exchange"):
            ranks[0].begin(tag=Tag.IDS, step=1, send=[[], []], receive=Inbox())


@pytest.mark.parametrize("buffer", [None, bytearray(2), b"read-only", "text"], ids=str)
def test_a_buffer_that_does_not_fit_ends_the_mesh(buffer: Any) -> None:
    with meshes(2) as ranks:
        ranks[1].begin(tag=Tag.IDS, step=0, send=[[b"abc"], []], receive=Inbox())
        with pytest.raises(MeshUsageError, match="Expected a"):
            ranks[0].exchange(tag=Tag.IDS, step=0, send=[[], []], receive=lambda *_: buffer, timeout_s=PATIENCE_S)
        with pytest.raises(MeshBroken):
            trade(ranks[0], [b"", b""])


def test_what_receive_raises_reaches_the_caller_and_the_peer_learns_of_it() -> None:
    with meshes(2) as ranks:

        def refuse(rank: int, num_bytes: int) -> None:
            raise ValueError(f"{num_bytes} bytes from rank {rank} are no whole rows")

        ranks[1].begin(tag=Tag.IDS, step=0, send=[[b"abc"], []], receive=Inbox())
        with pytest.raises(ValueError, match="3 bytes from rank 1"):
            ranks[0].exchange(tag=Tag.IDS, step=0, send=[[], []], receive=refuse, timeout_s=PATIENCE_S)
        # Rank 0's own frame of this exchange was whole, and that it left came right behind.
        with pytest.raises(PeerLost, match="failure of its own"):
            ranks[1].finish(timeout_s=PATIENCE_S)


def test_a_closed_mesh_says_so() -> None:
    with meshes(2) as ranks:
        ranks[0].close()
        ranks[0].close()
        with pytest.raises(MeshBroken, match="It was closed"):
            trade(ranks[0], [b"", b""])
        ranks[0].abort("too late to matter")
