"""What is done on devices and on the CPU, and compared: runs of small jobs, and parts of programs by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from podembed.embedding.kernels.threads import ONE_THREAD
from podembed.jobs.models.interaction import with_products
from podembed.jobs.models.layers import dropped, linear
from podembed.jobs.trainer import Trainer
from podembed.orchestrator.api.config import CheckpointConfig, RunConfig, ScalingConfig
from podembed.orchestrator.commit import checkpoint
from podembed.orchestrator.events.reporter import SilentReporter
from podembed.serving.committed_rows import row_batches
from podembed.workers.checkpoint.arrays import read_dense
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.options import AXIS, DeviceOptions
from podembed.workers.device.programs import Inputs
from podembed.workers.device.transfers.ways import HostArrays, Numbers, PackedTransfers
from podembed.workers.job.reference import JobReference
from podembed.workers.model.jagged import Jagged
from podembed.workers.storage.store import Store

Arrays = Mapping[str, np.ndarray]
NUM_STEPS = 4


def of_run(request: Mapping[str, Any], check: Mapping[str, Any]) -> Arrays:
    """What a run leaves after a few steps."""
    folder = request["folder"]
    arguments = {"rows": f"{folder}/rows.parquet", **check["arguments"]}
    result = Trainer(
        JobReference(function="podembed.jobs.check_device.jobs:check_job", arguments=arguments),
        # Devices take packed arrays, as accelerators do by default, and the CPU reads the memory of the host.
        scaling_config=ScalingConfig(in_process=True, transfers="packed" if request["on_devices"] else "separate"),
        run_config=RunConfig(
            storage_path=f"{folder}/{'devices' if request['on_devices'] else 'cpu'}",
            name=check["name"].replace(" ", "-").replace(",", ""),
            max_steps=NUM_STEPS,
            checkpoint_config=CheckpointConfig(every_steps=NUM_STEPS),
        ),
        reporter=SilentReporter(),
    ).fit()
    losses = np.asarray(list(result.losses.values()))
    evaluation = np.asarray(list(result.evaluations[-1].comparable.values()))
    return {"losses": losses, "evaluation": evaluation, **committed(result.path)}


def committed(path: str) -> Arrays:
    """All arrays of a run's newest commit."""
    store = Store(path)
    manifest = checkpoint.load_head(store)
    if manifest is None:
        raise RuntimeError("Found no commit. Expected one at the end of the run.")
    rows = {
        f"{table.name}/{array.name}": np.concatenate([batch.copy() for batch in row_batches(store, table, array)])
        for table in manifest.tables
        for array in table.arrays
    }
    return rows | {f"dense/{leaf.key}": read_dense(store, leaf) for leaf in manifest.dense}


def of_pieces(request: Mapping[str, Any], check: Mapping[str, Any]) -> Arrays:
    """Functions with derivatives or forms of their own, and their gradients."""
    random = np.random.default_rng(11)
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 6, 16), (16, 24)))
    lengths = random.integers(0, 7, 64).astype(np.int32)
    flat = jnp.asarray(random.standard_normal((512, 16)).astype(np.float32))

    def jagged(values: jax.Array) -> Any:
        one = Jagged.of(values, jnp.asarray(lengths), longest=6)
        spread = one.with_values(one.of_samples(jnp.asarray(x[:, 0]))).sum()
        return one.sum(), one.padded(), spread

    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "sequences": (jagged, (flat,)),
        "products of pairs": (lambda *vectors: with_products(vectors), tuple(x[:, at] for at in range(6))),
        "a layer": (lambda x, w: linear({"weight": w, "bias": jnp.zeros(24)}, x), (x, weight)),
        "dropout": (lambda x: dropped(jax.random.key(5), x, 0.3), (x,)),
    }
    found = {}
    for name, (function, given) in functions.items():

        def with_gradients(*given: Any, function: Callable[..., Any] = function) -> Any:
            def total(*given: Any) -> jax.Array:
                return sum((jnp.sin(leaf).sum() for leaf in jax.tree.leaves(function(*given))), jnp.float32(0))

            return function(*given), jax.grad(total, argnums=tuple(range(len(given))))(*given)

        leaves = jax.tree.leaves(jax.jit(with_gradients)(*given))
        found |= {f"{name} {at}": np.asarray(leaf) for at, leaf in enumerate(leaves)}
    return found


def of_bits(request: Mapping[str, Any], check: Mapping[str, Any]) -> Arrays:
    """What no rounding may change: packed arrays as devices take them apart, and random bits."""
    mesh, random = GangMesh.of(DeviceOptions()), np.random.default_rng(13)
    # As many on a single CPU device: a multiple of all numbers of devices up to 8, of 10, 12, 14, 15 and 16.
    size = 1680
    sent = Inputs(
        dense=random.standard_normal((size, 3)).astype(np.float32),  # type: ignore[arg-type]
        activations=tuple(random.standard_normal((size, 1, width)).astype(np.float32) for width in (7, 128, 129)),  # type: ignore[arg-type]
        labels=np.full(size, np.nan, np.float32),  # type: ignore[arg-type]
        weights=np.arange(size, dtype=np.float32),  # type: ignore[arg-type]
        columns={"ids": random.integers(-(2**31), 2**31, (size, 5)).astype(np.int32)},  # type: ignore[arg-type]
    )
    way = PackedTransfers(mesh, ONE_THREAD)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sent)
    words = way.send(HostArrays(sent, (), np.zeros(size, np.float32)), Numbers(3, np.float32(0.5)))
    apart = jax.shard_map(
        lambda *words: way.unpacked(shapes, words)[0], mesh=mesh.mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    )
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(apart)(*words))]
    bits = jax.jit(lambda: jax.random.bits(jax.random.fold_in(jax.random.key(3), 4), (1000,)))()
    return {f"array {at}": leaf.view(np.uint32) for at, leaf in enumerate(leaves)} | {"random": np.asarray(bits)}
