"""The workloads of `dlrm.py` trained by torch with FBGEMM's fused CPU tables, in one process. Prints one JSON line.

    python benchmarks/compare.py --theirs "PYTHON benchmarks/dlrm_fbgemm.py --bench B --threads 2" \\
        --ours "python benchmarks/dlrm.py --bench B --hosts 2"

The model, the batches and the first values are those of `dlrm.py`, so the losses agree. It needs an environment with
torch, fbgemm-gpu-cpu and numpy, and none of this project: PYTHON is that environment's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # type: ignore[import-not-found] # noqa: E402

from benchmarks import measuring, workloads  # noqa: E402
from benchmarks.workload import Workload, dense_values, fill_table, make_batches, workload  # noqa: E402
from benchmarks.workloads import MixedBatch, MixedWorkload  # noqa: E402

NUM_BATCHES = 32
CHECKED_STEPS = range(30, 40)
WARM_UP_STEPS = 8
WINDOW_S = 1.0

# As our own worker processes have it: memory is kept, and lies on huge pages. Threads that wait do not spin.
TUNED = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=67108864:glibc.malloc.arena_max=1",
    "OMP_WAIT_POLICY": "passive",
}

# Per batch: dense inputs (of sequences, the splits of histories), labels, and for each operator the ids and offsets of
# its features.
TorchBatch = tuple[Any, Any, list[tuple[Any, Any]]]


def fused_tables(
    rows: list[int],
    dims: list[int],
    table_of: list[int],
    *,
    combiner: str | None,
    emb_opt: str,
    rate: float,
    epsilon: float,
    fill: Callable[[int, np.ndarray], None],
) -> Any:
    """One fused operator over tables of one combiner, None for rows that stay apart. `fill(at, out)` draws the first
    values of its table `at`.
    """
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
    operator = SplitTableBatchedEmbeddingBagsCodegen(
        [(count, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for count, dim in zip(rows, dims, strict=True)],
        feature_table_map=table_of,
        optimizer=rules[emb_opt],
        learning_rate=rate,
        eps=epsilon,
        pooling_mode={"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, None: PoolingMode.NONE}[combiner],
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for at, weights in enumerate(operator.split_embedding_weights()):
            fill(at, weights.numpy())
    return operator


def linear(weight: np.ndarray, bias: np.ndarray) -> Any:
    layer = torch.nn.Linear(*weight.shape)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T)))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


def layers(values: list[tuple[np.ndarray, np.ndarray]], *, ends_linear: bool) -> Any:
    """Linear layers with ReLU after each, or after each but the last."""
    parts: list[Any] = []
    for number, (weight, bias) in enumerate(values):
        parts.append(linear(weight, bias))
        if number + 1 < len(values) or not ends_linear:
            parts.append(torch.nn.ReLU())
    return torch.nn.Sequential(*parts)


class Interaction(torch.nn.Module):
    """Bottom layers, dot products of all pairs of vectors, top layers. `order` is that in which activations come."""

    def __init__(self, shape: Workload, order: Sequence[int]) -> None:
        super().__init__()
        values = dense_values(shape)
        self.bottom, self.top = layers(values["bottom"], ends_linear=False), layers(values["top"], ends_linear=True)
        self.dim, self.vectors = shape.dim, shape.num_tables + 1
        first, second = torch.tril_indices(self.vectors, self.vectors, offset=-1)
        place = torch.tensor([0, *(1 + order.index(at) for at in range(shape.num_tables))])
        self.register_buffer("pairs", place[first] * self.vectors + place[second], persistent=False)

    def forward(self, dense: Any, pooled: list[Any]) -> Any:
        below = self.bottom(dense)
        vectors = torch.cat([below, *pooled], 1).view(len(below), self.vectors, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([below, products], 1)).squeeze(1)


class Concatenation(torch.nn.Module):
    """Bottom layers' output and all activations side by side, in the order of features, then two layers more.

    The activations come operator by operator. Columns of the weight are put into that order once.
    """

    def __init__(self, shape: MixedWorkload, order: list[int]) -> None:
        super().__init__()
        *bottom, (weight, bias), last = workloads.mixed_dense_values(shape)
        ends = np.cumsum([shape.bottom[-1], *shape.widths])
        parts = [weight[: shape.bottom[-1]], *(weight[ends[at] : ends[at + 1]] for at in order)]
        self.bottom = layers(bottom, ends_linear=False)
        self.top = layers([(np.concatenate(parts), bias), last], ends_linear=True)

    def forward(self, dense: Any, pooled: list[Any]) -> Any:
        return self.top(torch.cat([self.bottom(dense), *pooled], 1)).squeeze(1)


class Attention(torch.nn.Module):
    """SASRec with one block, as `jobs.models.sasrec` has it. Scores the candidates by the state after the last item, or
    the next item and the negative of each position.

    A history stands at the left, so what its positions see is a matter of causes alone.
    """

    def __init__(self, shape: MixedWorkload) -> None:
        super().__init__()
        values = workloads.attention_values(shape)
        (self.longest, self.candidates, *_), self.width = shape.longest, shape.dims[0]
        self.trains_all = shape.trains_all
        self.positions = torch.nn.Parameter(torch.from_numpy(values.pop("positions")))
        bias = np.zeros(self.width, np.float32)
        self.layers = torch.nn.ModuleDict({name: linear(weight, bias) for name, weight in values.items()})
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(self.width, eps=1e-8) for _ in range(3))

    def forward(self, splits: Any, pooled: list[Any]) -> Any:
        if len(pooled) == 1:
            size = int(splits[-1])
            pooled = pooled[0].split([size] * 3) if self.trains_all else pooled[0].tensor_split([size])
        history, *items = pooled
        lengths = splits.diff()
        x = torch.ops.fbgemm.jagged_to_padded_dense(history, [splits], [self.longest], 0.0)
        places = torch.arange(self.longest)
        ages = (lengths[:, None] - 1 - places).clip(0)
        mask = (places < lengths[:, None])[:, :, None].to(x.dtype)
        x = (x * self.width**0.5 + torch.nn.functional.embedding(ages, self.positions)) * mask
        query = self.norms[0](x)
        q, k, v = (self.layers[name](given) for name, given in (("query", query), ("key", x), ("value", x)))
        attend = torch.nn.functional.scaled_dot_product_attention
        x = self.norms[1](query + attend(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        x = (x + self.layers["outer"](self.layers["inner"](x).relu())) * mask
        x = self.norms[2](x)
        if self.trains_all:
            states = torch.ops.fbgemm.dense_to_jagged(x, [splits])[0]
            return torch.stack([(states * one).sum(1) for one in items], 1)
        user = x[torch.arange(len(x)), lengths - 1]
        return torch.bmm(items[0].view(-1, self.candidates, self.width), user[:, :, None])[:, :, 0]


class PositionsLoss(torch.nn.Module):
    """The loss of the next item and the negative of each position, as a mean by sample."""

    def forward(self, scores: Any, splits: Any) -> Any:
        """`scores` are `[positions, 2]`."""
        softplus = torch.nn.functional.softplus
        losses = softplus(-scores[:, 0]) + softplus(scores[:, 1])
        lengths = splits.diff()
        return (losses / lengths.repeat_interleave(lengths)).sum() / len(lengths)


def loss_for(shape: Any) -> Any:
    """What turns the scores of the dense half, and labels as of `dense_inputs`, into the loss."""
    is_of_positions = isinstance(shape, MixedWorkload) and shape.trains_all
    return PositionsLoss() if is_of_positions else torch.nn.BCEWithLogitsLoss()


def even_job(shape: Workload, emb_opt: str) -> tuple[list[Any], Any, list[TorchBatch]]:
    """Operators, dense half and batches of a workload whose tables have one width."""
    batches = make_batches(shape, NUM_BATCHES)
    lengths = np.concatenate([np.full(shape.batch_size, bag) for bag in shape.bag_lengths])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    taken = [
        (
            torch.from_numpy(batches.dense[step]),
            torch.from_numpy(batches.labels[step]),
            [(torch.from_numpy(np.concatenate([table[step].ravel() for table in batches.ids])), offsets)],
        )
        for step in range(NUM_BATCHES)
    ]
    operator = fused_tables(
        list(shape.table_rows),
        [shape.dim] * shape.num_tables,
        list(range(shape.num_tables)),
        combiner="sum",
        emb_opt=emb_opt,
        rate=shape.learning_rate,
        epsilon=shape.epsilon,
        fill=lambda at, out: fill_table(shape, at, out),
    )
    return [operator], Interaction(shape, range(shape.num_tables)), taken


def dense_inputs(shape: MixedWorkload, batch: MixedBatch) -> tuple[Any, Any]:
    """What a dense half reads beside activations, and the labels; of positions, the splits of histories twice."""
    if not shape.longest:
        return torch.from_numpy(batch.dense), torch.from_numpy(batch.labels)
    if shape.trains_all:
        splits = torch.from_numpy(batch.bags[0][1])
        return splits, splits
    labels = torch.zeros(len(batch.labels), shape.longest[1])
    labels[:, 0] = torch.from_numpy(batch.labels)
    return torch.from_numpy(batch.bags[0][1]), labels


def mixed_job(shape: MixedWorkload, emb_opt: str, folder: Path) -> tuple[list[Any], Any, list[TorchBatch]]:
    """Operators (one a combiner), dense half and batches of a workload whose tables differ."""
    workloads.write_mixed(shape, folder)
    combiners: list[str | None] = [None] if shape.longest else sorted(set(shape.combiners))
    features = [
        # FBGEMM's CPU kernels expect the features of a table side by side.
        sorted(
            (at for at in shape.trained if combiner in (None, shape.combiners[shape.table_of[at]])),
            key=lambda at: shape.table_of[at],
        )
        for combiner in combiners
    ]
    operators = []
    for combiner, chosen in zip(combiners, features, strict=True):
        tables = sorted({shape.table_of[at] for at in chosen})

        def fill(at: int, out: np.ndarray, tables: list[int] = tables) -> None:
            out[...] = workloads.mixed_table_values(shape, tables[at])(out.shape)

        operators.append(
            fused_tables(
                [shape.table_rows[table] for table in tables],
                [shape.dims[table] for table in tables],
                [tables.index(shape.table_of[at]) for at in chosen],
                combiner=combiner,
                emb_opt=emb_opt,
                rate=shape.learning_rate,
                epsilon=shape.epsilon,
                fill=fill,
            )
        )
    taken = []
    for number in range(shape.num_batches):
        batch = workloads.read_mixed(shape, folder, number, slice(0, shape.batch_size))
        inputs = []
        for chosen in features:
            bags = [batch.bags[at] for at in chosen]
            lengths = np.concatenate([np.diff(splits) for _, splits, _ in bags])
            given = [np.concatenate([ids for ids, _, _ in bags]), np.concatenate([[0], np.cumsum(lengths)])]
            if shape.has_weights:
                given.append(np.concatenate([weights for _, _, weights in bags]))
            inputs.append(tuple(map(torch.from_numpy, given)))
        taken.append((*dense_inputs(shape, batch), inputs))
    if shape.longest:
        return operators, Attention(shape), taken
    return operators, Concatenation(shape, [at for chosen in features for at in chosen]), taken


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and for how long."""
    parser.add_argument("--bench", default="A", choices=["A", "B", "E", "cut", "D2", "tiny", *workloads.NAMES])
    parser.add_argument("--emb-opt", default="rowwise", choices=["rowwise", "adagrad"], help="rule of the tables")
    parser.add_argument("--compute-dtype", default="float32", choices=["float32", "bfloat16"], help="of the dense half")
    parser.add_argument("--seconds", type=float, default=20.0, help="measure for at least so long")
    parser.add_argument("--max-seconds", type=float, default=None, help="wait for quiet windows until then (2 x)")


