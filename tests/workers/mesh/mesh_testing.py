"""Real meshes for tests: formed over loopback, one thread or one process per rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from podembed.workers.faults.frames import Spoil
from podembed.workers.mesh.frames import Tag
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.mesh import Mesh

TOKEN = bytes(range(32))
LOCAL = "127.0.0.1"
PATIENCE_S = 120.0


def identity(rank: int, num_ranks: int, **changes: Any) -> MeshIdentity:
    fields: dict[str, Any] = {
        "run_id": "clicks",
        "generation": 7,
        "token": TOKEN,
        "rank": rank,
        "num_ranks": num_ranks,
        "plan_hash": b"p" * 32,
    }
    return MeshIdentity(**(fields | changes))


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs all calls at the same time; a call that raises gives its exception as its result."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank did not come back"
    return results


def succeed(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextlib.contextmanager
def meshes(num_ranks: int, spoil: Spoil | None = None) -> Iterator[list[Mesh]]:
    """All ranks of one connected mesh, in this process."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Mesh.listen(identity(rank, num_ranks), bind_address=LOCAL, spoil=spoil))
            for rank in range(num_ranks)
        ]
        addresses = [mesh.address for mesh in ranks]
        succeed(in_threads([lambda mesh=mesh: mesh.connect(addresses, timeout_s=PATIENCE_S) for mesh in ranks]))
        yield ranks


class Inbox:
    """Allocates what arrives and keeps it by rank."""

    def __init__(self) -> None:
        self.payloads: dict[int, np.ndarray] = {}

    def __call__(self, rank: int, num_bytes: int) -> np.ndarray:
        assert rank not in self.payloads, "receive was called twice for one rank"
        self.payloads[rank] = np.zeros(num_bytes, np.uint8)
        return self.payloads[rank]

    def bytes_by_rank(self) -> dict[int, bytes]:
        return {rank: payload.tobytes() for rank, payload in self.payloads.items()}


def trade(
    mesh: Mesh, messages: Sequence[bytes], *, step: int = 0, tag: int = Tag.CONTROL, timeout_s: float = PATIENCE_S
) -> dict[int, bytes]:
    """One exchange of one message per rank; returns what came, by rank."""
    inbox = Inbox()
    mesh.exchange(tag=tag, step=step, send=[[message] for message in messages], receive=inbox, timeout_s=timeout_s)
    return inbox.bytes_by_rank()
