"""What a plan does to frames is met by the other end as an error that names the peer; nobody takes a spoilt frame for a
good one.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.chaos.plan_file import read_records
from podembed.workers.faults.frames import frame_spoiler
from podembed.workers.faults.inject import FaultPoints
from podembed.workers.faults.plan import Fault, FaultPlan
from podembed.workers.mesh.frames import Tag, tag_name
from podembed.workers.mesh.mesh import Mesh
from podembed.workers.mesh.mesh_errors import ExchangeTimeout, FrameError, MeshError, PeerLost
from tests.workers.mesh.mesh_testing import LOCAL, PATIENCE_S, identity, in_threads, succeed, trade


def spoilt_trades(folder: Path, action: str, **arguments: Any) -> list[Any]:
    """Three exchanges of two hosts, rank 1 spoiling its frame of the second; per rank its results or the error."""
    fault = Fault(point="mesh.send", action=action, rank="host 1", step=1, arguments=arguments)
    spoil = frame_spoiler(FaultPoints.of(FaultPlan(folder=str(folder), faults=(fault,)), "host 1"))
    with contextlib.ExitStack() as stack:
        meshes = [
            stack.enter_context(Mesh.listen(identity(rank, 2), bind_address=LOCAL, spoil=spoil if rank else None))
            for rank in range(2)
        ]
        addresses = [mesh.address for mesh in meshes]
        succeed(in_threads([lambda mesh=mesh: mesh.connect(addresses, timeout_s=PATIENCE_S) for mesh in meshes]))

        def run(mesh: Mesh) -> list[dict[int, bytes]]:
            return [trade(mesh, [b"payload"] * 2, step=step, timeout_s=10.0) for step in range(3)]

        return in_threads([lambda mesh=mesh: run(mesh) for mesh in meshes])


def test_a_mesh_that_no_fault_can_strike_spoils_nothing(tmp_path: Path) -> None:
    assert frame_spoiler(None) is None
    plan = FaultPlan(folder=str(tmp_path), faults=(Fault(point="step.update", action="kill"),))
    assert frame_spoiler(FaultPoints.of(plan, "host 0")) is None


@pytest.mark.parametrize(
    ("match", "tag", "strikes"),
    [("^ROWS to 0", Tag.ROWS, True), ("^ROWS", Tag.IDS, False), ("to 1$", Tag.IDS, False), ("^77 to 0", 77, True)],
)
def test_a_plan_names_a_frame_by_what_it_carries(match: str, tag: int, strikes: bool, tmp_path: Path) -> None:
    plan = FaultPlan(folder=str(tmp_path), faults=(Fault(point="mesh.send", action="drop", match=match),))
    spoil = frame_spoiler(FaultPoints.of(plan, "host 0"))
    assert spoil is not None
    frame = [memoryview(b"frame")]
    with socket.socket() as connection:
        assert spoil(connection, 0, tag_name(tag), 1, frame) == ([] if strikes else frame)


@pytest.mark.parametrize(
    ("action", "arguments", "error"),
    [
        ("duplicate", {}, FrameError),
        ("truncate", {}, MeshError),
        ("drop", {}, (FrameError, ExchangeTimeout, PeerLost)),
        ("flip", {"byte": 9}, FrameError),
        ("flip", {"byte": 1}, FrameError),
        ("cut", {}, PeerLost),
    ],
)
def test_a_spoilt_frame_ends_the_mesh(tmp_path: Path, action: str, arguments: dict[str, int], error: Any) -> None:
    results = spoilt_trades(tmp_path, action, **arguments)
    assert isinstance(results[0], error), results
    assert len(read_records(str(tmp_path))) == 1
