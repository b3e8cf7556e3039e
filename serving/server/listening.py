"""`run_server`: uvicorn around a program, until the process is told to end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.server.endpoints import Endpoints
from podembed.serving.server.server_config import ServerConfig

_SWITCH_S = 0.0005
# Load balancers keep a connection for 60 s. One that the server closes first may lose a request.
_IDLE_S = 75
_HEADER_S = 5
_MOST_HEADER_BYTES = 1 << 16
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_OWN_FILES = 128
_EXIT_OF_SIGNALS = 128


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection that does not send the whole header of its next request in time, nothing at first, or what
    belongs to no request, such as the rest of a body that was refused. The end of a request that runs is waited for.
    """

    _header_timer: TimerHandle | None = None
    _is_within_header = False
    _num_messages = _num_header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_header()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._num_messages
        super().data_received(data)
        # What came together with the end of another request does not count.
        if self._is_within_header and self._num_messages == before:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MOST_HEADER_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        if self.timeout_keep_alive_task is None:
            self._await_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_within_header = True
        self._num_messages += 1
        self._await_header()

    def on_headers_complete(self) -> None:
        self._is_within_header = False
        self._have_header()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_within_header:
            self._await_header()

    def _await_header(self) -> None:
        is_idle = (self.cycle is None or self.cycle.response_complete) and not self.pipeline
        # A byte now and then does not put it off.
        if is_idle and self._header_timer is None:
            seconds = min(_HEADER_S, self.timeout_keep_alive)
            # A client of TLS may not let itself be told that it is over.
            self._header_timer = self.loop.call_later(seconds, self.transport.abort)

    def _have_header(self) -> None:
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class DrainingServer(uvicorn.Server):
    """uvicorn, which drains first."""

    def __init__(self, config: uvicorn.Config, app: Endpoints, drain_s: float, began: Began) -> None:
        super().__init__(config)
        self._app, self._drain_s, self._began, self._is_told = app, drain_s, began, False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Ends in good order, so the process ends without an error. A second signal does not wait for clients."""
        if self._is_told:
            self.should_exit = self.force_exit = True
        elif self._drain_s:
            self._app.is_draining = True
            timer = threading.Timer(self._drain_s, self.end)
            timer.daemon = True
            timer.start()
        else:
            self.end()
        self._is_told = True

    def end(self) -> None:
        """Lets running requests end, then the server."""
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            listening = self.servers[0].sockets[0].getsockname()
            scheme = "https" if self.config.is_ssl else "http"
            host = f"[{listening[0]}]" if ":" in listening[0] else listening[0]
            self._began(self, f"{scheme}://{host}:{listening[1]}")


Began = Callable[[DrainingServer, str], None]
"""Gets a server that listens, and its address."""


def run_server(
    app: Endpoints, config: ServerConfig, *, began: Began, sockets: list[socket.socket] | None = None
) -> None:
    """Answers until SIGTERM or Ctrl-C, then lets running requests end, and closes the program.

    Args:
      sockets: to listen at; None for one at the address of the config.

    Raises:
      ConfigurationError: the port is taken.
    """
    answer_promptly()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    settings = uvicorn.Config(
        app.asgi(),
        host=config.host,
        port=config.port,
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.key,
        lifespan="off",
        timeout_keep_alive=_IDLE_S,
        # A client that does not read its answers must not keep the process from ending.
        timeout_graceful_shutdown=max(1, round(config.limits.timeout_s)),
        # Else a machine without free files could not even look for a newer version.
        limit_concurrency=max(64, most_files - _OWN_FILES),
    )
    server = DrainingServer(settings, app, config.drain_s, began)
    try:
        server.run(sockets=sockets)
    except SystemExit as error:
        # uvicorn has said why in a line of its own.
        raise port_taken(config) from error
    finally:
        app.close()


def answer_promptly() -> None:
    """Sets up this process, which has a version in memory, so that nothing holds requests up for long."""
    # The thread that scores holds the interpreter for as long as it may. With the usual 5 ms, each request would wait
    # so long to be read, and again to be answered.
    sys.setswitchinterval(_SWITCH_S)
    # What is there now, JAX above all, stays. Python would look through it for garbage every few seconds, which takes
    # more than 100 ms, and no request goes on meanwhile.
    gc.collect()
    gc.freeze()


@contextmanager
def ending_at_once(clean: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While a first version is loaded, SIGTERM and Ctrl-C end the process on the spot, with the code that shells give
    them. There is nothing to end in order, and an exception that rises in the midst of JAX may be lost.

    Args:
      clean: what to do before.
    """

    def end(number: int, frame: Any) -> None:
        clean()
        os._exit(_EXIT_OF_SIGNALS + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def port_taken(config: ServerConfig) -> ConfigurationError:
    """Why it cannot listen."""
    return ConfigurationError(
        f"Found no way to listen at {config.host}:{config.port}. Expected an address of this machine and a free "
        "port. Choose another --host or --port, or port 0 for any."
    )
