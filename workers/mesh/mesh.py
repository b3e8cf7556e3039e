"""The mesh: all-to-all exchange of bytes between the hosts of one generation.

One duplex TCP connection per pair of hosts, driven by readiness. `Mesh` decides when each `Link` moves, and holds the
deadline. It ends as a whole when any part fails, since a step that misses one host is no step.

A mesh belongs to one thread at a time, which calls everything; only `abort` may come from other threads. It starts no
threads. Whoever wants two exchanges at once owns two meshes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence

from podembed.workers.descriptors import require_for_host
from podembed.workers.faults.frames import Spoil
from podembed.workers.mesh.active_exchange import AbortSignal, ActiveExchange, ExchangeStatistics, Outgoing, views_of
from podembed.workers.mesh.frames import Farewell, size_of
from podembed.workers.mesh.handshake import MeshIdentity
from podembed.workers.mesh.link import Link, LinkPoll, LinkRules, Receive, farewell_for, new_stage
from podembed.workers.mesh.link_silence import NOTABLE_S, silence_s
from podembed.workers.mesh.listening import Address, Refusal, Refusals, open_listener
from podembed.workers.mesh.mesh_errors import MeshAborted, MeshBroken, MeshUsageError
from podembed.workers.mesh.setup import MeshSetup
from podembed.workers.tracing.recorder import Recorder


class Mesh:
    """Connections from this host to all others of its generation.

    Life: `listen`, then `connect` once the driver knows all addresses, then any number of exchanges, then `close`.
    After any `MeshError` the connections are closed at once, so that the other hosts notice, and every later call
    raises.

    Attributes:
      identity: who this host is.
      address: address for the other hosts.
    """

    def __init__(
        self,
        identity: MeshIdentity,
        *,
        listener: socket.socket,
        spoil: Spoil | None,
        trace: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self.identity = identity
        host, port = listener.getsockname()[:2]
        self.address: Address = (host, port)
        self._listener = listener
        self._spoil, self._trace, self._clock = spoil, trace, clock
        self._abort_signal = AbortSignal()
        self._poll = LinkPoll(self._abort_signal.fileno())
        self._refusals = Refusals()
        self._links: list[Link] = []
        self._link_of: dict[int, Link] = {}
        self._is_connected = False
        self._is_closed = False
        self._exchange: ActiveExchange | None = None
        self._error: BaseException | None = None
        self._statistics = ExchangeStatistics()

    @staticmethod
    def listen(
        identity: MeshIdentity,
        *,
        bind_address: str,
        spoil: Spoil | None = None,
        trace: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Mesh:
        """A mesh that listens on a free port of `bind_address` and is connected to no host yet.

        Args:
          spoil: injects faults into this host's frames.
          trace: recorder of exchanges with each host while a trace is on.

        Raises:
          MeshUsageError: the address is empty or stands for all interfaces.
          OSError: the address is not of this machine.
          DescriptorsExhausted: this process may not open as many connections.
        """
        require_for_host(identity.num_ranks)
        listener = open_listener(bind_address)
        try:
            return Mesh(identity, listener=listener, spoil=spoil, trace=trace or Recorder(), clock=clock)
        except BaseException:
            listener.close()
            raise

    def connect(self, addresses: Sequence[Address], *, timeout_s: float) -> None:
        """Connects to every other host and stops listening.

        Args:
          addresses: numeric address and port of every rank, in rank order; the own one is ignored.

        Raises:
          MeshConnectTimeout: some hosts did not connect in time, or their machine does not answer at all.
          HandshakeRefused: a host of lower rank is of another run, generation or plan, or holds another token.
          MeshAborted: `abort` was called.
          DescriptorsExhausted: there was no room for a connection with each of them.
        """
        self._require_usable()
        try:
            connections = MeshSetup(
                identity=self.identity,
                listener=self._listener,
                addresses=addresses,
                abort_signal=self._abort_signal,
                refusals=self._refusals,
                clock=self._clock,
            ).run(timeout_s)
        except BaseException as error:
            self._break(error)
            raise
        # Everybody is here. Whoever calls now does not belong to this generation.
        self._listener.close()
        rules = LinkRules(
            own_rank=self.identity.rank,
            generation=self.identity.generation,
            spoil=self._spoil,
        )
        stage = new_stage()
        for rank in sorted(connections):
            self._link_of[rank] = link = Link(rank=rank, connection=connections[rank], rules=rules, stage=stage)
            # A host that goes is noticed whether or not anything is due from it.
            self._poll.watch(link)
        self._links = [*self._link_of.values()]
        self._is_connected = True

    def exchange(
        self,
        *,
        tag: int,
        step: int,
        send: Outgoing,
        receive: Receive,
        senders: Collection[int] | None = None,
        timeout_s: float,
    ) -> ExchangeStatistics:
        """Sends other hosts their frames and takes theirs: `begin` and `finish` in one call."""
        self.begin(tag=tag, step=step, send=send, receive=receive, senders=senders)
        return self.finish(timeout_s=timeout_s)

    def begin(
        self,
        *,
        tag: int,
        step: int,
        send: Outgoing,
        receive: Receive,
        senders: Collection[int] | None = None,
    ) -> None:
        """Starts an exchange and sends what the kernel takes without waiting.

        Args:
          tag, step: name of the exchange; all hosts must run the same exchanges in the same order.
          send: per rank the buffers that make up its frame; they must not change before `finish` returns. Ranks that
            get no frame must know that. The own rank's entry is ignored.
          receive: called once per frame, in order of arrival, with its rank and the number of bytes that come. Returns
            writable C-contiguous buffers of at least that size, one or several, which are filled from their start. For
            0 bytes the result is ignored.
          senders: ranks that send a frame to this one; None for all others.

        Raises:
          MeshUsageError: not connected, an exchange is in progress, or a buffer cannot be sent.
          PeerLost, FrameError, MeshAborted, MeshBroken: the mesh has ended.
        """
        self._require_usable()
        if not self._is_connected or self._exchange is not None:
            raise MeshUsageError(
                "Found an unfinished exchange, or a mesh that is not connected. Expected one exchange at a time after "
                "connect. Call connect or finish first."
            )
        frames, link_of = views_of(send, own_rank=self.identity.rank), self._link_of
        links = self._links
        if senders is not None:
            links = [link_of[rank] for rank in dict.fromkeys([*frames, *senders]) if rank in link_of]
        self._exchange = exchange = ActiveExchange(
            tag=int(tag),
            step=int(step),
            started_s=self._clock(),
            num_frames=len(frames),
            bytes_sent=sum(map(size_of, frames.values())),
            links=links,
            unfinished=set(links),
            trace=self._trace,
        )
        try:
            for link in links:
                views = frames.get(link.rank)
                taking = receive if senders is None or link.rank in senders else None
                link.begin(tag=exchange.tag, step=exchange.step, views=views, receive=taking)
                self._after_move(exchange, link)
        except BaseException as error:
            self._break(error)
            raise

    def finish(self, *, timeout_s: float) -> ExchangeStatistics:
        """Waits until all frames of the exchange are in and out.

        Raises:
          PeerLost: a connection ended, whether or not anything was still due on it.
          ExchangeTimeout: `timeout_s` passed since this call.
          FrameError: a host sent another frame than the one due.
          MeshUsageError: `receive` gave no fitting buffer, which ends the mesh, since the frame cannot be taken.
          MeshAborted: `abort` was called.
        """
        exchange = self._exchange_in_progress()
        deadline_s = self._clock() + timeout_s
        try:
            while exchange.unfinished:
                now_s = self._clock()
                if now_s >= deadline_s:
                    raise exchange.timeout(timeout_s)
                self._move(exchange, deadline_s - now_s)
            # Also where nothing was waited for, as on a single host.
            self._abort_signal.raise_if_requested()
        except BaseException as error:
            self._break(error)
            raise
        self._exchange = None
        statistics = exchange.cost()
        self._statistics += statistics
        return statistics

    def abort(self, reason: str) -> None:
        """Ends the mesh from any thread: the thread in `connect` or `finish` wakes at once and raises `MeshAborted`."""
        self._abort_signal.request(reason)

    def close(self) -> None:
        """Says goodbye to the other hosts and frees all descriptors; harmless when repeated. Not to be called from
        other threads.
        """
        if self._is_closed:
            return
        # First of all: a goodbye that fails must not be said twice.
        self._is_closed = True
        self._leave(Farewell.ORDERLY if self._exchange is None else Farewell.FAILED)
        # The frames of a traceback, and the exchange that failed, lead to the caller's arrays, which are large.
        self._exchange = None
        if self._error is not None:
            self._error.__traceback__ = None
        self._poll.close()
        self._abort_signal.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def statistics(self) -> ExchangeStatistics:
        """Sum over all finished exchanges."""
        return self._statistics

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The last connections that were not let in, oldest first."""
        return self._refusals.last

    def describe_refusals(self) -> tuple[str, ...]:
        """The last connections that were not let in, one line each."""
        return self._refusals.describe()

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks without which the exchange in progress cannot end: their frame has not fully arrived, or ours has not
        left. From any thread; a moment later it may be another one.
        """
        return tuple(link.rank for link in self._links if not link.is_finished)

    @property
    def unheard_s(self) -> dict[int, float]:
        """Ranks of whose machine nothing came for a notable time, and for how long. From any thread."""
        silences = {link.rank: silence_s(link.connection) for link in self._links}
        return {rank: seconds for rank, seconds in silences.items() if seconds >= NOTABLE_S}

    def _require_usable(self) -> None:
        try:
            self._abort_signal.raise_if_requested()
        except MeshAborted as error:
            # Aborted between two calls: only now can this thread let the other hosts know.
            if self._error is None:
                self._break(error)
            raise
        if self._error is not None:
            raise MeshBroken(f"{self._error}") from self._error
        if self._is_closed:
            raise MeshBroken("It was closed.")

    def _exchange_in_progress(self) -> ActiveExchange:
        self._require_usable()
        if self._exchange is None:
            raise MeshUsageError("Found no exchange in progress. Expected a call of begin before finish.")
        return self._exchange

    def _move(self, exchange: ActiveExchange, wait_s: float) -> None:
        """One round: waits at most `wait_s` for anything to become ready, and moves it."""
        for link, can_read, can_write in self._poll.ready(wait_s):
            if link is None:
                self._abort_signal.raise_if_requested()
                continue
            # Reading first finds the goodbye of a peer that left, which says more than a failed send.
            if can_read:
                link.read()
            if can_write:
                link.write()
            self._after_move(exchange, link)

    def _after_move(self, exchange: ActiveExchange, link: Link) -> None:
        exchange.moved(link)
        self._poll.watch(link)

    def _break(self, error: BaseException) -> None:
        """Ends the mesh because of `error`: the other hosts learn it now, not when somebody calls `close`."""
        # Before the goodbye, so that every later call raises, whatever becomes of that.
        self._error = error
        self._leave(farewell_for(error))

    def _leave(self, farewell: int) -> None:
        # Nothing is waited for any more, and the kernel forgets connections that are closed.
        for link in self._links:
            link.say_goodbye(farewell)
            link.close()
        self._links, self._link_of = [], {}
        self._listener.close()
