"""The model of `serve.py` in torch, and what turns the columns of requests into its inputs. For the servers beside this
file, which `serve_peers.py` starts.

Weights are random: only what an answer costs is compared. It needs torch and numpy, and none of this project.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from benchmarks.workload import NUM_DENSE, Workload, workload


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    threads: of torch, in each worker.
    workers: processes with a model.
    batch: most requests that are scored together; 1 for each alone.
    wait_s: how long a request waits for others.
    """

    bench: str
    port: int
    threads: int
    workers: int
    batch: int
    wait_s: float


def settings() -> Settings:
    """As `serve_peers.py` gave them. Servers start processes of their own, so they are in the environment."""
    return Settings(**json.loads(os.environ["PEER_SETTINGS"]))


class DLRM(torch.nn.Module):
    """Tables, bottom layers, dot products of all pairs of vectors, top layers."""

    def __init__(self, shape: Workload) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(rows, shape.dim) if length == 1 else torch.nn.EmbeddingBag(rows, shape.dim, mode="sum")
            for rows, length in zip(shape.table_rows, shape.bag_lengths, strict=True)
        )
        self.bottom = layers(NUM_DENSE, shape.bottom)
        self.top = layers(shape.top_inputs, shape.top)[:-1]  # its last layer is linear
        vectors = shape.num_tables + 1
        rows, columns = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", rows * vectors + columns)

    def forward(self, dense: Any, ids: list[Any]) -> Any:
        """Scores `[n]` of dense inputs `[n, NUM_DENSE]` and, per table, ids `[n]` or `[n, length]`."""
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(table(own) for table, own in zip(self.tables, ids, strict=True))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return torch.sigmoid(self.top(torch.cat([bottom, products], 1))[:, 0])


def layers(inputs: int, widths: tuple[int, ...]) -> Any:
    """Linear layers with ReLU after each."""
    parts: list[Any] = []
    for width in widths:
        parts += [torch.nn.Linear(inputs, width), torch.nn.ReLU()]
        inputs = width
    return torch.nn.Sequential(*parts)


class Scorer:
    """The model behind a handler, as each of the servers calls it."""

    def __init__(self, given: Settings) -> None:
        torch.set_num_threads(given.threads)
        torch.manual_seed(0)
        self.shape = workload(given.bench)
        self.model = DLRM(self.shape).eval()
        self.dense = [f"d{at}" for at in range(NUM_DENSE)]
        self.ids = [f"f{at:02d}" for at in range(self.shape.num_tables)]

    def __call__(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Scores of each request's samples; a column has as many values, or one for all of them."""
        sizes = [max(map(len, columns.values())) for columns in requests]

        def column(name: str, dtype: Any) -> np.ndarray:
            parts = [np.asarray(columns[name], dtype) for columns in requests]
            wide = [
                np.broadcast_to(part, (size, *part.shape[1:])) if len(part) == 1 else part
                for part, size in zip(parts, sizes, strict=True)
            ]
            return wide[0] if len(wide) == 1 else np.concatenate(wide)

        with torch.inference_mode():
            dense = torch.from_numpy(np.stack([column(name, np.float32) for name in self.dense], 1))
            ids = [torch.from_numpy(np.ascontiguousarray(column(name, np.int64))) for name in self.ids]
            scores = self.model(dense, ids)
        return [part.tolist() for part in scores.split(sizes)]
