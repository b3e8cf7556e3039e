"""For `mlserver start`. It puts inputs of the same name together and does not say how long each was. So a request has
its number of samples as an input, too.
"""

from __future__ import annotations

from typing import Any

from mlserver import MLModel  # type: ignore[import-not-found]
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput  # type: ignore[import-not-found]

from benchmarks.peers.scorer import Scorer, settings


class Scores(MLModel):
    async def load(self) -> bool:
        self.scorer = Scorer(settings())
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        columns = {one.name: one.data.root for one in payload.inputs}
        scores = [score for part in self.scorer(apart(columns)) for score in part]
        output = ResponseOutput(name="score", shape=[len(scores)], datatype="FP32", data=scores)
        return InferenceResponse(model_name=self.name, outputs=[output])


def apart(columns: dict[str, list[Any]]) -> list[dict[str, list[Any]]]:
    """The requests whose columns were put together."""
    sizes = columns.pop("samples")
    found: list[dict[str, list[Any]]] = []
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        found.append(
            {
                name: values[number : number + 1] if len(values) == len(sizes) else values[start : start + size]
                for name, values in columns.items()
            }
        )
    return found
