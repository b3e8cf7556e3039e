"""The workloads of `dlrm.py` trained by TorchRec, in several processes. Prints one JSON line.

    python benchmarks/compare.py --theirs "PYTHON benchmarks/dlrm_torchrec.py --bench S" \\
        --ours "python benchmarks/dlrm.py --bench S --hosts 2"

The dense half, the batches and the first values are those of `dlrm_fbgemm.py`. It needs that environment and torchrec.
With `--device cuda`, which nobody has run yet, each process has a GPU, and the environment torch and fbgemm-gpu for
CUDA. That is for workloads whose tables have one width, such as A and B.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # type: ignore[import-not-found] # noqa: E402
import torch.distributed as dist  # type: ignore[import-not-found] # noqa: E402

from benchmarks import workloads  # noqa: E402
from benchmarks.dlrm_fbgemm import (  # noqa: E402
    NUM_BATCHES,
    TUNED,
    Attention,
    Concatenation,
    Interaction,
    add_options,
    dense_inputs,
    dense_optimizer,
    loss_for,
    measure,
    shown,
)
from benchmarks.workload import Workload, make_batches, table_values, workload  # noqa: E402


def read(shape: Any, folder: Path, rank: int, procs: int) -> list[tuple[Any, Any, Any]]:
    """This process's samples of all batches: dense inputs, labels, and ids by feature."""
    from torchrec import KeyedJaggedTensor  # type: ignore[import-not-found]

    own = slice(rank * shape.batch_size // procs, (rank + 1) * shape.batch_size // procs)
    given: list[tuple[Any, Any, list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]]] = []
    if isinstance(shape, Workload):
        batches, size = make_batches(shape, NUM_BATCHES), own.stop - own.start
        for step in range(NUM_BATCHES):
            bags = [(ids[step][own].ravel(), np.arange(size + 1) * ids.shape[2], None) for ids in batches.ids]
            dense, labels = (torch.from_numpy(whole[step][own].copy()) for whole in (batches.dense, batches.labels))
            given.append((dense, labels, bags))
    else:
        for number in range(shape.num_batches):
            batch = workloads.read_mixed(shape, folder, number, own)
            given.append((*dense_inputs(shape, batch), [batch.bags[at] for at in shape.trained]))
    found, names = [], trained_features(shape)
    for dense, labels, bags in given:
        weights = None if bags[0][2] is None else torch.from_numpy(np.concatenate([bag[2] for bag in bags]))
        inputs = KeyedJaggedTensor(
            keys=names,
            values=torch.from_numpy(np.concatenate([ids for ids, _, _ in bags])),
            lengths=torch.from_numpy(np.concatenate([np.diff(splits) for _, splits, _ in bags]).astype(np.int32)),
            weights=weights,
        )
        found.append((dense, labels, inputs))
    return found


def trained_features(shape: Any) -> list[str]:
    """Names of the features that the loss depends on."""
    return [f"f{at:03d}" for at in (range(shape.num_tables) if isinstance(shape, Workload) else shape.trained)]


