"""Putting together the manifest of a save that all workers have written, from what they say that they wrote."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import metadata

from podembed.orchestrator.api.run_errors import JobFailed
from podembed.orchestrator.commit.manifest import Manifest, commit_name
from podembed.orchestrator.run.run import OpenRun
from podembed.version import version
from podembed.workers.checkpoint.checkpoint_files import TableFiles
from podembed.workers.checkpoint.files import assemble_delta, assemble_table
from podembed.workers.checkpoint.shard import ShardReceipt, table_plan
from podembed.workers.device.process import DenseReceipt
from podembed.workers.job.tables import table_specs

Receipts = tuple[Sequence[ShardReceipt], Sequence[DenseReceipt]]


class ReplicasDiffer(RuntimeError):
    """The dense parameters of two hosts are no longer equal; nothing was committed."""


class StateSpoilt(JobFailed):
    """A row or a dense parameter is not finite any more, which the next loss may show; nothing was committed."""


def manifest_of(
    run: OpenRun,
    *,
    step: int,
    generation: int,
    created_unix_s: float,
    parent: Manifest | None,
    placement: Mapping[str, Sequence[int]],
    num_hosts: int,
    receipts: Receipts,
    counters: Mapping[str, int],
    metrics: Mapping[str, float],
    failed_saves: int,
) -> Manifest:
    """Puts together the manifest of a save that all workers have written.

    Args:
      receipts: what they wrote: of the hosts, and of the device processes.
      counters: beside those of samples and failed saves.
      metrics: metrics of an evaluation of this very state.
      failed_saves: saves that failed since the parent.

    Raises:
      ReplicasDiffer: the dense replicas are not bitwise equal.
      StateSpoilt: a row or a dense parameter is not finite any more.
    """
    attempt = commit_name(step=step, generation=generation)
    shards, replicas = receipts
    stands = "The last commit, from before, stands." if parent else "Nothing is committed yet."
    _require_numbers(shards, replicas, step=step, stands=stands, has_parent=parent is not None)
    if len({replica.digest for replica in replicas}) != 1:
        raise ReplicasDiffer(
            f"Found dense replicas with digests {[replica.digest[:12] for replica in replicas]} at step {step}. "
            f"Expected equal ones. {stands} The model or the optimizer is not deterministic, or a host computes "
            "wrongly."
        )
    # Padding is left out; malformed rows count.
    saves = {"failed_saves": failed_saves} if failed_saves else {}
    counters = {"samples": run.input_plan.rows_before(step), **saves, **counters}
    return Manifest(
        run_id=run.record.run_id,
        step=step,
        generation=generation,
        parent=parent.name if parent else None,
        created_unix_s=created_unix_s,
        hosts=num_hosts,
        cursor={"step": step},
        tables=_assemble(run, attempt, shards, parent),
        dense=tuple(file for replica in replicas for file in replica.files),
        placement=dict(placement),
        counters=counters,
        metrics=dict(metrics),
        versions=versions(),
    )


def _require_numbers(
    shards: Sequence[ShardReceipt], replicas: Sequence[DenseReceipt], *, step: int, stands: str, has_parent: bool
) -> None:
    """Refuses a state that no later step can mend.

    Raises:
      StateSpoilt: naming rows, or else a dense parameter.
    """
    spoilt = next((shard.spoilt for shard in shards if shard.spoilt), None)
    key = next((replica.spoilt for replica in replicas if replica.spoilt), None)
    if spoilt is None and key is None:
        return
    if spoilt is not None:
        values = "" if has_parent else ", and at the tables' first values"
        raise StateSpoilt(
            f"Found {spoilt.describe()} not finite after {step} steps. Expected numbers. {stands} Lower the learning "
            f"rates, clip the gradients of the rows (clipvalue), or look for extreme inputs{values}."
        )
    raise StateSpoilt(
        f"Found the dense parameter '{key}' not finite after {step} steps. Expected numbers. {stands} Lower the "
        "learning rates, clip the dense gradients (optax.clip_by_global_norm), or look for extreme inputs."
    )


def _assemble(
    run: OpenRun, attempt: str, shards: Sequence[ShardReceipt], parent: Manifest | None
) -> tuple[TableFiles, ...]:
    before = {table.name: table for table in parent.tables} if parent else {}
    tables = []
    for at, spec in enumerate(table_specs(run.job, run.table_buckets)):
        parts = [shard.tables[at] for shard in shards]
        buckets = [part.buckets for part in parts]
        if shards[0].is_delta:
            changed = [changed for part in parts for changed in part.parts]
            tables.append(assemble_delta(before[spec.name], attempt, changed, buckets))
        else:
            arrays = next(part.arrays for part in parts if part.arrays)
            plan = table_plan(spec, attempt, buckets_per_file=parts[0].buckets_per_file)
            tables.append(assemble_table(plan, arrays, buckets))
    return tuple(tables)


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of the packages that numbers depend on."""
    others = ("jax", "optax", "numpy", "numba", "ray")
    return {"podembed": version(), **{name: metadata.version(name) for name in others}}
