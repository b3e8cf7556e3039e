"""What the driver sends each process of a generation: who owns which buckets and lanes, where it starts, and what all
must agree on.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podembed.embedding.buckets import split_evenly
from podembed.embedding.lookup.placement import Chosen, place_tables
from podembed.embedding.table_spec import TableSpec
from podembed.orchestrator.api.config import RunConfig
from podembed.orchestrator.commit.manifest import Manifest, Owners
from podembed.orchestrator.run.run import OpenRun
from podembed.workers.device.options import DeviceOptions
from podembed.workers.device.process import DeviceSpec
from podembed.workers.host.spec import HostReady, HostSpec
from podembed.workers.job.job import JobConfig
from podembed.workers.job.tables import cut_ways, host_features_per_table, table_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The specs of a generation.

    Attributes:
      hosts: one a host.
      device: (host number, the host's answer, gang coordinator) → spec of its device process.
      placement: table → owner of each bucket, for manifests.
    """

    hosts: Sequence[HostSpec]
    device: Callable[[int, HostReady, str], DeviceSpec]
    placement: Mapping[str, Owners]


def renumbered(placement: Mapping[str, Sequence[int]], kept: Mapping[int, int], *, num_hosts: int) -> dict[str, Owners]:
    """The host of the next generation that holds each bucket already, by its number there.

    Args:
      placement: table → owner of each bucket, by the numbers of the generation before.
      kept: number of a host of the next generation → its number before.
      num_hosts: hosts of the next generation.

    Returns:
      As `placement`. A bucket of a host that is gone belongs to the new one of its number. If there is none, it belongs
      to no host (-1).
    """
    now = {old: new for new, old in kept.items()}
    most = max((int(np.max(owners)) for owners in placement.values() if len(owners)), default=-1)
    by_old = [now.get(old, old if old < num_hosts and old not in kept else -1) for old in range(most + 1)]
    # A bucket without an owner stays without one: the last entry is that of -1.
    table_of = np.array([*by_old, -1], np.int32)
    return {table: Owners.of(table_of[np.asarray(owners, np.int32)]) for table, owners in placement.items()}


def plan_generation(
    run: OpenRun,
    config: RunConfig,
    generation: int,
    base: Manifest | None,
    before: Mapping[str, Sequence[int]] | None,
    *,
    num_hosts: int,
    threads: int = 1,
    devices: DeviceOptions = DeviceOptions(),  # noqa: B008  # frozen
    chosen: Sequence[Chosen] | None = None,
    platform: str = "",
) -> GenerationPlan:
    """Plans who owns what. Buckets stay where they were, as far as that is even.

    Args:
      base: the commit that the generation starts from; None for the beginning of the run.
      before: table → owner of each bucket, -1 for no host; None where no host has any.
      threads: number of threads of a host's kernels, and of its device process.
      chosen: one a table, where a plan says how it lies; None follows from sizes, features and lengths.
      devices, platform: number of devices of a host, and their platform; any if that is empty.
    """
    job, failures, specs = run.job, config.failure_config, table_specs(run.job, run.table_buckets)
    placement = _placed(job, specs, before, chosen, num_hosts=num_hosts)
    pools_cut = _pools_cut(job, specs, chosen, num_hosts=num_hosts)
    lanes = tuple(split_evenly(job.num_lanes, num_hosts))
    token, plan_hash = secrets.token_bytes(32), _plan_hash(placement, lanes, pools_cut)
    hosts = [
        HostSpec(
            job=run.job_for_workers,
            run_id=run.record.run_id,
            generation=generation,
            token=token,
            plan_hash=plan_hash,
            host=host,
            num_hosts=num_hosts,
            lanes=lanes,
            table_buckets=run.table_buckets,
            placement=placement,
            storage_url=run.url,
            train_index=run.train_index,
            eval_index=run.eval_index,
            bind_address="",
            step_timeout_s=failures.worker_step_timeout_s,
            lease_timeout_s=failures.lease_timeout_s,
            fault_plan=config.fault_plan,
            tracks_changes=config.checkpoint_config.full_every > 1,
            base=base.name if base else None,
            undo_share=failures.undo_share,
            threads=threads,
            sample_multiple=devices.sample_multiple,
            pools_cut=pools_cut,
        )
        for host in range(num_hosts)
    ]

    def device(host: int, ready: HostReady, coordinator: str) -> DeviceSpec:
        return DeviceSpec(
            job=run.job_for_workers,
            host=host,
            num_hosts=num_hosts,
            coordinator=coordinator,
            num_samples=ready.num_samples,
            shares=tuple(len(of_host) * (job.batch_size // job.num_lanes) for of_host in lanes),
            invitation=ready.invitation,
            storage_url=run.url,
            start_timeout_s=failures.start_timeout_s,
            step_timeout_s=failures.worker_step_timeout_s,
            lease_timeout_s=failures.lease_timeout_s,
            fault_plan=config.fault_plan,
            is_restored_later=base is not None,
            platform=platform,
            threads=threads,
            devices=devices,
            table_buckets=run.table_buckets,
        )

    return GenerationPlan(hosts=hosts, device=device, placement=_owners(specs, placement))


def _owners(specs: Sequence[TableSpec], placement: Sequence[np.ndarray]) -> dict[str, Owners]:
    return {spec.name: Owners.of(owned) for spec, owned in zip(specs, placement, strict=True)}


def _placed(
    job: JobConfig,
    specs: Sequence[TableSpec],
    before: Mapping[str, Sequence[int]] | None,
    chosen: Sequence[Chosen] | None,
    *,
    num_hosts: int,
) -> tuple[np.ndarray, ...]:
    previous = None if before is None else [np.asarray(before[spec.name], np.int32) for spec in specs]
    features = host_features_per_table(job)
    return tuple(place_tables(specs, num_features=features, num_hosts=num_hosts, previous=previous, chosen=chosen))


def _pools_cut(
    job: JobConfig, specs: Sequence[TableSpec], chosen: Sequence[Chosen] | None, *, num_hosts: int
) -> tuple[bool, ...] | None:
    """The value for `HostSpec`."""
    if chosen is None:
        return None
    return tuple(way.is_pooled for way in cut_ways(job, specs, (), num_hosts=num_hosts, chosen=chosen))


def _plan_hash(placement: Sequence[np.ndarray], lanes: Sequence[range], pools_cut: Sequence[bool] | None) -> bytes:
    """32 bytes that hosts compare before they exchange anything: they must agree on who owns what, and who pools."""
    digest = hashlib.sha256()
    for owners in placement:
        digest.update(np.ascontiguousarray(owners, "<i4").tobytes() + b";")
    digest.update(repr([(lane.start, lane.stop) for lane in lanes]).encode())
    digest.update(repr(pools_cut).encode())
    return digest.digest()
