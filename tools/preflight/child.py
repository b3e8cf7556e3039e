"""The process that compiles: `python -m podembed.tools.preflight.child`.

A check of the compiler that fails ends the process in which it runs, so that is one of its own. It reads a request in
JSON from its input, and writes lines of JSON to its output. What else is printed goes to its other stream.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from podembed.embedding.device_places import DeviceRoom
from podembed.orchestrator.api.config import ConfigurationError, ScalingConfig
from podembed.orchestrator.api.policy_checks import check_hosts
from podembed.tools.preflight.answering import answering
from podembed.tools.preflight.memory_traffic import accessed_in_memory
from podembed.tools.preflight.program_text import collectives_in, flaws_in
from podembed.workers.device.device_mesh import GangMesh
from podembed.workers.device.gang_errors import GangError
from podembed.workers.device.model_step import DenseStateError, DeviceWorker
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.auto_places import chosen_places, with_places
from podembed.workers.job.job import JobConfig, JobError
from podembed.workers.job.padding import LARGEST_LEVELS, PaddingLevels, smallest_levels
from podembed.workers.job.reference import JobReference

_NUM_STATES = 4  # results of a training step that stay on the devices


class _Program(NamedTuple):
    name: str
    is_training: bool
    levels: PaddingLevels
    lower: Callable[[], Any]


def main() -> None:
    """Answers one request."""
    request, tell = answering()
    try:
        job = JobReference(**request["job"]).resolve()
    except JobError as error:
        tell(refused=str(error))
        return
    options = DeviceOptions(
        per_host=request["devices_per_host"],
        mesh=tuple(map(tuple, request["mesh"])),
        has_sparse_cores=request["sparse_cores"],
    )
    for at, wanted in enumerate(request["slices"]):
        try:
            _compile_for(job, wanted, options, request, tell=lambda at=at, **values: tell(slice=at, **values))
        except (ConfigurationError, DenseStateError, GangError) as error:
            tell(slice=at, refused="\n".join([str(error), *getattr(error, "__notes__", [])]))
    tell(done=True)


def _compile_for(
    job: JobConfig,
    wanted: dict[str, Any],
    options: DeviceOptions,
    request: dict[str, Any],
    *,
    tell: Callable[..., None],
) -> None:
    # libtpu knows two devices in a chip of v4; JAX on the real machine shows one.
    more = {"chip_config_name": "megacore"} if wanted["name"].startswith("v4:") else {}
    there = topologies.get_topology_desc(
        platform="tpu",
        topology_name=wanted["name"],
        chips_per_host_bounds=wanted["host_bounds"],
        num_slices=wanted["num_slices"],
        **more,
    )
    devices = there.devices
    hosts = {device.process_index for device in devices}
    mine = [device for device in devices if device.process_index == min(hosts)]
    mesh = GangMesh.over(devices, mine, options, num_hosts=len(hosts))
    check_hosts(job, ScalingConfig(num_hosts=mesh.num_hosts, sparse_cores=options.has_sparse_cores))
    room = DeviceRoom(
        kind=devices[0].device_kind, memory_bytes=wanted["memory_bytes"], num_parts=mesh.num_all_parts, is_tpu=True
    )
    places = chosen_places(job, room)
    job = with_places(job, places)
    tell(places=places)
    share = -(-job.num_lanes // mesh.num_hosts) * (job.batch_size // job.num_lanes)
    worker = DeviceWorker(job=job, num_samples=-(-share // mesh.num_parts) * mesh.num_parts, gang=mesh, options=options)
    worker.build(is_restored_later=True, is_rehearsal=True)
    tell(
        kind=devices[0].device_kind,
        num_devices=mesh.mesh.size,
        num_hosts=mesh.num_hosts,
        samples_per_device=worker.num_samples // mesh.num_parts,
        table_bytes=worker.tables.size_bytes,
        dense_bytes=sum(
            _device_bytes(leaf, leaf.sharding)
            for leaf in jax.tree.leaves((worker.params, worker.optimizer_state, worker.state))
        ),
    )
    tables = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(worker.tables.arrays)}
    for program in _programs(worker, is_all=request["all"]):
        tell(begins=program.name)
        started = time.perf_counter()
        try:
            lowered = program.lower()
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            tell(fails=program.name, why=str(error))
            continue
        seconds, text = time.perf_counter() - started, compiled.as_text()
        if request["dump"] is not None:
            _dump(Path(request["dump"]), f"{wanted['name'].replace(':', '-')}-{program.name}", lowered, text)
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        sent = jax.tree.leaves(worker.programs.sent(program.levels))
        found, where = (
            jax.tree.leaves(results[_NUM_STATES:] if program.is_training else results)
            for results in (compiled.out_info, compiled.output_shardings)
        )
        tell(
            program={
                "name": program.name,
                "compile_s": seconds,
                "argument_bytes": memory.argument_size_in_bytes,
                "result_bytes": memory.output_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "code_bytes": memory.generated_code_size_in_bytes,
                "shared_bytes": memory.alias_size_in_bytes,
                "flops": cost.get("flops", 0.0),
                "memory_traffic_bytes": accessed_in_memory(text),
                "accessed_bytes": cost.get("bytes accessed", 0.0),
                "collectives": [asdict(one) for one in collectives_in(text, num_devices=mesh.mesh.size)],
                "to_device_bytes": sum(_device_bytes(leaf, leaf.sharding) for leaf in sent),
                "to_host_bytes": sum(_device_bytes(leaf, one) for leaf, one in zip(found, where, strict=True)),
                "num_samples": job.batch_size,
                "flaws": flaws_in(lowered.as_text(), text, tables=tables),
            }
        )


def _programs(worker: DeviceWorker, *, is_all: bool) -> Iterator[_Program]:
    """Both steps in the rooms that sequences and bags may have: the largest and the smallest, or all of them."""
    padding, of_bags = worker.programs.padding, smallest_levels(len(worker.job.device_features))
    last = padding.most_levels
    rooms = [LARGEST_LEVELS, last] if last != LARGEST_LEVELS else [LARGEST_LEVELS]
    if is_all:
        rooms = list(itertools.product(*(range(level + 1) for level in last)))
    for room in rooms:
        name = ""
        if padding.sequences:
            vectors = max(padding.vectors(feature, room) for feature in padding.sequences)
            name = f" {vectors}x{max(padding.longest(feature, room) for feature in padding.sequences)}"
        levels = (*room, *of_bags)
        yield _Program(f"forward{name}", False, levels, partial(worker.programs.lower_forward, levels))
        yield _Program(f"train{name}", True, levels, partial(worker.programs.lower_train, levels))


def _device_bytes(leaf: Any, sharding: Any) -> int:
    """Bytes of an array on one device."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _dump(folder: Path, name: str, lowered: Any, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace(" ", "-")
    (folder / f"{stem}.stablehlo.txt").write_text(lowered.as_text(), encoding="utf-8")
    (folder / f"{stem}.compiled.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