def dense_optimizer(dense_half: Any, shape: Any) -> Any:
    return torch.optim.Adagrad(
        dense_half.parameters(),
        lr=shape.learning_rate,
        eps=shape.epsilon,
        initial_accumulator_value=shape.dense_accumulator,
    )


def measure(
    step: Callable[[int], None],
    arguments: argparse.Namespace,
    batch_size: int,
    *,
    root: int,
    agreed: Callable[[int], int] = int,
) -> dict[str, Any]:
    """Windows of steps until the time is over and enough windows were quiet.

    Args:
      step: trains on the batch of a number.
      root: all CPU seconds of this process and what is below it count.
      agreed: makes all processes go on for as many steps as the first one.
    """
    for number in range(WARM_UP_STEPS):
        step(number)
    meter, done = measuring.Meter(root), WARM_UP_STEPS
    window, started = WARM_UP_STEPS // 2, time.perf_counter()
    max_seconds = arguments.max_seconds or 2 * arguments.seconds
    while window := agreed(window):
        with meter.window(window * batch_size):
            for number in range(done, done + window):
                step(number)
        done += window
        taken_s = time.perf_counter() - started
        is_over = taken_s >= arguments.seconds and done >= CHECKED_STEPS.stop
        is_over = is_over and (taken_s >= max_seconds or meter.has_enough_quiet())
        window = 0 if is_over else max(4, int(WINDOW_S / meter.seconds_of_last * window))
    return {**meter.summary(), "peak_rss_gb": round(measuring.peak_rss_bytes(root) / 1e9, 2), "steps": done}