def sharded_tables(shape: Any, arguments: argparse.Namespace, device: Any) -> Any:
    """The collection of all tables, cut as asked for, with first values and an optimizer that runs in the backward
    pass.
    """
    import torchrec  # type: ignore[import-not-found]
    from torch.distributed.optim import (  # type: ignore[import-not-found]
        _apply_optimizer_in_backward as apply_in_backward,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder  # type: ignore[import-not-found]
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # type: ignore[import-not-found]
    from torchrec.distributed.model_parallel import DistributedModelParallel  # type: ignore[import-not-found]
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # type: ignore[import-not-found]
    from torchrec.distributed.planner.types import ParameterConstraints  # type: ignore[import-not-found]
    from torchrec.distributed.types import ShardingEnv  # type: ignore[import-not-found]

    is_even = isinstance(shape, Workload)
    num_tables = len(shape.table_rows)
    table_of = range(num_tables) if is_even else shape.table_of
    dims = [shape.dim] * num_tables if is_even else shape.dims
    combiners = ["sum"] * num_tables if is_even else shape.combiners
    stays_apart = not is_even and bool(shape.longest)
    shared: list[dict[str, Any]] = [
        {
            "name": f"t{table:03d}",
            "embedding_dim": dims[table],
            "num_embeddings": rows,
            "feature_names": [name for name in trained_features(shape) if table_of[int(name[1:])] == table],
        }
        for table, rows in enumerate(shape.table_rows)
    ]
    meta = torch.device("meta")
    if stays_apart:
        tables = torchrec.EmbeddingCollection(
            device=meta, tables=[torchrec.EmbeddingConfig(**fields) for fields in shared]
        )
    else:
        pooling = {"sum": torchrec.PoolingType.SUM, "mean": torchrec.PoolingType.MEAN}
        tables = torchrec.EmbeddingBagCollection(
            device=meta,
            is_weighted=not is_even and shape.has_weights,
            tables=[
                torchrec.EmbeddingBagConfig(**fields, pooling=pooling[combiner])
                for fields, combiner in zip(shared, combiners, strict=True)
            ],
        )
    rule = torchrec.optim.RowWiseAdagrad if arguments.emb_opt == "rowwise" else torch.optim.Adagrad
    apply_in_backward(rule, tables.parameters(), {"lr": shape.learning_rate, "eps": shape.epsilon})
    sharder = EmbeddingCollectionSharder if stays_apart else EmbeddingBagCollectionSharder

    class CpuSharder(sharder):  # type: ignore[misc, valid-type]
        """The stock sharders cut rows on CUDA alone."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return super().sharding_types("cuda")

    model = torch.nn.ModuleDict({"tables": tables})
    model.forward = lambda inputs: model["tables"](inputs)  # type: ignore[method-assign]
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=arguments.procs,
            compute_device=arguments.device,
            local_world_size=arguments.procs,
            ddr_cap=18 << 30,
        ),
        batch_size=shape.batch_size // arguments.procs,
        constraints={fields["name"]: ParameterConstraints(sharding_types=[arguments.sharding]) for fields in shared},
    )
    plan = planner.collective_plan(model, [CpuSharder()], dist.group.WORLD)
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=plan,
        sharders=[CpuSharder()],
    )
    tables = parallel.module["tables"]
    for name, values in tables.state_dict().items():
        table = int(name.split(".")[-2][1:])
        draw = table_values(shape, table) if is_even else workloads.mixed_table_values(shape, table)
        whole = torch.from_numpy(draw((shape.table_rows[table], dims[table])))
        for shard in values.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    return tables


def train(rank: int, arguments: argparse.Namespace, folder: str, port: int) -> None:
    """One process of the group. The first one prints."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(arguments.procs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(arguments.procs),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(arguments.threads)
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    is_even = arguments.bench not in workloads.NAMES
    shape: Any = workload(arguments.bench) if is_even else workloads.mixed_workload(arguments.bench)
    tables = sharded_tables(shape, arguments, device)
    batches = read(shape, Path(folder), rank, arguments.procs)
    if not is_even and shape.longest:
        half: Any = Attention(shape)
    else:
        order = [int(name[1:]) for name in tables(batches[0][2].to(device)).keys()]  # noqa: SIM118
        half = Interaction(shape, order) if is_even else Concatenation(shape, order)
    half = half.to(device)
    half = torch.nn.parallel.DistributedDataParallel(half, gradient_as_bucket_view=True)
    optimizer, loss_of = dense_optimizer(half, shape), loss_for(shape)
    is_narrow, losses = arguments.compute_dtype == "bfloat16", []

    def step(number: int) -> None:
        # As training would: batches come from the memory of the host.
        dense, labels, inputs = (one.to(device) for one in batches[number % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        found = tables(inputs).wait()
        pooled = [found[name].values() for name in inputs.keys()] if isinstance(found, dict) else [found.values()]  # noqa: SIM118
        with torch.autocast(arguments.device, torch.bfloat16, enabled=is_narrow):
            scores = half(dense, pooled)
        loss = loss_of(scores.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def agreed(number: int) -> int:
        told = torch.tensor(number, device=device)
        dist.broadcast(told, 0)
        return int(told)

    found = measure(step, arguments, shape.batch_size, root=os.getppid(), agreed=agreed)
    mean_losses = torch.tensor(losses, device=device)
    dist.all_reduce(mean_losses)
    if not rank:
        config = {
            name: getattr(arguments, name)
            for name in ("bench", "emb_opt", "compute_dtype", "procs", "threads", "sharding", "device")
        }
        line = {"benchmark": "dlrm_torchrec", **config, **found, **shown((mean_losses / arguments.procs).tolist())}
        print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--sharding", default="row_wise", choices=["row_wise", "table_wise", "column_wise"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="a GPU for each process")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and arguments.bench in workloads.NAMES:
        parser.error(f"Found --device cuda with workload {arguments.bench}. Expected A, B, E, cut, D2 or tiny.")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="podembed-bench-") as folder:
        if arguments.bench in workloads.NAMES:
            workloads.write_mixed(workloads.mixed_workload(arguments.bench), Path(folder))
        torch.multiprocessing.spawn(train, args=(arguments, folder, port), nprocs=arguments.procs)


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**TUNED, **os.environ})
    main()
