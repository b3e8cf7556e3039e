"""Run as a program. Queues of ZeroMQ are the faster of its two kinds."""

from __future__ import annotations

from typing import Any

import litserve  # type: ignore[import-not-found]

from benchmarks.peers.scorer import Scorer, settings


class Scores(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.scorer = Scorer(settings())

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(inputs)

    def predict(self, inputs: Any) -> Any:
        """Of a list with batching, else of one request."""
        return self.scorer(inputs) if isinstance(inputs, list) else self.scorer([inputs])[0]

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        return output

    def encode_response(self, output: list[float]) -> dict[str, Any]:
        return {"score": output}


if __name__ == "__main__":
    given = settings()
    api = Scores(max_batch_size=given.batch, batch_timeout=given.wait_s if given.batch > 1 else 0.0, api_path="/score")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=given.workers, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=given.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
