"""Requests to the processes of a pod that is measured, as plain JSON: a host gets its spec, a device its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from podembed.embedding.buckets import place, split_evenly
from podembed.embedding.features.column_shape import ColumnShape
from podembed.embedding.lookup.activation_layout import ActivationLayout
from podembed.embedding.lookup.placement import place_tables
from podembed.workers.device.shared_memory import ChannelLayout, Invitation
from podembed.workers.host.spec import HostSpec
from podembed.workers.input.index import InputFile, InputIndex
from podembed.workers.input.reader import build_index
from podembed.workers.input.sources import ReaderSource
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import JobReference
from podembed.workers.job.tables import choose_buckets, features_per_table, table_specs

TIMEOUT_S = 120.0
_STEPS_IN_MEMORY = 32


def owners_of(job: JobConfig, *, num_hosts: int, is_cut: bool) -> tuple[np.ndarray, ...]:
    """Who owns the buckets of each table: as the driver places a new run, or all tables cut."""
    specs = table_specs(job, choose_buckets(job))
    if not is_cut:
        return tuple(place_tables(specs, num_features=features_per_table(job), num_hosts=num_hosts))
    sizes = [np.full(spec.layout.num_buckets, spec.bucket_bytes, np.int64) for spec in specs]
    return tuple(place(bucket_bytes=sizes, num_hosts=num_hosts))


def index_of(job: JobConfig) -> InputIndex:
    """Of the job's files, or of batches in memory."""
    data = job.resolved_data
    if not isinstance(data, ReaderSource):
        return build_index(data)
    rows = (_STEPS_IN_MEMORY * job.batch_size,)
    return InputIndex(files=(InputFile(path="memory", size_bytes=0, version="", row_group_rows=rows),))


def spec_of(request: Mapping[str, Any]) -> HostSpec:
    """The spec of a host for a job. All hosts find the same placement for themselves."""
    reference = JobReference(**request["job"])
    job, num_hosts = reference.resolve(), int(request["hosts"])
    return HostSpec(
        job=reference,
        run_id="calibration",
        generation=int(request["generation"]),
        token=bytes.fromhex(request["token"]),
        plan_hash=bytes(32),
        host=int(request["host"]),
        num_hosts=num_hosts,
        lanes=tuple(split_evenly(job.num_lanes, num_hosts)),
        table_buckets=choose_buckets(job),
        placement=owners_of(job, num_hosts=num_hosts, is_cut=bool(request["is_cut"])),
        storage_url=str(request["storage"]),
        train_index=index_of(job),
        eval_index=None,
        bind_address="127.0.0.1",
        step_timeout_s=TIMEOUT_S,
    )


def document_of(invitation: Invitation) -> dict[str, Any]:
    """How a device reaches its host; `invitation_of` reads it."""
    layout = invitation.layout
    activations = layout.activations
    given = [field.name for field in fields(ActivationLayout) if field.init]
    return {
        "address": invitation.address,
        "secret": invitation.secret.hex(),
        "generation": invitation.generation,
        "num_dense": layout.num_dense,
        "num_buffers": layout.num_buffers,
        "sequences": list(layout.sequences),
        "columns": {name: (shape.inner, shape.dtype) for name, shape in layout.columns.items()},
        "activations": {name: getattr(activations, name) for name in given},
    }


def invitation_of(document: Mapping[str, Any]) -> Invitation:
    activations = {name: _tuples(value) for name, value in document["activations"].items()}
    layout = ChannelLayout(
        num_dense=document["num_dense"],
        activations=ActivationLayout(**activations),
        num_buffers=document["num_buffers"],
        sequences=tuple(document["sequences"]),
        columns={name: ColumnShape(tuple(inner), dtype) for name, (inner, dtype) in document["columns"].items()},
    )
    secret = bytes.fromhex(document["secret"])
    return Invitation(address=document["address"], secret=secret, generation=document["generation"], layout=layout)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
