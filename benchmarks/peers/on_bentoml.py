"""For `bentoml serve`. Only lists can be put together to batches, so a request is a list with one body."""

from __future__ import annotations

from typing import Any

import bentoml  # type: ignore[import-not-found]

from benchmarks.peers.scorer import Scorer, settings

given = settings()
together: dict[str, Any] = (
    {"batchable": True, "batch_dim": 0, "max_batch_size": given.batch, "max_latency_ms": 60_000}
    if given.batch > 1
    else {}
)


@bentoml.service(workers=given.workers, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Scores:
    def __init__(self) -> None:
        self.scorer = Scorer(given)

    @bentoml.api(**together)
    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        return self.scorer(requests)
