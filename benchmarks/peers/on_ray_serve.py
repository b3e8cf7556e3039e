"""Run as a program."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray import serve

from benchmarks.peers.scorer import Scorer, settings

given = settings()


class Scores:
    def __init__(self) -> None:
        self.scorer = Scorer(given)

    @serve.batch(max_batch_size=given.batch, batch_wait_timeout_s=given.wait_s)
    async def together(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        return self.scorer(requests)

    async def __call__(self, request: Any) -> dict[str, Any]:
        columns = await request.json()
        return {"score": self.scorer([columns])[0] if given.batch == 1 else await self.together(columns)}


if __name__ == "__main__":
    passed = {name: value for name, value in os.environ.items() if name.startswith(("PEER_", "PYTHONPATH", "OMP_"))}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": passed})
    serve.start(http_options={"host": "127.0.0.1", "port": given.port}, logging_config={"enable_access_log": False})
    deployed = serve.deployment(num_replicas=given.workers, max_ongoing_requests=64)(Scores)
    serve.run(deployed.bind(), route_prefix="/score")
    while True:
        time.sleep(3600)
