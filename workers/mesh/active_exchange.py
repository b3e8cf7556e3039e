"""One exchange of a mesh: what it may send, what is still under way, what it cost, and how another thread ends it.

`workers.mesh.mesh` moves the bytes.

Threads: the step thread waits in a selector. `AbortSignal` is the one file descriptor in that selector which other
threads may touch. They write the reason and one byte; the step thread alone closes the signal. A lock makes the two
orders of `request` and `close` equally harmless.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from podembed.workers.mesh.frames import MAX_FRAME_BYTES, Buffer, Tag, frame_views, size_of
from podembed.workers.mesh.link import Link
from podembed.workers.mesh.mesh_errors import ExchangeTimeout, MeshAborted, MeshUsageError
from podembed.workers.tracing.recorder import Recorder

TRACED_NAMES: dict[int, str] = {
    Tag.IDS: "id exchange",
    Tag.ROWS: "activation exchange",
    Tag.GRADIENTS: "gradient exchange",
    Tag.CONTROL: "control",
    Tag.BUCKETS: "bucket exchange",
}
"""Names of exchanges in a trace: those of the phases that wait for them."""

Outgoing = Sequence[Sequence[Buffer] | None] | Mapping[int, Sequence[Buffer]]
"""Frames to send, by rank. A rank with None, one that is not named, and the own one get no frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStatistics:
    """The cost of one exchange, or of many in sum.

    Attributes:
      num_exchanges: how many are summed here.
      num_frames: sent to other hosts.
      bytes_sent: payloads, without headers.
    """

    num_exchanges: int = 0
    num_frames: int = 0
    bytes_sent: int = 0

    def __add__(self, other: ExchangeStatistics) -> ExchangeStatistics:
        return ExchangeStatistics(
            num_exchanges=self.num_exchanges + other.num_exchanges,
            num_frames=self.num_frames + other.num_frames,
            bytes_sent=self.bytes_sent + other.bytes_sent,
        )


@dataclass(slots=True, kw_only=True)
class ActiveExchange:
    """The exchange in progress. Mutable.

    Attributes:
      tag, step: its name, the same on all hosts.
      started_s: when it began, by the mesh's clock.
      num_frames: frames sent.
      bytes_sent: payloads, without headers.
      links: links with which anything is exchanged.
      unfinished: links with something still to send or to receive.
      trace: recorder of the exchange with each host while a trace is on.
    """

    tag: int
    step: int
    started_s: float
    num_frames: int
    bytes_sent: int
    links: Collection[Link]
    unfinished: set[Link]
    trace: Recorder

    def moved(self, link: Link) -> None:
        """Notes that bytes of a link may have been sent or received."""
        if link.is_finished:
            if self.trace.is_on and link in self.unfinished:
                self._record(link)
            self.unfinished.discard(link)

    def _record(self, link: Link) -> None:
        """Records an exchange with one host: its frame is received, and the kernel has ours."""
        self.trace.add(
            f"with host {link.rank}",
            TRACED_NAMES.get(self.tag, "exchange"),
            self.started_s,
            self.trace.now_s(),
            step=self.step,
            bytes_sent=link.bytes_sent,
            bytes_received=link.bytes_received,
        )

    def timeout(self, timeout_s: float) -> ExchangeTimeout:
        """The error that names the hosts that did not send or take their frame."""
        waiting_for = sorted(link.rank for link in self.unfinished if not link.is_received)
        unsent = sorted(link.rank for link in self.unfinished if not link.is_sent)
        return ExchangeTimeout(self.tag, self.step, waiting_for, unsent, timeout_s)

    def cost(self) -> ExchangeStatistics:
        """Its cost, once it is finished."""
        return ExchangeStatistics(num_exchanges=1, num_frames=self.num_frames, bytes_sent=self.bytes_sent)


def views_of(send: Outgoing, *, own_rank: int) -> dict[int, list[memoryview]]:
    """The frames of an exchange as byte views, by rank; those of ranks that get one.

    Raises:
      MeshUsageError: a frame cannot be sent.
    """
    found = {}
    for rank, buffers in send.items() if isinstance(send, Mapping) else enumerate(send):
        if rank == own_rank or buffers is None:
            continue
        found[rank] = views = frame_views(buffers)
        if (num_bytes := size_of(views)) > MAX_FRAME_BYTES:
            raise MeshUsageError(
                f"Found a frame of {num_bytes} bytes for rank {rank}. Expected at most {MAX_FRAME_BYTES}. Use more "
                "hosts or a smaller batch."
            )
    return found


class AbortSignal:
    """Set at most once, from any thread; readable in a selector from then on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_closed = False
        self._reason: str | None = None

    def fileno(self) -> int:
        return self._reader.fileno()

    def request(self, reason: str) -> None:
        """Wakes whoever waits; the first reason stands, later ones and those after `close` change nothing."""
        with self._lock:
            if self._reason is not None or self._is_closed:
                return
            self._reason = reason
            # A byte that is never read keeps the descriptor readable for every later wait.
            with contextlib.suppress(OSError):
                self._writer.send(b"!")

    def raise_if_requested(self) -> None:
        """Does nothing until `request` is called.

        Raises:
          MeshAborted: it was, with the reason given there.
        """
        if self._reason is not None:
            raise MeshAborted(self._reason)

    def close(self) -> None:
        """Frees both descriptors; harmless when repeated."""
        with self._lock:
            self._is_closed = True
            self._reader.close()
            self._writer.close()
