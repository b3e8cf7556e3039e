"""`make_app`: the program of HTTP around a `Replica` and a `Scorer`, as ASGI. uvicorn runs it, Ray Serve may.

Nothing is decided here: bodies become columns, answers become bodies, and errors get their status.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.published import commit_of_version
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.artifact.exported_model import scores_among
from podembed.serving.server.open_inference import (
    HEADER_LENGTH,
    inputs_of,
    metadata_of,
    parse_json,
    read_request,
    to_json,
    write_response,
)
from podembed.serving.server.pages import front_page, openapi
from podembed.serving.server.recorder import RequestLog
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.scorer import Answer, Busy, Scorer, TooLate
from podembed.serving.server.server_metrics import ServerMetrics

VERSION_HEADER = "Model-Version"
_JSON = "application/json"
_MOST_DIGITS = 19
_LOOK_S = 0.05
_logger = logging.getLogger(__name__)


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


class App:
    """The endpoints. Mutated: whether it drains.

    Args:
      name: of the model.
      token: that clients must send, or None.
      recorder: keeps some requests, or None.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        name: str,
        limits: Limits | None = None,
        token: str | None = None,
        recorder: RequestLog | None = None,
    ) -> None:
        self._replica, self._name = replica, name
        self._limits = limits or Limits()
        self._token, self._recorder = token, recorder
        self._metrics = ServerMetrics(replica)
        self._scorer = Scorer(replica, most_waiting=self._limits.waiting_samples, watcher=self._metrics)
        self.is_draining = False

    def close(self) -> None:
        """Answers what waits, then ends."""
        self._scorer.close()
        if self._recorder is not None:
            self._recorder.close()

    def asgi(self) -> Starlette:
        """The program."""
        model = f"/v2/models/{self._name}"
        versioned = f"{model}/versions/{{version}}"
        found = [
            ("/v2", "GET", self._server, False),
            ("/v2/health/live", "GET", self._live, False),
            ("/v2/health/ready", "GET", self._ready, False),
            ("/metrics", "GET", self._series, True),
            ("/openapi.json", "GET", self._openapi, True),
            ("/", "GET", self._page, True),
            ("/example", "GET", self._example, True),
            ("/score", "POST", self._score, True),
            (model, "GET", self._metadata, True),
            (f"{model}/ready", "GET", self._ready, False),
            (f"{model}/infer", "POST", self._infer, True),
            (versioned, "GET", self._metadata, True),
            (f"{versioned}/ready", "GET", self._ready, False),
            (f"{versioned}/infer", "POST", self._infer, True),
        ]
        routes = [
            Route(path, self._guarded(path, answer, needs_token=guarded), methods=[method])
            for path, method, answer, guarded in found
        ]
        return Starlette(routes=routes, exception_handlers={404: self._missing, 405: self._missing})

    def _guarded(
        self, path: str, answer: Callable[[Request], Awaitable[Response]], *, needs_token: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            began_s = SYSTEM_CLOCK.monotonic_s()
            try:
                if needs_token:
                    self._require_token(request)
                response = await answer(request)
            except Refused as error:
                response = _json({"error": str(error)}, status=error.status, headers=error.headers)
            except ModelError as error:
                response = _json({"error": str(error)}, status=400)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                _logger.exception("found an error that the request does not explain")
                response = _json({"error": "Found an error in the server. Its log has it. Ask again."}, status=500)
            self._metrics.requests.labels(path, str(response.status_code)).inc()
            self._metrics.seconds.labels(path).observe(SYSTEM_CLOCK.monotonic_s() - began_s)
            return response

        return guarded

    async def _missing(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return _json(
            {
                "error": f"Found {request.method} {request.url.path:.200}. Expected POST /score, POST /v2/models/"
                f"{self._name}/infer, or another path of /openapi.json."
            },
            status=status,
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

    def _version(self) -> ServedVersion:
        version = self._replica.current
        if version is None:
            raise Refused(503, "Found no version loaded yet. Expected one. Ask again.", Retry_After="1")
        return version

    async def _server(self, request: Request) -> Response:
        from podembed.version import version

        return _json({"name": "podembed", "version": version(), "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        is_ready = self._replica.current is not None and not self.is_draining
        return _json({"ready": is_ready}, status=200 if is_ready else 503)

    async def _series(self, request: Request) -> Response:
        self._metrics.waiting.set(self._scorer.num_waiting)
        self._metrics.oldest.set(self._scorer.oldest_s)
        if self._recorder is not None:
            self._metrics.recorded.set(self._recorder.num_recorded)
            self._metrics.record_dropped.set(self._recorder.num_dropped)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _metadata(self, request: Request) -> Response:
        version = self._version()
        self._require_version(request, version.name)
        bits = "same" if version.has_same_bits else "close"
        found = metadata_of(version.model.manifest, name=self._name, versions=[version.name], bits=bits)
        return _json(found, headers={VERSION_HEADER: version.name})

    async def _openapi(self, request: Request) -> Response:
        version = self._version()
        inputs = inputs_of(version.model.manifest)
        return _json(openapi(version.model.manifest, name=self._name, inputs=inputs, example=version.example))

    async def _example(self, request: Request) -> Response:
        return _json(self._version().example)

    async def _page(self, request: Request) -> Response:
        version = self._version()
        return HTMLResponse(
            front_page(
                name=self._name,
                version=version.version,
                step=version.manifest.step,
                bits="same" if version.has_same_bits else "close",
                inputs=inputs_of(version.model.manifest),
                example=version.example,
                outputs=version.model.manifest["outputs"],
                address=str(request.base_url).rstrip("/"),
                error=self._replica.error,
            )
        )

    async def _score(self, request: Request) -> Response:
        document = parse_json(await self._body(request))
        if not isinstance(document, dict):
            raise ModelError(
                f'Found {type(document).__name__}. Expected an object of columns, such as {{"user": [7]}}.'
            )
        # One value stands for a column with one: a context.
        columns = {name: values if isinstance(values, list) else [values] for name, values in document.items()}
        answer = await self._answer(request, columns)
        scores = scores_among(dict(answer.outputs))
        found = scores if isinstance(scores, Mapping) else {"score": scores}
        return _json({**found, "model_version": answer.version}, headers={VERSION_HEADER: answer.version})

    async def _infer(self, request: Request) -> Response:
        inference = read_request(await self._body(request), request.headers.get(HEADER_LENGTH))
        answer = await self._answer(request, inference.columns)
        self._require_version(request, answer.version)
        body, length = write_response(answer.outputs, inference, model=self._name, version=answer.version)
        headers = {VERSION_HEADER: answer.version}
        if length is not None:
            headers[HEADER_LENGTH] = str(length)
        return Response(body, media_type=_JSON if length is None else "application/octet-stream", headers=headers)

    def _require_version(self, request: Request, name: str) -> None:
        wanted = request.path_params.get("version")
        if wanted is not None and wanted != name:
            raise Refused(404, f"Found version {name}. Expected {wanted:.80}. Leave the version out for the newest.")

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

    async def _answer(self, request: Request, columns: Mapping[str, Any]) -> Answer:
        timeout_s = self._timeout_s(request)
        began_s = SYSTEM_CLOCK.monotonic_s()
        await self._require_step(request, timeout_s)
        count = self._count(columns)
        try:
            future = self._scorer.submit(
                columns, num_samples=count, timeout_s=max(0.0, timeout_s - (SYSTEM_CLOCK.monotonic_s() - began_s))
            )
            answer = await asyncio.wrap_future(future)
            if self._recorder is not None:
                self._recorder.take(columns, answer, self._version().model.manifest)
            return answer
        except Busy as error:
            waiting = self._scorer.num_waiting
            raise Refused(
                503, f"Found {waiting:,} samples waiting. Expected fewer. Ask again, or add servers.", Retry_After="1"
            ) from error
        except TooLate as error:
            raise Refused(504, f"Found no turn within {timeout_s:g} s, so nothing was scored. Ask again.") from error

    def _count(self, columns: Mapping[str, Any]) -> int:
        """Number of samples.

        Raises:
          Refused: more than may be asked for.
        """
        limits = self._limits
        count = max(map(len, columns.values()), default=0)
        if count > limits.samples:
            raise Refused(413, f"Found {count:,} samples. Expected at most {limits.samples:,}. Send several requests.")
        for name, values in columns.items():
            longest = _longest(values)
            if longest > limits.list_length:
                raise Refused(
                    413,
                    f"Found a list of {longest:,} values in column {name!r:.80}. Expected at most "
                    f"{limits.list_length:,}. Send the last ones.",
                )
        return count

    def _timeout_s(self, request: Request) -> float:
        text = request.query_params.get("timeout")
        if text is None:
            return self._limits.timeout_s
        try:
            found = float(text)
        except ValueError:
            found = -1.0
        if not 0 < found <= 3600:
            raise Refused(400, f"Found timeout={text!r:.40}. Expected seconds above 0. Leave it out for the default.")
        return found

    async def _require_step(self, request: Request, timeout_s: float) -> None:
        """Waits until a version answers that is no older than the client wants."""
        text = request.query_params.get("min_version") or request.headers.get("if-version-at-least")
        if text is None:
            return
        parsed = parse_commit_name(commit_of_version(text) or "")
        is_step = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
        if parsed is None and not is_step:
            raise Refused(400, f"Found min_version={text!r:.80}. Expected a version's name, or a step.")
        step = parsed[0] if parsed is not None else int(text)
        until_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        while self._replica.current is None or self._replica.current.manifest.step < step:
            if SYSTEM_CLOCK.monotonic_s() >= until_s:
                raise Refused(
                    409, f"Found version {self._version().name} after {timeout_s:g} s. Expected step {step} or later."
                )
            if await request.is_disconnected():
                raise ClientDisconnect
            await asyncio.sleep(_LOOK_S)


def _longest(values: Any) -> int:
    """The length of the longest list in a column; 0 without any."""
    if isinstance(values, np.ndarray):
        return values.shape[1] if values.ndim == 2 else 0
    # Few types, many values.
    lists = {one for one in set(map(type, values)) if issubclass(one, (list, np.ndarray))}
    return max((len(one) for one in values if type(one) in lists), default=0) if lists else 0


def _json(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(document), status_code=status, headers=headers, media_type=_JSON)
