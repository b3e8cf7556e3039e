"""Exchanges under the faults of a network and of other hosts: what is lost is named, nobody hangs, nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from podembed.workers.mesh.frames import FrameHeader, Tag
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import (
    ExchangeTimeout,
    FrameError,
    MeshAborted,
    MeshBroken,
    MeshConnectTimeout,
    MeshError,
    PeerLost,
)
from tests.workers.mesh.frame_proxy import Rewrite, proxied_pair
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, Inbox, identity, in_threads, meshes, succeed, trade

_MORE_THAN_KERNELS_HOLD = 60_000_000


def _host_process(rank: int, num_ranks: int, num_bytes: int, pipe: Connection) -> None:
    """A host that exchanges for ever, and reports the error that ended it."""
    with Mesh.listen(identity(rank, num_ranks), bind_address=LOCAL) as mesh:
        pipe.send(mesh.address)
        mesh.connect(pipe.recv(), timeout_s=PATIENCE_S)
        payload = np.zeros(num_bytes, np.uint8)
        step = 0
        try:
            while True:
                mesh.exchange(
                    tag=Tag.ROWS,
                    step=step,
                    send=[[payload]] * num_ranks,
                    receive=Inbox(),
                    timeout_s=PATIENCE_S,
                )
                if step == 0:
                    pipe.send("exchanged")
                step += 1
        except MeshError as error:
            pipe.send((step, error))


class _Process:
    """A spawned host and the pipe to it."""

    def __init__(self, rank: int, num_ranks: int, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process: BaseProcess = context.Process(target=_host_process, args=(rank, num_ranks, num_bytes, far))
        self.process.start()
        far.close()
        self.address: tuple[str, int] = self.receive()

    def error(self) -> MeshError:
        """What ended it."""
        while (said := self.receive()) == "exchanged":
            pass
        return said[1]

    def receive(self):
        assert self.pipe.poll(PATIENCE_S), "the host process does not answer"
        return self.pipe.recv()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def _processes(ranks: list[int], num_ranks: int, num_bytes: int) -> Iterator[list[_Process]]:
    started: list[_Process] = []
    try:
        for rank in ranks:
            started.append(_Process(rank, num_ranks, num_bytes))
        yield started
    finally:
        for host in started:
            host.process.kill()
            host.process.join(PATIENCE_S)
            host.process.close()
            host.pipe.close()


@contextlib.contextmanager
def _mesh_with_a_process(num_bytes: int) -> Iterator[tuple[Mesh, _Process]]:
    """Rank 0 here, rank 1 in a process that sends `num_bytes` per exchange."""
    with _processes([1], 2, num_bytes) as (host,), Mesh.listen(identity(0, 2), bind_address=LOCAL) as mesh:
        addresses = [mesh.address, host.address]
        host.pipe.send(addresses)
        mesh.connect(addresses, timeout_s=PATIENCE_S)
        yield mesh, host


def test_a_host_killed_in_the_middle_of_its_frame_is_lost() -> None:
    with _mesh_with_a_process(_MORE_THAN_KERNELS_HOLD) as (mesh, host):

        def kill_on_arrival(_: int, num_bytes: int) -> bytearray:
            host.send_signal(signal.SIGKILL)
            return bytearray(num_bytes)

        with pytest.raises(PeerLost) as caught:
            mesh.exchange(tag=Tag.ROWS, step=0, send=[[], []], receive=kill_on_arrival, timeout_s=PATIENCE_S)
        assert caught.value.rank == caught.value.blamed_rank == 1
        with pytest.raises(MeshBroken, match="rank 1"):
            trade(mesh, [b"", b""])


def test_survivors_of_a_killed_host_report_and_live_on() -> None:
    num_ranks = 3
    with _processes(list(range(num_ranks)), num_ranks, 200_000) as hosts:
        for host in hosts:
            host.pipe.send([other.address for other in hosts])
        for host in hosts:
            assert host.receive() == "exchanged"
        hosts[1].send_signal(signal.SIGKILL)
        errors = [host.error() for host in (hosts[0], hosts[2])]
        assert all(isinstance(error, PeerLost) for error in errors)
        # Whoever noticed first can only have seen rank 1 go.
        assert any(error.rank == 1 for error in errors)


def test_a_frozen_host_is_named_by_the_timeout() -> None:
    with _mesh_with_a_process(1000) as (mesh, host):
        mesh.exchange(tag=Tag.ROWS, step=0, send=[[], [bytes(1000)]], receive=Inbox(), timeout_s=PATIENCE_S)
        host.send_signal(signal.SIGSTOP)

        def run_until_timeout() -> None:
            for step, num_bytes in ((1, 1000), (2, _MORE_THAN_KERNELS_HOLD)):
                trade(mesh, [b"", bytes(num_bytes)], step=step, tag=Tag.ROWS, timeout_s=0.4)

        with pytest.raises(ExchangeTimeout) as caught:
            run_until_timeout()
        # Its frame of step 1 may have left before it froze; that of step 2 cannot have.
        assert caught.value.waiting_for == (1,)
        assert caught.value.step == 1 or caught.value.unsent == (1,)
        host.send_signal(signal.SIGCONT)
        assert isinstance(host.error(), PeerLost)


def test_a_host_that_owes_no_frame_is_missed_all_the_same() -> None:
    """Ranks 0 and 1 exchange among themselves when rank 2 fails. Rank 1 never begins, so rank 0 waits only for it."""
    with meshes(3) as ranks:
        ranks[0].begin(tag=Tag.ROWS, step=0, send=[None, [b"a"], None], receive=Inbox(), senders=[1])
        with pytest.raises(ExchangeTimeout) as caught:
            ranks[2].exchange(
                tag=Tag.ROWS, step=0, send=[None, [b"c"], None], receive=Inbox(), senders=[1], timeout_s=0.1
            )
        assert caught.value.waiting_for == (1,)
        assert ranks[0].waiting_for == (1,)
        with pytest.raises(PeerLost) as lost:
            ranks[0].finish(timeout_s=PATIENCE_S)
        assert lost.value.rank == 2
        assert lost.value.blamed_rank == 1


def test_a_host_that_takes_no_frame_is_waited_for_although_it_owes_none() -> None:
    with meshes(3) as ranks:
        payload = np.zeros(_MORE_THAN_KERNELS_HOLD, np.uint8)
        ranks[0].begin(tag=Tag.ROWS, step=0, send=[None, [payload], [b"a"]], receive=Inbox(), senders=())
        assert ranks[0].waiting_for == (1,)


def test_a_frame_that_nobody_expects_ends_the_mesh_at_the_next_exchange() -> None:
    with meshes(2) as ranks:
        ranks[1].begin(tag=Tag.ROWS, step=0, send=[[b"abc"], []], receive=Inbox())
        ranks[0].exchange(tag=Tag.ROWS, step=0, send=[None, None], receive=Inbox(), senders=(), timeout_s=PATIENCE_S)
        with pytest.raises(FrameError, match="the exchange in progress"):
            trade(ranks[0], [b"", b""], step=1)


def test_abort_frees_a_host_that_waits_for_a_frozen_one() -> None:
    with _mesh_with_a_process(1000) as (mesh, host):
        host.send_signal(signal.SIGSTOP)
        threading.Timer(0.2, mesh.abort, args=["rank 1 does not answer"]).start()

        def run_until_aborted() -> None:
            for step in range(3):
                trade(mesh, [b"", bytes(1000)], step=step, tag=Tag.ROWS)

        with pytest.raises(MeshAborted, match="rank 1 does not answer"):
            run_until_aborted()
        with pytest.raises(MeshAborted):
            trade(mesh, [b"", b""])


def test_abort_between_exchanges_stops_the_next() -> None:
    with meshes(2) as ranks:
        ranks[0].abort("fenced")
        ranks[0].abort("a later reason")
        with pytest.raises(MeshAborted, match="fenced"):
            trade(ranks[0], [b"", b""])


def _pass(_: int, header: bytes, payload: bytes) -> bytes:
    return header + payload


def _duplicated(index: int, header: bytes, payload: bytes) -> bytes:
    return (header + payload) * (2 if index == 1 else 1)


def _reordered() -> Rewrite:
    held: list[bytes] = []

    def rewrite(index: int, header: bytes, payload: bytes) -> bytes:
        if index == 1:
            held.append(header + payload)
            return b""
        return header + payload + (held.pop() if held else b"")

    return rewrite


def _dropped(index: int, header: bytes, payload: bytes) -> bytes:
    return b"" if index == 1 else header + payload


def _corrupted_header(index: int, header: bytes, payload: bytes) -> bytes:
    damaged = bytearray(header)
    damaged[9] ^= 0x10 if index == 1 else 0
    return bytes(damaged) + payload


def _oversize(index: int, header: bytes, payload: bytes) -> bytes:
    if index != 1:
        return header + payload
    read = FrameHeader.unpack(header, rank=1)
    forged = FrameHeader(
        tag=read.tag,
        step=read.step,
        sender=read.sender,
        generation=read.generation,
        sequence=read.sequence,
        payload_bytes=2**62,
    )
    return forged.pack() + payload


def _shortened(index: int, header: bytes, payload: bytes) -> bytes:
    return header + (payload[:-1] if index == 1 else payload)


def _lengthened(index: int, header: bytes, payload: bytes) -> bytes:
    return header + payload[:1] + (payload if index == 1 else payload[1:])


def _trade_until_error(mesh: Mesh) -> MeshError:
    inbox = np.zeros(4096, np.uint8)
    for step in range(6):
        try:
            mesh.exchange(
                tag=Tag.GRADIENTS,
                step=step,
                send=[[b"%04d" % step], [b"%04d" % step]],
                receive=lambda *_: inbox,
                timeout_s=PATIENCE_S,
            )
        except MeshError as error:
            return error
        assert bytes(inbox[:4]) == b"%04d" % step, "a spoiled frame was taken for a good one"
    raise AssertionError("no error in six exchanges")


@pytest.mark.parametrize(
    ("rewrite", "field"),
    [
        (_duplicated, "sequence"),
        (_corrupted_header, "header crc32c"),
        (_oversize, "payload bytes"),
        (_shortened, "trailer"),
        (_lengthened, "trailer"),
    ],
)
def test_a_spoiled_frame_is_refused_and_the_other_end_learns_of_it(rewrite: Rewrite, field: str) -> None:
    with proxied_pair(rewrite) as (low, high, _):
        low_error, high_error = in_threads([lambda mesh=mesh: _trade_until_error(mesh) for mesh in (low, high)])
        assert isinstance(low_error, FrameError)
        assert (low_error.rank, low_error.field) == (1, field)
        assert isinstance(high_error, PeerLost)
        assert high_error.rank == 0


def test_reordered_frames_are_refused() -> None:
    """The frame that overtakes can only be of a host that runs ahead, so rank 1 does not wait for rank 0 here."""
    with proxied_pair(_reordered()) as (low, high, _):
        succeed(in_threads([lambda mesh=mesh: trade(mesh, [b"", b""]) for mesh in (low, high)]))
        low.begin(tag=Tag.CONTROL, step=1, send=[[], []], receive=Inbox())
        # Rank 1's frames 1 and 2 as it sends them: an exchange, and the goodbye of a mesh that closes.
        high.begin(tag=Tag.CONTROL, step=1, send=[[b"x"], []], receive=Inbox())
        high.close()
        with pytest.raises(FrameError) as caught:
            low.finish(timeout_s=PATIENCE_S)
        assert caught.value.field == "sequence"


def test_a_frame_that_never_comes_is_found_by_the_next_or_by_time() -> None:
    with proxied_pair(_dropped) as (low, high, _):
        low.begin(tag=Tag.CONTROL, step=0, send=[[], []], receive=Inbox())
        for step in range(2):
            trade(high, [b"x", b""], step=0) if step == 0 else high.begin(
                tag=Tag.CONTROL, step=1, send=[[b"x"], []], receive=Inbox()
            )
        low.finish(timeout_s=PATIENCE_S)
        with pytest.raises(ExchangeTimeout) as caught:
            trade(low, [b"", b""], step=1, timeout_s=0.3)
        assert (caught.value.step, caught.value.waiting_for, caught.value.unsent) == (1, (1,), ())
    with proxied_pair(_dropped) as (low, high, _):
        error = in_threads([lambda mesh=mesh: _trade_until_error(mesh) for mesh in (low, high)])[0]
        # Rank 1 had rank 0's frame and went on, so its next one shows the gap.
        assert isinstance(error, FrameError)
        assert (error.field, error.found, error.expected) == ("sequence", "2", "1")


def test_a_connection_cut_between_frames_is_a_lost_peer() -> None:
    with proxied_pair(lambda index, *frame: None if index == 2 else b"".join(frame)) as (low, high, _):
        errors = in_threads([lambda mesh=mesh: _trade_until_error(mesh) for mesh in (low, high)])
        assert all(isinstance(error, PeerLost) for error in errors)


def test_a_partition_is_a_timeout_that_names_the_pair() -> None:
    with proxied_pair(_pass) as (low, high, proxy):
        succeed(in_threads([lambda mesh=mesh: trade(mesh, [b"a", b"b"]) for mesh in (low, high)]))
        proxy.hold()
        errors = in_threads(
            [lambda mesh=mesh: trade(mesh, [b"a", b"b"], step=1, timeout_s=0.3) for mesh in (low, high)]
        )
        assert [error.waiting_for for error in errors] == [(1,), (0,)]


def test_hosts_that_disagree_on_the_exchange_are_both_told() -> None:
    with meshes(2) as ranks:
        errors = in_threads(
            [lambda mesh=mesh, step=step: trade(mesh, [b""] * 2, step=step) for step, mesh in enumerate(ranks)]
        )
        assert any(isinstance(error, FrameError) and error.field == "tag and step" for error in errors)
        assert all(isinstance(error, FrameError | PeerLost) for error in errors)


def test_the_others_learn_whom_to_blame() -> None:
    """Rank 1 dies; rank 0 notices, leaves, and rank 2, which waits only for rank 0, hears who it was."""
    with meshes(3) as ranks:
        for link in ranks[1]._links:
            if link.rank == 0:
                link.close()
        with pytest.raises(PeerLost):
            trade(ranks[0], [b"", b"", b""])
        with pytest.raises(PeerLost) as caught:
            trade(ranks[2], [b"", b"", b""])
        assert (caught.value.rank, caught.value.blamed_rank) == (0, 1)


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_outlives_a_mesh() -> None:
    def once(round_index: int) -> None:
        with meshes(3) as ranks:
            messages = [b"x"] * 3
            succeed(in_threads([lambda mesh=mesh: trade(mesh, messages) for mesh in ranks]))
            if round_index % 2:
                ranks[1].abort("every other time")
                in_threads([lambda mesh=mesh: trade(mesh, messages, step=1) for mesh in ranks])
        with Mesh.listen(identity(1, 2), bind_address=LOCAL) as lonely, pytest.raises(MeshConnectTimeout):
            lonely.connect([lonely.address, lonely.address], timeout_s=0.0)

    once(0)
    gc.collect()
    before = _num_descriptors()
    for round_index in range(50):
        once(round_index)
    assert _num_descriptors() <= before
