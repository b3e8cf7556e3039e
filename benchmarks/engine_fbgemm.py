"""FBGEMM's fused CPU kernels on the batches of `engine.py`: lookup and fused update, no dense half. Prints one JSON
line.

    python benchmarks/compare.py --theirs "PYTHON benchmarks/engine_fbgemm.py --bench A" \\
        --ours "python benchmarks/engine.py --bench A"

Needs an environment with torch, fbgemm-gpu-cpu and numpy, and none of this project: PYTHON is that environment's. One
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # type: ignore[import-not-found] # noqa: E402

from benchmarks.workload import Workload, fill_table, make_batches, workload  # noqa: E402

NUM_BATCHES = 8


def build(shape: Workload, emb_opt: str) -> Any:
    """All tables of the workload in one fused operator, filled with the workload's first values."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found]
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rules = {"rowwise": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
    tables = [(rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in shape.table_rows]
    operator = SplitTableBatchedEmbeddingBagsCodegen(
        tables,
        optimizer=rules[emb_opt],
        learning_rate=shape.learning_rate,
        eps=shape.epsilon,
        pooling_mode=PoolingMode.SUM,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for at, weights in enumerate(operator.split_embedding_weights()):
            fill_table(shape, at, weights.numpy())
    return operator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="A", choices=["A", "B", "tiny"])
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = workload(arguments.bench)
    batches = make_batches(shape, NUM_BATCHES)
    lengths = np.concatenate([np.full(shape.batch_size, bag) for bag in shape.bag_lengths])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    ids = [
        torch.from_numpy(np.concatenate([table[step].ravel() for table in batches.ids])) for step in range(NUM_BATCHES)
    ]
    operator = build(shape, arguments.emb_opt)
    random = np.random.default_rng(0)
    gradients = torch.from_numpy(
        random.standard_normal((shape.batch_size, shape.num_tables * shape.dim), dtype=np.float32) * 1e-3
    )
    forward: list[float] = []
    backward: list[float] = []
    stop = time.perf_counter() + arguments.seconds
    number = 0
    while time.perf_counter() < stop or number < 2 * NUM_BATCHES:
        clock = [time.thread_time()]
        pooled = operator(ids[number % NUM_BATCHES], offsets)
        clock.append(time.thread_time())
        pooled.backward(gradients)
        clock.append(time.thread_time())
        number += 1
        if number > NUM_BATCHES:
            forward.append(1e3 * (clock[1] - clock[0]))
            backward.append(1e3 * (clock[2] - clock[1]))
    total = float(np.median(np.add(forward, backward)))
    found = {"forward": round(float(np.median(forward)), 2), "backward": round(float(np.median(backward)), 2)}
    line = {"benchmark": "engine_fbgemm", "bench": arguments.bench, "emb_opt": arguments.emb_opt}
    rate = round(shape.batch_size / total * 1e3, 0)
    rates = {"samples_per_s": rate, "samples_per_cpu_s": rate}
    print(json.dumps({**line, "cpu_ms": round(total, 2), "parts_cpu_ms": found, **rates, "load1": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
