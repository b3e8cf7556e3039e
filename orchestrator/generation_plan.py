"""What each process of a generation is told: who owns which buckets and lanes, where the generation starts, and what all must agree on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedding.buckets import split_evenly
from embedding.placement import place_tables
from orchestrator.config import RunConfig
from orchestrator.manifest import Manifest
from orchestrator.run_folder import OpenRun
from workers.device_process import DeviceSpec
from workers.host_values import HostReady, HostSpec
from workers.tables import features_per_table, table_specs


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
    placement: Mapping[str, tuple[int, ...]]


def plan_generation(
    run: OpenRun, config: RunConfig, *, generation: int, base: Manifest | None, num_hosts: int
) -> GenerationPlan:
    """Plans who owns what. Buckets stay where the commit had them, as far as that is even.

    Args:
      base: the commit that the generation starts from; None for the beginning of the run.
    """
    job, failures = run.job, config.failure_config
    specs = table_specs(job, run.table_buckets)
    previous = None if base is None else [np.asarray(base.placement[spec.name], np.int32) for spec in specs]
    placement = tuple(place_tables(specs, num_features=features_per_table(job), num_hosts=num_hosts, previous=previous))
    lanes = tuple(split_evenly(job.num_lanes, num_hosts))
    token, plan_hash = secrets.token_bytes(32), _plan_hash(placement, lanes)
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
            invitation=ready.invitation,
            storage_url=run.url,
            start_timeout_s=failures.start_timeout_s,
            step_timeout_s=failures.worker_step_timeout_s,
            lease_timeout_s=failures.lease_timeout_s,
            fault_plan=config.fault_plan,
            is_filled_later=base is not None,
        )

    owners = {spec.name: tuple(int(o) for o in owned) for spec, owned in zip(specs, placement, strict=True)}
    return GenerationPlan(hosts=hosts, device=device, placement=owners)


def _plan_hash(placement: Sequence[np.ndarray], lanes: Sequence[range]) -> bytes:
    """32 bytes that hosts compare before they exchange anything: they must agree on who owns what."""
    digest = hashlib.sha256()
    for owners in placement:
        digest.update(np.ascontiguousarray(owners, "<i4").tobytes() + b";")
    digest.update(repr([(lane.start, lane.stop) for lane in lanes]).encode())
    return digest.digest()
