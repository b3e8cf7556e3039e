"""`ShardServer`: a process that holds a share of all tables, and answers with rows.

It speaks the protocol of the server that scores: model `rows` takes a tensor of ids for a table, INT64 `[n]`, and
answers with their rows, FP32 `[n, dim]`. Ids are row numbers, or keys where those come and go. Each request names its
version, so that all rows of an answer are of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from podembed.orchestrator.api.config import ConfigurationError
from podembed.serving.artifact.exported_columns import ModelError
from podembed.serving.server.endpoints import JSON, Answering, Endpoints, Limits, Refused, json_response
from podembed.serving.server.held_versions import HeldVersion, HeldVersions
from podembed.serving.server.open_inference import HEADER_LENGTH, read_request, write_response
from podembed.serving.server.server_metrics import RequestMetrics
from podembed.serving.server.shares import ROWS, ShardPlace
from podembed.workers.storage.store import Store


class ShardVersions(HeldVersions[HeldVersion]):
    """Versions without their models."""

    def __init__(self, store: Store, place: ShardPlace) -> None:
        super().__init__(store, share=place)
        self.place = place
        self._asked_s: dict[str, float] = {}

    def asked(self, name: str) -> None:
        """A process that scores wants rows of a version."""
        self._asked_s[name] = self._clock.monotonic_s()

    def _unneeded(self, older: HeldVersion, newer: HeldVersion) -> HeldVersion:
        # The one that was asked for last stays: other shards may not have the newer one yet.
        return min(newer, older, key=lambda one: self._asked_s.get(one.name, 0.0))

    def _ready(self, held: HeldVersion, document: Mapping[str, Any]) -> HeldVersion:
        return held


class ShardServer(Endpoints):
    """See the module."""

    def __init__(self, versions: ShardVersions, *, limits: Limits | None = None, token: str | None = None) -> None:
        hint = f"POST /v2/models/{ROWS}/versions/VERSION/infer, as processes that score send it"
        super().__init__(limits=limits or Limits(), token=token, metrics=RequestMetrics(versions), hint=hint)
        self._versions = versions

    def _paths(self) -> Sequence[tuple[str, str, Answering, bool]]:
        model = f"/v2/models/{ROWS}"
        return [
            *super()._paths(),
            ("/v2/health/ready", "GET", self._ready, False),
            ("/metrics", "GET", self._series, True),
            (model, "GET", self._metadata, True),
            (f"{model}/infer", "POST", self._rows, True),
            (f"{model}/versions/{{version}}/infer", "POST", self._rows, True),
        ]

    async def _ready(self, request: Request) -> Response:
        is_ready = not self.is_draining
        return json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _series(self, request: Request) -> Response:
        with self._versions.use() as version:
            self._metrics.count_ids(version)
        self._metrics.look()
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _metadata(self, request: Request) -> Response:
        names = self._versions.names
        with self._versions.use() as version:
            tables = version.tables
            place = self._versions.place
            return json_response(
                {
                    "name": ROWS,
                    "versions": names,
                    "platform": "podembed_rows",
                    "inputs": [{"name": name, "datatype": "INT64", "shape": [-1]} for name in tables],
                    "outputs": [
                        {"name": name, "datatype": "FP32", "shape": [-1, rows.arena.shape[1]]}
                        for name, rows in tables.items()
                    ],
                    "parameters": {
                        "shard": place.index,
                        "shards": place.count,
                        "run": version.manifest.run_id,
                    },
                }
            )

    async def _rows(self, request: Request) -> Response:
        inference = read_request(await self._body(request), request.headers.get(HEADER_LENGTH))
        wanted = request.path_params.get("version")
        try:
            with self._versions.use(wanted) as version:
                self._versions.asked(version.name)
                outputs = {name: self._found(version, name, ids) for name, ids in inference.columns.items()}
        except ConfigurationError as error:
            raise Refused(404, f"Found versions {self._versions.names}. Expected {wanted!r:.80} among them.") from error
        body, length = write_response(outputs, inference, model=ROWS, version=version.name)
        headers = {} if length is None else {HEADER_LENGTH: str(length)}
        return Response(body, media_type=JSON if length is None else "application/octet-stream", headers=headers)

    def _found(self, version: HeldVersion, name: str, ids: Any) -> np.ndarray:
        table: Any = version.tables.get(name)
        if table is None:
            raise ModelError(f"Found table {name!r:.80}. Expected one of {list(version.tables)}.")
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ModelError(f"Found other ids of table {name!r} than integers. Expected INT64 [n].")
        ids = ids.astype(np.int64)
        held = table.held(ids)
        if not held.all():
            place = self._versions.place
            raise ModelError(
                f"Found id {ids[~held][0]} for table {name!r}. Expected ids that shard {place.index} of {place.count} "
                "holds. Ask the shard that has its bucket."
            )
        return table.values(ids)
