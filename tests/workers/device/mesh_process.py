"""Steps of one model on 1, 4 and 8 devices of the processor, spread and cut in several ways. Prints results as JSON.

Usage: python -m tests.workers.device.mesh_process DATA_FOLDER few|all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

from podembed.workers.device.dense_leaves import by_key
from podembed.workers.device.options import DeviceOptions, Transfers
from podembed.workers.device.shared_memory import RecordKind
from podembed.workers.job.job import JobConfig
from podembed.workers.job.padding import LARGEST_LEVELS
from tests.small_job import small_job
from tests.workers.device.models import CutPart, EveryPart
from tests.workers.device.test_meshes import MESHES
from tests.workers.device.test_model_step import NUM_SAMPLES, Pair, random_batch

DEVICES = jax.devices()
WAYS = [
    ("1", Transfers.SEPARATE),
    ("1", Transfers.PACKED),
    ("8", Transfers.SEPARATE),
    ("8", Transfers.PACKED),
    ("data=4,model=2", Transfers.SEPARATE),
    ("data=2,model=2", Transfers.PACKED),
    ("data=1,model=8", Transfers.PACKED),
]
# One device, one program for all of eight, and a model that is cut.
FEW = [("1", Transfers.SEPARATE), ("8", Transfers.PACKED), ("data=4,model=2", Transfers.SEPARATE)]
COMPILED = "/jax/core/compile/backend_compile_duration"
NUM_STEPS = 4
UNFINISHED_STEPS = 40


def pair_on(job: JobConfig, mesh: str, way: Transfers, **changes: Any) -> Pair:
    """A worker on the first devices."""
    count, axes = MESHES[mesh]
    jax.devices = jax.local_devices = lambda *_, **__: DEVICES[:count]
    return Pair(job, options=DeviceOptions(mesh=tuple(axes.items()), transfers=way), **changes)


def batches(job: JobConfig) -> list[dict[str, Any]]:
    """The last one is short."""
    return [random_batch(job, seed, num_padding=11 if seed == NUM_STEPS - 1 else 0) for seed in range(NUM_STEPS)]


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """Programs that are compiled inside."""
    found: list[str] = []
    is_on = True

    def count(event: str, _: float, **__: Any) -> None:
        if is_on and event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    is_on = False


def trained(job: JobConfig, mesh: str, way: Transfers) -> dict[str, Any]:
    pair = pair_on(job, mesh, way)
    worker, before = pair.worker, pair.worker.params
    first, *others = batches(job)
    # Whatever goes to a device is sent on purpose: an array of numpy among the arguments of a program would be waited
    # for.
    with jax.transfer_guard_host_to_device("disallow"):
        window = pair.window([first], RecordKind.TRAIN)
        losses = [*window.losses]
        answers = [*pair.answers]
        with compiles() as late:
            losses += pair.window(others, RecordKind.TRAIN).losses
            answers += pair.answers
            pair.window([first], RecordKind.EVALUATE)
            scores = pair.answers[0][1].tolist()
            kept = {key: values.copy() for key, values in worker.dense_arrays().items()}
            worker.load_dense_arrays(kept)
            pair.window([first], RecordKind.TRAIN)
    result = {
        "losses": losses,
        "gradients": [[one.tolist() for one in gradients] for gradients, _ in answers],
        "scores": scores,
        "norms": asdict(window.norms) if window.norms else {},
        "arrays": {key: values.tolist() for key, values in kept.items()},
        "bytes": {key: values.tobytes().hex() for key, values in kept.items()},
        "late": len(late),
        "is_given_away": all(leaf.is_deleted() for leaf in jax.tree.leaves(before)),
        "parts": {
            key: [list(leaf.addressable_shards[0].data.shape), list(leaf.shape)]
            for key, leaf in by_key(worker._dense_state).items()
        },
    }
    pair.close()
    return result


def unfinished(job: JobConfig, mesh: str) -> int:
    """Steps that were over for the host while a device still worked on its batch."""
    pair = pair_on(job, mesh, Transfers.AUTO)
    worker, batch, found = pair.worker, random_batch(job, 0), 0
    pair.put(batch)
    arrays = worker._batches.of(pair.device, 0, LARGEST_LEVELS)
    for step in range(UNFINISHED_STEPS):
        worker.begin_training(arrays, weight_sum=float(batch["weights"].sum()), step=step).finish()
        shards = [shard.data for leaf in jax.tree.leaves(worker.params) for shard in leaf.addressable_shards]
        found += not all(shard.is_ready() for shard in shards)
    jax.block_until_ready(worker.params)
    pair.close()
    return found


def exchanges(job: JobConfig, mesh: str, way: Transfers) -> dict[str, Any]:
    """What the compiled step asks of other devices and of the host."""
    pair = pair_on(job, mesh, way)
    text = pair.worker.programs.train(LARGEST_LEVELS).as_text()
    pair.close()
    asked = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return {"asked": asked, "host": re.findall(r"\w*callback\w*|outfeed|infeed", text)}


def resumed(job: JobConfig, before: str, meshes: list[str]) -> dict[str, Any]:
    """Some steps on one mesh, and the others on each of some meshes, from what the first would commit."""
    early, late = pair_on(job, before, Transfers.AUTO), batches(job)
    first = [*early.window(late[:1], RecordKind.TRAIN).losses]
    arrays = {key: values.copy() for key, values in early.worker.dense_arrays().items()}
    early.close()
    found = {}
    for after in meshes:
        second = pair_on(job, after, Transfers.AUTO, is_restored_later=True)
        second.worker.load_dense_arrays(arrays)
        losses = [*first, *second.window(late[1:], RecordKind.TRAIN).losses]
        kept = {key: values.tobytes().hex() for key, values in second.worker.dense_arrays().items()}
        second.close()
        found[f"{before} to {after}"] = {"losses": losses, "bytes": kept}
    return found


def main(folder: str, which: str) -> None:
    is_few = which == "few"
    assert NUM_SAMPLES % 8 == 0
    job = small_job(folder=folder, audit=False)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
    job = replace(job, model=CutPart(), dense_optimizer=optimizer)
    found = {f"{mesh} {way}": trained(job, mesh, way) for mesh, way in (FEW if is_few else WAYS)}
    again = resumed(job, "data=4,model=2", ["data=4,model=2", "1"])
    # This model exchanges nothing by itself.
    plain = small_job(folder=folder, audit=False)
    ways = [Transfers.PACKED] if is_few else [Transfers.PACKED, Transfers.SEPARATE]
    programs = {f"8 {way}": exchanges(plain, "8", way) for way in ways}
    # Nothing of this model is cut, so that its devices never wait for each other.
    meshes = ["data=2,model=2"] if is_few else ["data=2,model=2", "data=1,model=8"]
    late = {mesh: unfinished(replace(job, model=EveryPart()), mesh) for mesh in meshes}
    result = {"is_few": is_few, "programs": programs, "trained": found, "resumed": again, "unfinished": late}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    np.set_printoptions(precision=9)
    main(*sys.argv[1:])
