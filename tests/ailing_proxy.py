"""A reverse proxy before an object store that fails as services fail: refusals, dropped connections, answers that never
come.

Threads: one serves for the life of the context, with one more a connection; all read `faults` and count requests under
one lock. They are daemons, and the server is shut down when the context ends.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["pass", "refuse", "drop", "hang"]
HANG_S = 20.0


class AilingProxy:
    """Where the proxy is, and what it does next.

    Attributes:
      url: of the proxy.
      fault_of: (method, path, how many requests came before for this method and path) to what becomes of the request.
      requests: (method, path) of every request so far.
    """

    def __init__(self, target: str) -> None:
        self.target = urllib.parse.urlsplit(target)
        self.url = ""
        self.fault_of: Callable[[str, str, int], Fault] = lambda method, path, before: "pass"
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.is_over = threading.Event()


@contextlib.contextmanager
def ailing_proxy(target: str) -> Iterator[AilingProxy]:
    """Serves until the block ends."""
    proxy = AilingProxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urllib.parse.urlsplit(self.path).path
            with proxy.lock:
                before = proxy.requests.count((self.command, path))
                proxy.requests.append((self.command, path))
            fault = proxy.fault_of(self.command, path, before)
            if fault == "refuse":
                self._answer(503, [("Content-Type", "text/plain")], b"SlowDown")
            elif fault == "pass":
                self._forward()
            else:
                if fault == "hang":
                    proxy.is_over.wait(HANG_S)
                self.close_connection = True

        do_HEAD = do_GET

        def _forward(self) -> None:
            connection = http.client.HTTPConnection(proxy.target.hostname or "", proxy.target.port, timeout=30)
            try:
                connection.request(self.command, self.path, headers=dict(self.headers))
                answer = connection.getresponse()
                body = answer.read()
                self._answer(answer.status, answer.getheaders(), body)
            finally:
                connection.close()

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            own = ("content-length", "transfer-encoding", "connection")
            for name, value in headers:
                if name.lower() not in own or (name.lower() == "content-length" and self.command == "HEAD"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="ailing-proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
