"""`Endpoints`: what programs of HTTP have in common: tokens, limits of bodies, errors with their status."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.server.open_inference import to_json
from podembed.serving.server.server_metrics import RequestMetrics

JSON = "application/json"
_logger = logging.getLogger(__name__)

Answering = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for.

    Attributes:
      body_bytes: size of its body.
      samples: number of samples.
      list_length: ids of one sample and column.
      timeout_s: seconds until it is given up, where it names none.
      waiting_samples: samples in the queue.
    """

    body_bytes: int = 8 << 20
    samples: int = 10_000
    list_length: int = 1_000
    timeout_s: float = 5.0
    waiting_samples: int = 20_000


class Refused(Exception):
    """An answer that is an error.

    Args:
      status: its status.
      text: its words.
      headers: further headers.
    """

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Endpoints:
    """The base of such programs. Mutated: whether it drains.

    Args:
      token: that clients must send, or None.
      metrics: gets what each request took.
      hint: paths that a client may have meant, for messages.

    Attributes:
      is_draining: whether it says that it is not ready, though it answers.
    """

    def __init__(self, *, limits: Limits, token: str | None, metrics: RequestMetrics, hint: str) -> None:
        self._limits, self._token, self._metrics, self._hint = limits, token, metrics, hint
        self.is_draining = False

    def close(self) -> None:
        """Answers what waits, then ends."""

    def asgi(self) -> Starlette:
        """The program."""
        routes = [
            Route(path, _Endpoint(self, path, answer, guarded), methods=[method])
            for path, method, answer, guarded in self._paths()
        ]
        program = Starlette(routes=routes, exception_handlers={404: self._missing, 405: self._missing})
        program.router.redirect_slashes = False
        return program

    def _paths(self) -> Sequence[tuple[str, str, Answering, bool]]:
        """Path, method, what answers, and whether it needs the token."""
        return [("/v2", "GET", self._server, False), ("/v2/health/live", "GET", self._live, False)]

    async def respond(self, request: Request, path: str, answer: Answering, *, needs_token: bool) -> Response:
        """What `answer` finds, or the error that it raises, as a response that is counted."""
        began_s = SYSTEM_CLOCK.monotonic_s()
        try:
            if needs_token:
                self._require_token(request)
            response = await answer(request)
        except Refused as error:
            response = json_response({"error": str(error)}, status=error.status, headers=error.headers)
        except ModelError as error:
            response = json_response({"error": str(error)}, status=400)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception:
            _logger.exception("found an error that the request does not explain")
            response = json_response({"error": "Found an error in the server. Its log has it. Ask again."}, status=500)
        self._metrics.requests.labels(path, str(response.status_code)).inc()
        self._metrics.seconds.labels(path).observe(SYSTEM_CLOCK.monotonic_s() - began_s)
        return response

    async def _missing(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return json_response(
            {"error": f"Found {request.method} {request.url.path:.200}. Expected {self._hint}."},
            status=status,
            headers=getattr(error, "headers", None),
        )

    def _require_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refused(
                401,
                "Found no valid token. Expected the header 'Authorization: Bearer TOKEN'.",
                WWW_Authenticate="Bearer",
            )

    async def _server(self, request: Request) -> Response:
        from podembed.version import version

        return json_response({"name": "podembed", "version": version(), "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _body(self, request: Request) -> bytes:
        most, parts, size = self._limits.body_bytes, [], 0
        too_large = Refused(
            413, f"Found a body of more than {most:,} bytes. Expected at most so many. Send fewer samples."
        )
        if int(request.headers.get("content-length") or 0) > most:
            raise too_large
        try:
            # A client that sends slowly holds no more than its connection, and that not for ever.
            async with asyncio.timeout(self._limits.timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            raise Refused(
                408, f"Found no whole body after {self._limits.timeout_s:g} s. Expected it. Send faster."
            ) from error
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One path as ASGI. A function would get a further layer for its errors, which are answered here anyway."""

    endpoints: Endpoints
    path: str
    answering: Answering
    needs_token: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await self.endpoints.respond(request, self.path, self.answering, needs_token=self.needs_token)
        await response(scope, receive, send)


def json_response(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(document), status_code=status, headers=headers, media_type=JSON)
