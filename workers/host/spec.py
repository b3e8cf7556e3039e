"""What a driver and a host tell each other: all that a host must know of a generation, and what it answers. Values that
travel, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from podembed.embedding.vocabulary.policies import VocabularyCounts
from podembed.workers.data.bad_rows import BadRow
from podembed.workers.data.unknown_values import UnknownColumn
from podembed.workers.device.shared_memory import Invitation
from podembed.workers.faults.plan import FaultPlan
from podembed.workers.host.row_norms import HostNorms
from podembed.workers.input.data_sample import DataSample
from podembed.workers.input.index import InputIndex
from podembed.workers.input.table_profile import TableProfile
from podembed.workers.job.candidates import Ranks
from podembed.workers.job.job import JobConfig
from podembed.workers.job.reference import AnyJob, JobReference
from podembed.workers.liveness.process_statistics import ProcessUsage
from podembed.workers.liveness.progress import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """All that a host needs to know of a generation.

    Attributes:
      job: the declared job, or the function that returns it.
      run_id, generation, token, plan_hash: what peers must agree on.
      host, num_hosts: this host's number, from 0, and how many there are.
      lanes: per host, the lanes that it reads.
      table_buckets: per table, the number of buckets.
      placement: per table, int32 `[num_buckets]`, the owner of each bucket.
      storage_url: folder of the run.
      train_index, eval_index: the data's files; no evaluation without the latter.
      bind_address: where the mesh listens; an actor replaces an empty one by its machine's address.
      step_timeout_s: longest wait for a peer or the device within a step.
      shares_memory: whether hosts of one machine use each other's memory; without, they exchange everything as between
        machines.
      tracks_changes: whether saves may be deltas.
      lease_timeout_s: without calls and heartbeats of the driver for so long, the process ends itself.
      fault_plan: faults to be injected.
      base: the commit that the generation starts from; None for first values.
      undo_share: of the tables' bytes, what the undo log may take; 0 for none.
      compares_first: whether rows that this host kept are compared with the commit before training goes on, and not
        while it does.
      threads: threads of the host's kernels.
      exchange: how the frames of each step travel; the same on all hosts.
      sample_multiple: the rows of a share, with padding, are a multiple of it.
      pools_cut: per table, whether its owners pool where it is cut; None leaves that to the lengths of bags.
    """

    job: AnyJob
    run_id: str
    generation: int
    token: bytes
    plan_hash: bytes
    host: int
    num_hosts: int
    lanes: tuple[range, ...]
    table_buckets: tuple[int, ...]
    placement: tuple[np.ndarray, ...]
    storage_url: str
    train_index: InputIndex
    eval_index: InputIndex | None
    bind_address: str
    step_timeout_s: float
    shares_memory: bool = True
    tracks_changes: bool = False
    lease_timeout_s: float = 30.0
    fault_plan: FaultPlan | None = None
    base: str | None = None
    undo_share: float = 0.0
    compares_first: bool = False
    threads: int = 1
    sample_multiple: int = 1
    pools_cut: tuple[bool, ...] | None = None

    def resolve_job(self) -> JobConfig:
        return self.job.resolve() if isinstance(self.job, JobReference) else self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """A started host. `shard_bytes` counts rows and slots, `save_bytes` the memory that saving them takes beside
    them.
    """

    mesh_address: tuple[str, int]
    invitation: Invitation
    num_samples: int
    process: int
    hostname: str
    shard_bytes: int
    save_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWindow:
    """A host's report of one window of steps.

    Attributes:
      num_samples: samples trained, without padding.
      phase_s: seconds of each phase.
      phase_cpu_s: processor seconds of the working thread in each, and between them.
      bytes_sent: payload on the mesh.
      rows_asked: per table, rows that all hosts asked of this one.
      bad_rows: malformed rows that were met for the first time, also by reading ahead.
      unknown: columns of which it met no value that is in their vocabulary; once a column.
      altered_ids: per table, ids outside its vocabulary that were dropped, clipped or hashed, as the table says.
      profiles: per table, what the last step's batch asked of it; empty where the driver does not want to know, and of
        hosts above `MOST_PROFILED`.
      usage: resource usage of the process, at its end.
      data: histograms of some of the samples, where the driver wants them.
      rates: per table, its learning rate in the last step.
      row_norms: of samples of the largest tables' rows, where the driver wants them.
      vocabularies: by position of the table, what became of keys that come and go.
    """

    num_samples: int
    phase_s: Mapping[Phase, float]
    bytes_sent: int
    phase_cpu_s: Mapping[Phase, float] = field(default_factory=dict)
    bad_rows: tuple[BadRow, ...] = ()
    unknown: tuple[UnknownColumn, ...] = ()
    rows_asked: tuple[int, ...] = ()
    altered_ids: tuple[int, ...] = ()
    profiles: tuple[TableProfile, ...] = ()
    usage: ProcessUsage | None = None
    data: DataSample | None = None
    rates: tuple[float, ...] = ()
    row_norms: tuple[HostNorms, ...] = ()
    vocabularies: Mapping[int, VocabularyCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSamples:
    """Evaluation samples of one host: arrays `[n]`, padding left out, `losses` by the job's loss. `groups` has int64
    `[n]` for each of `JobConfig.group_features`. `bad_rows` are malformed rows that were met for the first time,
    `unknown` and `altered_ids` as of `HostWindow`.

    Of a job with tasks, `scores` are `[n, scores of all tasks]`, and `labels` `[n, tasks]`, NaN where one is missing.
    Of a job that ranks all ids, a sample is its positive candidate, and `ranks` say where that stands among the others.
    """

    scores: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    losses: np.ndarray
    groups: dict[str, np.ndarray] = field(default_factory=dict)
    bad_rows: tuple[BadRow, ...] = ()
    altered_ids: tuple[int, ...] = ()
    unknown: tuple[UnknownColumn, ...] = ()
    ranks: Ranks | None = None
