"""`make_app`: the program of HTTP around a `Replica` and a `Scorer`, as ASGI. uvicorn runs it, Ray Serve may.

Nothing is decided here: bodies become columns, answers become bodies, and errors get their status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from podembed.orchestrator.api.clock import SYSTEM_CLOCK
from podembed.orchestrator.commit.manifest import parse_commit_name
from podembed.orchestrator.commit.published import commit_of_version
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.artifact.exported_model import scores_among
from podembed.serving.server.endpoints import JSON, Answering, Endpoints, Limits, Refused, json_response
from podembed.serving.server.open_inference import (
    HEADER_LENGTH,
    inputs_of,
    metadata_of,
    parse_json,
    read_request,
    write_response,
)
from podembed.serving.server.pages import front_page, openapi
from podembed.serving.server.recorder import RequestLog
from podembed.serving.server.replica import Replica, ServedVersion
from podembed.serving.server.retrieval import Retrieval
from podembed.serving.server.scorer import Answer, Busy, Scorer, TooLate
from podembed.serving.server.server_metrics import ServerMetrics
from podembed.serving.server.shards import ShardAway

VERSION_HEADER = "Model-Version"
_MOST_DIGITS = 19
_LOOK_S = 0.05


class App(Endpoints):
    """The endpoints of a server that scores.

    Args:
      name: of the model.
      token: that clients must send, or None.
      recorder: keeps some requests, or None.
      retrieval: knows the items, or None.

    Attributes:
      retrieval: as given.
    """

    _metrics: ServerMetrics

    def __init__(
        self,
        replica: Replica,
        *,
        name: str,
        limits: Limits | None = None,
        token: str | None = None,
        recorder: RequestLog | None = None,
        retrieval: Retrieval | None = None,
    ) -> None:
        hint = f"POST /score, POST /v2/models/{name}/infer, or another path of /openapi.json"
        super().__init__(limits=limits or Limits(), token=token, metrics=ServerMetrics(replica), hint=hint)
        self._replica, self._name, self._recorder, self.retrieval = replica, name, recorder, retrieval
        self._scorer = Scorer(replica, most_waiting=self._limits.waiting_samples, watcher=self._metrics)

    def close(self) -> None:
        """Answers what waits, then ends."""
        self._scorer.close()
        if self.retrieval is not None:
            self.retrieval.close()
        if self._recorder is not None:
            self._recorder.close()

    def _paths(self) -> Sequence[tuple[str, str, Answering, bool]]:
        model = f"/v2/models/{self._name}"
        versioned = f"{model}/versions/{{version}}"
        return [
            # They are tried in this order.
            ("/score", "POST", self._score, True),
            (f"{model}/infer", "POST", self._infer, True),
            ("/recommend", "POST", self._recommend, True),
            *super()._paths(),
            ("/v2/health/ready", "GET", self._ready, False),
            ("/metrics", "GET", self._series, True),
            ("/openapi.json", "GET", self._openapi, True),
            ("/", "GET", self._page, True),
            ("/example", "GET", self._example, True),
            (model, "GET", self._metadata, True),
            (f"{model}/ready", "GET", self._ready, False),
            (versioned, "GET", self._metadata, True),
            (f"{versioned}/ready", "GET", self._ready, False),
            (f"{versioned}/infer", "POST", self._infer, True),
        ]

    def _version(self) -> ServedVersion:
        version = self._replica.current
        if version is None:
            raise Refused(503, "Found no version loaded yet. Expected one. Ask again.", Retry_After="1")
        return version

    async def _ready(self, request: Request) -> Response:
        is_ready = self._replica.current is not None and not self.is_draining
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    def refresh(self) -> None:
        """Brings up to date what is measured by looking, for other processes that answer with it."""
        self._metrics.waiting.set(self._scorer.num_waiting)
        self._metrics.oldest.set(self._scorer.oldest_s)
        if self._recorder is not None:
            self._metrics.recorded.set(self._recorder.num_recorded)
            self._metrics.record_dropped.set(self._recorder.num_dropped)
        self._metrics.look()

    async def _series(self, request: Request) -> Response:
        self.refresh()
        found = self._metrics.text() + (self.retrieval.series() if self.retrieval is not None else b"")
        return Response(found, media_type="text/plain; version=0.0.4")

    async def _metadata(self, request: Request) -> Response:
        version = self._version()
        self._require_version(request, version.name)
        bits = "same" if version.has_same_bits else "close"
        found = metadata_of(version.model.manifest, name=self._name, versions=[version.name], bits=bits)
        return json_response(found, headers={VERSION_HEADER: version.name})

    async def _openapi(self, request: Request) -> Response:
        version = self._version()
        inputs = inputs_of(version.model.manifest)
        found = openapi(
            version.model.manifest,
            name=self._name,
            inputs=inputs,
            example=version.example,
            items=self.retrieval.index if self.retrieval is not None else None,
        )
        return json_response(found)

    async def _example(self, request: Request) -> Response:
        return json_response(self._version().example)

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
                items=self.retrieval.words() if self.retrieval is not None else None,
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
        answer = await self._answer(request, self._filled(columns))
        scores = scores_among(dict(answer.outputs))
        found = scores if isinstance(scores, Mapping) else {"score": scores}
        return json_response({**found, "model_version": answer.version}, headers={VERSION_HEADER: answer.version})

    async def _infer(self, request: Request) -> Response:
        inference = read_request(await self._body(request), request.headers.get(HEADER_LENGTH))
        answer = await self._answer(request, self._filled(inference.columns))
        self._require_version(request, answer.version)
        body, length = write_response(answer.outputs, inference, model=self._name, version=answer.version)
        headers = {VERSION_HEADER: answer.version}
        if length is not None:
            headers[HEADER_LENGTH] = str(length)
        return Response(body, media_type=JSON if length is None else "application/octet-stream", headers=headers)

    async def _recommend(self, request: Request) -> Response:
        if self.retrieval is None:
            raise ModelError(
                "Found no items in this server. Expected some to recommend. Start it with --recommend FEATURE, the "
                "feature of the items, or with --items FILE."
            )
        wanted = self.retrieval.read(parse_json(await self._body(request)))
        began_s = SYSTEM_CLOCK.monotonic_s()
        found = await self.retrieval.answer(wanted, lambda columns: self._scored(request, columns, began_s))
        if found.answer is not None:
            self._record(found.columns, found.answer)
        version = found.answer.version if found.answer is not None else self._version().name
        document = {
            "items": found.items,
            "score": found.scores,
            "model_version": version,
            "index_version": found.index_version,
        }
        return json_response(document, headers={VERSION_HEADER: version})

    def _filled(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the columns of items that the server knows."""
        if self.retrieval is None:
            return columns
        return self.retrieval.filled(columns, self._version().model.columns)

    def _require_version(self, request: Request, name: str) -> None:
        wanted = request.path_params.get("version")
        if wanted is not None and wanted != name:
            raise Refused(404, f"Found version {name}. Expected {wanted:.80}. Leave the version out for the newest.")

    async def _answer(self, request: Request, columns: Mapping[str, Any]) -> Answer:
        answer = await self._scored(request, columns, SYSTEM_CLOCK.monotonic_s())
        self._record(columns, answer)
        return answer

    def _record(self, columns: Mapping[str, Any], answer: Answer) -> None:
        if self._recorder is not None:
            self._recorder.take(columns, answer, self._version().model.manifest)

    async def _scored(self, request: Request, columns: Mapping[str, Any], began_s: float) -> Answer:
        timeout_s = self._timeout_s(request)
        await self._require_step(request, timeout_s)
        count = self._count(columns)
        try:
            future = self._scorer.submit(
                columns, num_samples=count, timeout_s=max(0.0, timeout_s - (SYSTEM_CLOCK.monotonic_s() - began_s))
            )
            return await asyncio.wrap_future(future)
        except Busy as error:
            waiting = self._scorer.num_waiting
            raise Refused(
                503, f"Found {waiting:,} samples waiting. Expected fewer. Ask again, or add servers.", Retry_After="1"
            ) from error
        except ShardAway as error:
            raise Refused(503, str(error), Retry_After="1") from error
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