def shown(losses: Sequence[float]) -> dict[str, Any]:
    """The losses that tell whether programs train the same, and the load of the machine."""
    return {
        "losses": [round(loss, 4) for loss in losses[:8]],
        "loss_31_40": round(statistics.fmean(losses[at] for at in CHECKED_STEPS), 5),
        "load1": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        if arguments.bench in workloads.NAMES:
            shape: Any = workloads.mixed_workload(arguments.bench)
            operators, dense_half, batches = mixed_job(shape, arguments.emb_opt, Path(folder))
        else:
            shape = workload(arguments.bench)
            operators, dense_half, batches = even_job(shape, arguments.emb_opt)
    optimizer = dense_optimizer(dense_half, shape)
    loss_of = loss_for(shape)
    is_narrow = arguments.compute_dtype == "bfloat16"
    losses: list[float] = []

    def step(number: int) -> None:
        dense, labels, inputs = batches[number % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        pooled = [operator(*given) for operator, given in zip(operators, inputs, strict=True)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            scores = dense_half(dense, pooled)
        loss = loss_of(scores.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    found = measure(step, arguments, shape.batch_size, root=os.getpid())
    config = {name: getattr(arguments, name) for name in ("bench", "emb_opt", "compute_dtype", "threads")}
    print(json.dumps({"benchmark": "dlrm_fbgemm", **config, **found, **shown(losses)}), flush=True)


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**TUNED, **os.environ})
    main()
